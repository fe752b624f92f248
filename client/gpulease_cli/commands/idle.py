"""`gpulease idle`: which leases hold GPUs that do nothing."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import DURATION
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_protocol.model import Lease, LeaseState
from gpulease_protocol.status_table import describe_holder, describe_kept, describe_places, format_duration, short_id


@command(examples=("gpulease idle", "gpulease idle --for 2h --user ada"))
@option(
    "--for", "least_s", type=DURATION, metavar="DURATION", default=600.0, show_default="10m", help="Minimum idle time."
)
@option("--user", metavar="USER", help="Only this user.")
@JSON
def idle(least_s: float, user: str | None, json: bool) -> None:
    """Show the leases whose GPUs do nothing, those that waste the most first.

    A lease is idle for as long as every reading of every GPU of it has shown no work: never by an average. WASTED is
    that time for all of its GPUs together. What is not known, as after a restart of the daemon, is not counted. KEPT
    says until when the holder keeps them on purpose, and why (`gpulease keep`).
    """
    with Client() as client:
        leases = client.leases((LeaseState.ACTIVE,), user=user)
    found = sorted((one for one in leases if (one.idle_s or 0.0) >= max(least_s, 1.0)), key=_wasted_s, reverse=True)
    if json:
        output.print_json_list(found)
        return
    if not found:
        click.echo(f"no lease has been idle for {format_duration(least_s)}")
        return
    several_nodes = len({gpu.node for one in leases for gpu in one.gpus}) > 1
    now, short = datetime.now(UTC), output.terminal_width() is not None
    rows: list[tuple[str, ...]] = [
        (
            short_id(one.id) if short else one.id,
            describe_holder(one.holder, one.job_id),
            describe_places(one.gpus, several_nodes),
            format_duration(one.held_for_s or 0.0),
            format_duration(one.idle_s or 0.0),
            f"{_wasted_s(one) / 3600:.1f} GPU-h",
            *([describe_kept(one, now) or ""] if any(other.kept for other in found) else ()),
        )
        for one in found
    ]
    heads: tuple[str, ...] = ("LEASE", "HOLDER", "GPUS", "HELD", "IDLE", "WASTED")
    if any(one.kept for one in found):
        heads = (*heads, "KEPT")
    output.print_rows(heads, rows, cut={"HOLDER": 10, "GPUS": 6, "KEPT": 10}, drop=("HELD",))


def _wasted_s(lease: Lease) -> float:
    return (lease.idle_s or 0.0) * len(lease.gpus)
