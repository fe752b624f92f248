"""Sleeping in a way that every signal ends, for a process that does all its work in one loop."""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress


class SignalWakeup:
    """Ends a sleep when a signal arrives, also one that arrives just before it."""

    def __init__(self) -> None:
        self._wake, self._wake_end = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_end.setblocking(False)

    def install(self) -> None:
        """From now on, the arrival of a signal that Python handles wakes the loop."""
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)

    def sleep(self, seconds: float, *descriptors: int) -> None:
        """Sleep, until there is a signal or something to read."""
        wake = self._wake.fileno()
        if wake in select.select([wake, *descriptors], [], [], max(0.0, seconds))[0]:
            with suppress(BlockingIOError):
                self._wake.recv(4096)

    def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Sleep until a signal has made a condition true, so long at most."""
        until_s = time.monotonic() + seconds
        while not condition() and (left_s := until_s - time.monotonic()) > 0:
            self.sleep(left_s)
