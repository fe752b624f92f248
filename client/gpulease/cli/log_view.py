"""A job's log on a terminal: ranks in colour, and nothing in it that could steer the terminal.

A training may show a progress bar and colours, so carriage returns, tabs and SGR sequences (`ESC [ ... m`) pass. Every
other control character and escape sequence is dropped: cursor movements, titles, links, the clipboard, answers that the
terminal would type. What goes into a pipe or a file is passed on as it is.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

RANK_COLOURS = (36, 33, 32, 35, 34, 31)
"""SGR numbers, by rank."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELD_CHARACTERS = 4096
"""How much of an escape sequence that has not ended is waited for."""
HARMLESS = re.compile(r"\x1b\[[0-9;:]*m")
STEERING = re.compile(
    r"\x1b\[[0-9;:]*m"  # kept, see below
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x9c|\x1b\\)"  # OSC, DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
UNENDED = re.compile(
    r"(?:(?:\x1b\[|\x9b)[0-?]*[ -/]*|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*\x1b?|\x1b[ -/]*)\Z"
)
PREFIX = re.compile(r"(^|[\n\r])\[(rank (\d+)|launcher)\]")


class LogView:
    """Makes text for a terminal out of a log's pieces.

    Args:
        prefixed: The lines begin with the name of their rank, and every piece begins with a line.
        coloured: Whether these names are coloured.
    """

    def __init__(self, prefixed: bool, coloured: bool) -> None:
        self._coloured = prefixed and coloured
        self._held = ""
        self._in_colour = False

    def show(self, piece: str) -> str:
        """What of a log may be shown once this piece has come."""
        text, self._held = self._held + piece, ""
        unended = UNENDED.search(text)
        if unended is not None and len(text) - unended.start() <= HELD_CHARACTERS:
            text, self._held = text[: unended.start()], text[unended.start() :]
        text = STEERING.sub(lambda found: found[0] if HARMLESS.fullmatch(found[0]) else "", text)
        self._in_colour = self._in_colour or "\x1b" in text
        if not self._coloured:
            return text
        if self._in_colour:  # one rank's colours must not run into the next one's line
            text = text.replace("\n", f"{PLAIN}\n")
        return PREFIX.sub(_named, text)

    def end(self) -> str:
        """What puts the terminal back."""
        self._held = ""
        return PLAIN if self._in_colour else ""


def write(pieces: Iterable[str], prefixed: bool) -> None:
    """Write a log to stdout as it comes: made safe and coloured on a terminal, as it is elsewhere."""
    if not sys.stdout.isatty():
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        return
    view = LogView(prefixed, not os.environ.get("NO_COLOR"))
    try:
        for piece in pieces:
            sys.stdout.write(view.show(piece))
            sys.stdout.flush()
    finally:
        sys.stdout.write(view.end())
        sys.stdout.flush()


def _named(found: re.Match[str]) -> str:
    colour = DIM if found[3] is None else f"\x1b[{RANK_COLOURS[int(found[3]) % len(RANK_COLOURS)]}m"
    return f"{found[1]}{colour}[{found[2]}]{PLAIN}"
