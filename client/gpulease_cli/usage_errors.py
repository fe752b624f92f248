"""Errors in what was typed, in words of the command line."""

from __future__ import annotations

from collections.abc import Iterable

import click

from gpulease_cli.help_format import flags

SIMILAR = 0.75
"""How similar a word has to be to be suggested, from 0 to 1: `stauts` suggests `status`, `--time` not `--model`."""


def message(error: click.ClickException) -> str:
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


def command_path(error: click.ClickException) -> str:
    """The program and the command that an error is about."""
    context = getattr(error, "ctx", None)
    return "gpulease" if context is None else str(context.command_path)


def _options(context: click.Context | None) -> list[str]:
    return [name for one in context.command.get_params(context) for name in one.opts] if context else []


def _suggestion(word: str, known: Iterable[str]) -> str:
    import difflib  # noqa: PLC0415 - after a mistake only

    matches = difflib.get_close_matches(word, list(known), 1, SIMILAR)
    return f". Did you mean {matches[0]}?" if matches else ""
