"""Reports what made a command fail: mistakes in what was typed, and errors of the library."""

from __future__ import annotations

from collections.abc import Iterable

import click

from gpulease_cli import output
from gpulease_cli.help_format import flags
from gpulease_protocol.errors import DaemonUnavailable, GpuleaseError, InvalidRequest, LeaseLost

SIMILAR = 0.75
"""How similar a word has to be to be suggested, from 0 to 1: `stauts` suggests `status`, `--time` not `--model`."""


def report(error: click.ClickException | GpuleaseError) -> int:
    """Print the error in three lines; the exit code that it means."""
    if isinstance(error, click.ClickException):
        output.print_error("usage error", _message(error), f"See `{_command_path(error)} --help`.")
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
        case click.exceptions.NoSuchOption():
            return f"there is no option {error.option_name}{_suggestion(error.option_name, _options(error.ctx))}"
        case click.exceptions.NoSuchCommand():
            known = error.ctx.command.commands if error.ctx and isinstance(error.ctx.command, click.Group) else ()
            return f"there is no command {error.command_name}{_suggestion(error.command_name, known)}"
        case click.MissingParameter() if error.param is not None:
            return f"{flags(error.param)} is missing"
        case click.BadParameter() if error.param is not None:
            return f"{flags(error.param)}: {error.message}"
    return error.format_message()


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
