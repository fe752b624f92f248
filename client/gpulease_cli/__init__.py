"""The program `gpulease`. `main` runs it; each module of `commands` has the commands of one subject.

Exit codes: 0 done, 1 refused, 2 usage error, 3 daemon unreachable, 4 lease lost. `run` and `wait` pass on the
command's own.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import sys

import click

from gpulease_cli.global_options import GLOBAL_OPTIONS
from gpulease_cli.program import PROGRAM
from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.host import garbage

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of writing the output to a file."""
COMPLETION = "_GPULEASE_COMPLETE"
"""Set by the completion script of a shell; see `gpulease_cli.completion`."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. Prints errors in three lines, never a traceback."""
    if arguments is None:
        garbage.starting()
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from gpulease_cli import standard_streams  # noqa: PLC0415 - where one is closed

        standard_streams.open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        if isinstance(sys.stdout.buffer, io.RawIOBase):  # PYTHONUNBUFFERED: what one write does not take would be lost
            encoding = sys.stdout.encoding
            buffer = io.BufferedWriter(sys.stdout.detach())
            sys.__stdout__ = sys.stdout = io.TextIOWrapper(buffer, encoding, line_buffering=True)  # type: ignore[misc]
        sys.stdout.reconfigure(errors="replace")  # a name or a label may have letters that this locale does not
    words = _as_options(sys.argv[1:] if arguments is None else arguments)
    code = _run(words)
    if code and "--json" not in words and _command(words) == "acquire":
        from gpulease_cli import output  # noqa: PLC0415 - after a failure only

        output.fail_in_shell(code)
    if arguments is None:  # The process ends now: there is no use in looking for garbage among all objects.
        gc.freeze()
    return code


def _run(words: list[str]) -> int:
    try:
        if COMPLETION in os.environ:
            from gpulease_cli import completion  # noqa: PLC0415 - when a shell asks

            return completion.answer(PROGRAM)
        with PROGRAM.make_context("gpulease", list(words)) as context:
            code = PROGRAM.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except (click.ClickException, GpuleaseError) as error:
        from gpulease_cli import failures  # noqa: PLC0415 - after a failure only

        return failures.report(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader (`| head`) has gone
        _discard_output()
        return 128 + 13
    except OSError as error:
        if error.errno not in FULL:
            raise
        from gpulease_cli import output  # noqa: PLC0415 - after a failure only

        _discard_output()
        why = error.strerror or str(error)
        remedy = "Raise `ulimit -f`" if error.errno == errno.EFBIG else "Free space there"
        output.print_error("the output was not written", why, f"{remedy}, or write it elsewhere.")
        return output.REFUSED
    return code if isinstance(code, int) else 0


def _discard_output() -> None:
    # Python would complain once more when it flushes stdout at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _as_options(words: list[str]) -> list[str]:
    """`gpulease help run` and `gpulease version` as `gpulease run --help` and `gpulease --version`."""
    match words:
        case ["help", *command]:
            return [*command, "--help"]
        case ["version"]:
            return ["--version"]
    return words


def _command(words: list[str]) -> str | None:
    """The first word that is neither an option of the program nor the value of one."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            return word
        if any(word in option.opts for option in GLOBAL_OPTIONS):
            next(rest, None)
    return None
