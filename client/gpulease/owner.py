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
        return None if seen is None or seen.dead else cls(pid, seen.start_ticks)

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


def boot_id() -> str:
    """Changes with every boot of the machine, after which start times mean something else. Empty if unreadable."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


@cache
def realm() -> str | None:
    """Where this process's pids and start times count: the boot and the pid namespace. None if it cannot be read.

    A pid with its start time names a process only to who is in the same realm.
    """
    boot = boot_id()
    with suppress(OSError):
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}" if boot else None
    return None


class Stat(NamedTuple):
    """The part of /proc/PID/stat that is used here."""

    name: str
    """Name of its program, at most 15 bytes; it can name itself otherwise."""
    dead: bool
    """True when it has ended, to its last thread, and only waits to be reaped."""
    parent: int
    """Pid of its parent."""
    group: int
    """Its process group."""
    start_ticks: int
    """Start time in clock ticks since boot."""
    headless: bool = False
    """True when its first thread has ended and others have not: its own files in /proc then tell nothing."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """What the file says. Raises ValueError or IndexError when it is not such a file."""
        # The name is in brackets and may itself contain brackets and spaces: count from the last one.
        opened, closed = text.index("("), text.rindex(")")
        words = text[closed + 2 :].split()
        # The state is that of its first thread. Where that has ended, others may go on or hang in the kernel: so does a
        # killed process look of which one thread is in a driver call.
        ended, threads = words[0] in "ZX", int(words[17])
        name, dead, headless = text[opened + 1 : closed], ended and threads <= 1, ended and threads > 1
        return cls(name, dead, int(words[1]), int(words[2]), int(words[19]), headless)


def stat(pid: int, proc: Path = Path("/proc")) -> Stat | None:
    """What /proc says of a process at this moment; None if there is none, or it cannot be read."""
    try:
        return Stat.parse((proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
