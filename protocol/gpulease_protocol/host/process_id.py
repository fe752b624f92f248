"""Process identity. A pid alone identifies no process, because the kernel reuses pids; a pid with its start time does.

`ProcessId` is used wherever a process is remembered for longer than one look at /proc: the owner of a lease, a job's
supervisor, a process that is to be signalled. Signals go through a pidfd that was checked against the start time.
"""

from __future__ import annotations

import errno
import os
import signal
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from gpulease_protocol.lazy_dataclass import dataclass

PF_KTHREAD = 0x00200000
"""Flag of a process: it is a thread of the kernel (`sched.h`)."""
STAT_BYTES = 4096
"""More than /proc/PID/stat ever has."""
CANNOT_LOOK = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that say nothing of a process, but that the caller may open no more files."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, for as long as the machine is up."""

    pid: int
    """Process id, as this process counts."""
    start_ticks: int
    """Start time in clock ticks since boot, field 22 of /proc/PID/stat; 0, as of no process, where it is unreadable."""

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process that has this pid now; None if it is gone or a zombie."""
        status = stat(pid)
        return None if status is None or status.dead else cls(pid, status.start_ticks)

    @classmethod
    def this_process(cls) -> Self:
        """The calling process."""
        return cls.of(os.getpid()) or cls(os.getpid(), 0)

    def alive(self) -> bool:
        """True while it runs; false once it is gone, a zombie, or its pid has been reused.

        While the caller may open no more files, a process with this pid counts as this one: what lives is never taken
        for dead.
        """
        status = stat(self.pid)
        if status is None:
            try:
                status = Stat.parse(_stat_content(self.pid, "/proc").decode(errors="replace"))
            except OSError as error:
                return error.errno in CANNOT_LOOK and self.start_ticks > 0 and _exists(self.pid)
        return not status.dead and status.start_ticks == self.start_ticks

    def pidfd(self) -> int | None:
        """A pidfd of exactly this process, for the caller to close; None if it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return None
        # An open pidfd keeps the pid from being reused; only after that does the start time prove the identity.
        status = stat(self.pid)
        if status is not None and status.start_ticks == self.start_ticks:
            return descriptor
        os.close(descriptor)
        return None

    def send_signal(self, number: int) -> bool:
        """Send a signal to exactly this process. False if it is gone or belongs to another user."""
        descriptor = self.pidfd()
        if descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(descriptor, number)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(descriptor)
        return True

    def owner_fields(self, *, local: bool) -> dict[str, Any]:
        """The fields of a `LeaseRequest` that name it as the owner; none where other processes count pids otherwise.

        `local`: whether the daemon is on this host. Another one finds the worker that can watch it by the realm.
        """
        if not proc_shows_own_pids() or (not local and realm() is None):
            return {}
        fields: dict[str, Any] = {"owner_pid": self.pid, "owner_start_ticks": self.start_ticks}
        return fields if local else fields | {"owner_realm": realm()}


def proc_shows_own_pids() -> bool:
    """False where /proc belongs to another pid namespace, so that our own pid there is another process.

    As after `unshare --pid --fork` without `--mount-proc`: pid 1 in that /proc is the init process of the machine.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def boot_id() -> str:
    """Changes with every boot of the machine, which restarts the count of start times. Empty if unreadable."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


@cache
def realm() -> str | None:
    """Where this process's pids and start times are valid: the boot and the pid namespace. None if it is unreadable.

    A pid with its start time identifies a process only to processes of the same realm.
    """
    boot = boot_id()
    with suppress(OSError):
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}" if boot else None
    return None


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that are used here."""

    name: str
    """Name of the program, at most 15 bytes; a process can rename itself."""
    dead: bool
    """True when all its threads have ended and it only waits to be reaped."""
    parent: int
    """Pid of its parent."""
    group: int
    """Its process group."""
    start_ticks: int
    """Start time in clock ticks since boot."""
    leader_ended: bool = False
    """True when its first thread has ended and others have not: its own files in /proc are then empty."""
    stack_start: int = 0
    """Address of its stack, another one after each exec; 0 where the caller may not know it, or it has no memory."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the content of the file. Raises ValueError or IndexError when it is not such a file."""
        # The name is in brackets and may itself contain brackets and spaces: count from the last bracket.
        opened, closed = text.index("("), text.rindex(")")
        words = text[closed + 2 :].split(None, 26)
        # The state is that of the first thread. Once that has ended, others may still run or hang in the kernel: a
        # killed process with one thread in a driver call looks like this.
        ended, threads = words[0] in "ZX", int(words[17])
        name, dead, leader_ended = text[opened + 1 : closed], ended and threads <= 1, ended and threads > 1
        stack_start = int(words[25]) if len(words) > 25 else 0
        return cls(name, dead, int(words[1]), int(words[2]), int(words[19]), leader_ended, stack_start)


def stat(pid: int, proc: Path = Path("/proc")) -> Stat | None:
    """The current status of a process from /proc; None if there is no such process, or it is unreadable."""
    content = _read_stat(pid, proc)
    return None if content is None else Stat.parse(content.decode(errors="replace"))


def program_stat(pid: int) -> Stat | None:
    """As `stat`, but None also for a thread of the kernel: it has no program, and so no environment and no open file.
    That takes less than `stat`, and most processes of a quiet machine are such threads."""
    content = _read_stat(pid, "/proc")
    if content is None or int(content[content.rindex(b")") + 2 :].split(None, 7)[6]) & PF_KTHREAD:
        return None
    return Stat.parse(content.decode(errors="replace"))


def started_since(pid: int, start_ticks: int) -> bool:
    """True for a process that was started at this time, in clock ticks since boot, or later. Faster than `stat`."""
    content = _read_stat(pid, "/proc")
    return content is not None and int(content[content.rindex(b")") + 2 :].split(None, 20)[19]) >= start_ticks


def _read_stat(pid: int, proc: Path | str) -> bytes | None:
    try:
        return _stat_content(pid, proc)
    except OSError:
        return None


def _stat_content(pid: int, proc: Path | str) -> bytes:
    descriptor = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, STAT_BYTES)
    finally:
        os.close(descriptor)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
