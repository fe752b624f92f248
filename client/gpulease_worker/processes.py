"""What /proc says of processes: who they are, which lease they work under, and how to end exactly them.

A pid alone names nobody, because pids are used again. Everything here that lasts longer than one look holds an
`Identity` (pid and start time), and a signal goes through a pidfd that was checked against it. A zombie counts as dead:
it holds no GPU and no port. One whose first thread alone has ended lives: another may hang in the kernel, GPU in hand.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpulease.owner import Stat, stat
from gpulease_worker import patience

MARKER = "GPULEASE_LEASE_ID"
"""Environment variable that says under which lease a process works."""
RANK_VARIABLES = frozenset((b"RANK", b"HOROVOD_RANK", b"OMPI_COMM_WORLD_RANK"))
"""What launchers tell a rank of its place, and nobody else: a submitted environment is scrubbed of them."""
COMMAND_CHARACTERS = 200
"""Characters of a command line that are kept."""
ANCESTORS = 64
"""How far up the tree of processes a marker is looked for."""
KILL_ROUND_S = 0.05
"""Pause between two rounds of SIGKILL: long enough for the dead to go, short beside any grace."""
NAME_WAIT_S, NAME_KEPT_S = 0.1, 60.0
"""How long a name is waited for, short beside a reading's deadline; how long it is taken to be the same."""

INITIAL_PID_NAMESPACE = 4026531836
"""Inode of the host's own PID namespace (`PROC_PID_INIT_INO` in the kernel's proc_ns.h)."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, for as long as the machine is up."""

    pid: int
    """Process id."""
    start_ticks: int
    """Start time in clock ticks since boot, field 22 of /proc/PID/stat."""

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process that has this pid now; None if it is gone or a zombie."""
        seen = stat(pid)
        return None if seen is None or seen.dead else cls(pid, seen.start_ticks)

    def alive(self) -> bool:
        """True while it runs; false once it is gone, a zombie, or its pid is another's."""
        return Identity.of(self.pid) == self

    def pidfd(self) -> int | None:
        """A pidfd of exactly this process, for the caller to close; None if it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return None
        # The pidfd pins whoever has the pid now; only after that does the start time prove who it is.
        seen = stat(self.pid)
        if seen is not None and seen.start_ticks == self.start_ticks:
            return descriptor
        os.close(descriptor)
        return None

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to exactly this process. False if it is gone or another user's."""
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


class UserNames:
    """Login names, from a user database that may lie on a network and not answer: nobody waits long for it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, float]] = {}
        """By number: the name, and when it is asked for again."""
        self._asking: threading.Thread | None = None

    def name_of(self, uid: int) -> str:
        """The name; the one that was known before, or else the number, while the database does not answer."""
        name, until_s = self._known.get(uid, (str(uid), 0.0))
        if time.monotonic() < until_s or (self._asking is not None and self._asking.is_alive()):
            return name
        self._asking = threading.Thread(target=self._ask, args=(uid,), daemon=True)
        self._asking.start()
        self._asking.join(NAME_WAIT_S)
        return self._known.get(uid, (name, 0.0))[0]

    def _ask(self, uid: int) -> None:
        try:
            name = pwd.getpwuid(uid).pw_name
        except (KeyError, OSError):
            name = str(uid)
        self._known[uid] = (name, time.monotonic() + NAME_KEPT_S)


USERS = UserNames()


def pids() -> Iterator[int]:
    """Every process of this pid namespace."""
    with os.scandir("/proc") as entries:
        yield from [int(entry.name) for entry in entries if entry.name.isdigit()]


def marker(pid: int) -> str | None:
    """The lease in the environment that the process was started with; None if there is none, or it cannot be read."""
    return patience.one(_marker, pid, None)


def _marker(pid: int) -> str | None:
    prefix = MARKER.encode() + b"="
    for entry in _environment(pid).split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace") or None
    return None


def markers(pids: Iterable[int]) -> dict[int, str]:
    """The marker of each of these processes that has one, by pid. Far quicker than to ask for one after the other."""
    return {pid: found for pid, found in patience.each(_marker, pids).items() if found is not None}


def has_rank(pid: int) -> bool:
    """True for a process that was started as a rank: its environment says which."""
    return patience.one(_has_rank, pid, False)


def _has_rank(pid: int) -> bool:
    return any(entry.partition(b"=")[0] in RANK_VARIABLES for entry in _environment(pid).split(b"\0"))


def _environment(pid: int) -> bytes:
    """What a process was started with; empty where that may not be read. Its first thread may have ended before the
    others, and tells nothing then."""
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
        found = marker(pid)
        if found is not None:
            return found
        seen = stat(pid)
        if seen is None or seen.parent <= 1:
            return None
        pid = seen.parent
    return None


def descends_from(pid: int, owner: Identity) -> bool:
    """True for that very process and everything below it, as long as it and those between live."""
    for _ in range(ANCESTORS):
        seen = stat(pid)
        if seen is None:
            return False
        if pid == owner.pid:
            return seen.start_ticks == owner.start_ticks
        if seen.parent <= 1:
            return False
        pid = seen.parent
    return False


def cgroup_names(pid: int, lease_id: str) -> bool:
    """True when the path of one of the process's cgroups has the lease's id in it, as a whole word."""
    return names(cgroups_of(pid), lease_id)


def cgroups_of(pid: int) -> str:
    """The paths of a process's cgroups, as /proc tells them; empty where that cannot be read."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(errors="replace")
    except OSError:
        return ""


def names(cgroups: str, lease_id: str) -> bool:
    """True when the lease's id is in the paths of cgroups, as a whole word."""
    whole_word = rf"(?<![A-Za-z0-9]){re.escape(lease_id)}(?![A-Za-z0-9])"
    return lease_id in cgroups and re.search(whole_word, cgroups) is not None


def ticks_now() -> int:
    """This moment in clock ticks since boot, comparable with start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def marked(leases: Collection[str]) -> dict[Identity, str]:
    """Every living process that carries the marker of one of these leases, and of which. One walk of /proc."""
    if not leases:
        return {}

    def look(pid: int) -> tuple[Identity, str] | None:
        # Who it is before and after the marker is read: the marker of a process that ended in between is not the one of
        # the stranger that has the pid then.
        process = Identity.of(pid)
        lease_id = _marker(pid) if process is not None else None
        if process is None or lease_id is None or lease_id not in leases or not process.alive():
            return None
        return process, lease_id

    everybody = list(pids())
    found = dict(one for one in patience.each(look, everybody).values() if one is not None)
    for pid in filter(patience.hangs, everybody):  # its environment cannot be read; its cgroup can
        for lease_id in leases:
            if cgroup_names(pid, lease_id) and (process := Identity.of(pid)) is not None:
                found[process] = lease_id
    return found


def descendants(root: int) -> set[Identity]:
    """Every living process below `root`. With `root` a child subreaper, also those whose parents have died."""
    children: dict[int, list[int]] = {}
    seen: dict[int, Stat] = {}
    for pid in pids():
        if (one := stat(pid)) is not None:
            seen[pid] = one
            children.setdefault(one.parent, []).append(pid)
    found: set[Identity] = set()
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        waiting.extend(children.get(pid, ()))
        if not seen[pid].dead:
            found.add(Identity(pid, seen[pid].start_ticks))
    return found


def user_of(pid: int) -> str | None:
    """Login name of a process's owner, its number where it has none or none can be had; None if the process is gone."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    return USERS.name_of(uid)


def command_of(pid: int) -> str | None:
    """Command line of a process, cut at 200 characters; None if the process is gone, or it cannot be read."""
    return patience.one(_command, pid, None)


def commands(pids: Iterable[int]) -> dict[int, str]:
    """The command line of each of these processes that has one, by pid. Far quicker than one after the other."""
    return {pid: found for pid, found in patience.each(_command, pids).items() if found is not None}


def _command(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        line = b" ".join(words) or Path(f"/proc/{pid}/comm").read_bytes().strip()
    except OSError:
        return None
    return line.decode(errors="replace")[:COMMAND_CHARACTERS]


def send_all(processes: Iterable[Identity], number: signal.Signals) -> None:
    """Send a signal to each that still lives."""
    for process in processes:
        process.send(number)


def kill_marked(lease_id: str, deadline_s: float, closing: threading.Event | None = None) -> set[Identity]:
    """SIGKILL everything with the lease's marker until nothing is left, never the caller. Returns what would not die.

    Rounds are needed because a process may fork between the look and the signal; `deadline_s` bounds them because a
    process in an uninterruptible driver call does not die. `closing` ends it early.
    """
    closing = closing or threading.Event()
    end = time.monotonic() + deadline_s
    while True:
        left = {process for process in marked({lease_id}) if process.pid != os.getpid()}
        if (not left and not patience.doubtful()) or time.monotonic() > end or closing.is_set():
            return left
        send_all(left, signal.SIGKILL)
        closing.wait(KILL_ROUND_S)


def sees_the_host() -> bool:
    """True in the host's own PID namespace; elsewhere the driver leaves out, silently, the processes of others."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE
    except OSError:
        return False


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends. Raises OSError where that is not to be had."""
    _prctl(PR_SET_PDEATHSIG, int(number))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends. Raises OSError."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
