"""Output of the commands: JSON, tables on stdout, and errors in three lines on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from gpulease_cli.rest_words import COMMANDS
from gpulease_protocol.codec import to_json
from gpulease_protocol.errors import GpuleaseError, InvalidRequest, respelled
from gpulease_protocol.model import GpuState, Page
from gpulease_protocol.status_table import align_columns, printable

DONE, REFUSED, USAGE, UNREACHABLE, LOST = range(5)
"""Exit codes."""

STATE_COLORS = {
    GpuState.FREE.value: "green",
    GpuState.LEASED.value: "cyan",
    GpuState.DRAINING.value: "yellow",
    GpuState.FOREIGN.value: "magenta",
    GpuState.UNHEALTHY.value: "red",
    GpuState.UNKNOWN.value: "red",
    GpuState.PROHIBITED.value: "red",
    GpuState.CORDONED.value: "yellow",
}

STATE_WORDS = re.compile(rf"(?<=  )(?:{'|'.join(STATE_COLORS)})\b")
UTC_TIME = re.compile(r"\b(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC\b")
STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "magenta": "35", "cyan": "36"}
"""SGR numbers."""


def print_json(value: Any) -> None:
    """Print one REST noun as JSON."""
    _json(to_json(value))


def print_json_line(value: Any) -> None:
    """Print one REST noun as one line of JSON, for programs that read a stream."""
    sys.stdout.write(json.dumps(to_json(value), ensure_ascii=False) + "\n")


def print_json_list(values: Sequence[Any]) -> None:
    """Print a list as the REST API does: one page, with all items in it."""
    _json(to_json(Page(items=tuple(values))))


def spelled(word: str) -> str:
    """A word of the API as people read it: `timed out`."""
    return str(word).replace("_", " ")


def local_times(sentence: str) -> str:
    """The sentence with its UTC times in this time zone: `14:05:06` for today's."""

    def local(found: re.Match[str]) -> str:
        at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).astimezone()
        return f"{at:%H:%M:%S}" if at.date() == datetime.now(UTC).astimezone().date() else f"{at:%Y-%m-%d %H:%M:%S}"

    return UTC_TIME.sub(local, sentence)


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None where it is none: then nothing is cut."""
    if not sys.stdout.isatty():
        return None
    import shutil  # noqa: PLC0415 - 2 ms, with the compression of files

    return shutil.get_terminal_size().columns


def print_table(table: str) -> None:
    """Print a table; on a terminal, states are colored."""
    sys.stdout.write(colored(table) if sys.stdout.isatty() else table)


def print_rows(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    cut: Mapping[str, int] | None = None,
    drop: Sequence[str] = (),
    styles: Sequence[str] = (),
    none: str = "",
) -> None:
    """Print rows under heads. On a terminal they fit its width, as `align_columns` does it, and each row has its style;
    in a pipe nothing is cut. `none`: the line on stderr in place of a table without a row."""
    if none and not rows:
        print(none, file=sys.stderr)
        return
    table = align_columns(heads, rows, terminal_width(), cut=cut, drop=drop)
    if styles and sys.stdout.isatty():
        head, *lines = table.splitlines()
        table = "\n".join([head, *map(styled, lines, styles)]) + "\n"
    sys.stdout.write(table)


def colored(table: str) -> str:
    """A table with its states in color, if the terminal has any."""
    return STATE_WORDS.sub(lambda found: styled(found[0], STATE_COLORS[found[0]]), table)


def styled(text: str, style: str) -> str:
    """`text` in a style of `STYLES`, if the terminal has any."""
    if not style or os.environ.get("NO_COLOR") or os.environ.get("TERM") in (None, "", "dumb"):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def warn_if_stale(as_of: str | None) -> None:
    """Warn on stderr that the data shown is a copy as of `as_of`; None means that it is current."""
    if as_of is not None:
        print(
            f"gpulease: this is a copy as of {as_of}, without GPU readings: the daemon is on standby or cannot reach"
            " its database. Run gpulease doctor.",
            file=sys.stderr,
        )


def say(text: str) -> None:
    """Write to stderr. Where that is gone, as when a terminal was closed, nothing that waits or runs ends by it."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def print_error(what: str, why: str, remedy: str) -> None:
    """Print an error: one line each of what, why and what to do."""
    lines = (f"gpulease: {what}", f"  why: {why}", f"  do:  {remedy}")
    say("".join(printable(line, 2000) + "\n" for line in lines if not line.endswith(":  ")))


def print_gpulease_error(error: GpuleaseError) -> None:
    """Print an error of the library. Its title is not repeated where its detail begins with it."""
    first, colon, rest = error.detail.partition(": ")
    told = colon and first in (
        error.title,
        error.title.removesuffix(" fits"),
    )
    why = rest[:1].upper() + rest[1:] if told else error.detail
    what = "usage error" if type(error) is InvalidRequest else error.title.lower()
    print_error(what, why, respelled(error.remedy, COMMANDS) or _default_remedy(error))


def fail_in_shell(code: int) -> None:
    """Make `eval "$(...)"` fail with this program's exit code: eval of nothing would succeed and hide the error.

    Not on a terminal, where nothing evaluates it.
    """
    if not sys.stdout.isatty():
        with suppress(OSError):  # the reader has gone
            sys.stdout.write(f"(exit {code})\n")
            sys.stdout.flush()


def _default_remedy(error: GpuleaseError) -> str:
    """The last sentence of the error's docstring: what to do about errors of this kind."""
    if isinstance(error, InvalidRequest):
        return "Correct it and try again."
    sentences = " ".join((type(error).__doc__ or "").split()).rstrip(".").split(". ")
    return f"{sentences[-1]}." if len(sentences) > 1 else "Look at the daemon's log."


def _json(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
