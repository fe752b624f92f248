"""`gpulease queue`: who waits."""

from __future__ import annotations

import click

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.options import JSON
from gpulease_cli.queue_table import CUT, DROP, HEADS, queue_rows
from gpulease_cli.snapshot import Snapshot
from gpulease_protocol.status_table import describe_totals


@command(examples=("gpulease queue",))
@JSON
def queue(json: bool) -> None:
    """Show who waits, for what, since when, and when they are likely to start, where that is known.

    `in about 40m`: if all before it last as long as they declared (`--time`) and no newer request passes. It is no
    promise.
    Where that is not known, START names who is in the way longest.
    `gpulease explain LEASE` names everything that is in the way.
    """
    with Client() as client:
        now = Snapshot.fetch(client)
    if json:
        output.print_json_list(now.queue)
    elif now.queue:
        rows = queue_rows(now, short=output.terminal_width() is not None)
        output.print_rows(HEADS, rows, cut=CUT, drop=DROP)
    else:
        click.echo(f"No one waits. {describe_totals(now.gpus, 0, now.nodes)}")
    output.warn_if_stale(now.as_of)
