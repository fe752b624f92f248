"""Reads which lease a process claims to work under: the GPULEASE_LEASE_ID in its environment, its marker.

Everyone can put any lease's id there, so a marker is a claim and no proof. It counts only if the process's real user is
the lease's: setuid programs keep that, and no user can start a process as another one. Cgroup and descent are proofs,
see `cgroup_directory` and `procfs.descends_from`.

Everyone can also make environments megabytes large. So the user is looked at first, and environments of processes whose
claims could not count are not read; of the others the first ENVIRONMENT_BYTES are. What was read is kept until the
process executes another program. `Budget` bounds the time that the processes of one user take from a reading.

`uids`, in all of this: by lease, the user id whose claims count; None if every user's do, NO_USER if those of none do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId, Stat, program_stat, started_since, stat
from gpulease_protocol.node_protocol import NodeLease
from gpulease_worker.processes import bounded_read, cgroup_directory, procfs

MARKER = "GPULEASE_LEASE_ID"
"""Environment variable that says under which lease a process works."""
PART = "NODE_RANK"
"""Environment variable of a process of a job on several nodes: on which of them it is."""
NO_USER = -1
"""The user id of a lease while its user is not known."""
ENVIRONMENT_BYTES = 256 * 1024
"""As much of an environment is searched. A job has its marker at the beginning."""
LEASE_BYTES = 128
"""A longer value is no lease's id."""
MAX_CACHED = 16384
"""How many markers are kept."""
BUDGET_S = 0.1
"""Processor time in which the environments of one user's processes are read for one reading."""

Uids = Mapping[str, int | None]

_cached: dict[tuple[int, int, int], str | None] = {}
"""Marker by pid, start time and address of the stack, which is another one after each exec."""


class Budget:
    """The time that one reading has for the environments of each user's processes."""

    def __init__(self, seconds: float = BUDGET_S) -> None:
        self._seconds = seconds
        self._spent_s: dict[int | None, float] = {}

    def is_spent(self, uid: int | None) -> bool:
        """True once no more environments of this user are to be read."""
        return self._spent_s.get(uid, 0.0) >= self._seconds

    def spend(self, uid: int | None, seconds: float) -> None:
        """Count time that an environment of this user has taken."""
        self._spent_s[uid] = self._spent_s.get(uid, 0.0) + seconds


def uids_of(leases: Iterable[NodeLease]) -> dict[str, int | None]:
    """For each of these leases, the user id that may claim it."""
    return {lease.id: lease.uid for lease in leases}


def claim_of(pid: int, uids: Uids) -> str | None:
    """The lease that a process's own marker names, if the claim counts; None otherwise and where it is unreadable."""
    return claims_of((pid,), uids).get(pid)


def claims_of(pids: Iterable[int], uids: Uids, budget: Budget | None = None) -> dict[int, str]:
    """The lease that each of these processes claims, by pid. What the budget does not suffice for is left out."""
    return {pid: lease_id for pid, (_, lease_id) in _read(pids, uids, budget).items()}


def nearest_claim(lineage: Iterable[int], claims: Mapping[int, str]) -> str | None:
    """The claim that counts of a process or of its nearest ancestor with one (`lineage`)."""
    return next((claims[pid] for pid in lineage if pid in claims), None)


def nearest_claims(pids: Collection[int], uids: Uids, budget: Budget | None = None) -> dict[int, str]:
    """The nearest claim that counts among each of these processes and its ancestors, by pid."""
    if not uids:
        return {}
    stats: dict[int, Stat | None] = {}
    lineages = {pid: lineage(pid, stats) for pid in pids}
    claims = claims_of({pid for line in lineages.values() for pid in line}, uids, budget)
    found = {pid: nearest_claim(line, claims) for pid, line in lineages.items()}
    return {pid: lease_id for pid, lease_id in found.items() if lease_id is not None}


def lineage(pid: int, stats: dict[int, Stat | None]) -> Sequence[int]:
    """The process and its ancestors, nearest first, as far as they are alive. `stats`: what was read; added to."""
    line: list[int] = []
    for _ in range(procfs.ANCESTORS):
        if pid not in stats:
            stats[pid] = stat(pid)
        seen = stats[pid]
        if seen is None:
            break
        line.append(pid)
        if seen.parent <= 1:
            break
        pid = seen.parent
    return line


def claimants(
    uids: Uids, budget: Budget | None = None, since_ticks: int = 0, part: int | None = None
) -> dict[ProcessId, str]:
    """Every living process whose own claim of one of these leases counts, with that lease. One walk of /proc.

    `since_ticks`: only those that were started then or later, as `ProcessId.start_ticks`; of others little is read.
    `part`: the rank of this node in the lease's job on several nodes. Two of those can share a host; so without the
    processes that say that they are of another.
    """
    if not uids:
        return {}
    pids = list(process_tree.all_pids())
    young = [pid for pid in pids if started_since(pid, since_ticks)] if since_ticks else pids
    found = dict(_read(young, uids, budget).values())
    for pid in filter(bounded_read.is_hung, pids):  # its environment is unreadable; its cgroup is not
        for lease_id in cgroup_directory.leases_of(pid, uids):
            if (process := ProcessId.of(pid)) is not None:
                found[process] = lease_id
    if part is None or not found:
        return found
    parts = bounded_read.read_each(_part, [process.pid for process in found])
    return {process: lease_id for process, lease_id in found.items() if parts.get(process.pid) in (None, str(part))}


def kill_claimants(
    lease_id: str,
    uid: int | None,
    deadline_s: float,
    cancelled: threading.Event | None = None,
    part: int | None = None,
) -> set[ProcessId]:
    """SIGKILL everything whose claim of the lease counts until nothing is left, never the caller. Returns the
    survivors. `part` as in `claimants`.

    Nothing is left only once every process could be read. `deadline_s` bounds it, and `cancelled` ends it early.
    """

    def find() -> set[ProcessId]:
        return {process for process in claimants({lease_id: uid}, part=part) if process.pid != os.getpid()}

    return process_tree.kill_all(
        find, deadline_s, cancelled=cancelled, complete=lambda: not bounded_read.abandoned_recently()
    )


def _read(pids: Iterable[int], uids: Uids, budget: Budget | None) -> dict[int, tuple[ProcessId, str]]:
    read: Callable[[int], tuple[ProcessId, str] | None] = lambda pid: _claim(pid, uids, budget)  # noqa: E731
    return {pid: claim for pid, claim in bounded_read.read_each(read, pids).items() if claim is not None}


def _claim(pid: int, uids: Uids, budget: Budget | None) -> tuple[ProcessId, str] | None:
    """The process and the lease that it claims, if that counts.

    The identity is looked at before and after user and marker: if the process ended in between and its pid was reused,
    they are not those of the new process. What costs most comes last: most processes are of others, and name no lease.
    """
    status = program_stat(pid)
    if status is None or status.dead:
        return None
    lease_id = _marker(pid, status, uids, budget)
    if lease_id is None or lease_id not in uids:
        return None
    uid = procfs.real_uid(pid)
    if uid is None or uids[lease_id] not in (None, uid):
        return None
    process = ProcessId(pid, status.start_ticks)
    return (process, lease_id) if process.alive() else None


def _marker(pid: int, status: Stat, uids: Uids, budget: Budget | None) -> str | None:
    """The marker of a process; also None where no claim of its user counts: its environment is then not read."""
    key = (pid, status.start_ticks, status.stack_start)
    if status.stack_start and key in _cached:
        return _cached[key]
    uid = procfs.real_uid(pid)
    if uid is None or not any(allowed is None or allowed == uid for allowed in uids.values()):
        return None
    if budget is not None and budget.is_spent(uid):
        return None
    begun_s = time.thread_time()
    marker = _find(procfs.environment(pid, ENVIRONMENT_BYTES), MARKER)
    if budget is not None:
        budget.spend(uid, time.thread_time() - begun_s)
    if status.stack_start and (now := stat(pid)) is not None and key == (pid, now.start_ticks, now.stack_start):
        if len(_cached) >= MAX_CACHED:
            _cached.clear()
        _cached[key] = marker
    return marker


def _part(pid: int) -> str | None:
    """The rank of the node that a process of a job on several nodes says it is of."""
    return _find(procfs.environment(pid, ENVIRONMENT_BYTES), PART)


def _find(environment: bytes, variable: str) -> str | None:
    """The value of a variable in an environment; None where it is longer than a lease's id."""
    prefix = variable.encode() + b"="
    start = 0 if environment.startswith(prefix) else environment.find(b"\0" + prefix) + 1
    if start == 0 and not environment.startswith(prefix):
        return None
    start += len(prefix)
    end = environment.find(b"\0", start, start + LEASE_BYTES + 1)
    value = environment[start:end] if end >= 0 else environment[start:]
    return value.decode(errors="replace") or None if len(value) <= LEASE_BYTES else None
