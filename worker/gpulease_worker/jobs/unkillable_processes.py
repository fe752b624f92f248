"""Explains why processes survive SIGKILL.

A killed process ends when it leaves the kernel. A process that waits there for a driver or a file system leaves when
that answers, or never; a process of another user is not even sent the signal. It may still use its GPU, so the job
stays `stopping`, and its lease active, until the process has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.host.process_id import ProcessId
from gpulease_worker.jobs.job_records import UnkillableRecord

NAMED_PIDS = 20
"""How many of the unkillable processes are named: the record has space for this many."""
EXPLAINED_PIDS = 4
"""For how many of them the place where they hang is named."""


def unkillable_record(left: Iterable[ProcessId]) -> UnkillableRecord:
    """The record of processes that survive SIGKILL."""
    pids = sorted(process.pid for process in left)
    who = ", ".join(
        _explain(pid) if place < EXPLAINED_PIDS else str(pid) for place, pid in enumerate(pids[:NAMED_PIDS])
    )
    more = f" and {len(pids) - NAMED_PIDS} more" if len(pids) > NAMED_PIDS else ""
    return UnkillableRecord(
        pids=tuple(pids[:NAMED_PIDS]),
        reason=f"processes that SIGKILL does not end: {who}{more}; the job keeps its GPUs until they have ended",
    )


def _explain(pid: int) -> str:
    waits = _hangs_in(pid)
    if waits is None:
        return f"{pid} (runs on, perhaps as a user whom this worker may not signal)"
    return f"{pid} (hangs in the kernel{f', in {waits}' if waits else ''})"


def _hangs_in(pid: int) -> str | None:
    """Kernel function in which a thread of it waits uninterruptibly; "" if only root may know, None if none does."""
    with suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError):
                status = Path(f"/proc/{pid}/task/{task}/stat").read_text(errors="replace")
                if status[status.rindex(")") + 2] == "D":
                    waits = Path(f"/proc/{pid}/task/{task}/wchan").read_text(errors="replace")
                    return waits if waits != "0" else ""
    return None
