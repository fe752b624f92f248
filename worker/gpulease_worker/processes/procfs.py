"""Reads processes in /proc: whose they are, what they run, and from which process they descend.

What is kept longer than one look is kept as a `ProcessId`. A zombie counts as dead: it holds no GPU and no port. A
process whose first thread alone has ended counts as alive: another thread may hang in the kernel and hold a GPU.
Whatever comes from a process's memory (environment, command line) is read by `bounded_read`, because it may hang.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from gpulease_protocol.host.process_id import ProcessId, stat
from gpulease_worker.processes import bounded_read
from gpulease_worker.processes.user_names import USERS

RANK_VARIABLES = frozenset((b"RANK", b"HOROVOD_RANK", b"OMPI_COMM_WORLD_RANK"))
"""Variables that only a launcher sets, to tell a process its rank: a submitted environment is scrubbed of them."""
COMMAND_CHARACTERS = 200
"""Characters of a command line that are kept."""
COMMAND_BYTES = 4096
"""As much of a command line is read: a user can make it megabytes long."""
ANCESTORS = 64
"""How many generations up a process is looked for."""
INITIAL_PID_NAMESPACE = 4026531836
"""Inode of the host's own PID namespace (`PROC_PID_INIT_INO` in the kernel's proc_ns.h)."""


def has_rank(pid: int) -> bool:
    """True for a process that was started as a rank: its environment says which."""
    return bounded_read.read_one(_has_rank, pid, False)


def _has_rank(pid: int) -> bool:
    variables = b"\0" + environment(pid)
    return any(b"\0" + name + b"=" in variables for name in RANK_VARIABLES)


def environment(pid: int, size_bytes: int = -1) -> bytes:
    """The environment that a process was started with, at most so many bytes of it; empty where it is unreadable.

    Its first thread may have ended before the others and then has none, so the other threads are tried too. May hang.
    """
    with suppress(OSError):
        return _head(f"/proc/{pid}/environ", size_bytes)
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                return _head(f"/proc/{pid}/task/{task}/environ", size_bytes)
    return b""


def _head(path: str, size_bytes: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(size_bytes) or b""


def real_uid(pid: int) -> int | None:
    """The user who started a process; None if it is gone. A setuid program changes only its effective user."""
    try:
        status = _head(f"/proc/{pid}/status", 4096)
        return int(status[status.index(b"\nUid:") + 5 :].split(None, 1)[0])
    except (OSError, ValueError):
        return None


def descends_from(pid: int, ancestor: ProcessId, known: Mapping[ProcessId, ProcessId] = MappingProxyType({})) -> bool:
    """True for `ancestor` itself and every process below it, as long as those in between are alive, or are `known` to
    have descended from it."""
    for _ in range(ANCESTORS):
        status = stat(pid)
        if status is None:
            return False
        if pid == ancestor.pid:
            return status.start_ticks == ancestor.start_ticks
        if known and known.get(ProcessId(pid, status.start_ticks)) == ancestor:
            return True
        if status.parent <= 1:
            return False
        pid = status.parent
    return False


def ticks_now() -> int:
    """The current time in clock ticks since boot, comparable with start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def user_of(pid: int) -> str | None:
    """Login name of a process's owner, or the user id where no name is known; None if the process is gone."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    return USERS.name_of(uid)


def runs_as(pid: int, user: str) -> bool:
    """True if a process runs as this user, given as login name or number."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return False
    return user == str(uid) or user == USERS.name_of(uid)


def command_of(pid: int) -> str | None:
    """Command line of a process, cut at 200 characters; None if the process is gone or it is unreadable."""
    return bounded_read.read_one(_command, pid, None)


def commands(pids: Iterable[int]) -> dict[int, str]:
    """The command line of each of these processes that has one, by pid. Much faster than one call for each."""
    return {pid: command for pid, command in bounded_read.read_each(_command, pids).items() if command is not None}


def _command(pid: int) -> str | None:
    try:
        words = _head(f"/proc/{pid}/cmdline", COMMAND_BYTES).rstrip(b"\0").split(b"\0")
        line = b" ".join(words) or Path(f"/proc/{pid}/comm").read_bytes().strip()
    except OSError:
        return None
    return line.decode(errors="replace")[:COMMAND_CHARACTERS]


def sees_the_host() -> bool:
    """True in the host's own PID namespace; elsewhere the driver silently omits the processes of others."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE
    except OSError:
        return False
