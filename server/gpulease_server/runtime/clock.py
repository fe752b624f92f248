"""The one module that reads the clocks."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from gpulease_server.core.records import Instant

TOLERANCE_S = 0.05
"""How far the two clocks may drift apart before the wall clock is read again."""


class _Clocks:
    """Ties the wall clock to the monotonic one, so that a deadline is displayed as the same time every time."""

    def __init__(self) -> None:
        self._zero = datetime.now(UTC) - timedelta(seconds=time.monotonic())

    def now(self) -> Instant:
        mono_s = time.monotonic()
        at, wall = self._zero + timedelta(seconds=mono_s), datetime.now(UTC)
        if abs((wall - at).total_seconds()) > TOLERANCE_S:
            self._zero, at = wall - timedelta(seconds=mono_s), wall
        return Instant(at=at, mono_s=mono_s)


now = _Clocks().now
"""Now, on both clocks. Jumps of the wall clock are followed; nothing is measured by it."""


def mono_s() -> float:
    """The monotonic clock alone, to measure how long something takes."""
    return time.monotonic()


def thread_s() -> float:
    """The processor time of this thread, to measure how much of the machine something takes, without its waits."""
    return time.thread_time()


def wall() -> datetime:
    """The wall clock alone, for what is only shown."""
    return datetime.now(UTC)
