"""Classifies the openers of a draining GPU's device file: which keep the GPU, which only delay it, which do not count.

An open device file alone says little: CUDA without a mask, every NCCL rank and every NVML user open the files of all
GPUs of the node, and forked workers inherit them. What counts is the lease that the process belongs to. The first row
that applies decides:

| the process | counts as |
|---|---|
| is a probe | nothing |
| works under the ended lease, by claim or cgroup | the lease's |
| works under another lease with GPUs on this node, by claim or cgroup | nothing: that lease answers for it |
| belonged to a lease with GPUs on this node before (an exiting process loses its marker before its files) | as before |
| is an owner of leases or descends from one (the nearest counts), one of them active or none the ended one | nothing |
| is the owner of a request that waits, or descends from one and from no owner above it | nothing: it asks |
| is itself the owner of the ended lease, and lives on | a stranger: no one waits for themselves |
| descends from that owner, or did before an ancestor died (`owner_descendants`) | the lease's |
| was in that owner's process group, if it has ended | the lease's |
| is listed by the driver on another GPU and not on this one, or descends from such a process | nothing |
| started before the lease | nothing |
| has ended since the scan, which may be a second old | nothing: it has no files open any more |
| any other: a stranger | a delay, see `gpulease_server.core.draining` |

A claim is the marker of the process or an ancestor, and counts only if that process is of the lease's user
(`lease_claims`). Whether a process uses the GPU is decided separately, by the driver's process lists and the memory in
use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gpulease_protocol.host.process_id import ProcessId, Stat, stat
from gpulease_protocol.model import GpuReading, LeaseState, Process
from gpulease_worker.processes import cgroup_directory, lease_claims, procfs
from gpulease_worker.processes.lease_cache import CachedLease, remembered_owners

KnownProcesses = dict[int, tuple[int | None, str]]
"""By pid: start time of a process on a GPU (None if it had already ended), and its lease."""
OWN_COMMAND = "-m gpulease_worker."
"""Part of every probe's command line, also of other daemons' probes: each has all device files open, and holds no GPU
memory."""


class OpenerClassifier:
    """Classifies the processes that have device files open. For one reading: caches what it reads of each process.

    Args:
        gpus: Every GPU of the node, with its processes.
        leases: Every lease with GPUs on the node.
        known: The lease that processes belonged to before.
        openers: The processes that have any device file open.
        budget: The time for reading environments.
        askers: The owners of all leases that have not ended, of those that wait too.
    """

    def __init__(
        self,
        gpus: Sequence[GpuReading],
        leases: Sequence[CachedLease],
        known: KnownProcesses,
        openers: Collection[ProcessId],
        budget: lease_claims.Budget | None = None,
        askers: Collection[ProcessId] = (),
    ) -> None:
        self._leases = leases
        self._askers = frozenset(askers)
        self._known = known
        self._descendants = remembered_owners(leases)
        self._owned: dict[ProcessId, list[CachedLease]] = {}
        for lease in leases:
            if lease.owner is not None:
                self._owned.setdefault(lease.owner, []).append(lease)
        self._listed = {gpu.uuid: {process.pid for process in gpu.processes} for gpu in gpus}
        self._stats: dict[int, Stat | None] = {}
        self._lineages = {process.pid: lease_claims.lineage(process.pid, self._stats) for process in openers}
        lineages = {pid for lineage in self._lineages.values() for pid in lineage}
        self._claims = lease_claims.claims_of(lineages, lease_claims.uids_of(leases), budget)
        self._named_leases = {process.pid: self._leases_named_by(process.pid) for process in openers}
        self._commands: dict[int, str] = {}
        self.lease_processes: KnownProcesses = {}
        """Openers that belong to an ended lease, in the form of `known`."""

    def classify(self, gpu: GpuReading, lease: CachedLease, openers: Iterable[ProcessId]) -> tuple[Process, ...]:
        """Of this GPU's openers, those that count. Those of the ended lease have its id."""
        here = self._listed[gpu.uuid]
        elsewhere = {pid for pids in self._listed.values() for pid in pids} - here
        ownership = {process: self._is_of(process, lease) for process in openers}
        counts = {
            process: is_leases
            for process, is_leases in ownership.items()
            if is_leases or (is_leases is False and not self._is_unrelated(process, lease, elsewhere))
        }
        self._commands |= procfs.commands({process.pid for process in counts} - self._commands.keys())
        shown = []
        for process, is_leases in counts.items():
            pid, command = process.pid, self._commands.get(process.pid)
            if OWN_COMMAND in (command or ""):
                continue
            if is_leases:
                self.lease_processes[pid] = (process.start_ticks, lease.id)
            lease_id = lease.id if is_leases else self._claim(pid)
            shown.append(Process(pid=pid, user=procfs.user_of(pid), command=command, lease_id=lease_id))
        return tuple(shown)

    def _is_of(self, process: ProcessId, lease: CachedLease) -> bool | None:
        """True for a process of the ended lease, None for one of another lease, False for one of no lease."""
        named = self._named_leases[process.pid]
        if named:
            return True if lease.id in named else None
        known_ticks, known_lease = self._known.get(process.pid, (None, None))
        if known_ticks == process.start_ticks and any(one.id == known_lease for one in self._leases):
            return True if known_lease == lease.id else None
        owner = self._nearest_owner(process.pid)
        if owner is None:
            return False
        owned = self._owned.get(owner, ())
        if all(one.id != lease.id for one in owned):
            return None
        if any(one.state is LeaseState.ACTIVE for one in owned) or process in self._askers:
            return None
        return owner != process

    def _is_unrelated(self, process: ProcessId, lease: CachedLease, elsewhere: Collection[int]) -> bool:
        if any(pid in elsewhere for pid in self._lineages[process.pid]):
            return True
        if not process.alive():
            return True  # it has ended since the scan; its lease can no longer be told
        return lease.since_ticks is not None and process.start_ticks < lease.since_ticks

    def _leases_named_by(self, pid: int) -> frozenset[str]:
        """The leases with GPUs on this node that a claim or a cgroup names."""
        claim = self._claim(pid)
        return cgroup_directory.leases_of(pid, [one.id for one in self._leases]) | ({claim} if claim else set())

    def _nearest_owner(self, pid: int) -> ProcessId | None:
        """The owner or asker that this process is, descends or descended from, or that has ended and led its group."""
        lineage, asker = self._lineages[pid], None
        for ancestor in lineage:
            if (seen := self._stat(ancestor)) is None:
                continue
            process = ProcessId(ancestor, seen.start_ticks)
            if process in self._owned or (ancestor == pid and process in self._askers):
                return process
            if (owner := self._descendants.get(process)) is not None:
                return owner
            if asker is None and process in self._askers:
                asker = process
        for member in lineage:
            seen = self._stat(member)
            # The kernel does not reuse the pid of a group leader while the group has members.
            if seen is not None and ((leader := self._stat(seen.group)) is None or leader.dead):
                for owner in self._owned:
                    if owner.pid == seen.group and (leader is None or leader.start_ticks == owner.start_ticks):
                        return owner
        return asker

    def _stat(self, pid: int) -> Stat | None:
        if pid not in self._stats:
            self._stats[pid] = stat(pid)
        return self._stats[pid]

    def _claim(self, pid: int) -> str | None:
        """The lease that the process or its nearest ancestor with a claim that counts names."""
        return lease_claims.nearest_claim(self._lineages[pid], self._claims)
