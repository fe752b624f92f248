"""`gpulease queue`: who waits."""

from __future__ import annotations

import click

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.expected_start import expected_starts
from gpulease_cli.help_format import command
from gpulease_cli.options import JSON
from gpulease_cli.snapshot import Snapshot
from gpulease_protocol.status_table import (
    describe_demand,
    describe_holder,
    describe_totals,
    format_duration,
    job_label,
    short_id,
)

HEADS = ("PLACE", "WHO", "WANTS", "WAITING", "START", "LEASE")


@command(examples=("gpulease queue",))
@JSON
def queue(json: bool) -> None:
    """Show who waits, for what, since when, and when they start at the latest, where that is known.

    A start is known where the jobs in the way have a time limit (`submit --timeout`); else who is in the way longest.
    `gpulease explain LEASE` names everything that is in the way.
    """
    with Client() as client:
        now = Snapshot.fetch(client)
    if json:
        output.print_json_list(now.queue)
    elif now.queue:
        short = output.terminal_width() is not None
        output.print_rows(HEADS, rows(now, short=short), cut={"WHO": 14, "WANTS": 8, "START": 12}, drop=("LEASE",))
    else:
        click.echo(f"No one waits. {describe_totals(now.gpus, 0, now.nodes)}")
    output.warn_if_stale(now.as_of)


def rows(now: Snapshot, *, short: bool = True) -> list[tuple[str, ...]]:
    """A row for each waiting request, the next one first; `short` for a terminal, with the beginnings of ids."""
    starts = expected_starts(now.gpus, now.leases, now.jobs, now.queue, now.at)
    return [
        (
            str(lease.position or "-"),
            describe_holder(lease.holder, job_label(now.job_of_lease.get(lease.id))),
            describe_demand(lease.demand),
            format_duration((now.at - lease.created_at).total_seconds()),
            starts.get(lease.id, "-"),
            short_id(lease.id) if short else lease.id,
        )
        for lease in now.queue
    ]
