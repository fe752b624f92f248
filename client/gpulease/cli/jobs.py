"""`gpulease submit`, `jobs`, `logs`, `cancel` and `wait`."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from gpulease import arrays, calls
from gpulease.cli import log_view, output, scripts, waiting
from gpulease.cli.options import Gpus, Json, MaskOption, Model, Node, checked, duration
from gpulease.client import Client
from gpulease.errors import InvalidRequest, NotFound
from gpulease.launchers import mask_for, scrubbed
from gpulease.model import Job, JobState, Launcher, Mask, Page
from gpulease.table import columns, plain
from gpulease.table import duration as spell
from gpulease.wire import LIMITS, ArrayRequest, CancelRequest, JobRequest

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]
JobOrArrayId = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job or of an array.")]
RANKED = (Launcher.TORCHRUN, Launcher.ACCELERATE)
"""Launchers whose ranks have log files of their own. Of the others the launcher's has everything in it."""
Duration = Annotated[float | None, typer.Option(parser=duration, metavar="DURATION")]


def submit(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT", help="What to run from this directory, with its arguments, after `--`."),
    ],
    gpus: Gpus = 1,
    launcher: Annotated[Launcher, typer.Option(help="What starts the ranks.")] = Launcher.TORCHRUN,
    name: Annotated[str, typer.Option(help="Name of the job.")] = "",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="A variable for the job, beside your shell's; may be repeated."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(parser=duration, metavar="DURATION", help="End the job after it has run so long.")
    ] = None,
    retries: Annotated[int, typer.Option(help="How often to start it again, on other GPUs, when it has failed.")] = 0,
    max_restarts: Annotated[
        int, typer.Option(help="How often torchrun or accelerate may start its ranks again, on the same GPUs.")
    ] = 0,
    model: Model = None,
    node: Node = None,
    mask: MaskOption = None,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="INDICES%N",
            help="One job for each index, N of them at once, as in 0-19%3; {index} in the command is replaced.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show its log until it ends; exit with its code.")] = False,
    json: Json = False,
) -> int:
    """Queue a training; the daemon launches it when its GPUs are free. Prints the job's id, or the array's.

    It runs as you, in this directory, with this shell's environment, umask and resource limits.
    """
    request = checked(
        lambda: JobRequest(
            command=command,
            gpus=gpus,
            launcher=launcher.value,
            name=name,
            environment=_environment() | _variables(env or []),
            timeout_s=timeout,
            retries=retries,
            max_restarts=max_restarts,
            umask=_umask(),
            limits=_limits(),
            gpu_model=model,
            node=node,
            working_directory=os.getcwd(),
            interpreter=_interpreter(launcher, mask or mask_for(launcher, command)),
            mask=None if mask is None else mask.value,
            array=None if array is None else _array(array),
        )
    )
    if follow and array is not None:
        raise InvalidRequest("--follow: shows one job, not an array.", remedy="Leave it out, and use gpulease wait.")
    with Client() as client:
        absent = (
            scripts.missing(command, launcher, Path.cwd(), request.environment) if client.destination.local else None
        )
        if absent is not None:
            output.complain("the job was not submitted", absent, "Check its name, and the directory that you are in.")
            return output.REFUSED
        job = client.submit(request)
        output.noun(job) if json else typer.echo(job.array_id or job.id)
        return _follow(client, job) if follow else output.DONE


def list_jobs(
    state: Annotated[
        list[JobState] | None, typer.Option("--state", help="Only jobs in this state; may be repeated.")
    ] = None,
    array: Annotated[str | None, typer.Option(metavar="ARRAY", help="Only the jobs of this array.")] = None,
    user: Annotated[str | None, typer.Option(metavar="USER", help="Only jobs of this user.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1000, help="How many, at most; an array is shown whole.")
    ] = 50,
    json: Json = False,
) -> None:
    """List the jobs, newest first; those of an array by their index."""
    with Client() as client:
        if array is None:
            page = client.send(calls.jobs(state or (), limit=limit, user=user))
        else:
            members = [member for member in _members(client, array) if not state or member.state in state]
            members = [member for member in members if user is None or member.user == user]
            page = Page(items=tuple(members), next=None)
    if json:
        output.noun(page)
        return
    heads = ("JOB", "NAME", "USER", "STATE", "GPUS", "CODE", "AGE", "COMMAND")
    output.text(columns(heads, [_row(job, datetime.now(UTC)) for job in page.items]))
    if page.next is not None:
        typer.echo(f"These are the newest {limit}; more with --limit, fewer with --state and --user.", err=True)


def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, max=9999, help="Only what this rank wrote.")] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, max=1_000_000, help="Begin with so many last lines, of each rank.")
    ] = None,
) -> None:
    """Show what a job wrote: of torchrun and accelerate every rank, each line after its rank's name."""
    with Client() as client, waiting.interruptible(job, "logs -f"):
        _show(client, client.job(job), follow, rank, tail)


def cancel(
    job: JobOrArrayId,
    grace: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="DURATION", help="Time between SIGTERM and SIGKILL."),
    ] = None,
    json: Json = False,
) -> None:
    """End a job, or withdraw it from the queue; or all jobs of an array."""
    if grace is not None:
        checked(lambda: CancelRequest(grace_s=grace))
    with Client() as client:
        if not _names_array(job):
            cancelled = [client.cancel_job(job, grace)]
        else:
            live = [member for member in _members(client, job) if not member.state.final]
            # Those that wait first, so that none of them begins in the place of one that ends.
            live.sort(key=lambda member: member.state is not JobState.QUEUED)
            cancelled = [client.cancel_job(member.id, grace) for member in live]
    if json:
        output.nouns(cancelled) if _names_array(job) else output.noun(cancelled[0])
        return
    for one in cancelled:
        typer.echo(f"job {one.id} is {one.state}")
    if not cancelled:
        typer.echo(f"all jobs of {job} have ended")


def wait(job: JobOrArrayId, json: Json = False) -> int:
    """Wait until a job has ended, or all of an array have, and exit with its code: of an array, the first to fail.
    Says on stderr what it waits for."""
    with Client() as client, waiting.interruptible(job, "wait"):
        if not _names_array(job):
            ended = waiting.wait_for_job(client, job, lambda job: job.state.final)
            if json:
                output.noun(ended)
            return _conclude(ended)
        members = _members(client, job)
        left = sum(not member.state.final for member in members)
        typer.echo(f"{job}: {len(members) - left} of its {len(members)} jobs have ended, waiting for {left}.", err=True)
        members = tuple(client.wait_job(member.id) for member in members)
    if json:
        output.nouns(members)
    failed = [member for member in members if member.state is not JobState.SUCCEEDED]
    return _conclude(min(failed, key=lambda member: member.ended_at or member.created_at)) if failed else output.DONE


def _names_array(name: str) -> bool:
    return name.startswith("array-")


def _members(client: Client, array: str) -> tuple[Job, ...]:
    """The jobs of an array, in the order of its indices' submission. Raises NotFound."""
    members = client.jobs(array=array)
    if not members:
        raise NotFound(f"There is no array {array}.", remedy="gpulease jobs --json shows the array_id of each job.")
    return tuple(reversed(members))


def _array(text: str) -> ArrayRequest:
    indices, at_most = arrays.split(text)
    return ArrayRequest(indices=indices, at_most=at_most)


def _follow(client: Client, job: Job) -> int:
    with waiting.interruptible(job.id, "logs -f"):
        started = waiting.wait_for_job(
            client, job.id, lambda job: job.state not in (JobState.QUEUED, JobState.STARTING)
        )
        # A job that could not be started may have no log, but has a reason.
        if started.started_at is not None:
            _show(client, started, follow=True)
        return _conclude(client.wait_job(job.id))


def _show(client: Client, job: Job, follow: bool, rank: int | None = None, tail: int | None = None) -> None:
    """Write a job's log to stdout."""
    merged = rank is None and job.launcher in RANKED
    log_view.write(client.job_logs(job.id, follow, "all" if merged else rank, tail), merged)


def _conclude(job: Job) -> int:
    """The exit code to pass on; says why when the job did not succeed."""
    if job.state is JobState.SUCCEEDED:
        return output.DONE
    sys.stderr.write(f"job {job.id} {job.state}: {plain(job.reason or 'no reason is known', 2000)}\n")
    return job.exit_code or output.REFUSED


def _variables(assignments: list[str]) -> dict[str, str]:
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise InvalidRequest(f"--env: {assignment!r} is not NAME=VALUE.", remedy="Write it like --env SEED=7.")
        variables[name] = value
    return variables


def _environment() -> dict[str, str]:
    """This shell's variables, without what other launches left in it and without the key to the daemon.

    One that is not text in UTF-8 cannot be sent and is left out.
    """
    own = scrubbed(os.environ)
    kept = {name: value for name, value in own.items() if name and name not in ("GPULEASE_TOKEN", "_")}
    return {name: value for name, value in kept.items() if (name + value).isascii() or _is_text(name + value)}


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _umask() -> int:
    """This shell's umask; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _limits() -> dict[str, list[int]]:
    """This shell's resource limits, soft and hard."""
    known = {name: getattr(resource, f"RLIMIT_{name.upper()}", None) for name in LIMITS}
    return {name: list(resource.getrlimit(number)) for name, number in known.items() if number is not None}


def _interpreter(launcher: Launcher, mask: Mask) -> str | None:
    """The Python of the shell that submits: of its virtual environment, else the first on its PATH. None where the job
    runs no Python of ours: neither a launcher nor what asks CUDA for its numbers."""
    if launcher is Launcher.PLAIN and mask is Mask.UUIDS:
        return None
    environment = os.environ.get("VIRTUAL_ENV")
    python = Path(environment) / "bin" / "python" if environment else None
    return str(python) if python and python.exists() else shutil.which("python3")


def _row(job: Job, now: datetime) -> tuple[str, ...]:
    return (
        job.id,
        plain(job.name if job.array_index is None else f"{job.name}[{job.array_index}]", 30),
        plain(job.user or "-", 20),
        job.state.value,
        ", ".join(f"{gpu.node}:{gpu.index}" for gpu in job.gpus) or "-",
        "-" if job.exit_code is None else str(job.exit_code),
        spell((now - job.created_at).total_seconds()),
        " ".join(job.command),
    )
