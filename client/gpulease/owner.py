"""The process that a lease belongs to. A pid alone names nobody, because pids are used again."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self


@dataclass(frozen=True, slots=True)
class Owner:
    """One process, for as long as this machine is up."""

    pid: int
    """Process id, as this process counts."""
    start_ticks: int | None = None
    """Start time in clock ticks since boot, field 22 of /proc/PID/stat; null where that cannot be read."""

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process that has this pid now; None if it is gone or a zombie."""
        seen = stat(pid)
        return None if seen is None or seen.state in "ZX" else cls(pid, seen.start_ticks)

    @classmethod
    def this_process(cls) -> Self:
        """The calling process."""
        seen = stat(os.getpid())
        return cls(os.getpid(), None if seen is None else seen.start_ticks)

    def alive(self) -> bool:
        """True while it runs; false once it is gone, a zombie, or its pid is another's."""
        return Owner.of(self.pid) == self

    def named(self) -> dict[str, Any]:
        """The fields of a `LeaseRequest` that name it; none where its number means another process to others."""
        if not sees_itself():
            return {}
        return {"owner_pid": self.pid, "owner_start_ticks": self.start_ticks}


def sees_itself() -> bool:
    """False where /proc is that of another pid namespace, so that what it says of our pid is about somebody else.

    As after `unshare --pid --fork` without `--mount-proc`: our pid 1 is then the whole machine's there.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


@cache
def realm() -> str | None:
    """Where this process's pids and start times count: the boot and the pid namespace. None if it cannot be read.

    A pid with its start time names a process only to who is in the same realm.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return None


class Stat(NamedTuple):
    """The part of /proc/PID/stat that tells one process from another."""

    state: str
    """One letter; Z and X are dead."""
    parent: int
    """Pid of its parent."""
    start_ticks: int
    """Start time in clock ticks since boot."""


def stat(pid: int) -> Stat | None:
    """What /proc says of a process at this moment; None if there is none, or it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name is in brackets and may itself contain brackets and spaces: count from the last one.
    words = text[text.rindex(")") + 2 :].split()
    return Stat(words[0], int(words[1]), int(words[19]))
