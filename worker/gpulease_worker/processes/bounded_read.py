"""Reads processes that may hang, each read in a thread that can be abandoned.

The kernel reads what /proc shows of a process's memory (`environ`, `cmdline`, `maps`) under a lock of that memory. If a
process hangs in the kernel while it holds the lock, in a file system or a driver, every reader hangs too: this is why
`ps` hangs on a sick machine. One such process, of any user, must not keep other users' jobs from ending, nor a node's
GPUs from being read. So a read that makes no progress while its thread is in uninterruptible sleep (state D) is
abandoned; one that is merely waiting for CPU is not. The process is skipped until the abandoned read has returned.
Its thread ends with the reading process at the latest: SIGKILL does end this kind of sleep.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Result = TypeVar("Result")

STALL_S = 0.1
"""A read is abandoned after one to two of these. It takes microseconds; a reading has 2 s for everything."""
THREADS = 16
"""Once a read hangs, the remaining processes are shared by this many threads: all ranks of one job may hang at once."""
RECENT_S = 5.0
"""A read that was abandoned more recently than this may only have been slow, on a machine that swaps."""

_abandoned: dict[int, tuple[threading.Thread, float]] = {}
"""The thread that hangs on a process, and since when, by pid."""


class _Reader(Generic[Result]):
    """Reads processes one after another, in a thread."""

    def __init__(self, read: Callable[[int], Result], pids: list[int]) -> None:
        self.pids = pids
        self.results: dict[int, Result] = {}
        self.index = 0
        self.last_index = -1
        self.abandoned = False
        self.failure: Exception | None = None
        self.done = threading.Event()
        self._read = read
        self.thread = threading.Thread(target=self._run, name="bounded read", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:  # no further thread is possible: a read that hangs now blocks the caller
            self._run()

    def _run(self) -> None:
        try:
            for index, pid in enumerate(self.pids):
                self.index = index
                result = self._read(pid)
                if self.abandoned:
                    return
                self.results[pid] = result
        except Exception as error:
            self.failure = error
        finally:
            self.done.set()

    def wait(self) -> list[int]:
        """Wait until it is done, or hangs. Returns the processes still to read, without the one on which it hangs."""
        while not self.done.wait(STALL_S):
            if self.index == self.last_index and _sleeps_uninterruptibly(self.thread):
                self.abandoned = True
                _abandoned[self.pids[self.last_index]] = self.thread, time.monotonic()
                return self.pids[self.last_index + 1 :]
            self.last_index = self.index
        if self.failure is not None:
            raise self.failure
        return []


def read_each(read: Callable[[int], Result], pids: Iterable[int]) -> dict[int, Result]:
    """Call `read` for each process; the results by pid, without processes on which it hangs. Raises what it raises."""
    left, parts = [pid for pid in pids if not is_hung(pid)], 1
    results: dict[int, Result] = {}
    while left:
        readers = [_Reader(read, part) for number in range(parts) if (part := left[number::parts])]
        left, parts = [pid for reader in readers for pid in reader.wait()], THREADS
        for reader in readers:
            results.update(list(reader.results.items()))
    return results


def _sleeps_uninterruptibly(thread: threading.Thread) -> bool:
    """True for a thread in state D."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", encoding="utf-8", errors="replace") as file:
            status = file.read()
    except OSError:
        return False
    return status[status.rindex(")") + 2] == "D"


def read_one(read: Callable[[int], Result], pid: int, default: Result) -> Result:
    """Call `read` for one process; `default` if it hangs."""
    return read_each(read, (pid,)).get(pid, default)


def is_hung(pid: int) -> bool:
    """True while an abandoned read of this process has not returned."""
    thread, _ = _abandoned.get(pid, (None, 0.0))
    if thread is not None and not thread.is_alive():
        _abandoned.pop(pid, None)
        thread = None
    return thread is not None


def abandoned_recently() -> bool:
    """True while a process is skipped that perhaps was only slow."""
    now_s = time.monotonic()
    return any(is_hung(pid) and now_s - since_s < RECENT_S for pid, (_, since_s) in list(_abandoned.items()))
