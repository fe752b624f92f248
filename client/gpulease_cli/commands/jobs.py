"""`gpulease jobs`, `logs`, `cancel` and `wait`."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import click

from gpulease.client import Client
from gpulease_cli import id_completion, log_colors, output, wait_progress
from gpulease_cli.help_format import command
from gpulease_cli.option_types import DURATION, Field, Number, OneOf
from gpulease_cli.options import JSON
from gpulease_cli.parameters import argument, option
from gpulease_protocol import endpoints
from gpulease_protocol.errors import NotFound
from gpulease_protocol.model import Job, JobState, Launcher, Page
from gpulease_protocol.requests import CancelRequest
from gpulease_protocol.status_table import align_columns, format_duration, printable

JOB = argument("job", metavar="JOB", help="Job id.", shell_complete=id_completion.jobs)
JOB_OR_ARRAY = argument("job", metavar="JOB", help="Job or array id.", shell_complete=id_completion.jobs)
RANKED = (Launcher.TORCHRUN, Launcher.ACCELERATE)
"""Launchers that write one log file per rank. With the others, the launcher's own log has everything."""


@command("jobs", examples=("gpulease jobs --state queued --state running",))
@option(
    "--state",
    type=OneOf(JobState),
    multiple=True,
    metavar="STATE",
    help=f"Only jobs in this state: {', '.join(JobState)}. Repeatable.",
)
@option("--array", metavar="ARRAY", help="Only the jobs of this array.")
@option("--user", metavar="USER", help="Only jobs of this user.")
@option(
    "--limit",
    type=Number(int, 1, 1000),
    metavar="N",
    default=50,
    help="Show at most N jobs; an array is always shown whole.",
)
@JSON
def list_jobs(state: tuple[JobState, ...], array: str | None, user: str | None, limit: int, json: bool) -> None:
    """List jobs, newest first; those of an array by index."""
    with Client() as client:
        if array is None:
            page = client.send(endpoints.jobs(state, limit=limit, user=user))
        else:
            members = [member for member in _members(client, array) if not state or member.state in state]
            members = [member for member in members if user is None or member.user == user]
            page = Page(items=tuple(members), next=None)
    if json:
        output.print_json(page)
        return
    heads = ("JOB", "NAME", "USER", "STATE", "GPUS", "CODE", "AGE", "COMMAND")
    output.print_table(align_columns(heads, [_row(job, datetime.now(UTC)) for job in page.items]))
    if page.next is not None:
        click.echo(f"Only the newest {limit} are shown; see --limit, --state and --user.", err=True)


@command(examples=("gpulease logs -f job-82c4b92c1f47e880", "gpulease logs --tail 20 --rank 1 job-82c4b92c1f47e880"))
@JOB
@option("-f", "--follow", is_flag=True, help="Keep printing until the job ends.")
@option("--rank", type=Number(int, 0, 9999), metavar="N", help="Show only this rank.")
@option("--tail", type=Number(int, 0, 1_000_000), metavar="N", help="Start with the last N lines (per rank).")
def logs(job: str, follow: bool, rank: int | None, tail: int | None) -> None:
    """Show a job's output: with torchrun and accelerate that of all ranks, each line prefixed with its rank."""
    with Client() as client, wait_progress.hint_on_interrupt(job, "logs -f"):
        print_log(client, client.job(job), follow, rank, tail)


@command(examples=("gpulease cancel --grace 1m job-82c4b92c1f47e880",))
@JOB_OR_ARRAY
@option(
    "--grace",
    type=Field(DURATION, CancelRequest, "grace_s"),
    metavar="DURATION",
    help="Time between SIGTERM and SIGKILL.",
)
@JSON
def cancel(job: str, grace: float | None, json: bool) -> None:
    """End a job, or all jobs of an array; queued jobs are withdrawn."""
    with Client() as client:
        if not _is_array_id(job):
            cancelled = [client.cancel_job(job, grace)]
        else:
            live = [member for member in _members(client, job) if not member.ended]
            # Queued jobs first, so that none of them starts in the place of one that ends.
            live.sort(key=lambda member: member.state is not JobState.QUEUED)
            cancelled = [client.cancel_job(member.id, grace) for member in live]
    if json:
        output.print_json_list(cancelled) if _is_array_id(job) else output.print_json(cancelled[0])
        return
    for one in cancelled:
        click.echo(f"{one.id} is {one.state}")
    if not cancelled:
        click.echo(f"all jobs of {job} have already ended")


@command(examples=("gpulease wait job-82c4b92c1f47e880",))
@JOB_OR_ARRAY
@JSON
def wait(job: str, json: bool) -> int:
    """Wait until a job, or every job of an array, has ended. Exits with its code; for an array, the first failure's.

    Prints on stderr what it waits for."""
    with Client() as client, wait_progress.hint_on_interrupt(job, "wait"):
        if not _is_array_id(job):
            ended = wait_progress.wait_for_job(client, job, lambda job: job.ended)
            if json:
                output.print_json(ended)
            return exit_code(ended)
        members = _members(client, job)
        left = sum(not member.ended for member in members)
        click.echo(f"{job}: {len(members) - left} of {len(members)} jobs have ended, waiting for {left}", err=True)
        members = tuple(client.wait_job(member.id) for member in members)
    if json:
        output.print_json_list(members)
    failed = [member for member in members if member.state is not JobState.SUCCEEDED]
    return exit_code(min(failed, key=lambda member: member.ended_at or member.created_at)) if failed else output.DONE


def _is_array_id(name: str) -> bool:
    return name.startswith("array-")


def _members(client: Client, array: str) -> tuple[Job, ...]:
    """The jobs of an array, by index. Raises NotFound."""
    members = client.jobs(array=array)
    if not members:
        raise NotFound(f"There is no array {array}.", remedy="`gpulease jobs --json` shows the array_id of each job.")
    return tuple(reversed(members))


def print_log(client: Client, job: Job, follow: bool, rank: int | None = None, tail: int | None = None) -> None:
    """Write a job's log to stdout."""
    merged = rank is None and job.launcher in RANKED
    log_colors.write(client.job_logs(job.id, follow, "all" if merged else rank, tail), merged)


def exit_code(job: Job) -> int:
    """The exit code to pass on. Prints the reason if the job did not succeed."""
    if job.state is JobState.SUCCEEDED:
        return output.DONE
    sys.stderr.write(f"{job.id} {job.state}: {printable(job.reason or 'no reason is known', 2000)}\n")
    return job.exit_code or output.REFUSED


def _row(job: Job, now: datetime) -> tuple[str, ...]:
    return (
        job.id,
        printable(job.name if job.array_index is None else f"{job.name}[{job.array_index}]", 30),
        printable(job.user or "-", 20),
        job.state.value,
        ", ".join(f"{gpu.node}:{gpu.index}" for gpu in job.gpus) or "-",
        "-" if job.exit_code is None else str(job.exit_code),
        format_duration((now - job.created_at).total_seconds()),
        " ".join(job.command),
    )
