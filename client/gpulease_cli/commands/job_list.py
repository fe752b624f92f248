"""`gpulease jobs`: the list, once or redrawn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial

import click

from gpulease.client import Client
from gpulease_cli import names, output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import Number, OneOf
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_cli.screen import Screen, redraw
from gpulease_cli.snapshot import LIVE_JOBS
from gpulease_protocol import endpoints
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Job, JobState, Page
from gpulease_protocol.status_table import (
    align_columns,
    describe_places,
    format_duration,
    job_label,
    printable,
    short_id,
)

REFRESH_S = 2.0
"""Time between two refreshes of `--watch`."""
HEADS = ("JOB", "NAME", "USER", "STATE", "TIME", "GPUS", "COMMAND")
NO_JOBS = "No jobs. `gpulease submit -n 1 -- COMMAND` queues one."
CUT = {"NAME": 10, "USER": 6, "COMMAND": 8}
DROP = ("USER", "COMMAND")


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs are listed."""

    states: tuple[JobState, ...]
    array: str | None
    user: str | None
    limit: int
    today: bool
    """Without those that ended before today."""


@command(
    "jobs", examples=("gpulease jobs --mine", "gpulease jobs --watch", "gpulease jobs -s failed -u ada --limit 20")
)
@option("-m", "--mine", is_flag=True, help="Only your jobs.")
@option("-u", "--user", metavar="USER", help="Only jobs of this user.")
@option(
    "-s",
    "--state",
    type=OneOf(JobState),
    multiple=True,
    metavar="STATE",
    help=f"Only jobs in this state: {', '.join(JobState)}. Repeatable.",
)
@option("--array", metavar="ARRAY", help="Only the jobs of this array.")
@option("-a", "--all", "everything", is_flag=True, help="Also jobs that ended before today.")
@option(
    "--limit",
    type=Number(int, 1, 1000),
    metavar="N",
    default=50,
    help="Show at most N jobs; an array is always shown whole.",
)
@option("-w", "--watch", is_flag=True, help="Refresh every two seconds until q or Ctrl-C.")
@JSON
def list_jobs(
    mine: bool,
    user: str | None,
    state: tuple[JobState, ...],
    array: str | None,
    everything: bool,
    limit: int,
    watch: bool,
    json: bool,
) -> None:
    """List jobs, newest first; those of an array by index. By default those that have not ended and those of today."""
    if watch and json:
        raise InvalidRequest(
            "--watch and --json cannot be combined.", remedy="Programs can read the stream GET /v1/events."
        )
    if mine and user:
        raise InvalidRequest("--mine and --user cannot be combined.", remedy="Use one of them.")
    with Client() as client:
        me = client.me().user if mine or sys.stdout.isatty() else None
        array = array and names.find(client, array, ("array",)).id
        today = not (everything or state or array or json)
        which = Filter(state, array, me if mine else user, limit, today)
        if watch and sys.stdout.isatty():
            with suppress(KeyboardInterrupt), Screen() as screen:
                redraw(screen, partial(_picture, client, which), REFRESH_S)
            return
        page, older = _fetch(client, which, _now())
        if json:
            output.print_json(page)
            return
        several_nodes = len(client.nodes()) > 1
    if page.items:
        _print(page.items, me, several_nodes)
    else:
        click.echo("No job matches." if state or array or user or mine else NO_JOBS, err=True)
    if page.next is not None:
        click.echo(f"Only the newest {limit} are shown; see --limit, --state and --user.", err=True)
    elif older:
        click.echo("Jobs that ended before today are left out; --all shows them.", err=True)


def _fetch(client: Client, which: Filter, now: datetime) -> tuple[Page[Job], bool]:
    """The jobs to show, and whether any were left out because they ended before today."""
    if which.array is not None:
        members = (job for job in names.members(client, which.array) if not which.states or job.state in which.states)
        return Page(items=tuple(job for job in members if which.user in (None, job.user))), False
    page = client.send(endpoints.jobs(which.states, limit=which.limit, user=which.user))
    if not which.today:
        return page, False
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    recent = [job for job in page.items if job.ended_at is None or job.ended_at >= midnight]
    older = len(recent) < len(page.items)
    # A job that runs for weeks may be older than the newest ones.
    live = client.send(endpoints.jobs(LIVE_JOBS, limit=which.limit, user=which.user)) if page.next else page
    known = {job.id for job in recent}
    recent += [job for job in live.items if not job.ended and job.id not in known]
    return Page(items=tuple(recent[: which.limit]), next=None if older else page.next), older


def _picture(client: Client, which: Filter, width: int) -> str:
    jobs, several_nodes = _fetch(client, which, _now())[0].items, len(client.nodes()) > 1
    return align_columns(HEADS, _rows(jobs, several_nodes, short=True), width, cut=CUT, drop=DROP)


def _print(jobs: Sequence[Job], me: str | None, several_nodes: bool) -> None:
    rows = _rows(jobs, several_nodes, short=sys.stdout.isatty())
    output.print_rows(HEADS, rows, cut=CUT, drop=DROP, styles=[_style(job, me) for job in jobs])


def _now() -> datetime:
    return datetime.now().astimezone()


def _rows(jobs: Sequence[Job], several_nodes: bool, *, short: bool) -> list[tuple[str, ...]]:
    now = _now()
    return [_row(job, now, several_nodes, short) for job in jobs]


def _row(job: Job, now: datetime, several_nodes: bool, short: bool) -> tuple[str, ...]:
    waits = job.state is JobState.QUEUED
    state = output.spelled(job.state) + (
        f" ({job.exit_code})" if job.state is JobState.FAILED and job.exit_code else ""
    )
    ran_s = ((job.ended_at or now) - job.started_at).total_seconds() if job.started_at and not waits else None
    asked = f"wants {job.gpu_count}" if job.gpu_count else "-"
    # Of a command that failed by itself its exit code says enough, and of one that waits for GPUs its state does.
    is_plain = job.state is JobState.SUCCEEDED or job.exit_code or job.reason in (None, "", "waiting for its GPUs")
    why = "" if is_plain else f"({printable(job.reason or '', 200)}) "
    return (
        short_id(job.id) if short else job.id,
        printable(job_label(job) or "", 60) if job.name else "-",
        printable(job.user or "-", 40),
        state,
        "-" if ran_s is None else format_duration(ran_s),
        asked if waits else describe_places(job.gpus, several_nodes),
        why + (" ".join(job.command) or "-"),
    )


def _style(job: Job, me: str | None) -> str:
    """Failed jobs in red, own ones bold."""
    if job.state in (JobState.FAILED, JobState.LOST, JobState.TIMED_OUT):
        return "red"
    return "bold" if me is not None and job.user == me else ""
