"""`gpulease limits`: what a user, a group or a token may have, and has."""

from __future__ import annotations

from typing import Any

import click

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import DURATION, Field
from gpulease_cli.options import JSON, checked
from gpulease_cli.parameters import argument, option
from gpulease_protocol.gpu_hours import plain_hours, used_hours
from gpulease_protocol.limits import WEEK_S, LimitKind, LimitsRequest, LimitUse
from gpulease_protocol.status_table import align_columns, format_duration

NAME = argument("name", metavar="NAME", help="A user, @GROUP, or the id of a token.")
HEADS = ("LIMITS OF", "GPUS", "LEASES", "QUEUE", "MAX TIME", "GPU-HOURS", "MEMBERS")
NUMBERS = {
    "gpus": "max_gpus",
    "leases": "max_leases",
    "queue": "max_queued",
    "max_time": "max_lease_s",
    "gpu_hours": "gpu_hours",
    "window": "window_s",
}
"""The field of each option."""


@command(
    "set",
    examples=(
        "gpulease limits set ada --gpus 4 --max-time 24h",
        "gpulease limits set @vision --member ada --member bob --gpus 16 --gpu-hours 500 --window 7d",
    ),
)
@NAME
@option(
    "--gpus",
    type=Field(click.INT, LimitsRequest, "max_gpus"),
    metavar="N",
    show_default="as before",
    help="GPUs that may be held at a time; requests for more wait.",
)
@option(
    "--leases",
    type=Field(click.INT, LimitsRequest, "max_leases"),
    metavar="N",
    show_default="as before",
    help="Leases that may be held at a time, those of jobs included; more wait.",
)
@option(
    "--queue",
    type=Field(click.INT, LimitsRequest, "max_queued"),
    metavar="N",
    show_default="as before",
    help="Requests that may wait at a time; more are refused.",
)
@option(
    "--max-time",
    type=Field(DURATION, LimitsRequest, "max_lease_s"),
    metavar="DURATION",
    show_default="as before",
    help="Longest time that a lease, or an attempt of a job, may hold its GPUs, such as 24h.",
)
@option(
    "--gpu-hours",
    type=Field(click.FLOAT, LimitsRequest, "gpu_hours"),
    metavar="HOURS",
    show_default="as before",
    help="GPU-hours that may be held within the window; then requests wait.",
)
@option(
    "--window",
    type=Field(DURATION, LimitsRequest, "window_s"),
    metavar="DURATION",
    show_default="as before",
    help="Window of `--gpu-hours`: 7d unless set.",
)
@option(
    "--member",
    "members",
    multiple=True,
    metavar="USER",
    show_default="as before",
    help="User of the group; repeat it to name all.",
)
@JSON
def set_limits(name: str, members: tuple[str, ...], json: bool, **given: Any) -> None:
    """Set limits of a user, a group or a token; they end no lease. For administrators.

    Limits that are not named stay as they are. A group counts what all of its members have; a user is in one at most.
    """
    if not members and all(value is None for value in given.values()):
        raise click.UsageError("Name at least one limit, such as --gpus 4", click.get_current_context())
    kind, own = _whose(name)
    with Client() as client:
        before = client.limits_of(kind, own)
        fields: dict[str, Any] = {field: _set_before(before, field) for field in NUMBERS.values()}
        fields |= {NUMBERS[option]: value for option, value in given.items() if value is not None}
        named = list(members or before.members)
        done = client.set_limits(kind, own, checked(lambda: LimitsRequest(**fields, members=named)))
    _print(done, json)


@command(examples=("gpulease limits show ada", "gpulease limits show @vision"))
@NAME
@JSON
def show(name: str, json: bool) -> None:
    """Show the limits of a user, a group or a token, and what is used of them."""
    with Client() as client:
        found = client.limits_of(*_whose(name))
    _print(found, json)


@command("list", examples=("gpulease limits list",))
@JSON
def list_limits(json: bool) -> None:
    """List the limits that are set and what is used of them.

    Without the rights of an administrator: your own, those of your group and of your token.
    """
    with Client() as client:
        found = client.limits()
    if json:
        output.print_json_list(found)
        return
    rows = [_row(one) for one in found]
    none = "No limits are set. Those of the configuration apply: `gpulease config show serve`."
    output.print_rows(HEADS, rows, cut={"LIMITS OF": 12, "MEMBERS": 8}, drop=("LEASES", "QUEUE"), none=none)


@command(examples=("gpulease limits remove ada",))
@NAME
@JSON
def remove(name: str, json: bool) -> None:
    """Remove the limits that were set for a user, a group or a token. For administrators."""
    with Client() as client:
        left = client.remove_limits(*_whose(name))
    if json:
        output.print_json(left)
    else:
        click.echo(f"no limits are set for {_spelled(left)} any more")


def _whose(name: str) -> tuple[LimitKind, str]:
    """Whose limits a name on the command line means. No user has a name that begins with `token-` and 16 digits."""
    if name.startswith("@"):
        return LimitKind.GROUP, name[1:]
    is_token = name.startswith("token-") and len(name) == len("token-6434526eb94cfb23")
    return LimitKind.TOKEN if is_token else LimitKind.USER, name


def _spelled(one: LimitUse) -> str:
    return f"@{one.name}" if one.kind is LimitKind.GROUP else one.name


def _set_before(before: LimitUse, field: str) -> Any:
    """The number that was set, and not the configuration's."""
    if field == "window_s":
        return before.window_s if before.set_at is not None else WEEK_S
    return None if field in before.defaults else getattr(before, field)


def _print(one: LimitUse, json: bool) -> None:
    if json:
        output.print_json(one)
        return
    who = (
        "" if one.set_at is None else f"set by {one.set_by or 'an unknown user'} on {one.set_at.astimezone():%Y-%m-%d}"
    )
    output.print_table(align_columns(HEADS, [_row(one)]))  # whole: this is where all members are seen
    if one.defaults:
        who += f"{'; ' if who else ''}of the configuration: {', '.join(one.defaults)}"
    if who:
        click.echo(who)


def _row(one: LimitUse) -> tuple[str, ...]:
    hours = "-"
    if one.gpu_hours is not None:
        hours = f"{used_hours(one.gpu_hours_used or 0.0, one.gpu_hours)} of {plain_hours(one.gpu_hours)}"
        hours += f" in {format_duration(one.window_s)}"
    return (
        _spelled(one),
        _of(one.gpus, one.max_gpus),
        _of(one.leases, one.max_leases),
        _of(one.queued, one.max_queued),
        "-" if one.max_lease_s is None else format_duration(one.max_lease_s),
        hours,
        ", ".join(one.members) or "-",
    )


def _of(used: int, limit: int | None) -> str:
    return str(used) if limit is None else f"{used} of {limit}"
