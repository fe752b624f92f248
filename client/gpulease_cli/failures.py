"""Reports what made a command fail: mistakes in what was typed, and errors of the library."""

from __future__ import annotations

from collections.abc import Iterable

import click

from gpulease_cli import output
from gpulease_cli.command_groups import NoSuchCommand
from gpulease_cli.help_format import flags
from gpulease_protocol.errors import DaemonUnavailable, GpuleaseError, InvalidRequest, LeaseLost

SIMILAR = 0.75
"""How similar a word has to be to be suggested, from 0 to 1: `stauts` suggests `status`, `--time` not `--model`."""
COMMANDS_ELSEWHERE = {
    "ps": "jobs",
    "ls": "jobs",
    "squeue": "queue",
    "sbatch": "submit",
    "srun": "run",
    "exec": "run",
    "salloc": "shell",
    "scancel": "cancel",
    "kill": "cancel",
    "stop": "cancel",
    "rm": "cancel",
    "sinfo": "node list",
    "sacct": "usage",
    "htop": "top",
    "nvidia-smi": "status",
    "gpus": "gpu list",
    "users": "usage",
    "who": "status",
    "free": "status",
    "watch": "status --watch",
    "describe": "show",
    "info": "status",
    "start": "serve",
    "login": "token create",
}
"""What other tools call a command: Slurm, Docker, kubectl, nvidia-smi."""
OPTIONS_ELSEWHERE = {
    "--gres": "-n 2 asks for two GPUs",
    "--gpus-per-node": "-n 2 asks for two GPUs on one node",
    "-g": "-n 2 asks for two GPUs",
    "-G": "-n 2 asks for two GPUs",
    "-c": "gpulease shares out only GPUs; CPUs are everyone's",
    "--mem": "gpulease shares out only GPUs; --model chooses among them",
    "-i": "Leave it out: the command has your terminal already",
    "--rm": "Leave it out: the GPUs are given back when the command ends",
    "-t": "--wait 10m waits for GPUs, and `gpulease submit --time 2h` ends a job",
    "-J": "--name names a job, and --label a lease",
    "--partition": "--node or --model chooses among the GPUs",
    "-p": "--node or --model chooses among the GPUs",
}
"""The same for options, with what to write here."""


def report(error: click.ClickException | GpuleaseError) -> int:
    """Print the error in three lines. Returns its exit code."""
    if isinstance(error, click.ClickException):
        output.print_error("usage error", _message(error), _remedy(error))
        return output.USAGE
    output.print_gpulease_error(error)
    if isinstance(error, DaemonUnavailable):
        return output.UNREACHABLE
    if isinstance(error, LeaseLost):
        return output.LOST
    return output.USAGE if isinstance(error, InvalidRequest) else output.REFUSED


def _message(error: click.ClickException) -> str:
    """What is wrong, on one line."""
    match error:
        case click.NoSuchOption(option_name=name, ctx=context):
            return f"there is no option {name}{_suggestion(name, _options(context))}"
        case NoSuchCommand(name=name, ctx=context):
            return (
                f"there is no command {name}{_suggestion(name, getattr(context and context.command, 'commands', ()))}"
            )
        case click.BadOptionUsage(option_name=name) if "requires an argument" in error.message:
            return f"{name} needs a value"
        case click.MissingParameter() if error.param is not None:
            return f"{flags(error.param)} is missing"
        case click.BadParameter() if error.param is not None:
            return f"{flags(error.param)}: {error.message}"
    return error.format_message()


def _remedy(error: click.ClickException) -> str:
    """What to do about it."""
    match error:
        case click.NoSuchOption(option_name=name) if name in OPTIONS_ELSEWHERE:
            return f"{OPTIONS_ELSEWHERE[name]}."
        case NoSuchCommand(name=name, ctx=context) if context and not context.parent and name in COMMANDS_ELSEWHERE:
            return f"Use `gpulease {COMMANDS_ELSEWHERE[name]}`."
    return f"See `{_command_path(error)} --help`."


def _command_path(error: click.ClickException) -> str:
    """The program and the command that an error is about."""
    context = getattr(error, "ctx", None)
    return "gpulease" if context is None else str(context.command_path)


def _options(context: click.Context | None) -> list[str]:
    return [name for one in context.command.get_params(context) for name in one.opts] if context else []


def _suggestion(word: str, known: Iterable[str]) -> str:
    import difflib  # noqa: PLC0415 - after a mistake only

    matches = difflib.get_close_matches(word, list(known), 1, SIMILAR)
    return f". Did you mean {matches[0]}?" if matches else ""
