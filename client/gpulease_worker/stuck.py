"""What keeps processes that SIGKILL does not end, in words.

A killed process ends when it comes out of the kernel. One that waits there for a driver or a file system that does not
answer comes out when that answers, or never; a process of another user is not even sent the signal. Its GPU is whatever
that process makes of it, so the job stays on record as stopping, and its lease active, until it has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpulease_worker.processes import Identity
from gpulease_worker.records import Stuck

NAMED_PIDS = 20
"""How many of the processes that cannot be killed are named: the record has room for so many."""
CLUES = 4
"""Of so many of them it is said where they hang."""


def note(left: Iterable[Identity]) -> Stuck:
    """The record of processes that would not die."""
    pids = sorted(process.pid for process in left)
    who = ", ".join(_words(pid) if place < CLUES else str(pid) for place, pid in enumerate(pids[:NAMED_PIDS]))
    more = f" and {len(pids) - NAMED_PIDS} more" if len(pids) > NAMED_PIDS else ""
    return Stuck(
        pids=tuple(pids[:NAMED_PIDS]),
        reason=f"processes that SIGKILL does not end: {who}{more}; the job keeps its GPUs until they have ended",
    )


def _words(pid: int) -> str:
    waits = _hangs_in(pid)
    if waits is None:
        return f"{pid} (runs on, perhaps as a user whom this worker may not signal)"
    return f"{pid} (hangs in the kernel{f', in {waits}' if waits else ''})"


def _hangs_in(pid: int) -> str | None:
    """Where in the kernel a thread of it waits and takes no signal; "" where only root is told, None if none does."""
    with suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError):
                status = Path(f"/proc/{pid}/task/{task}/stat").read_text(errors="replace")
                if status[status.rindex(")") + 2] == "D":
                    waits = Path(f"/proc/{pid}/task/{task}/wchan").read_text(errors="replace")
                    return waits if waits != "0" else ""
    return None
