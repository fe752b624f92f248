"""Reads processes in /proc: which lease they work under, whose they are, and what they run.

What is kept longer than one look is kept as a `ProcessId`. A zombie counts as dead: it holds no GPU and no port. A
process whose first thread alone has ended counts as alive: another thread may hang in the kernel and hold a GPU.
Whatever comes from a process's memory (environment, command line) is read by `bounded_read`, because it may hang.
"""

from __future__ import annotations

import os
import pwd
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId, stat
from gpulease_worker.processes import bounded_read

MARKER = "GPULEASE_LEASE_ID"
"""Environment variable that says under which lease a process works."""
RANK_VARIABLES = frozenset((b"RANK", b"HOROVOD_RANK", b"OMPI_COMM_WORLD_RANK"))
"""Variables that only a launcher sets, to tell a process its rank: a submitted environment is scrubbed of them."""
COMMAND_CHARACTERS = 200
"""Characters of a command line that are kept."""
ANCESTORS = 64
"""How many generations up a marker is looked for."""
NAME_WAIT_S, NAME_KEPT_S = 0.1, 60.0
"""How long to wait for a login name, short compared with a reading's deadline; how long a name is cached."""

INITIAL_PID_NAMESPACE = 4026531836
"""Inode of the host's own PID namespace (`PROC_PID_INIT_INO` in the kernel's proc_ns.h)."""


class UserNameCache:
    """Login names, from a user database that may be on a network and not answer. No lookup blocks for long."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, float]] = {}
        """By user id: the name, and when it expires."""
        self._lookup: threading.Thread | None = None

    def name_of(self, uid: int) -> str:
        """The login name; while the database does not answer, the last one known, or else the number."""
        name, until_s = self._names.get(uid, (str(uid), 0.0))
        if time.monotonic() < until_s or (self._lookup is not None and self._lookup.is_alive()):
            return name
        self._lookup = threading.Thread(target=self._look_up, args=(uid,), daemon=True)
        self._lookup.start()
        self._lookup.join(NAME_WAIT_S)
        return self._names.get(uid, (name, 0.0))[0]

    def _look_up(self, uid: int) -> None:
        try:
            name = pwd.getpwuid(uid).pw_name
        except (KeyError, OSError):
            name = str(uid)
        self._names[uid] = (name, time.monotonic() + NAME_KEPT_S)


USERS = UserNameCache()


def marker(pid: int) -> str | None:
    """The lease in the environment that the process was started with; None if there is none or it is unreadable."""
    return bounded_read.read_one(_marker, pid, None)


def _marker(pid: int) -> str | None:
    prefix = MARKER.encode() + b"="
    for entry in _environment(pid).split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace") or None
    return None


def markers(pids: Iterable[int]) -> dict[int, str]:
    """The marker of each of these processes that has one, by pid. Much faster than one call for each."""
    return {pid: lease_id for pid, lease_id in bounded_read.read_each(_marker, pids).items() if lease_id is not None}


def has_rank(pid: int) -> bool:
    """True for a process that was started as a rank: its environment says which."""
    return bounded_read.read_one(_has_rank, pid, False)


def _has_rank(pid: int) -> bool:
    return any(entry.partition(b"=")[0] in RANK_VARIABLES for entry in _environment(pid).split(b"\0"))


def _environment(pid: int) -> bytes:
    """The environment a process was started with; empty where it is unreadable. Its first thread may have ended before
    the others and then has none, so the other threads are tried too."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                return Path(f"/proc/{pid}/task/{task}/environ").read_bytes()
    return b""


def lease_of(pid: int) -> str | None:
    """The lease that a process works under, by its own marker or that of its nearest marked ancestor."""
    for _ in range(ANCESTORS):
        lease_id = marker(pid)
        if lease_id is not None:
            return lease_id
        status = stat(pid)
        if status is None or status.parent <= 1:
            return None
        pid = status.parent
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


def in_cgroup_of(pid: int, lease_id: str) -> bool:
    """True when the path of one of the process's cgroups contains the lease's id as a whole word."""
    return names_lease(cgroup_paths(pid), lease_id)


def cgroup_paths(pid: int) -> str:
    """The content of a process's /proc/PID/cgroup; empty where it is unreadable."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(errors="replace")
    except OSError:
        return ""


def names_lease(cgroups: str, lease_id: str) -> bool:
    """True when the paths of these cgroups contain the lease's id as a whole word."""
    whole_word = rf"(?<![A-Za-z0-9]){re.escape(lease_id)}(?![A-Za-z0-9])"
    return lease_id in cgroups and re.search(whole_word, cgroups) is not None


def ticks_now() -> int:
    """The current time in clock ticks since boot, comparable with start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def marked_processes(leases: Collection[str]) -> dict[ProcessId, str]:
    """Every living process that carries the marker of one of these leases, with that lease. One walk of /proc."""
    if not leases:
        return {}

    def read(pid: int) -> tuple[ProcessId, str] | None:
        # The identity is checked before and after the marker is read: if the process ended in between and its pid was
        # reused, the marker is not the one of the new process.
        process = ProcessId.of(pid)
        lease_id = _marker(pid) if process is not None else None
        if process is None or lease_id is None or lease_id not in leases or not process.alive():
            return None
        return process, lease_id

    pids = list(process_tree.all_pids())
    marked = dict(entry for entry in bounded_read.read_each(read, pids).values() if entry is not None)
    for pid in filter(bounded_read.is_hung, pids):  # its environment is unreadable; its cgroup is not
        for lease_id in leases:
            if in_cgroup_of(pid, lease_id) and (process := ProcessId.of(pid)) is not None:
                marked[process] = lease_id
    return marked


def kill_marked(lease_id: str, deadline_s: float, cancelled: threading.Event | None = None) -> set[ProcessId]:
    """SIGKILL everything with the lease's marker until nothing is left, never the caller. Returns the survivors.

    Nothing is left only once every process could be read. `deadline_s` bounds it, and `cancelled` ends it early.
    """

    def find() -> set[ProcessId]:
        return {process for process in marked_processes({lease_id}) if process.pid != os.getpid()}

    return process_tree.kill_all(
        find, deadline_s, cancelled=cancelled, complete=lambda: not bounded_read.abandoned_recently()
    )


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
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4 * COMMAND_CHARACTERS)  # its process may have made it as long as its address space
        line = words.rstrip(b"\0").replace(b"\0", b" ") or Path(f"/proc/{pid}/comm").read_bytes().strip()
    except OSError:
        return None
    return line.decode(errors="replace")[:COMMAND_CHARACTERS]


def sees_the_host() -> bool:
    """True in the host's own PID namespace; elsewhere the driver silently omits the processes of others."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE
    except OSError:
        return False
