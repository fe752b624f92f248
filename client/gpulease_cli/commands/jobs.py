"""`gpulease logs`, `cancel` and `wait`. `gpulease jobs` is in `job_list`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

from gpulease.client import Client
from gpulease_cli import id_completion, log_colors, names, output, wait_progress
from gpulease_cli.help_format import command
from gpulease_cli.option_types import DURATION, Field, Number
from gpulease_cli.options import JSON
from gpulease_cli.parameters import argument, option
from gpulease_cli.snapshot import LIVE_JOBS
from gpulease_protocol.errors import GpuleaseError, InvalidRequest
from gpulease_protocol.model import Job, JobState, Launcher
from gpulease_protocol.requests import CancelRequest
from gpulease_protocol.status_table import printable

JOB = argument(
    "job",
    metavar="JOB",
    help="Id of a job, the beginning of one, the name of a job of yours, or NAME[INDEX] in an array.",
    shell_complete=id_completion.jobs,
)
RANKED = (Launcher.TORCHRUN, Launcher.ACCELERATE)
"""Launchers that write one log file per rank. With the others, the launcher's own log has everything."""


def jobs_or_arrays(required: bool) -> Callable[[Any], Any]:
    """The argument for jobs and arrays, one or several."""
    return argument(
        "words",
        metavar="JOB...",
        nargs=-1,
        required=required,
        help="Jobs and arrays: ids, beginnings of ids, or names of your own.",
        shell_complete=id_completion.jobs,
    )


@command(
    examples=(
        "gpulease logs -f job-82c4b92c1f47e880",
        "gpulease logs -n 20 --rank 1 resnet",
        "gpulease logs --node gpubox2 resnet",
        "gpulease logs --attempt 1 resnet",
    )
)
@JOB
@option("-f", "--follow", is_flag=True, help="Keep printing until the job ends.")
@option("--rank", type=Number(int, 0, 9999), metavar="N", help="Show only this rank.")
@option("--node", metavar="NAME", help="Show only what runs on this node.", shell_complete=id_completion.nodes)
@option("-n", "--tail", type=Number(int, 0, 1_000_000), metavar="N", help="Start with the last N lines (per rank).")
@option(
    "--attempt",
    type=Number(int, 1, 1_000_000),
    metavar="N",
    show_default="the last one that has a log",
    help="Show only this attempt of a job that was tried again.",
)
def logs(job: str, follow: bool, rank: int | None, node: str | None, tail: int | None, attempt: int | None) -> None:
    """Show a job's output: with torchrun and accelerate that of all ranks, each line prefixed with its rank; of a job
    on several nodes that of all nodes, with other lines prefixed with their node."""
    if follow and attempt is not None:
        raise click.UsageError("--attempt cannot be combined with --follow", click.get_current_context())
    with Client() as client:
        found = names.find_job(client, job)
        if rank and found.launcher not in RANKED and found.nodes is None:
            raise InvalidRequest(
                f"--rank: {found.id} has one log for all that it prints, because its launcher is {found.launcher}.",
                remedy="Leave it out.",
            )
        with wait_progress.hint_on_interrupt(found.id, "logs -f"):
            if follow and found.state is JobState.QUEUED:
                print(f"{found.id} waits: {printable(found.reason or '', 500)}", file=sys.stderr)
            if not follow and attempt is None:
                attempt = _earlier_attempt(found)
            if not print_log(client, found, follow, rank, tail, node, attempt) and tail != 0:
                _say_why_empty(client.job(found.id), attempt, rank)


@command(
    examples=(
        "gpulease cancel job-82c4b92c1f47e880",
        "gpulease cancel --grace 1m resnet sweep[3]",
        "gpulease cancel --mine --yes",
    )
)
@jobs_or_arrays(required=False)
@option("--mine", is_flag=True, help="All of your jobs.")
@option("--name", metavar="NAME", help="All of your jobs with this name.")
@option("-y", "--yes", is_flag=True, help="Do not ask before `--mine` and `--name` cancel several.")
@option(
    "--grace",
    type=Field(DURATION, CancelRequest, "grace_s"),
    metavar="DURATION",
    help="Time between SIGTERM and SIGKILL.",
)
@JSON
def cancel(words: tuple[str, ...], mine: bool, name: str | None, yes: bool, grace: float | None, json: bool) -> int:
    """End jobs, or all jobs of an array; queued jobs are withdrawn."""
    if not words and not mine and name is None:
        raise click.UsageError("JOB... is missing; --mine is for all of yours", click.get_current_context())
    with Client() as client:
        found = {job.id: job for word in words for job in names.find_jobs(client, word, single=True)}
        several = mine or name is not None
        if several:
            own = client.jobs(LIVE_JOBS, user=client.me().user, name=name)
            found |= {job.id: job for job in own}
        live = [job for job in found.values() if not job.ended]
        if several and live and not yes and not _confirmed(live):
            return output.REFUSED
        # Queued jobs first, so that none of them starts in the place of one that ends.
        live.sort(key=lambda job: job.state is not JobState.QUEUED)
        one = len(words) == len(found) == 1 and not several and not names.is_array(words[0])
        cancelled, refusals = _cancel(client, list(found.values()) if one else live, grace)
    if json:
        output.print_json(cancelled[0]) if one and cancelled else output.print_json_list(cancelled)
    else:
        _print_cancelled(words, cancelled)
    for error in refusals:
        output.print_gpulease_error(error)
    return output.REFUSED if refusals else output.DONE


@command(examples=("gpulease wait job-82c4b92c1f47e880", "gpulease wait resnet sweep"))
@jobs_or_arrays(required=True)
@JSON
def wait(words: tuple[str, ...], json: bool) -> int:
    """Wait until jobs, or every job of an array, have ended. Exits with its exit code; of several, the first failure's.

    Prints on stderr what it waits for."""
    with Client() as client:
        found = {job.id: job for word in words for job in names.find_jobs(client, word)}
        jobs, shown = list(found.values()), " ".join(words)
        one = len(words) == len(jobs) == 1 and not names.is_array(words[0])
        with wait_progress.hint_on_interrupt(jobs[0].id if one else shown, "wait"):
            if one:
                jobs = [wait_progress.wait_for_job(client, jobs[0].id, lambda job: job.ended)]
            else:
                left = sum(not job.ended for job in jobs)
                note = f"{shown}: {len(jobs) - left} of {len(jobs)} jobs have ended, waiting for {left}"
                click.echo(note, err=True)
                jobs = [client.wait_job(job.id) for job in jobs]
    if json:
        output.print_json(jobs[0]) if one else output.print_json_list(jobs)
    failed = [job for job in jobs if job.state is not JobState.SUCCEEDED]
    return exit_code(min(failed, key=lambda job: job.ended_at or job.created_at)) if failed else output.DONE


def print_log(
    client: Client,
    job: Job,
    follow: bool,
    rank: int | None = None,
    tail: int | None = None,
    node: str | None = None,
    attempt: int | None = None,
) -> bool:
    """Write a job's log to stdout. Returns whether there was anything."""
    merged = rank is None and job.launcher in RANKED
    any_text, errors = False, log_colors.decode_errors()

    def pieces() -> Iterator[str]:
        nonlocal any_text
        ranks = "all" if merged else rank
        for piece in client.job_logs(job.id, follow, ranks, tail, node=node, attempt=attempt, errors=errors):
            any_text = any_text or bool(piece)
            yield piece

    log_colors.write(pieces(), merged or (len(job.members) > 1 and rank is None and node is None))
    return any_text


def exit_code(job: Job) -> int:
    """The exit code to pass on. Prints the reason if the job did not succeed."""
    if job.state is JobState.SUCCEEDED:
        return output.DONE
    reason = printable(job.reason or "no reason is known", 2000)
    sys.stderr.write(f"{job.id} {output.spelled(job.state)}: {reason}\n")
    return job.exit_code or output.REFUSED


def _earlier_attempt(job: Job) -> int | None:
    """The last attempt that has a log, where the present one has none; says which it is on stderr."""
    if job.log_directory or any(member.log_directory for member in job.members):
        return None
    earlier = next((one for one in reversed(job.attempt_history) if one.log_directory), None)
    if earlier is None:
        return None
    state = (
        "waits again"
        if job.state is JobState.QUEUED
        else f"({output.spelled(job.state)}) has no log of its last attempt"
    )
    print(f"{job.id} {state}; this is the log of attempt {earlier.number}:", file=sys.stderr)
    return earlier.number


def _say_why_empty(job: Job, attempt: int | None, rank: int | None) -> None:
    """Say on stderr why a job has no log, and where it would be."""
    reason = printable(job.reason or "", 2000)
    earlier = next((one for one in job.attempt_history if one.number == attempt), None)
    if earlier is not None:
        where = f"; its logs are in {earlier.log_directory} on {earlier.node}" if earlier.log_directory else ""
        said = f"has written nothing in attempt {attempt}{where}"
    elif job.state is JobState.QUEUED:
        said = f"waits, so it has no log yet: {reason}; see `gpulease explain {job.id}`"
    elif job.started_at is None and job.ended:
        said = f"has no log, because it never started: {output.spelled(job.state)}{f', {reason}' if reason else ''}"
    elif rank is not None and rank >= len(job.gpus) > 0:
        said = f"has no rank {rank}: its last one is {len(job.gpus) - 1}"
    else:
        node = f" on {job.gpus[0].node}" if job.gpus else ""
        where = f"; its logs are in {job.log_directory}{node}" if job.log_directory else ""
        if job.members:
            places = [f"{one.log_directory} on {one.node}" for one in job.members if one.log_directory]
            where = f"; its logs are in {', '.join(places)}" if places else ""
        said = f"({output.spelled(job.state)}) has written nothing{'' if job.ended else ' yet'}{where}"
    print(f"{job.id} {said}", file=sys.stderr)


def _confirmed(jobs: Sequence[Job]) -> bool:
    """Ask on a terminal whether these jobs should be cancelled; True where there is no one to ask."""
    if not sys.stdin.isatty():
        return True
    for job in jobs[:20]:
        click.echo(f"  {job.id} {output.spelled(job.state)} {printable(job.name)}".rstrip(), err=True)
    more = f" ({len(jobs) - 20} are not shown)" if len(jobs) > 20 else ""
    click.echo(f"Cancel {len(jobs)} job{'s' if len(jobs) > 1 else ''}{more}? [y/N] ", nl=False, err=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _cancel(client: Client, jobs: Iterable[Job], grace: float | None) -> tuple[list[Job], list[GpuleaseError]]:
    """Cancel each; the jobs as answered, and what was refused. A single refusal is raised."""
    cancelled, refusals = [], []
    jobs = list(jobs)
    for job in jobs:
        try:
            cancelled.append(client.cancel_job(job.id, grace))
        except InvalidRequest:
            raise
        except GpuleaseError as error:
            if len(jobs) == 1:
                raise
            refusals.append(error)
    return cancelled, refusals


def _print_cancelled(words: Sequence[str], cancelled: Sequence[Job]) -> None:
    for job in cancelled:
        click.echo(f"{job.id} is {output.spelled(job.state)}")
    if not cancelled:
        click.echo(f"all jobs of {' '.join(words)} have already ended" if words else "you have no job to cancel")
