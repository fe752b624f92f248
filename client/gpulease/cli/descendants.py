"""Every process below this one, wherever it has gone: sessions and process groups hold nobody.

torchrun's ranks are sessions of their own, and a child that detaches itself loses its parent. So this process adopts
what loses its parent, and finds its descendants by walking up from every process of the machine. `gpulease_worker` has
more of this kind; the client stands without it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

ROUND_S = 0.05
"""Pause between two rounds of signals: long enough for the dead to go, short beside any grace."""
GENERATIONS = 1000
"""How far up the tree of processes is looked."""
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends. Raises OSError.

    From then on it has children that it did not start, and must reap them.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def send_all(number: int) -> tuple[int, ...]:
    """Pids of the descendants that live, after a signal to each of them; 0 sends none.

    A process counts as living until its last thread has ended; a zombie does not. One walk of /proc: some 20 us for
    each process of the machine.
    """
    living = []
    for pid in [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        # The pidfd pins whoever has the pid now; only after that do /proc and the signal speak of the same process.
        try:
            if _descends(pid) and not _ended(descriptor):
                living.append(pid)
                with suppress(ProcessLookupError, PermissionError):  # gone meanwhile, or another user's
                    signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
    return tuple(living)


def await_end(deadline_s: float) -> None:
    """Return when no descendant lives, after `deadline_s` at the latest."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and send_all(0):
        time.sleep(ROUND_S)


def kill_all(deadline_s: float) -> tuple[int, ...]:
    """SIGKILL every descendant until none is left, and return those that live after `deadline_s`.

    Rounds are needed because a process may fork between the look and the signal. Those that stay are another user's, or
    hang in the kernel.
    """
    end = time.monotonic() + deadline_s
    while (left := send_all(signal.SIGKILL)) and time.monotonic() < end:
        time.sleep(ROUND_S)
    return left


def _descends(pid: int) -> bool:
    own = os.getpid()
    for _ in range(GENERATIONS):
        parent = _parent(pid)
        if parent in (own, 0):
            return parent == own
        pid = parent
    return False


def _parent(pid: int) -> int:
    """Pid of the parent; 0 if there is none, or no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # The name is in brackets and may itself contain brackets and spaces: count from the last one.
    return int(text[text.rindex(b")") + 2 :].split()[1])


def _ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
