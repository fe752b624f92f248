"""What other programs use of the machine: no figure is printed beside more than half a core of theirs.

Busy time comes from /proc/stat: user, nice and system. What the measurement uses itself is subtracted: this process,
all its descendants, and those that have ended. The process that measures is a child subreaper, so that a process which
detaches itself, as the supervisor of a job does, stays its descendant.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpulease_protocol.host import process_tree

MAX_FOREIGN_CORES = 0.5
QUIET_S, PATIENCE_S = 2.0, 120.0
"""How long it must be quiet before a question, and how long the table waits for that."""
TICKS = os.sysconf("SC_CLK_TCK")


class ForeignLoad(Exception):
    """Other programs use too much of the machine for a figure to mean anything."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far."""

    at_s: float
    """Monotonic time of the reading."""
    machine_s: float
    """Of the whole machine."""
    own_s: float
    """Of this process, its descendants, and those of them that have ended."""

    @classmethod
    def now(cls, own: int | None = None, stat: Path = Path("/proc/stat")) -> Usage:
        """Of the machine now; `own` is the process that measures, by default this one."""
        own = own or os.getpid()
        user, nice, system = stat.read_text().split(maxsplit=4)[1:4]
        pids = [own, *(process.pid for process in process_tree.descendants(own))]
        own_s = sum(cpu_s(pid, ended_children=True) for pid in pids)
        return cls(time.monotonic(), (int(user) + int(nice) + int(system)) / TICKS, own_s)

    def foreign_cores(self, later: Usage) -> float:
        """Cores that other programs used between two readings."""
        busy_s = (later.machine_s - self.machine_s) - (later.own_s - self.own_s)
        return max(0.0, busy_s / max(later.at_s - self.at_s, 0.001))


def cpu_s(pid: int, *, ended_children: bool = False) -> float:
    """User and system time of a process so far, in seconds; 0 if it is gone. `ended_children` adds that of its children
    that it has waited for."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    times = status[status.rindex(")") + 2 :].split()[11 : 15 if ended_children else 13]
    return sum(map(int, times)) / TICKS


def pss_bytes(pid: int) -> int:
    """Memory of a process in bytes. A page that several processes share counts in part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def become_subreaper() -> None:
    """Become the parent of every orphan below this process."""
    ctypes.CDLL(None, use_errno=True).prctl(process_tree.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def foreign_cores_now(seconds: float = QUIET_S) -> float:
    """What other programs use over so many seconds."""
    before = Usage.now()
    time.sleep(seconds)
    return before.foreign_cores(Usage.now())


def wait_for_quiet(
    patience_s: float = PATIENCE_S,
    usage: Callable[[], Usage] = Usage.now,
    pause: Callable[[float], None] = time.sleep,
) -> float:
    """Wait until other programs use little of the machine; the cores that they use. Raises ForeignLoad."""
    first = before = usage()
    while True:
        pause(QUIET_S)
        after = usage()
        cores = before.foreign_cores(after)
        if cores <= MAX_FOREIGN_CORES:
            return cores
        if after.at_s - first.at_s >= patience_s:
            raise ForeignLoad(refusal(cores))
        if before is first:
            print(f"Other programs use {cores:.1f} cores. Waiting {patience_s:.0f} s for quiet.", file=sys.stderr)
        before = after


def refusal(cores: float) -> str:
    """Why nothing is printed, and what to do."""
    return (
        f"Other programs use {cores:.1f} of {os.cpu_count()} cores, so a figure would say nothing: at most "
        f"{MAX_FOREIGN_CORES} may be in use. Wait until they have ended, or measure all the same with --beside-load, "
        "which the table says."
    )
