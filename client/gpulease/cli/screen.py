"""A terminal's whole screen, for a table that is drawn again and again."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpulease.cli import output

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""To the terminal's other screen without a cursor, and back to what was there before."""
TOP, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


@contextmanager
def whole() -> Iterator[Callable[[str], None]]:
    """A function that shows a text in place of the last one, cut to the screen's size. What was there comes back."""
    sys.stdout.write(ENTER)
    try:
        yield _show
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()


def _show(text: str) -> None:
    columns, rows = shutil.get_terminal_size()
    lines = text.rstrip("\n").split("\n")
    if len(lines) > rows:
        lines = [*lines[: rows - 1], f"... and {len(lines) - rows + 1} lines more"]
    # Not to the last column: after that a terminal may take the clearing for the next line, or for the last letter.
    cut = "\n".join(line[: columns - 1] for line in lines)
    # Each line is written over the old one and cleared from its end on: nothing flickers.
    drawn = output.coloured(cut).replace("\n", f"{CLEAR_LINE}\n")
    sys.stdout.write(f"{TOP}{drawn}{CLEAR_LINE}{CLEAR_BELOW}")
    sys.stdout.flush()
