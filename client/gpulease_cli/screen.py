"""The whole terminal as one picture: the alternate screen, redrawn in place, with keys. It is left as it was found."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from types import FrameType, TracebackType
from typing import Any, Self

from gpulease_protocol.errors import DaemonUnavailable, Unavailable
from gpulease_protocol.status_table import printable, shortened

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""To the terminal's alternate screen without a cursor, and back to what was there before."""
TOP, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
KEYS = {"\x1b[A": "k", "\x1b[B": "j", "\x1bOA": "k", "\x1bOB": "j", "\x1b[5~": "K", "\x1b[6~": "J", "\x03": "q"}
"""Keys that send several characters, as the letters that do the same."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Screen:
    """The terminal for the length of a block. SIGTERM and SIGHUP end the block as Ctrl-C does: by KeyboardInterrupt."""

    def __init__(self) -> None:
        self._stdin: int | None = None
        self._settings: list[Any] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in ENDING_SIGNALS:
            self._handlers[number] = signal.signal(number, _interrupt)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows that may be drawn to. Not the last column: a terminal may apply the clearing of a line to
        the next one, or to its last letter."""
        columns, rows = shutil.get_terminal_size()
        return max(columns - 1, 1), max(rows, 1)

    def draw(self, lines: Sequence[str], paint: Callable[[str], str] = str) -> None:
        """Show these lines in place of the last ones, cut to the screen's size; `paint` adds colors to them."""
        columns, rows = self.size
        if len(lines) > rows:
            lines = [*lines[: rows - 1], f"... and {len(lines) - rows + 1} more lines"]
        # Each line overwrites the old one and is cleared from its end on, so nothing flickers.
        text = paint("\n".join(shortened(line, columns) for line in lines)).replace("\n", f"{CLEAR_LINE}\n")
        sys.stdout.write(f"{TOP}{text}{CLEAR_LINE}{CLEAR_BELOW}")
        sys.stdout.flush()

    def key(self, timeout_s: float) -> str:
        """The key that was pressed, as one letter; empty when none is within `timeout_s`."""
        if self._stdin is None:
            time.sleep(timeout_s)
            return ""
        if not select.select([self._stdin], [], [], timeout_s)[0]:
            return ""
        typed = os.read(self._stdin, 32).decode(errors="replace")
        if not typed:  # the terminal has gone
            raise KeyboardInterrupt
        return KEYS.get(typed, typed[0])

    def _take(self) -> None:
        with suppress(OSError, ValueError, termios.error):  # stdin may be a pipe, or closed: then there are no keys
            if os.isatty(sys.stdin.fileno()):
                self._stdin = sys.stdin.fileno()
                self._settings = termios.tcgetattr(self._stdin)
                tty.setcbreak(self._stdin)
        sys.stdout.write(ENTER)
        sys.stdout.flush()

    def _give_back(self) -> None:
        if self._stdin is not None and self._settings:
            with suppress(OSError, termios.error):  # the terminal has gone
                termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._settings)
        with suppress(OSError):
            sys.stdout.write(LEAVE)
            sys.stdout.flush()

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its own screen back, and this one returns with `fg`."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()


def redraw(screen: Screen, picture: Callable[[int], str], refresh_s: float, paint: Callable[[str], str] = str) -> None:
    """Show the text that `picture` makes for a width, again and again until q. While the daemon does not answer, the
    last one stays, under the error."""
    text, key = "", ""
    while key != "q":
        heading = f"{datetime.now().astimezone():%H:%M:%S}  every {refresh_s:g}s, q quits\n\n"
        try:
            text = picture(screen.size[0])
        except (DaemonUnavailable, Unavailable) as error:
            heading += f"{printable(error.detail, 300)} Trying again.\n\n"
        screen.draw((heading + text).rstrip("\n").split("\n"), paint)
        key = screen.key(refresh_s)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
