"""Looks at processes that may hang, each in a thread that can be given up.

What /proc shows out of a process's memory (`environ`, `cmdline`, `maps`) is read under a lock of that memory. A process
that hangs in the kernel while it has the lock, in a file system or a driver, hangs everybody who reads: this is why
`ps` hangs on a sick machine. One such process, of whatever user, must not keep the jobs of others from ending, nor the
GPUs of a node from being read. So a look that makes no progress, and of which the kernel shows that it sleeps
uninterruptibly, is given up: one that only waits for a processor is not. Its process is left out until the thread that
hangs there has returned. That thread ends with its own process at the latest: SIGKILL does end this wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Seen = TypeVar("Seen")

PATIENCE_S = 0.1
"""A look is given up after between one and two of these. It takes microseconds; a reading has 2 s for everything."""
PARTS = 16
"""Once something hangs, so many threads share the rest: the ranks of one job may all hang at once."""
DOUBT_S = 5.0
"""A look that was given up more recently may just have been slow, on a machine that swaps."""

_given_up: dict[int, tuple[threading.Thread, float]] = {}
"""The thread that hangs at a process and since when, by pid."""


class _Walk(Generic[Seen]):
    """Looks at one process after the other."""

    def __init__(self, look: Callable[[int], Seen], pids: list[int]) -> None:
        self.pids = pids
        self.seen: dict[int, Seen] = {}
        self.place = 0
        self.last_place = -1
        self.given_up = False
        self.failure: Exception | None = None
        self.over = threading.Event()
        self._look = look
        self.thread = threading.Thread(target=self._run, name="look", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:  # no further thread can be had: whoever hangs then, hangs
            self._run()

    def _run(self) -> None:
        try:
            for place, pid in enumerate(self.pids):
                self.place = place
                seen = self._look(pid)
                if self.given_up:
                    return
                self.seen[pid] = seen
        except Exception as error:
            self.failure = error
        finally:
            self.over.set()

    def wait(self) -> list[int]:
        """Until it is over, or hangs; what is then left to look at, without the process at which it hangs."""
        while not self.over.wait(PATIENCE_S):
            if self.place == self.last_place and _sleeps_in_kernel(self.thread):
                self.given_up = True
                _given_up[self.pids[self.last_place]] = self.thread, time.monotonic()
                return self.pids[self.last_place + 1 :]
            self.last_place = self.place
        if self.failure is not None:
            raise self.failure
        return []


def each(look: Callable[[int], Seen], pids: Iterable[int]) -> dict[int, Seen]:
    """What a look at each process shows, by pid; those are left out at which it hangs. Raises what `look` raises."""
    left, parts = [pid for pid in pids if not hangs(pid)], 1
    found: dict[int, Seen] = {}
    while left:
        walks = [_Walk(look, part) for number in range(parts) if (part := left[number::parts])]
        left, parts = [pid for walk in walks for pid in walk.wait()], PARTS
        for walk in walks:
            found.update(list(walk.seen.items()))
    return found


def _sleeps_in_kernel(thread: threading.Thread) -> bool:
    """True for a thread in state D."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", encoding="utf-8", errors="replace") as file:
            status = file.read()
    except OSError:
        return False
    return status[status.rindex(")") + 2] == "D"


def one(look: Callable[[int], Seen], pid: int, otherwise: Seen) -> Seen:
    """What a look at one process shows; `otherwise` where it hangs."""
    return each(look, (pid,)).get(pid, otherwise)


def hangs(pid: int) -> bool:
    """True while a look at this process that was given up has not returned."""
    thread, _ = _given_up.get(pid, (None, 0.0))
    if thread is not None and not thread.is_alive():
        _given_up.pop(pid, None)
        thread = None
    return thread is not None


def doubtful() -> bool:
    """True while a process is left out that perhaps only was slow."""
    now_s = time.monotonic()
    return any(hangs(pid) and now_s - since_s < DOUBT_S for pid, (_, since_s) in list(_given_up.items()))
