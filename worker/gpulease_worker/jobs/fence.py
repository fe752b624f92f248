"""The fence of a job: without an answer of any daemon for `fence_s`, its supervisor ends it.

The worker notes the time at which it sent each report that a daemon answered (`ContactFile`). The supervisor, which
outlives the worker, reads it (`Fence`): the job must not run once `fence_s` have passed since then. The daemon, which
got that report no earlier than it was sent, counts the job as lost later than that by a margin
(`gpulease_protocol.job_fence`). Time is counted since boot, not by the wall clock; it also counts while a host is
suspended.

| what happens | what follows |
|---|---|
| the link is cut, the worker is stopped or killed, its host is suspended | no contact: the job ends at its fence |
| the file cannot be written, or is torn or of an earlier boot | the same |
| an order arrives late, from before a cut | contact is when its report was sent: past the fence nothing starts |
| the supervisor is killed | the worker ends the job at once; where that is dead too, the next worker does |
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from gpulease_protocol.host.process_id import boot_id

FILE = "contact"
"""In the data directory."""
SIZE_BYTES = 64
"""Of its one line, with what fills it up: each write replaces all of it."""
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL at the fence."""
CHECK_S = 5.0
"""Longest sleep of a supervisor with a fence: what it sleeps does not count time in which its host is suspended."""


def since_boot_s() -> float:
    """Seconds since boot, those in which the host was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ContactFile:
    """When this host last had an answer of a daemon. Written by its worker."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE

    def note(self, sent_at_s: float) -> None:
        """Note that a report was answered that was sent at this time since boot. Raises OSError."""
        line = f"{boot_id()} {sent_at_s:.3f}".ljust(SIZE_BYTES - 1) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, line.encode(), 0)
        finally:
            os.close(descriptor)


class Fence:
    """The fence of one job, as its supervisor sees it.

    Args:
        data_dir: Where the worker notes its contact.
        fence_s: How long the job may run without; None for a job without a fence.
    """

    def __init__(self, data_dir: Path, fence_s: float | None) -> None:
        self._path = data_dir / FILE
        self._fence_s = fence_s
        self._contact_s = float("-inf")
        self.was_reached = False
        """True once the job was to be ended."""

    @property
    def reason(self) -> str:
        """Why the job was ended."""
        return f"No daemon has answered this node for {self._fence_s:g} s, which is the job's fence (fence_s)."

    def left_s(self) -> float:
        """How long the job may still run if no daemon answers; 0 or less: it must not."""
        if self._fence_s is None:
            return float("inf")
        now_s = since_boot_s()
        if now_s - self._contact_s >= self._fence_s / 2:
            self._contact_s = max(self._contact_s, self._read(now_s))
        return self._contact_s + self._fence_s - now_s

    def require(self, error: type[Exception]) -> None:
        """Raise an error with the reason when the job must not run: it is then not launched any more."""
        if self.left_s() <= 0:
            self.was_reached = True
            raise error(self.reason)

    def is_reached(self) -> bool:
        """True once, when the job is to be ended."""
        if self.was_reached or self.left_s() > 0:
            return False
        self.was_reached = True
        return True

    def next_look_s(self) -> float:
        """For how long a supervisor may sleep."""
        if self._fence_s is None:
            return float("inf")
        return CHECK_S if self.was_reached else min(CHECK_S, max(0.0, self.left_s()))

    def _read(self, now_s: float) -> float:
        try:
            boot, at = self._path.read_text(encoding="ascii").split()
            at_s = float(at)
        except (OSError, ValueError):
            return float("-inf")
        return at_s if boot == boot_id() and at_s <= now_s else float("-inf")
