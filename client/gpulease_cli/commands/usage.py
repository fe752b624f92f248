"""`gpulease usage`: GPU-hours held and used."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import click

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import DURATION, OneOf
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.status_table import printable
from gpulease_protocol.usage import GpuTime, UsageKey

WEEK_S = 7 * 86400.0
OLDEST = datetime(1970, 1, 1, tzinfo=UTC)


@command(examples=("gpulease usage", "gpulease usage --since 30d --by label --user ada"))
@option("--since", type=DURATION, metavar="DURATION", default=WEEK_S, show_default="7d", help="How far to look back.")
@option("--user", metavar="USER", help="Only this user.")
@option("--by", type=OneOf(UsageKey), default=UsageKey.USER, show_default="user", help="What to group by.")
@JSON
def usage(since: float, user: str | None, by: UsageKey, json: bool) -> None:
    """Show GPU-hours held and used, by user, label, node, agent or session.

    Used is utilization times time. It is known for jobs only; UNKNOWN is the part of HELD for which it is not.
    """
    if since <= 0:
        raise InvalidRequest("--since: must be over 0.", remedy="Write it like 12h, 7d or 30d.")
    with Client() as client:
        now = datetime.now(UTC)
        used = client.usage(max(OLDEST, now - timedelta(seconds=since)), None, by, user)
    if json:
        output.print_json(used)
        return
    heads = (by.upper(), "HELD", "USED", "UTIL", "UNKNOWN", "LEASES")
    rows = [(printable(share.key or "-"), *_measures(share)) for share in used.shares]
    if len(rows) > 1:
        rows.append(("all", *_measures(used)))
    output.print_rows(heads, rows, cut={by.upper(): 10}, drop=("LEASES", "UNKNOWN"))
    begin, end = used.from_at.astimezone(), used.to_at.astimezone()
    click.echo(f"\nGPU-hours from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}")


def _measures(time: GpuTime) -> tuple[str, ...]:
    known = time.gpu_hours_held - time.gpu_hours_unknown
    share = "-" if time.gpu_hours_used is None or known <= 0 else f"{time.gpu_hours_used / known:.0%}"
    used = "-" if time.gpu_hours_used is None else _hours(time.gpu_hours_used)
    return _hours(time.gpu_hours_held), used, share, _hours(time.gpu_hours_unknown), str(time.leases)


def _hours(hours: float) -> str:
    return f"{hours:.1f}" if hours >= 10 else f"{hours:.2f}"
