"""The shell that `eval "$(gpulease acquire)"` is typed into: it owns the lease, which ends when the shell does.

A shell runs `$(...)` in a fork of itself that ends at once. A fork has the stack of the process that it was forked
from, at the same address, until it executes another program; so it is told from the shell itself.
"""

from __future__ import annotations

import os

from gpulease_protocol.host.process_id import ProcessId, proc_shows_own_pids, stat
from gpulease_protocol.lazy_dataclass import dataclass

SHELLS = frozenset("sh bash dash ash busybox zsh ksh ksh93 mksh yash fish csh tcsh nu xonsh elvish pwsh osh".split())  # noqa: SIM905
MAX_ANCESTORS = 32
"""How far up the process tree to look."""


@dataclass(frozen=True, slots=True)
class CallingShell:
    """The nearest shell above this program, or the process that started it where there is none."""

    process: ProcessId
    """The process."""
    name: str
    """Name of its program, such as `bash`."""

    @property
    def is_fish(self) -> bool:
        """True for the one shell here that has a syntax of its own."""
        return self.name == "fish"


def calling_shell() -> CallingShell | None:
    """The shell that called this program; None if no process of this user did, or /proc does not show it."""
    if not proc_shows_own_pids():
        return None
    ancestors = _ancestors()
    return next((one for one in ancestors if one.name in SHELLS), ancestors[0] if ancestors else None)


def _ancestors() -> list[CallingShell]:
    """Processes of this user above this one, nearest first, without those that are only forks of the next one."""
    found: list[CallingShell] = []
    stacks: list[int] = []
    pid = os.getppid()
    for _ in range(MAX_ANCESTORS):
        seen = stat(pid) if pid > 1 else None
        if seen is None or not _is_own(pid):
            break
        if stacks and stacks[-1] == seen.stack_start != 0:
            found.pop()
            stacks.pop()
        found.append(CallingShell(ProcessId(pid, seen.start_ticks), seen.name))
        stacks.append(seen.stack_start)
        pid = seen.parent
    return found


def _is_own(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False
