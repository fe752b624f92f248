"""`gpulease submit`: a job as this shell would run it."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from gpulease.client import Client
from gpulease_cli import output, wait_progress
from gpulease_cli.commands.jobs import exit_code, print_log
from gpulease_cli.help_format import ARGUMENTS_LAST, command
from gpulease_cli.option_types import DURATION, Field, Number, OneOf
from gpulease_cli.options import GPUS, JSON, MASK, MODEL, NODE, checked
from gpulease_cli.parameters import argument, option
from gpulease_protocol import job_arrays
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.launchers import choose_mask, strip_launcher_variables
from gpulease_protocol.model import Job, JobState, Launcher, Mask
from gpulease_protocol.requests import RESOURCE_LIMITS, ArrayRequest, JobRequest


@command(
    context_settings=ARGUMENTS_LAST,
    examples=(
        "gpulease submit -n 2 -- train.py --epochs 20",
        "gpulease submit --launcher plain -- make experiment",
        "gpulease submit --array 0-19%3 -- train.py --seed {index}",
    ),
)
@argument(
    "words",
    nargs=-1,
    required=True,
    metavar="SCRIPT...",
    help="What to run in this directory, with its arguments, after `--`.",
)
@GPUS
@option(
    "--launcher",
    type=OneOf(Launcher),
    metavar="LAUNCHER",
    default=Launcher.TORCHRUN.value,
    help=f"What starts the ranks: {', '.join(Launcher)}; plain means no launcher.",
)
@option("--name", type=Field(click.STRING, JobRequest, "name"), metavar="NAME", default="", help="Name of the job.")
@option(
    "--env",
    multiple=True,
    metavar="NAME=VALUE",
    help="Variable for the job, in addition to your shell's. Repeatable.",
)
@option(
    "--timeout",
    type=Field(DURATION, JobRequest, "timeout_s"),
    metavar="DURATION",
    help="End the job after it has run this long.",
)
@option(
    "--retries",
    type=Field(Number(), JobRequest, "retries"),
    metavar="N",
    default=0,
    help="Retry a failed job up to N times, on other GPUs.",
)
@option(
    "--max-restarts",
    type=Field(Number(), JobRequest, "max_restarts"),
    metavar="N",
    default=0,
    help="How many times torchrun or accelerate may restart its ranks on the same GPUs.",
)
@MODEL
@NODE
@MASK
@option(
    "--array",
    metavar="INDICES%N",
    help="One job per index, at most N at a time, as in 0-19%3; {index} in the command is replaced.",
)
@option("--follow", is_flag=True, help="Show its log until it ends; exit with its code.")
@JSON
def submit(
    words: tuple[str, ...],
    gpus: int,
    launcher: Launcher,
    name: str,
    env: tuple[str, ...],
    timeout: float | None,
    retries: int,
    max_restarts: int,
    model: str | None,
    node: str | None,
    mask: Mask | None,
    array: str | None,
    follow: bool,
    json: bool,
) -> int:
    """Queue a job; the daemon launches it when its GPUs are free. Prints the id of the job or the array.

    It runs as you, in this directory, with this shell's environment, umask and resource limits.
    """
    request = checked(
        lambda: JobRequest(
            command=list(words),
            gpus=gpus,
            launcher=launcher.value,
            name=name,
            environment=_environment() | _variables(env),
            timeout_s=timeout,
            retries=retries,
            max_restarts=max_restarts,
            umask=_umask(),
            limits=_limits(),
            gpu_model=model,
            node=node,
            working_directory=os.getcwd(),
            interpreter=_interpreter(launcher, mask or choose_mask(launcher, words)),
            mask=None if mask is None else mask.value,
            array=None if array is None else _array(array),
        )
    )
    if follow and array is not None:
        raise InvalidRequest("--follow: follows one job, not an array.", remedy="Leave it out, and use gpulease wait.")
    with Client() as client:
        if client.destination.local and (reason := _not_found(words, launcher, Path.cwd(), request.environment)):
            output.print_error("the job was not submitted", *reason)
            return output.REFUSED
        job = client.submit(request)
        output.print_json(job) if json else click.echo(job.array_id or job.id)
        return _follow_job(client, job) if follow else output.DONE


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
            print_log(client, started, follow=True)
        return exit_code(client.wait_job(job.id))


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


def _variables(assignments: Sequence[str]) -> dict[str, str]:
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
