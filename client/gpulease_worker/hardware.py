"""The GPUs of this host as NVML shows them: what is read how often, and what it says together.

Three kinds of things are read. What changes from second to second, at every reading. Processes and what decides health,
in every *whole* reading: when one is asked for, and every `processes_s`. How a GPU fares, every `health_s`; nothing is
decided by that. A reading that is not whole repeats the processes and the health of the last that was, and says so.
Only where memory in use has changed are they read anew, so that who comes or goes is seen within a second.

The errors of one GPU stay with that GPU. One that was known, to this probe or to the one before it, and does not answer
keeps its name and is `lost`, `reset_required` or `unreadable`; one that could never be identified is left out, because
nothing can be said of it.

Where the processes of others cannot be seen, memory and utilization tell whether a GPU is in use: in a PID namespace of
its own, from which the driver hides the others, and where the driver has no process lists at all (WSL2). An idle GPU
has some memory in use, the least that was seen, by this probe or the ones before it; but that is believed only up to
`IDLE_BYTES`, because somebody hidden may have been there from the beginning. So whoever is on it at the first reading
makes it foreign, and so does a GPU's own idle memory where it is more, as of a screen: an administrator says then how
much that is (`Start.idle_bytes`).

While a GPU is lost, NVML is opened anew every `health_s`, because a session does not always find it again; less often
the longer it is lost.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from gpulease.exchange import NodeLease
from gpulease.model import ComputeMode, Device, GpuLink, GpuReading, Process
from gpulease_worker import driver, health, pci, processes
from gpulease_worker.cuda_starts import CudaStarts
from gpulease_worker.nvml import GpuFailed, LibraryFailed, NoProcessList, Nvml, Refused
from gpulease_worker.source import IDLE_BYTES, ModeChange, ModeNotSet, Reading, ReadingFailed, Start, attribute
from gpulease_worker.xid_watch import XidWatch

WHAT_TO_DO = "Install the NVIDIA driver, or try without GPUs: --simulate 4."

HIDDEN_BYTES = 16 * 1024**2
"""So much more memory in use than when idle is somebody's, although no process is listed: the smallest context of CUDA
takes some 60 MiB, an MPS client 30."""
RENEWAL_RATIO = 0.1
"""The pause between two sessions, as a share of the time for which a GPU has been lost."""
MOVED_BYTES = 16 * 1024**2
"""When memory in use has changed by so much, a process has come or gone: its GPU's processes are read at once."""


@dataclass
class Sighted:
    """One GPU, as far as it has been read."""

    device: Device
    """What does not change; its index is the driver's."""
    minor_number: int | None
    """N of `/dev/nvidiaN`."""
    whole: dict[str, Any] = field(default_factory=dict)
    """Members of a `GpuReading` from the last whole reading; empty when it has to be made anew."""
    condition: dict[str, Any] = field(default_factory=dict)
    """Members of a `GpuReading` that decide nothing."""
    used_bytes: int | None = None
    """Memory in use at the last read of its processes."""
    failed: str | None = None
    """Its health when it did not answer the last reading."""
    listless: bool = False
    """The driver has no list of its processes."""


def renewal_pause_s(health_s: float, lost_s: float) -> float:
    """How long a session lasts, at least, while a GPU has been lost for `lost_s`. Seconds.

    Without persistence mode a new session sets every GPU up anew, seconds each, and all are unknown meanwhile.
    """
    return max(health_s, RENEWAL_RATIO * lost_s)


class Hardware:
    """A source that reads this host's GPUs. NVML is opened at the first reading and again after it has failed."""

    def __init__(self, node: str, start: Start | None = None) -> None:
        self._node = node
        start = start or Start()
        self._pace = start.pace
        self._nvml = Nvml()
        self._sees_all = processes.sees_the_host()
        self._lists = False
        """Some GPU's processes could be listed."""
        self._idle_bytes = start.idle_bytes
        self._least_bytes = dict(start.least_bytes)
        """By UUID: the least memory in use that was seen."""
        self._open = False
        self._opened_at_s = 0.0
        self._lost_since_s = float("inf")
        """Since when some GPU has been lost."""
        self._known: dict[int, Sighted] = {}
        """By the driver's index, which stays the same for a session."""
        self._gone = [Sighted(_device(gpu, node), gpu.minor_number) for gpu in start.gpus]
        """GPUs of an earlier session, or of the probe before this one, that this one does not show."""
        self._links: tuple[GpuLink, ...] = ()
        self._linked: set[str] = set()
        """GPUs that were asked for their links."""
        self._xids = health.Xids(self._pace.health_s)
        for uuid, xid in start.xids.items():
            self._xids.saw(uuid, xid, time.monotonic())
        self._cuda = CudaStarts(self._pace.health_s)
        self._watch: XidWatch | None = None
        self._watched: set[str] = set()
        """GPUs whose Xids it tells."""
        self._whole_at_s = self._condition_at_s = -float("inf")
        self._reread: set[str] = set()
        """GPUs whose processes and health were read anew in the reading under way."""

    @property
    def under_way(self) -> tuple[str, float] | None:
        """The call into the driver that has not come back yet, and since when on the monotonic clock."""
        return self._nvml.under_way

    def read(self, leases: Sequence[NodeLease], fresh: bool = True, anew: Collection[str] = ()) -> Reading:
        """Every GPU as it is now, in PCI order. Raises ReadingFailed when NVML itself is not to be had."""
        now_s = time.monotonic()
        self._reread = set()
        try:
            self._renew_session(now_s)
            whole = fresh or now_s - self._whole_at_s >= self._pace.processes_s
            condition = now_s - self._condition_at_s >= self._pace.health_s
            version = self._nvml.driver_version()
            if whole and (misfit := driver.misfit(version)) is not None:
                raise ReadingFailed(misfit, over=driver.outdated())
            count = self._nvml.count()
            self._gone += [self._known.pop(position) for position in list(self._known) if position >= count]
            dirty = {position for position, one in self._known.items() if one.device.uuid in anew}
            found = [self._read_at(position, whole or position in dirty, condition) for position in range(count)]
            self._link()
            self._watch_xids()
        except LibraryFailed as failed:
            self._stop()
            raise self._explained(failed) from failed
        if whole:
            self._whole_at_s = now_s
        if condition:
            self._condition_at_s = now_s
        found = self._without_lists(found)
        gpus = [gpu for gpu in found if gpu is not None] + [_silent(sighted, health.LOST) for sighted in self._gone]
        if not gpus:
            raise ReadingFailed(f"The NVIDIA driver shows no usable GPU. {WHAT_TO_DO}")
        gpus.sort(key=lambda gpu: gpu.pci_bus_id or "")
        return Reading(
            gpus=tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus)),
            links=self._links,
            driver_version=version,
            whole=whole,
            reread=() if whole else tuple(sorted(self._reread)),
        )

    def change_compute_mode(self, change: ModeChange) -> ComputeMode | None:
        """Change a GPU's mode if it is as expected; what it was before. Raises ModeNotSet, ReadingFailed."""
        try:
            self._renew_session(time.monotonic())
            handle = self._nvml.handle_at(change.pci_bus_id)
            found = self._nvml.compute_mode(handle)
            if found is change.expected:
                self._nvml.set_compute_mode(handle, change.mode)
        except Refused as error:
            why = f"{change.pci_bus_id} refuses it ({error}); it needs root, and no MIG"
            raise ModeNotSet(why, refused=True) from error
        except GpuFailed as failed:
            raise ModeNotSet(f"{change.pci_bus_id} does not answer: {failed}") from failed
        except LibraryFailed as failed:
            self._stop()
            raise self._explained(failed) from failed
        return found

    def _explained(self, failed: LibraryFailed) -> ReadingFailed:
        if failed.mismatch:
            text = f"The NVIDIA driver was changed under the running system ({failed}). {driver.REMEDY}"
        else:
            text = f"NVML does not answer: {failed}. {WHAT_TO_DO}"
        return ReadingFailed(text, over=driver.outdated())

    def _renew_session(self, now_s: float) -> None:
        """Open NVML; also anew when a GPU has been lost for a while."""
        lost = bool(self._gone) or any(sighted.failed == health.LOST for sighted in self._known.values())
        self._lost_since_s = min(self._lost_since_s, now_s) if lost else float("inf")
        pause_s = renewal_pause_s(self._pace.health_s, now_s - self._lost_since_s)
        if self._open and lost and now_s - self._opened_at_s >= pause_s:
            self._stop()
        if self._open:
            return
        self._nvml.open()
        self._open, self._opened_at_s = True, now_s
        self._whole_at_s = self._condition_at_s = -float("inf")
        self._identify_all()

    def _identify_all(self) -> None:
        """Find out which GPU has which index in this session. One that is silent keeps the index it had."""
        former = {sighted.device.uuid: sighted for sighted in (*self._known.values(), *self._gone)}
        before, self._known = self._known, {}
        for position in range(self._nvml.count()):
            try:
                self._known[position] = self._identified(self._nvml.handle(position), position)
            except GpuFailed as failed:
                print(f"GPU {position} cannot be identified: {failed}", file=sys.stderr, flush=True)
        present = {sighted.device.uuid for sighted in self._known.values()}
        for position, sighted in before.items():
            if position not in self._known and sighted.device.uuid not in present:
                self._known[position] = sighted
                present.add(sighted.device.uuid)
        self._gone = [sighted for uuid, sighted in former.items() if uuid not in present]
        count = self._nvml.count()
        self._gone += [self._known.pop(position) for position in list(self._known) if position >= count]
        self._linked.clear()
        self._watch_xids()

    def _identified(self, handle: Any, position: int) -> Sighted:
        memory = self._nvml.memory(handle)
        device = Device(
            uuid=self._nvml.uuid(handle),
            node=self._node,
            index=position,
            pci_bus_id=self._nvml.bus_id(handle),
            name=self._nvml.name(handle),
            memory_total_bytes=None if memory is None else memory[0],
        )
        return Sighted(device, self._nvml.number("nvmlDeviceGetMinorNumber", handle))

    def _watch_xids(self) -> None:
        """Have the Xids told of every GPU that answers, also of one that did not when the session began."""
        answering = {one.device.uuid: position for position, one in self._known.items() if one.failed is None}
        spoilt = self._watch is not None and self._watch.spoilt and answering.keys() != self._watched
        if answering.keys() <= self._watched and not spoilt:
            return
        self._stop_watch()
        handles = {}
        for uuid, position in answering.items():
            with suppress(GpuFailed):
                handles[uuid] = self._nvml.handle(position)
        self._watch, self._watched = XidWatch(self._nvml, list(handles.values())), set(handles)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            with suppress(LibraryFailed, GpuFailed):
                self._watch.close()
            self._note_xids()
        self._watch, self._watched = None, set()

    def _stop(self) -> None:
        self._stop_watch()
        if self._open:
            self._nvml.close()
        self._open = False

    def _note_xids(self) -> None:
        for uuid, xid, at_s in self._watch.seen() if self._watch is not None else ():
            self._xids.saw(uuid, xid, at_s)

    def _read_at(self, position: int, whole: bool, condition: bool) -> GpuReading | None:
        """One GPU; None for one that could never be identified."""
        sighted = self._known.get(position)
        try:
            handle = self._nvml.handle(position)
            if sighted is None:
                sighted = self._known[position] = self._identified(handle, position)
                self._gone = [one for one in self._gone if one.device.uuid != sighted.device.uuid]
            return self._read_one(handle, sighted, whole, condition)
        except GpuFailed as failed:
            if sighted is None:
                return None
            # What was read before says nothing any more: when it answers again, all of it is read anew.
            sighted.failed, sighted.whole, sighted.condition = failed.health, {}, {}
            return _silent(sighted, failed.health)

    def _read_one(self, handle: Any, sighted: Sighted, whole: bool, condition: bool) -> GpuReading:
        activity = self._nvml.activity(handle)
        self._note_xids()
        used = activity["memory_used_bytes"]
        moved = used is not None and abs(used - (sighted.used_bytes or 0)) >= MOVED_BYTES
        if whole or moved or not sighted.whole:
            sighted.whole, sighted.used_bytes = self._read_whole(handle, sighted), used
            self._reread.add(sighted.device.uuid)
        if condition or not sighted.condition:
            numa_node = pci.numa_node(sighted.device.pci_bus_id)
            sighted.condition = {**self._nvml.condition(handle), "numa_node": numa_node}
        members = {**activity, **sighted.condition, **sighted.whole}
        facts: health.Facts = members.pop("facts")
        least_bytes = self._least(sighted.device.uuid, used)
        if sighted.listless or not self._sees_all:
            idle_bytes = max(self._idle_bytes, min(least_bytes, IDLE_BYTES) + HIDDEN_BYTES)
            members["hidden_use"] = _hidden(members["processes"], used, idle_bytes, activity["utilization_ratio"])
        xid = self._xids.standing(sighted.device.uuid, facts.recovery_action, time.monotonic())
        starts = self._cuda.of(sighted.device.uuid, facts.fabric if health.cuda_decides(facts) else None)
        facts = replace(facts, xid=xid, cuda_starts=starts)
        sighted.failed = None
        return _reading(sighted, **members, health=health.judged(facts), warnings=health.warnings(facts))

    def _least(self, uuid: str, used_bytes: int | None) -> int:
        if used_bytes is not None:
            self._least_bytes[uuid] = min(used_bytes, self._least_bytes.get(uuid, used_bytes))
        return self._least_bytes.get(uuid, 0)

    def _without_lists(self, found: list[GpuReading | None]) -> list[GpuReading | None]:
        """The readings, where a GPU has no process list. It counts only if none has: one that alone does not tell, on a
        driver that has lists, is one whose processes are not known."""
        if not self._lists and not self._gone and all(one.listless for one in self._known.values()):
            return found
        listless = {one.device.uuid for one in self._known.values() if one.listless and one.failed is None}
        return [
            replace(gpu, health=health.judged(health.Facts(processes_known=False)))
            if gpu is not None and gpu.uuid in listless and gpu.health == health.OK
            else gpu
            for gpu in found
        ]

    def _read_whole(self, handle: Any, sighted: Sighted) -> dict[str, Any]:
        try:
            listed = self._nvml.processes(handle)
            sighted.listless = False
            self._lists |= listed is not None
        except NoProcessList:
            listed, sighted.listless = [], True
        facts, remapped_rows = self._nvml.facts(handle)
        return {
            "facts": replace(facts, processes_known=listed is not None),
            "mig": facts.mig,
            "recovery_action": facts.recovery_action,
            "fabric": facts.fabric,
            "remapped_rows": remapped_rows,
            "processes": tuple(
                attribute(Process(pid=one.pid, type=one.type, memory_bytes=one.memory_bytes)) for one in listed or ()
            ),
        }

    def _link(self) -> None:
        """How the GPUs are connected: asked once, and again when one that was silent answers."""
        answering = {position: one for position, one in self._known.items() if one.failed is None}
        present = {one.device.uuid for one in answering.values()}
        if present <= self._linked:
            return
        found = []
        for first, second in combinations(answering, 2):
            with suppress(GpuFailed):
                path, peer = self._nvml.path(self._nvml.handle(first), self._nvml.handle(second))
                uuids = sorted(
                    (answering[first].device, answering[second].device), key=lambda one: one.pci_bus_id or ""
                )
                if path is not None:
                    link = GpuLink(first=uuids[0].uuid, second=uuids[1].uuid, path=path, peer_to_peer=peer)
                    found.append(link)
        self._links, self._linked = tuple(found), present


def _silent(sighted: Sighted, word: str) -> GpuReading:
    """A GPU that does not answer: its name, and why."""
    return _reading(sighted, health=word)


def _device(gpu: Device, node: str) -> Device:
    """What does not change of a GPU."""
    return Device(**{name: getattr(gpu, name) for name in Device.__dataclass_fields__} | {"node": node})


def _hidden(listed: Sequence[Process], used: int | None, idle_bytes: int, utilization_ratio: float | None) -> bool:
    """Whether somebody is on a GPU beside those who are listed. A process of a lease answers for all of it; any other
    may keep the GPU from nobody, as a desktop's does, and answers for the memory that it has."""
    if any(process.lease_id is not None for process in listed):
        return False
    known = [process.memory_bytes for process in listed if process.memory_bytes is not None]
    if used is None or len(known) < len(listed) or used - sum(known) > idle_bytes:
        return True
    return not listed and bool(utilization_ratio)


def _reading(sighted: Sighted, **members: Any) -> GpuReading:
    device = {name: getattr(sighted.device, name) for name in Device.__dataclass_fields__}
    return GpuReading(**device, minor_number=sighted.minor_number, **members)
