"""`gpulease top`: a live view of the machine, on the full screen of the terminal."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

from gpulease.client import Client
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.screen import Screen
from gpulease_cli.snapshot import Snapshot
from gpulease_cli.top_picture import SORT_KEYS, heading, lines, paint
from gpulease_protocol.errors import GpuleaseError, InvalidRequest
from gpulease_protocol.lazy_dataclass import dataclass

REFRESH_S = 1.0
"""Time between two requests for the state: as often as the worker reads the hardware."""
KEY_S = 0.2
"""How soon a new state is drawn."""


@command(examples=("gpulease top",))
def top() -> None:
    """Show GPUs, processes, jobs and the queue live. Keys: q quits, j, k and arrows scroll, s sorts the GPUs."""
    if not sys.stdout.isatty():
        raise InvalidRequest("`top` needs a terminal, and stdout is not one.", remedy="Use gpulease status.")
    with suppress(KeyboardInterrupt), Screen() as screen:
        _Top(screen).run()


@dataclass
class _Latest:
    """The last answer to the thread that asks the daemon. The picture stays while the daemon is away."""

    snapshot: Snapshot | None = None
    problem: str = ""

    def keep_fetching(self, ended: threading.Event) -> None:
        """Ask again and again, until `ended`."""
        with Client(retry_s=0.0) as client:
            while not ended.is_set():
                try:
                    self.snapshot, self.problem = Snapshot.fetch(client), ""
                except GpuleaseError as error:
                    self.problem = error.detail
                ended.wait(REFRESH_S)


class _Top:
    """The picture, and what keys have changed about it."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._latest = _Latest()
        self._sort = 0
        self._first = 0
        """The first line that is shown below the heading."""

    def run(self) -> None:
        """Draw until q. Asking the daemon is left to a thread, so that keys are obeyed while it does not answer."""
        ended = threading.Event()
        threading.Thread(target=self._latest.keep_fetching, args=(ended,), daemon=True).start()
        try:
            key = ""
            while key != "q":
                self._draw()
                key = self._screen.key(KEY_S)
                self._obey(key)
        finally:
            ended.set()

    def _obey(self, key: str) -> None:
        rows = self._screen.size[1]
        self._first += {"j": 1, "k": -1, "J": rows // 2, " ": rows // 2, "K": -(rows // 2)}.get(key, 0)
        if key == "s":
            self._sort = (self._sort + 1) % len(SORT_KEYS)

    def _draw(self) -> None:
        width, rows = self._screen.size
        now, sort = self._latest.snapshot, SORT_KEYS[self._sort]
        top = heading(now, self._latest.problem, sort, width)
        body = [] if now is None else lines(now, sort, width)
        room = max(1, rows - len(top))
        self._first = max(0, min(self._first, len(body) - room))
        shown = body[self._first : self._first + room]
        if self._first + room < len(body):
            shown[-1] = f"... {len(body) - self._first - room + 1} more lines: j"
        self._screen.draw([*top, *shown], paint if output.styled("x", "bold") != "x" else str)
