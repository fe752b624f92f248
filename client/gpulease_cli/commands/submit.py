"""`gpulease submit`: a job as this shell would run it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from gpulease import submitter
from gpulease.client import Client
from gpulease.own_node import ANY_NODE
from gpulease_cli import id_completion, names, output, submitted_command, wait_progress
from gpulease_cli.commands.jobs import exit_code, print_log
from gpulease_cli.help_format import ARGUMENTS_LAST
from gpulease_cli.job_script import MARKED, ScriptCommand
from gpulease_cli.option_types import DURATION, Field, NodeRange, Number, OneOf
from gpulease_cli.options import GPUS, JSON, MASK, MODEL, NODE, PREEMPTIBLE, PRIORITY, RECLAIM, TOPOLOGY, checked
from gpulease_cli.parameters import argument, option
from gpulease_protocol import job_arrays
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.launchers import choose_launcher, choose_mask
from gpulease_protocol.model import Job, JobDependency, JobState, Launcher, Mask, Priority, TopologyMode
from gpulease_protocol.requests import ArrayRequest, JobRequest
from gpulease_protocol.status_table import printable

LIKELY_OURS = (
    "-n",
    "--gpus",
    "--nodes",
    "--launcher",
    "--topology",
    "--priority",
    "--preemptible",
    "--array",
    "--after",
    "--notify",
    "--dry-run",
    "--retries",
    "--follow",
)
"""Options after the script that were probably meant for `submit`."""


@click.command(
    cls=ScriptCommand,
    context_settings=ARGUMENTS_LAST,
    examples=(
        "gpulease submit -n 2 -- train.py --epochs 20       # torchrun, one process per GPU",
        "gpulease submit -- python train.py                 # any program, or a script: train.sh",
        "gpulease submit --nodes 2 -n 4 -- train.py         # torchrun on two nodes, 8 ranks",
        "gpulease submit --array 0-19%3 -- train.py --seed {index}",
        "gpulease submit --after job-82c4b92c1f47e880 --dry-run -- evaluate.py",
    ),
)
@argument(
    "words",
    nargs=-1,
    required=True,
    metavar="COMMAND...",
    help="What to run in this directory: a script or program with its arguments, after `--`. A script may also"
    " have options at its top: #GPULEASE -n 2 --time 1h",
)
@GPUS
@option(
    "--nodes",
    type=NodeRange(),
    metavar="N|MIN:MAX",
    default="1",
    help="Number of nodes, each with a launcher and -n GPUs; all are granted together or not at all. 2:4 makes the job"
    " elastic: it runs on 2 to 4 nodes, as many as are free, and continues if one is lost.",
)
@option(
    "--launcher",
    type=OneOf(Launcher),
    metavar="LAUNCHER",
    show_default="torchrun for a Python script (train.py) and -m MODULE, else plain",
    help=f"What starts the ranks: {', '.join(Launcher)}; plain means no launcher.",
)
@option(
    "--interpreter",
    type=Field(click.STRING, JobRequest, "interpreter"),
    metavar="PATH",
    show_default="that of VIRTUAL_ENV, else python3 on PATH",
    help="Python that runs launcher and script.",
)
@option("--name", type=Field(click.STRING, JobRequest, "name"), metavar="NAME", default="", help="Name of the job.")
@option(
    "--env",
    multiple=True,
    metavar="NAME=VALUE",
    help="Variable for the job, in addition to your shell's. Repeatable.",
)
@option(
    "timeout",
    "--timeout",
    "--time",
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
@option(
    "fence",
    "--fence",
    type=Field(DURATION, JobRequest, "fence_s"),
    metavar="DURATION",
    show_default="it continues",
    help="End the job after this time if its node cannot reach the daemon; --retries may start it elsewhere.",
)
@MODEL
@TOPOLOGY
@NODE
@PRIORITY
@PREEMPTIBLE
@RECLAIM
@MASK
@option(
    "--array",
    metavar="INDICES%N",
    help="One job per index, at most N at a time, as in 0-19%3; {index} in the command is replaced.",
)
@option(
    "--after",
    multiple=True,
    metavar="JOB[,JOB]",
    shell_complete=id_completion.jobs,
    help="Wait until these jobs or arrays have succeeded; with any:JOB, until it has ended. If one fails, this job is"
    " cancelled. Repeatable.",
)
@option(
    "--notify",
    type=Field(click.STRING, JobRequest, "notify"),
    metavar="URL|COMMAND",
    help="When the job has ended, send it as JSON to this http(s) URL, or run this command as you.",
)
@option("--follow", is_flag=True, help="Show the job's log until it ends; exit with the job's exit code.")
@option("--dry-run", is_flag=True, help="Only say whether the job fits now, would wait, or can never fit.")
@JSON
def submit(
    words: tuple[str, ...],
    gpus: int,
    nodes: tuple[int, int | None],
    launcher: Launcher | None,
    interpreter: str | None,
    name: str,
    env: tuple[str, ...],
    timeout: float | None,
    retries: int,
    max_restarts: int,
    fence: float | None,
    model: str | None,
    topology: TopologyMode,
    node: str | None,
    priority: Priority,
    preemptible: bool,
    reclaim_idle_after: float | None,
    mask: Mask | None,
    array: str | None,
    after: tuple[str, ...],
    notify: str | None,
    follow: bool,
    dry_run: bool,
    json: bool,
) -> int:
    """Queue a job; the daemon launches it when its GPUs are free. Prints the id of the job or the array.

    It runs as you, in this directory, with this shell's environment, umask and resource limits.
    """
    taken_over = submitter.job_fields(_variables(env))
    command = submitted_command.startable(words, launcher, Path.cwd(), taken_over["environment"].get("PATH"))
    launcher = launcher or choose_launcher(command)
    python = submitted_command.interpreter(interpreter, launcher, mask or choose_mask(launcher, command))
    _check_follow(follow, array)
    ends: dict[str, Any] = {"timeout_s": timeout, "retries": retries, "max_restarts": max_restarts, "fence_s": fence}
    request = checked(
        lambda: JobRequest(
            command=command,
            gpus=gpus,
            nodes=nodes[0],
            max_nodes=nodes[1],
            launcher=launcher.value,
            name=name,
            **ends,
            gpu_model=model,
            topology=topology.value,
            priority=priority.value,
            preemptible=preemptible or None,
            reclaim_idle_after_s=reclaim_idle_after,
            node=None if node == ANY_NODE else node,
            interpreter=python,
            mask=None if mask is None else mask.value,
            array=None if array is None else _array(array),
            notify=notify,
            **taken_over,
        )
    )
    _hint_at_options(words)
    with Client() as client:
        if client.destination.local and (problem := _problem(request, launcher)):
            output.print_error("the job was not submitted", *problem)
            return output.REFUSED
        if after:
            request = checked(lambda: replace(request, after=_dependencies(client, after)))
        if dry_run:
            return _print_dry_run(client.explain_request(request), json)
        job = _submit(client, request)
        _print_submitted(job, json)
        return _follow_job(client, job) if follow else output.DONE


def _check_follow(follow: bool, array: str | None) -> None:
    if follow and array is not None:
        raise InvalidRequest("--follow: follows one job, not an array.", remedy="Leave it out, and use gpulease wait.")


def _submit(client: Client, request: JobRequest) -> Job:
    try:
        return client.submit(request)
    except InvalidRequest as error:
        if error.detail.startswith("after: ") and "only its success" in error.detail:
            raise InvalidRequest(error.detail, remedy="Leave it out, or wait for any end: --after any:JOB") from error
        raise
    except KeyboardInterrupt:
        output.say("\ngpulease: interrupted; the job may have been submitted: `gpulease jobs --mine` shows it\n")
        raise


def _print_submitted(job: Job, json: bool) -> None:
    """The id, or the job as JSON. Raises OSError unless all of it was written: then the id is on stderr."""
    job_id = job.array_id or job.id
    try:
        output.print_json(job) if json else click.echo(job_id)
        sys.stdout.flush()
    except OSError:
        output.say(f"gpulease: {job_id} was submitted; `gpulease cancel {job_id}` ends it\n")
        raise


def _problem(request: JobRequest, launcher: Launcher) -> submitted_command.Problem | None:
    """Why the job cannot start, as far as this shell sees, and what to do; None if it can."""
    command, environment = request.command, request.environment
    missing = submitted_command.not_found(command, launcher, Path.cwd(), environment)
    return missing or submitted_command.launcher_missing(launcher, command, request.interpreter, environment)


def _print_dry_run(found: Explanation, json: bool) -> int:
    if json:
        output.print_json(found)
    elif found.verdict == "not_now":
        click.echo(f"Would wait: {printable(found.sentence.removeprefix('Not now: '), 4000)}")
    else:
        click.echo(printable(found.sentence, 4000))
    return output.REFUSED if found.verdict == "never" else output.DONE


def _hint_at_options(words: Sequence[str]) -> None:
    """Say on stderr that an option after the script is the script's, if it was probably meant for `submit`."""
    if click.get_current_context().meta.get(MARKED):
        return
    for word in words[1:]:
        if word.partition("=")[0] in LIKELY_OURS:
            shown = printable(words[0], 100)
            click.echo(
                f"gpulease: {word} comes after {shown}, so it is passed to it. Put options of submit before it,"
                f" or `--` before {shown} if all that follows is its own.",
                err=True,
            )
            return


def _dependencies(client: Client, texts: Sequence[str]) -> list[JobDependency]:
    """What `--after` names: ids, beginnings of ids, or names of own jobs. Raises NotFound, InvalidRequest."""
    found = []
    for word in (word.strip() for text in texts for word in text.split(",")):
        prefix, colon, rest = word.partition(":")
        when: Literal["succeeded", "ended"] = "ended" if colon and prefix == "any" else "succeeded"
        match = names.find(client, rest if colon and prefix in ("any", "ok") else word)
        if match.kind not in names.JOBS_AND_ARRAYS:
            raise InvalidRequest(f"--after: {word!r} is neither a job nor an array.", remedy="List them: gpulease jobs")
        found.append(JobDependency(job=match.id, when=when))
    return found


def _array(text: str) -> ArrayRequest:
    try:
        indices, at_most = job_arrays.parse_array(text)
        return ArrayRequest(indices=indices, at_most=at_most)
    except ValueError as error:
        raise ValueError(f"--array: {str(error).partition(': ')[2]}") from error


def _follow_job(client: Client, job: Job) -> int:
    with wait_progress.hint_on_interrupt(job.id, "logs -f"):
        started = wait_progress.wait_for_job(
            client, job.id, lambda job: job.state not in (JobState.QUEUED, JobState.STARTING)
        )
        # A job that could not be started may have no log, but it has a reason.
        if started.started_at is not None:
            print_log(client, started, follow=True)
        return exit_code(client.wait_job(job.id))


def _variables(assignments: Sequence[str]) -> dict[str, str]:
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise InvalidRequest(f"--env: {assignment!r} is not NAME=VALUE.", remedy="Write it like --env SEED=7")
        variables[name] = value
    return variables
