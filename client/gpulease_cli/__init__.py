"""The program `gpulease`. `main` runs it; each module of `commands` has the commands of one subject.

Exit codes: 0 done, 1 refused, 2 invalid usage, 3 daemon unreachable, 4 lease lost. `run` and `wait` pass on the
command's own.
"""

from __future__ import annotations

import os
import sys

from gpulease_cli import output
from gpulease_protocol.errors import DaemonUnavailable, GpuleaseError, InvalidRequest, LeaseLost

VALIDATOR_PHRASES = (
    ("Input should be a valid integer, unable to parse string as an integer", "must be a whole number"),
    ("Input should be a valid integer", "must be a whole number"),
    ("Input should be a valid number, unable to parse string as a number", "must be a number"),
    ("Input should be a finite number", "must be a finite number"),
    ("Input should be ", "must be "),
    ("greater than or equal to ", "at least "),
    ("less than or equal to ", "at most "),
    ("Value error, ", ""),
)
"""Phrases of pydantic, which checks options for typer, and what a user reads instead."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. Prints errors in three lines, never a traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    code = _run(words)
    if code and "--json" not in words and _command(words) == "acquire":
        output.fail_in_shell(code)
    return code


def _run(words: list[str]) -> int:
    try:
        import typer  # noqa: PLC0415 - part of an extra
    except ModuleNotFoundError:
        output.print_error(
            "the command line is not installed", "the package typer is missing", "pip install 'gpulease[cli]'"
        )
        return output.REFUSED
    from gpulease_cli.program import app  # noqa: PLC0415 - needs typer

    try:
        code = app(words, prog_name="gpulease", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        if "\n" in error.format_message():  # a group without a command: its help
            sys.stderr.write(error.format_message() + "\n")
        else:
            output.print_error(
                "invalid usage", _plain_message(error.format_message()), f"See `{_command_path(error)} --help`."
            )
        return output.USAGE
    except typer.Exit as exit_:
        return exit_.exit_code
    except GpuleaseError as error:
        output.print_gpulease_error(error)
        return _code(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    return code if isinstance(code, int) else output.DONE


def _command(words: list[str]) -> str | None:
    """The first word that is neither an option of the program nor the value of one."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            return word
        if word in ("--url", "--token", "--daemon-user", "--config"):
            next(rest, None)
    return None


def _plain_message(message: str) -> str:
    """A usage error without the validator's own phrases."""
    for phrase, plain in VALIDATOR_PHRASES:
        message = message.replace(phrase, plain)
    return message


def _command_path(error: Exception) -> str:
    """The program and the command that a usage error is about."""
    context = getattr(error, "ctx", None)
    return "gpulease" if context is None else str(context.command_path)


def _code(error: GpuleaseError) -> int:
    if isinstance(error, DaemonUnavailable):
        return output.UNREACHABLE
    if isinstance(error, LeaseLost):
        return output.LOST
    return output.USAGE if isinstance(error, InvalidRequest) else output.REFUSED
