"""`gpulease timeline`: who had which GPU when."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import MOMENT
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_cli.timeline_picture import WIDTH, period, picture
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.timeline import MAX_SPANS


@command(examples=("gpulease timeline", "gpulease timeline --since 7d --node gpubox", "gpulease timeline --json"))
@option(
    "--since",
    type=MOMENT,
    metavar="TIME",
    default="24h",
    show_default=True,
    help="Start of the period: 2026-11-23T18:00, 03:00, or how long ago.",
)
@option("--until", type=MOMENT, metavar="TIME", show_default="now", help="End of the period.")
@option("--user", metavar="USER", help="Only leases of this user.")
@option("--node", metavar="NODE", help="Only GPUs of this node.")
@JSON
def timeline(since: datetime, until: datetime | None, user: str | None, node: str | None, json: bool) -> None:
    """Show who had which GPU when, and when a GPU could not be used.

    Each user has a letter. A column shows what took most of its time. The queue is the number of requests that waited.
    Times are local.
    """
    now = datetime.now(UTC)
    if since >= min(until or now, now):
        raise InvalidRequest("--since: must be before now and before --until.", remedy="Write it like 12h, 7d or 30d.")
    with Client() as client:
        shown = client.timeline(from_at=since, to_at=until, user=user, node=node, limit=MAX_SPANS)
    if json:
        output.print_json(shown)
        return
    width = min(output.terminal_width() or WIDTH, 2 * WIDTH)
    click.echo("\n".join(picture(shown, width)))
    click.echo(f"\n{period(shown)}")
    if shown.complete_since is not None:
        click.echo(f"Before {shown.complete_since.astimezone():%Y-%m-%d %H:%M} not everything is known.")
    if shown.next is not None:
        click.echo(f"Only the last {MAX_SPANS} leases are shown. Use a later --since.")
