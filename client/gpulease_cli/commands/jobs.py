"""`gpulease submit`, `jobs`, `logs`, `cancel` and `wait`."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from gpulease.client import Client
from gpulease_cli import log_colors, output, wait_progress
from gpulease_cli.options import Gpus, Json, MaskOption, Model, Node, checked, duration
from gpulease_protocol import endpoints, job_arrays
from gpulease_protocol.errors import InvalidRequest, NotFound
from gpulease_protocol.launchers import choose_mask, strip_launcher_variables
from gpulease_protocol.model import Job, JobState, Launcher, Mask, Page
from gpulease_protocol.requests import RESOURCE_LIMITS, ArrayRequest, CancelRequest, JobRequest
from gpulease_protocol.status_table import align_columns, format_duration, printable

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Job id.")]
JobOrArrayId = Annotated[str, typer.Argument(metavar="JOB", help="Job or array id.")]
RANKED = (Launcher.TORCHRUN, Launcher.ACCELERATE)
"""Launchers that write one log file per rank. With the others, the launcher's own log has everything."""


def submit(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT", help="What to run in this directory, with its arguments, after `--`."),
    ],
    gpus: Gpus = 1,
    launcher: Annotated[Launcher, typer.Option(help="What starts the ranks; plain: no launcher.")] = Launcher.TORCHRUN,
    name: Annotated[str, typer.Option(help="Name of the job.")] = "",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Variable for the job, in addition to your shell's. Repeatable."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(parser=duration, metavar="DURATION", help="End the job after it has run this long.")
    ] = None,
    retries: Annotated[int, typer.Option(help="Retry a failed job up to N times, on other GPUs.")] = 0,
    max_restarts: Annotated[
        int, typer.Option(help="How many times torchrun or accelerate may restart its ranks on the same GPUs.")
    ] = 0,
    model: Model = None,
    node: Node = None,
    mask: MaskOption = None,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="INDICES%N",
            help="One job per index, at most N at a time, as in 0-19%3; {index} in the command is replaced.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show its log until it ends; exit with its code.")] = False,
    json: Json = False,
) -> int:
    """Queue a job; the daemon launches it when its GPUs are free. Prints the id of the job or the array.

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
            interpreter=_interpreter(launcher, mask or choose_mask(launcher, command)),
            mask=None if mask is None else mask.value,
            array=None if array is None else _array(array),
        )
    )
    if follow and array is not None:
        raise InvalidRequest("--follow: follows one job, not an array.", remedy="Leave it out, and use gpulease wait.")
    with Client() as client:
        if client.destination.local and (reason := _not_found(command, launcher, Path.cwd(), request.environment)):
            output.print_error("the job was not submitted", *reason)
            return output.REFUSED
        job = client.submit(request)
        output.print_json(job) if json else typer.echo(job.array_id or job.id)
        return _follow_job(client, job) if follow else output.DONE


def list_jobs(
    state: Annotated[
        list[JobState] | None, typer.Option("--state", help="Only jobs in this state. Repeatable.")
    ] = None,
    array: Annotated[str | None, typer.Option(metavar="ARRAY", help="Only the jobs of this array.")] = None,
    user: Annotated[str | None, typer.Option(metavar="USER", help="Only jobs of this user.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1000, help="Show at most N jobs; an array is always shown whole.")
    ] = 50,
    json: Json = False,
) -> None:
    """List jobs, newest first; those of an array by index."""
    with Client() as client:
        if array is None:
            page = client.send(endpoints.jobs(state or (), limit=limit, user=user))
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
        typer.echo(f"Only the newest {limit} are shown; see --limit, --state and --user.", err=True)


def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, max=9999, help="Show only this rank.")] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, max=1_000_000, help="Start with the last N lines (per rank).")
    ] = None,
) -> None:
    """Show a job's output: with torchrun and accelerate that of all ranks, each line prefixed with its rank."""
    with Client() as client, wait_progress.hint_on_interrupt(job, "logs -f"):
        _print_log(client, client.job(job), follow, rank, tail)


def cancel(
    job: JobOrArrayId,
    grace: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="DURATION", help="Time between SIGTERM and SIGKILL."),
    ] = None,
    json: Json = False,
) -> None:
    """End a job, or all jobs of an array; queued jobs are withdrawn."""
    if grace is not None:
        checked(lambda: CancelRequest(grace_s=grace))
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
        typer.echo(f"{one.id} is {one.state}")
    if not cancelled:
        typer.echo(f"all jobs of {job} have already ended")


def wait(job: JobOrArrayId, json: Json = False) -> int:
    """Wait until a job, or every job of an array, has ended. Exits with its code; for an array, the first failure's.

    Prints on stderr what it waits for."""
    with Client() as client, wait_progress.hint_on_interrupt(job, "wait"):
        if not _is_array_id(job):
            ended = wait_progress.wait_for_job(client, job, lambda job: job.ended)
            if json:
                output.print_json(ended)
            return _exit_code(ended)
        members = _members(client, job)
        left = sum(not member.ended for member in members)
        typer.echo(f"{job}: {len(members) - left} of {len(members)} jobs have ended, waiting for {left}", err=True)
        members = tuple(client.wait_job(member.id) for member in members)
    if json:
        output.print_json_list(members)
    failed = [member for member in members if member.state is not JobState.SUCCEEDED]
    return _exit_code(min(failed, key=lambda member: member.ended_at or member.created_at)) if failed else output.DONE


def _is_array_id(name: str) -> bool:
    return name.startswith("array-")


def _members(client: Client, array: str) -> tuple[Job, ...]:
    """The jobs of an array, by index. Raises NotFound."""
    members = client.jobs(array=array)
    if not members:
        raise NotFound(f"There is no array {array}.", remedy="`gpulease jobs --json` shows the array_id of each job.")
    return tuple(reversed(members))


def _array(text: str) -> ArrayRequest:
    indices, at_most = job_arrays.parse_array(text)
    return ArrayRequest(indices=indices, at_most=at_most)


def _follow_job(client: Client, job: Job) -> int:
    with wait_progress.hint_on_interrupt(job.id, "logs -f"):
        started = wait_progress.wait_for_job(
            client, job.id, lambda job: job.state not in (JobState.QUEUED, JobState.STARTING)
        )
        # A job that could not be started may have no log, but it has a reason.
        if started.started_at is not None:
            _print_log(client, started, follow=True)
        return _exit_code(client.wait_job(job.id))


def _print_log(client: Client, job: Job, follow: bool, rank: int | None = None, tail: int | None = None) -> None:
    """Write a job's log to stdout."""
    merged = rank is None and job.launcher in RANKED
    log_colors.write(client.job_logs(job.id, follow, "all" if merged else rank, tail), merged)


def _exit_code(job: Job) -> int:
    """The exit code to pass on. Prints the reason if the job did not succeed."""
    if job.state is JobState.SUCCEEDED:
        return output.DONE
    sys.stderr.write(f"{job.id} {job.state}: {printable(job.reason or 'no reason is known', 2000)}\n")
    return job.exit_code or output.REFUSED


def _not_found(
    command: Sequence[str], launcher: Launcher, directory: Path, environment: Mapping[str, str]
) -> tuple[str, str] | None:
    """Why the command cannot run from `directory`, and what to do; None if it can, as far as this shell sees.

    Checked before the job is queued, where it might wait for hours and then fail at once. The rules are the worker's
    (`gpulease_worker.jobs.launch_plan.missing_path`), applied as the submitting user.
    """
    name = command[0]
    path = environment.get("PATH")
    if launcher is not Launcher.PLAIN:
        # A launcher's own option may come first, such as -m: then no file is named.
        if name.startswith("-") or (directory / name).is_file():
            return None
        if shutil.which(name, path=path) is not None:
            why = f"There is no script {name!r} in {directory}; {name!r} is a program."
            return why, f"Leave {name!r} out, or add --launcher plain."
        return f"There is no script {name!r} in {directory}.", "Check its name and your current directory."
    if "/" not in name:
        if shutil.which(name, path=path) is not None:
            return None
        remedy = f"Write ./{name}" if (directory / name).is_file() else "Check its name."
        return f"There is no program {name!r} on PATH.", remedy
    if shutil.which(str(directory / name)) is not None:
        return None
    if (directory / name).is_file():
        return f"{name!r} is not executable.", f"chmod +x {name}"
    return f"There is no program {name!r} in {directory}.", "Check its name and your current directory."


def _variables(assignments: list[str]) -> dict[str, str]:
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise InvalidRequest(f"--env: {assignment!r} is not NAME=VALUE.", remedy="Write it like --env SEED=7")
        variables[name] = value
    return variables


def _environment() -> dict[str, str]:
    """This shell's variables, without those of other launches and without the bearer token.

    A value that is not UTF-8 cannot be sent and is left out.
    """
    variables = strip_launcher_variables(os.environ)
    kept = {name: value for name, value in variables.items() if name and name not in ("GPULEASE_TOKEN", "_")}
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
    known = {name: getattr(resource, f"RLIMIT_{name.upper()}", None) for name in RESOURCE_LIMITS}
    return {name: list(resource.getrlimit(number)) for name, number in known.items() if number is not None}


def _interpreter(launcher: Launcher, mask: Mask) -> str | None:
    """The Python of the submitting shell: that of its virtual environment, else the first on its PATH.

    None where the job needs none of ours: it has no launcher and does not ask CUDA for its ordinals.
    """
    if launcher is Launcher.PLAIN and mask is Mask.UUIDS:
        return None
    environment = os.environ.get("VIRTUAL_ENV")
    python = Path(environment) / "bin" / "python" if environment else None
    return str(python) if python and python.exists() else shutil.which("python3")


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
