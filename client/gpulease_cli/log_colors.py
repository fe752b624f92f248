"""A job's log on a terminal: colored rank prefixes, and no control sequence that could take over the terminal.

A training may print progress bars and colors, so carriage returns, tabs and SGR sequences (`ESC [ ... m`) pass. Every
other control character and escape sequence is removed: cursor movement, titles, links, clipboard access, and
queries that make the terminal type an answer. Output to a pipe or a file is not changed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

RANK_COLORS = (36, 33, 32, 35, 34, 31)
"""SGR numbers by rank."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
MAX_PENDING_CHARACTERS = 4096
"""Longest incomplete escape sequence that is held back until the rest arrives."""
SGR = re.compile(r"\x1b\[[0-9;:]*m")
CONTROL_SEQUENCES = re.compile(
    r"\x1b\[[0-9;:]*m"  # kept, see below
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x9c|\x1b\\)"  # OSC, DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
INCOMPLETE_SEQUENCE = re.compile(
    r"(?:(?:\x1b\[|\x9b)[0-?]*[ -/]*|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*\x1b?|\x1b[ -/]*)\Z"
)
PREFIX = re.compile(r"(^|[\n\r])\[(rank (\d+)|(?!\.\.\. )[^\]\n\r]{1,253})\]")
"""The name of a rank, of the launcher, or of a node."""


class TerminalLog:
    """Turns the pieces of a log into text that is safe for a terminal.

    Args:
        prefixed: Each line begins with the name of its rank or node, and each piece begins with a line.
        colored: Color these names.
    """

    def __init__(self, prefixed: bool, colored: bool) -> None:
        self._colored = prefixed and colored
        self._pending = ""
        self._has_escapes = False

    def show(self, piece: str) -> str:
        """The text to print after this piece has arrived."""
        text, self._pending = self._pending + piece, ""
        incomplete = INCOMPLETE_SEQUENCE.search(text)
        if incomplete is not None and len(text) - incomplete.start() <= MAX_PENDING_CHARACTERS:
            text, self._pending = text[: incomplete.start()], text[incomplete.start() :]
        text = CONTROL_SEQUENCES.sub(lambda match: match[0] if SGR.fullmatch(match[0]) else "", text)
        self._has_escapes = self._has_escapes or "\x1b" in text
        if not self._colored:
            return text
        if self._has_escapes:  # one rank's colors must not run into the next line
            text = text.replace("\n", f"{PLAIN}\n")
        return PREFIX.sub(_colored_prefix, text)

    def end(self) -> str:
        """The text that resets the terminal."""
        self._pending = ""
        return PLAIN if self._has_escapes else ""


def decode_errors() -> str:
    """What becomes of bytes that are not UTF-8, as of `bytes.decode`: only a terminal shows a sign in their place."""
    return "replace" if sys.stdout.isatty() else "surrogateescape"


def write(pieces: Iterable[str], prefixed: bool) -> None:
    """Write a log to stdout as it arrives: safe and colored on a terminal, elsewhere byte for byte in any locale.
    The pieces are decoded with `decode_errors`."""
    if not sys.stdout.isatty():
        sys.stdout.flush()
        for piece in pieces:
            sys.stdout.buffer.write(piece.encode(errors="surrogateescape"))
            sys.stdout.buffer.flush()
        return
    view = TerminalLog(prefixed, not os.environ.get("NO_COLOR"))
    try:
        for piece in pieces:
            sys.stdout.write(view.show(piece))
            sys.stdout.flush()
    finally:
        sys.stdout.write(view.end())
        sys.stdout.flush()


def _colored_prefix(match: re.Match[str]) -> str:
    color = DIM if match[3] is None else f"\x1b[{RANK_COLORS[int(match[3]) % len(RANK_COLORS)]}m"
    return f"{match[1]}{color}[{match[2]}]{PLAIN}"
