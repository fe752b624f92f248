"""Who of those that have a draining GPU's device file open keeps it, who only delays it, and who does not count.

An open device file says little: CUDA without a mask, every NCCL rank and every NVML user opens those of all GPUs of the
node, and forked workers inherit them. So it is asked whose the process is. The first that applies:

| the process | counts |
|---|---|
| is a probe | not |
| works under the lease that has ended, by marker or cgroup | it is the lease's |
| works under another lease with GPUs on this node, by marker or cgroup | not: it is answered for there |
| was known as one of a lease with GPUs on this node before (what ends loses its marker before its files) | as that |
| is, or descends from, the owner of leases, the nearest owner counts: of an active one that is another | not |
| is itself the owner of the lease that has ended, and lives on | like a stranger: nobody waits behind themselves |
| descends from that owner; or was in its process group, where that owner has ended | it is the lease's |
| descends from the owner of another lease that drains | not: it is answered for there |
| is listed by the driver on another GPU and not on this one, or descends from one that is | not |
| was there before the lease | not |
| has ended since the look, which may be a second old | not: it has nothing open any more |
| is none of these: a stranger | it delays, see `gpulease_server.core.remains` |

Whoever uses the GPU is on the driver's list for it, and holds memory: that is asked beside this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gpulease.model import GpuReading, LeaseState, Process
from gpulease.owner import Stat, stat
from gpulease_worker import processes
from gpulease_worker.holders import SeenLease
from gpulease_worker.processes import ANCESTORS, Identity

Known = dict[int, tuple[int | None, str]]
"""By pid: start time of a process on a GPU, None where it was gone already, and its lease."""
OUR_OWN = "-m gpulease_worker."
"""Command lines of probes, this node's and other daemons': each has every device file open, and holds no memory."""


class Openers:
    """Tells the processes with open device files apart. For one reading: what it has read of a process it keeps.

    Args:
        gpus: Every GPU of the node, with its processes.
        leases: Every lease with GPUs on the node.
        known: Whose processes were before.
        found: The processes that have some device file open.
    """

    def __init__(
        self, gpus: Sequence[GpuReading], leases: Sequence[SeenLease], known: Known, found: Collection[Identity]
    ) -> None:
        self._leases = leases
        self._known = known
        self._owned: dict[Identity, list[SeenLease]] = {}
        for lease in leases:
            if lease.owner is not None:
                self._owned.setdefault(lease.owner, []).append(lease)
        self._listed = {gpu.uuid: {process.pid for process in gpu.processes} for gpu in gpus}
        self._stats: dict[int, Stat | None] = {}
        self._lines = {process.pid: tuple(self._line(process.pid)) for process in found}
        self._markers = processes.markers({pid for line in self._lines.values() for pid in line})
        self._named = {process.pid: self._names(process.pid) for process in found}
        self._commands: dict[int, str] = {}
        self.theirs: Known = {}
        """Processes that were found to be those of a lease that has ended, in the form of `known`."""

    def of(self, gpu: GpuReading, lease: SeenLease, found: Iterable[Identity]) -> tuple[Process, ...]:
        """Of the processes that have this GPU's device file open, those that count; the ended lease's with its id."""
        here = self._listed[gpu.uuid]
        elsewhere = {pid for pids in self._listed.values() for pid in pids} - here
        whose = {process: self._is_of(process, lease) for process in found}
        counts = {
            process: mine
            for process, mine in whose.items()
            if mine or (mine is False and not self._is_innocent(process, lease, elsewhere))
        }
        self._commands |= processes.commands({process.pid for process in counts} - self._commands.keys())
        shown = []
        for process, mine in counts.items():
            pid, command = process.pid, self._commands.get(process.pid)
            if OUR_OWN in (command or ""):
                continue
            if mine:
                self.theirs[pid] = (process.start_ticks, lease.id)
            lease_id = lease.id if mine else self._marker(pid)
            shown.append(Process(pid=pid, user=processes.user_of(pid), command=command, lease_id=lease_id))
        return tuple(shown)

    def _is_of(self, process: Identity, lease: SeenLease) -> bool | None:
        """True for a process of the lease that has ended, None for one of another lease, False for one of none."""
        named = self._named[process.pid]
        if named:
            return True if lease.id in named else None
        then_ticks, then_lease = self._known.get(process.pid, (None, None))
        if then_ticks == process.start_ticks and any(one.id == then_lease for one in self._leases):
            return True if then_lease == lease.id else None
        owner = self._nearest_owner(process.pid)
        if owner is None:
            return False
        owned = self._owned[owner]
        if all(one.id != lease.id for one in owned):
            return None
        if any(one.state is LeaseState.ACTIVE for one in owned):
            return None
        return owner != process

    def _is_innocent(self, process: Identity, lease: SeenLease, elsewhere: Collection[int]) -> bool:
        if any(pid in elsewhere for pid in self._lines[process.pid]):
            return True
        if not process.alive():
            return True  # it has ended since the look, and with it whatever could have told whose it was
        return lease.since_ticks is not None and process.start_ticks < lease.since_ticks

    def _names(self, pid: int) -> frozenset[str]:
        """The leases with GPUs on this node that marker or cgroup name."""
        marker, cgroups = self._marker(pid), processes.cgroups_of(pid)
        return frozenset(one.id for one in self._leases if one.id == marker or processes.names(cgroups, one.id))

    def _nearest_owner(self, pid: int) -> Identity | None:
        """The owner of a lease that this process is, or descends from; or that has ended and led its process group."""
        line = self._lines[pid]
        for ancestor in line:
            seen = self._stat(ancestor)
            if seen is not None and (found := Identity(ancestor, seen.start_ticks)) in self._owned:
                return found
        for one in line:
            seen = self._stat(one)
            # The number of a process that led a group is not given to another while the group has members.
            if seen is not None and ((leader := self._stat(seen.group)) is None or leader.dead):
                for owner in self._owned:
                    if owner.pid == seen.group and (leader is None or leader.start_ticks == owner.start_ticks):
                        return owner
        return None

    def _line(self, pid: int) -> Iterable[int]:
        """The process and its ancestors, as far as they live."""
        for _ in range(ANCESTORS):
            seen = self._stat(pid)
            if seen is None:
                return
            yield pid
            if seen.parent <= 1:
                return
            pid = seen.parent

    def _stat(self, pid: int) -> Stat | None:
        if pid not in self._stats:
            self._stats[pid] = stat(pid)
        return self._stats[pid]

    def _marker(self, pid: int) -> str | None:
        """The lease of the process, by its own marker or that of its nearest marked ancestor."""
        return next((found for one in self._lines[pid] if (found := self._markers.get(one))), None)
