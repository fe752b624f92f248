"""`gpulease usage`: GPU-hours held and used."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import MOMENT, OneOf
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.status_table import printable
from gpulease_protocol.usage import GpuTime, UsageKey


@command(examples=("gpulease usage", "gpulease usage --since 30d --by label --user ada"))
@option(
    "--since",
    type=MOMENT,
    metavar="TIME",
    default="7d",
    show_default=True,
    help="Start of the period, such as 2026-11-23T18:00 or 03:00, or how long ago.",
)
@option("--until", type=MOMENT, metavar="TIME", show_default="now", help="End of the period.")
@option("--user", metavar="USER", help="Only this user.")
@option("--by", type=OneOf(UsageKey), default=UsageKey.USER, show_default="user", help="What to group by.")
@JSON
def usage(since: datetime, until: datetime | None, user: str | None, by: UsageKey, json: bool) -> None:
    """Show GPU-hours held and used, by user, label, node, agent, session or day.

    USED is utilization times time. IDLE is time at a utilization of 0. UNKNOWN is the part of HELD for which neither is
    known. Days are in UTC.
    """
    now = datetime.now(UTC)
    if since >= min(until or now, now):
        raise InvalidRequest("--since: must be before now and before --until.", remedy="Write it like 12h, 7d or 30d.")
    with Client() as client:
        used = client.usage(since, until, by, user)
    if json:
        output.print_json(used)
        return
    heads = (by.upper(), "HELD", "USED", "UTIL", "IDLE", "UNKNOWN", "LEASES")
    rows = [(printable(share.key or "-"), *_measures(share)) for share in used.shares]
    if len(rows) > 1:
        rows.append(("all", *_measures(used)))
    output.print_rows(heads, rows, cut={by.upper(): 10}, drop=("LEASES", "UNKNOWN", "IDLE"), none="No GPU was leased.")
    begin, end = used.from_at.astimezone(), used.to_at.astimezone()
    click.echo(f"\nGPU-hours from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}")


def _measures(time: GpuTime) -> tuple[str, ...]:
    known = time.gpu_hours_held - time.gpu_hours_unknown
    share = "-" if time.gpu_hours_used is None or known <= 0 else f"{time.gpu_hours_used / known:.0%}"
    used = "-" if time.gpu_hours_used is None else _hours(time.gpu_hours_used)
    idle = "-" if time.gpu_hours_idle is None else _hours(time.gpu_hours_idle)
    return _hours(time.gpu_hours_held), used, share, idle, _hours(time.gpu_hours_unknown), str(time.leases)


def _hours(hours: float) -> str:
    return f"{hours:.1f}" if hours >= 10 else f"{hours:.2f}"
