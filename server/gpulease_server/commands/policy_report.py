"""The report of `gpulease policy replay` for people: tables of 80 columns, and a picture of who waited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from gpulease_cli import output
from gpulease_cli.plot import axis, plot
from gpulease_protocol.host.settings import Declaration
from gpulease_protocol.status_table import align_columns, format_duration, printable
from gpulease_server.replay.comparison import PolicyComparison
from gpulease_server.replay.measures import PolicyOutcome

MAX_USERS = 20
"""Lines of the table of users."""
UNKNOWN = "-"
MEASURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("wait, mean", "wait_mean_s", format_duration),
    ("wait, median", "wait_median_s", format_duration),
    ("wait, 99th percentile", "wait_p99_s", format_duration),
    ("wait, longest", "wait_max_s", format_duration),
    ("bounded slowdown, mean", "slowdown_mean", "{:.2f}".format),
    ("bounded slowdown, 99th percentile", "slowdown_p99", "{:.1f}".format),
    ("Jain's index of users' slowdowns", "jain_of_slowdowns", "{:.3f}".format),
    ("Jain's index of users' shares", "jain_of_shares", "{:.3f}".format),
    ("GPUs in use", "utilization_ratio", "{:.1%}".format),
    ("GPU-hours held", "gpu_hours_held", "{:.1f}".format),
    ("GPU-hours idle while requests waited", "gpu_hours_idle_while_waited_for", "{:.1f}".format),
    ("GPU-hours lost", "gpu_hours_lost", "{:.1f}".format),
    ("refused", "refused", "{}".format),
    ("never granted", "never_granted", "{}".format),
)
"""What is shown, its field, and how that is written."""


def option_words(name: str, declaration: Declaration, value: Any) -> str:
    """An option of `serve` as it is typed."""
    flag = declaration.flag or f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return flag.split("/")[0 if value else 1]
    if isinstance(value, tuple):
        return " ".join(f"{flag} {one}" for one in value) or f"no {flag}"
    return f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"


def print_report(found: PolicyComparison, tried: str, *, as_plot: bool) -> None:
    """Print the tables, and with `as_plot` the picture. `tried`: the options that make the other policy."""
    users = len(found.now.users)
    on = f"{found.gpus} GPU{'s' if found.gpus != 1 else ''} of {found.nodes} node{'s' if found.nodes != 1 else ''}"
    click.echo(
        f"{found.now.requests} requests of {users} user{'s' if users != 1 else ''} in"
        f" {format_duration(found.now.end_s)}, on {on}."
    )
    if found.left_out:
        click.echo(f"Left out, because they were never granted: {found.left_out}.")
    click.echo(f"Tried: {tried}\n" if tried else "Nothing is tried: give the options of a policy, as --fair-share.\n")
    heads, rows = _measures(found)
    output.print_table(align_columns(heads, rows))
    for name, policy in _policies(found):
        if policy.refusals:
            click.echo(f"Refused {name}: " + ", ".join(f"{code} {times}" for code, times in policy.refusals.items()))
    click.echo()
    heads, rows = _users(found)
    output.print_rows(heads, rows, cut={"USER": 10})
    if users > MAX_USERS:
        click.echo(f"{users - MAX_USERS} more users; --json has all.")
    if as_plot:
        click.echo("\n".join(picture(found)))


def _policies(found: PolicyComparison) -> list[tuple[str, PolicyOutcome]]:
    return [("now", found.now), *([] if found.tried is None else [("tried", found.tried)])]


def _measures(found: PolicyComparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    columns: dict[str, Any] = {"NOW": found.now}
    if found.recorded is not None:
        columns = {"RECORDED": found.recorded, **columns}
    if found.tried is not None:
        columns["TRIED"] = found.tried
    rows = []
    for what, field, write in MEASURES:
        values = [getattr(column, field, None) for column in columns.values()]
        rows.append((what, *(UNKNOWN if value is None else write(value) for value in values)))
    return ("", *columns), rows


def _users(found: PolicyComparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    policies = [found.now] if found.tried is None else [found.now, found.tried]
    of_user = [{one.user: one for one in policy.users} for policy in policies]
    names = ("NOW",) if found.tried is None else ("NOW", "TRIED")
    heads = ("USER", "REQUESTS", "GPU-HOURS", *(f"WAIT {name}" for name in names), *(f"SLOW {name}" for name in names))
    rows = []
    for user in found.now.users[:MAX_USERS]:
        here = [users.get(user.user) for users in of_user]
        rows.append(
            (
                printable(user.user),
                str(user.requests),
                f"{user.gpu_hours:.1f}",
                *(UNKNOWN if one is None else format_duration(one.wait_mean_s) for one in here),
                *(UNKNOWN if one is None else f"{one.slowdown_mean:.2f}" for one in here),
            )
        )
    return heads, rows


def picture(found: PolicyComparison) -> list[str]:
    """How many requests waited over time: one plot for each policy, of the same height."""
    policies = _policies(found)
    most = max(max(policy.waiting, default=0.0) for _, policy in policies)
    end_s = max(policy.end_s for _, policy in policies)
    lines: list[str] = []
    for name, policy in policies:
        curve: Sequence[float] = policy.waiting
        lines += ["", f"Requests waiting, {name}: mean {_mean(curve):.1f}, max {max(curve, default=0.0):.1f}"]
        lines += plot([curve], 0.0, max(most, 1.0), (f"{max(most, 1.0):.0f}", "0"))
        lines.append(axis("0", format_duration(end_s)))
    return lines


def _mean(curve: Sequence[float]) -> float:
    return sum(curve) / len(curve) if curve else 0.0
