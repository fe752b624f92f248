"""What the commands say: nouns as JSON, tables, and errors in three lines on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gpulease.errors import GpuleaseError, InvalidRequest
from gpulease.model import GpuState, Page
from gpulease.table import plain
from gpulease.wire import to_json

DONE, REFUSED, USAGE, UNREACHABLE, LOST = range(5)
"""Exit codes."""

COLOURS = {
    GpuState.FREE.value: "green",
    GpuState.LEASED.value: "cyan",
    GpuState.DRAINING.value: "yellow",
    GpuState.FOREIGN.value: "magenta",
    GpuState.UNHEALTHY.value: "red",
    GpuState.UNKNOWN.value: "red",
    GpuState.PROHIBITED.value: "red",
    GpuState.CORDONED.value: "yellow",
}


def noun(value: Any) -> None:
    """Print one REST noun as JSON."""
    _json(to_json(value))


def line(value: Any) -> None:
    """Print one REST noun as JSON on a line of its own, for programs that read as it comes."""
    sys.stdout.write(json.dumps(to_json(value), ensure_ascii=False) + "\n")


def nouns(values: Sequence[Any]) -> None:
    """Print a list as the REST API would: one page with everything in it."""
    _json(to_json(Page(items=tuple(values))))


def text(table: str) -> None:
    """Print a table, with its states in colour on a terminal."""
    sys.stdout.write(coloured(table) if sys.stdout.isatty() else table)


def coloured(table: str) -> str:
    """A table with its states in colour, as far as the terminal has any."""
    from rich.console import Console  # noqa: PLC0415 - 50 ms that a pipe need not pay
    from rich.text import Text  # noqa: PLC0415

    text = Text(table)
    for word, colour in COLOURS.items():
        text.highlight_regex(rf"(?<=  ){word}\b", colour)
    console = Console(highlight=False, soft_wrap=True)
    with console.capture() as capture:
        console.print(text, end="")
    return capture.get()


def copied(as_of: str | None) -> None:
    """Say on stderr that what was shown may be out of date, if it may: it was true at `as_of`."""
    if as_of is not None:
        print(
            f"gpulease: this is a copy as of {as_of}, without readings of the GPUs: the daemon stands by, or"
            " cannot reach its database. Do: gpulease doctor",
            file=sys.stderr,
        )


def complain(what: str, why: str, remedy: str) -> None:
    """Print an error: one line each of what, why and what to do."""
    lines = (f"gpulease: {what}", f"  why: {why}", f"  do:  {remedy}")
    sys.stderr.write("".join(plain(line, 2000) + "\n" for line in lines if not line.endswith(":  ")))


def complain_of(error: GpuleaseError) -> None:
    """Print an error of the library; what it says is left out where its title says as much."""
    _, said, rest = error.detail.partition(f"{error.title}: ")
    why = rest[:1].upper() + rest[1:] if said and error.detail.startswith(said) else error.detail
    complain(error.title.lower(), why, error.remedy or _usual_remedy(error))


def fail_in_shell(code: int) -> None:
    """Have `eval "$(...)"` fail as this program does: eval of nothing would succeed, and hide the refusal.

    Not on a terminal, where nobody evaluates it.
    """
    if not sys.stdout.isatty():
        with suppress(OSError):  # the reader has gone
            sys.stdout.write(f"(exit {code})\n")
            sys.stdout.flush()


def _usual_remedy(error: GpuleaseError) -> str:
    """The last sentence of the error's docstring: what to do about errors of this kind."""
    if isinstance(error, InvalidRequest):
        return "Correct it and ask again."
    sentences = " ".join((type(error).__doc__ or "").split()).rstrip(".").split(". ")
    return f"{sentences[-1]}." if len(sentences) > 1 else "Look at the daemon's log."


def _json(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
