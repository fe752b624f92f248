"""Finds and ends every process below another one, whatever its session or process group.

torchrun's ranks are sessions of their own, and a child that detaches itself loses its parent. So the process at the
root becomes a child subreaper, the parent of every orphan below it, and descendants are found by parent pid alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from gpulease_protocol.host.process_id import ProcessId, Stat, stat

ROUND_S = 0.05
"""Pause between two rounds of signals: long enough for processes to end, short compared with any grace period."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def all_pids() -> Iterator[int]:
    """Every process of this pid namespace."""
    with os.scandir("/proc") as entries:
        yield from [int(entry.name) for entry in entries if entry.name.isdigit()]


def descendants(root: int) -> set[ProcessId]:
    """Every living process below `root`. With `root` a child subreaper, orphans are among them.

    One walk of /proc: some 20 us for each process of the machine.
    """
    children: dict[int, list[int]] = {}
    status_of: dict[int, Stat] = {}
    for pid in all_pids():
        if (status := stat(pid)) is not None:
            status_of[pid] = status
            children.setdefault(status.parent, []).append(pid)
    found: set[ProcessId] = set()
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        waiting.extend(children.get(pid, ()))
        if not status_of[pid].dead:
            found.add(ProcessId(pid, status_of[pid].start_ticks))
    return found


def signal_all(processes: Iterable[ProcessId], number: int) -> None:
    """Send a signal to each that is still alive."""
    for process in processes:
        process.send_signal(number)


def await_end(find: Callable[[], Collection[ProcessId]], deadline_s: float) -> None:
    """Return when `find` finds no process, after `deadline_s` at the latest."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and find():
        time.sleep(ROUND_S)


def kill_all(
    find: Callable[[], set[ProcessId]],
    deadline_s: float,
    *,
    cancelled: threading.Event | None = None,
    complete: Callable[[], bool] = lambda: True,
) -> set[ProcessId]:
    """SIGKILL everything that `find` finds, until it finds nothing. Returns what is alive after `deadline_s`.

    Rounds are needed because a process may fork between the search and the signal. Survivors belong to another user, or
    hang in an uninterruptible driver call. `cancelled` ends it early; `complete` is false while `find` may miss some.
    """
    cancelled = cancelled or threading.Event()
    end = time.monotonic() + deadline_s
    while True:
        left = find()
        if (not left and complete()) or time.monotonic() > end or cancelled.is_set():
            return left
        signal_all(left, signal.SIGKILL)
        cancelled.wait(ROUND_S)


def signal_on_parent_death(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends. Raises OSError where it cannot."""
    _prctl(PR_SET_PDEATHSIG, int(number))


def adopt_orphans() -> None:
    """Make this process a child subreaper: orphaned descendants become its children. Raises OSError.

    It must reap them, although it did not start them.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
