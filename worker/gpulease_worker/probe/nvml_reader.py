"""Reads the GPUs of this host through NVML, and decides which values are read how often.

There are three kinds of values. Memory, utilization and the like change from second to second, and are part of every
reading. Processes and what decides health are part of every *complete* reading: on request, and every `processes_s`.
ECC counts and the like are read every `health_s`; nothing is decided by them. An incomplete reading repeats processes
and health from the last complete one, and says so. Only if a GPU's memory in use has changed are they read again, so
that a process that comes or goes is seen within a second.

An error of one GPU stays with that GPU. If a GPU was known, to this probe or to the one before it, and does not answer,
it keeps its identity and is `lost`, `reset_required` or `unreadable`. One that could never be identified is left out,
because nothing can be said about it.

Where other users' processes are not visible, memory and utilization tell whether a GPU is in use: in a private PID
namespace, because the driver hides processes outside it, and under WSL2, where the driver has no process lists. An idle
GPU has some memory in use: the least that was ever seen, by this probe or the ones before it, but at most `IDLE_BYTES`,
because a hidden process may have been there from the start. A process that is there at the first reading therefore
makes the GPU foreign. So does a GPU's own idle memory if it is larger, as with a display; then an administrator states
how much it is (`ProbeSetup.idle_bytes`).

While a GPU is lost, NVML is reopened every `health_s`, because a session does not always find the GPU again, and less
often the longer it is lost.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import field, replace
from itertools import combinations
from math import comb
from typing import Any

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import ComputeMode, Device, GpuLink, GpuReading, Process
from gpulease_protocol.node_protocol import NodeLease
from gpulease_worker.probe import driver_check, gpu_health, pci_sysfs
from gpulease_worker.probe.cuda_init_check import CudaInitCheck
from gpulease_worker.probe.nvlink_count import count_nvlinks
from gpulease_worker.probe.nvml_binding import CallRefused, GpuFailed, LibraryFailed, NoProcessList, Nvml
from gpulease_worker.probe.probe_protocol import (
    IDLE_BYTES,
    ComputeModeChange,
    ComputeModeNotSet,
    ProbeSetup,
    Reading,
    ReadingFailed,
    with_proc_details,
)
from gpulease_worker.probe.xid_events import XidWatch
from gpulease_worker.processes import procfs

NO_DRIVER_REMEDY = "Install the NVIDIA driver, or try without GPUs: --simulate 4."

HIDDEN_USE_BYTES = 16 * 1024**2
"""Memory in use above the idle level that means a hidden process: the smallest CUDA context takes some 60 MiB, an MPS
client 30."""
REOPEN_PAUSE_RATIO = 0.1
"""The pause between two sessions, as a fraction of the time for which a GPU has been lost."""
LINKS_S, LINKS_AGAIN_S = 600.0, 30.0
"""How long what was read of the connections counts, and how long where a pair could not be read."""
MEMORY_CHANGE_BYTES = 16 * 1024**2
"""A change of memory in use that means that a process has come or gone: the GPU's processes are read immediately."""


@dataclass
class GpuCache:
    """What has been read of one GPU so far."""

    device: Device
    """What does not change. The index is the driver's."""
    minor_number: int | None
    """N of `/dev/nvidiaN`."""
    decisive: dict[str, Any] = field(default_factory=dict)
    """Members of a `GpuReading` that decide health and use, from the last complete reading; empty if outdated."""
    condition: dict[str, Any] = field(default_factory=dict)
    """Members of a `GpuReading` that decide nothing."""
    used_bytes: int | None = None
    """Memory in use when its processes were last read."""
    failed_health: str | None = None
    """Its health if it did not answer the last reading; else None."""
    no_process_list: bool = False
    """The driver has no list of its processes."""


def reopen_pause_s(health_s: float, lost_s: float) -> float:
    """Minimum duration of a session, in seconds, while a GPU has been lost for `lost_s`.

    Without persistence mode a new session initializes every GPU, seconds each, and all are unknown meanwhile.
    """
    return max(health_s, REOPEN_PAUSE_RATIO * lost_s)


class NvmlReader:
    """Reads this host's GPUs. Opens NVML at the first reading, and again after NVML has failed."""

    def __init__(self, node: str, setup: ProbeSetup | None = None) -> None:
        self._node = node
        setup = setup or ProbeSetup()
        self._pace = setup.pace
        self._nvml = Nvml()
        self._sees_all = procfs.sees_the_host()
        self._has_process_lists = False
        """True once any GPU's processes could be listed."""
        self._idle_bytes = setup.idle_bytes
        self._least_bytes = dict(setup.least_bytes)
        """By UUID: the least memory in use ever seen."""
        self._open = False
        self._opened_at_s = 0.0
        self._lost_since_s = float("inf")
        """When the first of the GPUs that are lost was lost."""
        self._gpus: dict[int, GpuCache] = {}
        """By the driver's index, which is stable during a session."""
        self._facts: dict[str, gpu_health.HealthFacts] = {}
        self._modes: dict[str, ComputeMode | None] = {}
        """By UUID: what the driver has told last, in whichever session; it counts while a call fails."""
        self._missing = [GpuCache(_device(gpu, node), gpu.minor_number) for gpu in setup.gpus]
        """GPUs of an earlier session or probe that this session does not show."""
        self._links: tuple[GpuLink, ...] = ()
        self._linked_uuids: set[str] = set()
        self._links_until_s = 0.0
        """UUIDs of the GPUs with links that have been read."""
        self._xids = gpu_health.ActiveXids(self._pace.health_s)
        for uuid, xid in setup.xids.items():
            self._xids.record(uuid, xid, time.monotonic())
        self._cuda_check = CudaInitCheck(self._pace.health_s)
        self._xid_watch: XidWatch | None = None
        self._watched_uuids: set[str] = set()
        """UUIDs of the GPUs that it watches."""
        self._complete_at_s = self._condition_at_s = -float("inf")
        self._reread: set[str] = set()
        """The current reading has the processes and health of the GPUs with these UUIDs."""
        self._indices: dict[str, int] = {}
        """By UUID: the places of the GPUs in the last reading of all."""

    @property
    def under_way(self) -> tuple[str, float] | None:
        """The driver call that has not returned yet, and its monotonic start time."""
        return self._nvml.under_way

    def read(self, leases: Sequence[NodeLease], complete: bool = True, reread: Collection[str] = ()) -> Reading:
        """Every GPU as it is now, in PCI order. Raises ReadingFailed if NVML itself does not answer."""
        now_s = time.monotonic()
        self._reread = set()
        try:
            self._renew_session(now_s)
            complete = complete or now_s - self._complete_at_s >= self._pace.processes_s
            condition = now_s - self._condition_at_s >= self._pace.health_s
            version = self._nvml.driver_version()
            if complete and (mismatch := driver_check.version_mismatch(version)) is not None:
                raise ReadingFailed(mismatch, over=driver_check.library_was_replaced())
            count = self._nvml.count()
            self._missing += [self._gpus.pop(position) for position in list(self._gpus) if position >= count]
            stale = {position for position, one in self._gpus.items() if one.device.uuid in reread}
            readings = [self._read_at(position, complete or position in stale, condition) for position in range(count)]
            self._read_links()
            self._watch_xids()
        except LibraryFailed as failed:
            self._stop()
            raise self._explained(failed) from failed
        if complete:
            self._complete_at_s = now_s
        if condition:
            self._condition_at_s = now_s
        readings = self._mark_unlisted(readings)
        gpus = [gpu for gpu in readings if gpu is not None] + [
            _unanswered(cached, gpu_health.LOST) for cached in self._missing
        ]
        if not gpus:
            raise ReadingFailed(f"The NVIDIA driver shows no usable GPU. {NO_DRIVER_REMEDY}")
        gpus.sort(key=lambda gpu: gpu.pci_bus_id or "")
        self._indices = {gpu.uuid: index for index, gpu in enumerate(gpus)}
        return Reading(
            gpus=tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus)),
            links=self._links,
            driver_version=version,
            whole=complete,
            reread=() if complete else tuple(sorted(self._reread)),
        )

    def read_some(self, uuids: Collection[str], leases: Sequence[NodeLease]) -> Reading:
        """These GPUs as they are now, in PCI order. Raises ReadingFailed if NVML itself does not answer."""
        self._reread = set()
        try:
            positions = [position for position, one in self._gpus.items() if one.device.uuid in uuids and self._open]
            readings = self._mark_unlisted([self._read_at(position, True, False) for position in positions])
        except LibraryFailed as failed:
            self._stop()
            raise self._explained(failed) from failed
        shown = [gpu for gpu in readings if gpu and gpu.uuid in self._reread and gpu.uuid in self._indices]
        gpus = [replace(gpu, index=self._indices[gpu.uuid]) for gpu in shown]
        gpus.sort(key=lambda gpu: gpu.index or 0)
        return Reading(gpus=tuple(gpus), whole=False, reread=tuple(sorted(gpu.uuid for gpu in gpus)))

    def change_compute_mode(self, change: ComputeModeChange) -> ComputeMode | None:
        """Change a GPU's mode if it is as expected. Returns the mode before.

        Raises ComputeModeNotSet, ReadingFailed.
        """
        try:
            self._renew_session(time.monotonic())
            handle = self._nvml.handle_by_bus_id(change.pci_bus_id)
            before = self._nvml.compute_mode(handle)
            if before is change.expected:
                self._nvml.set_compute_mode(handle, change.mode)
        except CallRefused as error:
            why = f"GPU {change.pci_bus_id} refuses it ({error}); it requires root, and MIG off"
            raise ComputeModeNotSet(why, refused=True) from error
        except GpuFailed as failed:
            raise ComputeModeNotSet(f"GPU {change.pci_bus_id} does not answer: {failed}") from failed
        except LibraryFailed as failed:
            self._stop()
            raise self._explained(failed) from failed
        return before

    def _explained(self, failed: LibraryFailed) -> ReadingFailed:
        if failed.mismatch:
            text = f"The NVIDIA driver was changed under the running system ({failed}). {driver_check.MISMATCH_REMEDY}"
        else:
            text = f"NVML does not answer: {failed}. {NO_DRIVER_REMEDY}"
        return ReadingFailed(text, over=driver_check.library_was_replaced())

    def _renew_session(self, now_s: float) -> None:
        """Open NVML; reopen it if a GPU has been lost for a while."""
        lost = bool(self._missing) or any(cached.failed_health == gpu_health.LOST for cached in self._gpus.values())
        self._lost_since_s = min(self._lost_since_s, now_s) if lost else float("inf")
        pause_s = reopen_pause_s(self._pace.health_s, now_s - self._lost_since_s)
        if self._open and lost and now_s - self._opened_at_s >= pause_s:
            self._stop()
        if self._open:
            return
        self._nvml.open()
        self._open, self._opened_at_s = True, now_s
        self._complete_at_s = self._condition_at_s = -float("inf")
        self._identify_all()

    def _identify_all(self) -> None:
        """Determine the index of each GPU in this session. A GPU that does not answer keeps its last index."""
        former = {cached.device.uuid: cached for cached in (*self._gpus.values(), *self._missing)}
        before, self._gpus = self._gpus, {}
        for position in range(self._nvml.count()):
            try:
                self._gpus[position] = self._identified(self._nvml.handle(position), position)
            except GpuFailed as failed:
                print(f"GPU {position} cannot be identified: {failed}", file=sys.stderr, flush=True)
        present = {cached.device.uuid for cached in self._gpus.values()}
        for position, cached in before.items():
            if position not in self._gpus and cached.device.uuid not in present:
                self._gpus[position] = cached
                present.add(cached.device.uuid)
        self._missing = [cached for uuid, cached in former.items() if uuid not in present]
        count = self._nvml.count()
        self._missing += [self._gpus.pop(position) for position in list(self._gpus) if position >= count]
        self._linked_uuids.clear()
        self._watch_xids()

    def _identified(self, handle: Any, position: int) -> GpuCache:
        memory = self._nvml.memory(handle)
        device = Device(
            uuid=self._nvml.uuid(handle),
            node=self._node,
            index=position,
            pci_bus_id=self._nvml.bus_id(handle),
            name=self._nvml.name(handle),
            memory_total_bytes=None if memory is None else memory[0],
        )
        return GpuCache(device, self._nvml.number("nvmlDeviceGetMinorNumber", handle))

    def _watch_xids(self) -> None:
        """Watch every GPU that answers for Xids, also one that did not answer when the session began."""
        answering = {one.device.uuid: position for position, one in self._gpus.items() if one.failed_health is None}
        failing = self._xid_watch is not None and self._xid_watch.failing and answering.keys() != self._watched_uuids
        if answering.keys() <= self._watched_uuids and not failing:
            return
        self._stop_watch()
        handles = {}
        for uuid, position in answering.items():
            with suppress(GpuFailed):
                handles[uuid] = self._nvml.handle(position)
        self._xid_watch, self._watched_uuids = XidWatch(self._nvml, list(handles.values())), set(handles)

    def _stop_watch(self) -> None:
        if self._xid_watch is not None:
            with suppress(LibraryFailed, GpuFailed):
                self._xid_watch.close()
            self._record_xids()
        self._xid_watch, self._watched_uuids = None, set()

    def _stop(self) -> None:
        self._stop_watch()
        if self._open:
            self._nvml.close()
        self._open = False

    def _record_xids(self) -> None:
        for uuid, xid, at_s in self._xid_watch.new_xids() if self._xid_watch is not None else ():
            self._xids.record(uuid, xid, at_s)

    def _read_at(self, position: int, complete: bool, condition: bool) -> GpuReading | None:
        """One GPU; None if it could never be identified."""
        cached = self._gpus.get(position)
        try:
            handle = self._nvml.handle(position)
            if cached is None:
                cached = self._gpus[position] = self._identified(handle, position)
                self._missing = [one for one in self._missing if one.device.uuid != cached.device.uuid]
            return self._read_one(handle, cached, complete, condition)
        except GpuFailed as failed:
            if cached is None:
                return None
            # Earlier values no longer count: when the GPU answers again, everything is read again.
            cached.failed_health, cached.decisive, cached.condition = failed.health, {}, {}
            return _unanswered(cached, failed.health)

    def _read_one(self, handle: Any, cached: GpuCache, complete: bool, condition: bool) -> GpuReading:
        activity = self._nvml.activity(handle)
        uuid = cached.device.uuid
        activity["compute_mode"] = self._modes[uuid] = activity["compute_mode"] or self._modes.get(uuid)
        self._record_xids()
        used = activity["memory_used_bytes"]
        changed = used is not None and abs(used - (cached.used_bytes or 0)) >= MEMORY_CHANGE_BYTES
        if complete or changed or not cached.decisive:
            cached.decisive, cached.used_bytes = self._read_decisive(handle, cached), used
            self._reread.add(cached.device.uuid)
        if condition or not cached.condition:
            numa_node = pci_sysfs.numa_node(cached.device.pci_bus_id)
            cached.condition = {**self._nvml.condition(handle), "numa_node": numa_node}
        members = {**activity, **cached.condition, **cached.decisive}
        facts: gpu_health.HealthFacts = members.pop("facts")
        least_bytes = self._update_least_bytes(cached.device.uuid, used)
        if cached.no_process_list or not self._sees_all:
            idle_bytes = max(self._idle_bytes, min(least_bytes, IDLE_BYTES) + HIDDEN_USE_BYTES)
            members["hidden_use"] = _has_hidden_use(
                members["processes"], used, idle_bytes, activity["utilization_ratio"]
            )
        xid = self._xids.active(cached.device.uuid, facts.recovery_action, time.monotonic())
        starts = self._cuda_check.starts_on(
            cached.device.uuid, facts.fabric if gpu_health.cuda_decides(facts) else None
        )
        facts = replace(facts, xid=xid, cuda_starts=starts)
        cached.failed_health = None
        return _reading(cached, **members, health=gpu_health.health_of(facts), warnings=gpu_health.warnings_of(facts))

    def _update_least_bytes(self, uuid: str, used_bytes: int | None) -> int:
        if used_bytes is not None:
            self._least_bytes[uuid] = min(used_bytes, self._least_bytes.get(uuid, used_bytes))
        return self._least_bytes.get(uuid, 0)

    def _mark_unlisted(self, readings: list[GpuReading | None]) -> list[GpuReading | None]:
        """Mark GPUs without a process list `processes_unknown`, unless no GPU has one: if the driver lists processes of
        other GPUs, those of this one are unknown."""
        unlisted = [one for one in self._gpus.values() if one.no_process_list]
        if not self._has_process_lists and not self._missing and len(unlisted) == len(self._gpus):
            return readings
        unknown = {one.device.uuid for one in unlisted if one.failed_health is None}
        return [
            replace(gpu, health=gpu_health.health_of(gpu_health.HealthFacts(processes_known=False)))
            if gpu is not None and gpu.uuid in unknown and gpu.health == gpu_health.OK
            else gpu
            for gpu in readings
        ]

    def _read_decisive(self, handle: Any, cached: GpuCache) -> dict[str, Any]:
        try:
            listed = self._nvml.processes(handle)
            cached.no_process_list = False
            self._has_process_lists |= listed is not None
        except NoProcessList:
            listed, cached.no_process_list = [], True
        facts, remapped_rows = self._nvml.health_facts(handle)
        uuid = cached.device.uuid
        facts = self._facts[uuid] = gpu_health.with_last_known(facts, self._facts.get(uuid, gpu_health.HealthFacts()))
        return {
            "facts": replace(facts, processes_known=listed is not None),
            "mig": facts.mig,
            "recovery_action": facts.recovery_action,
            "fabric": facts.fabric,
            "remapped_rows": remapped_rows,
            "processes": tuple(
                with_proc_details(Process(pid=one.pid, type=one.type, memory_bytes=one.memory_bytes))
                for one in listed or ()
            ),
        }

    def _read_links(self) -> None:
        """Read how the GPUs are connected: now and then, since NVLink may come up late or fail, soon again where a pair
        could not be read, and when a GPU that did not answer does."""
        answering = {position: one for position, one in self._gpus.items() if one.failed_health is None}
        present = {one.device.uuid for one in answering.values()}
        if present <= self._linked_uuids and time.monotonic() < self._links_until_s:
            return
        links, pairs = [], 0
        nvlinks = functools.cache(functools.partial(count_nvlinks, self._nvml))
        for first, second in combinations(answering, 2):
            with suppress(GpuFailed):
                path, peer = self._nvml.link_path(self._nvml.handle(first), self._nvml.handle(second))
                pairs += 1
                uuids = sorted(
                    (answering[first].device, answering[second].device), key=lambda one: one.pci_bus_id or ""
                )
                if path is not None:
                    count = nvlinks(first)[answering[second].device.pci_bus_id or ""] if path == "nvlink" else 0
                    link = GpuLink(first=uuids[0].uuid, second=uuids[1].uuid, path=path, peer_to_peer=peer)
                    links.append(replace(link, nvlinks=count) if count else link)
        self._links, self._linked_uuids = tuple(links), present
        all_read = pairs == comb(len(answering), 2)
        self._links_until_s = time.monotonic() + (LINKS_S if all_read else LINKS_AGAIN_S)


def _unanswered(cached: GpuCache, health: str) -> GpuReading:
    """A GPU that does not answer: its identity, and its health."""
    return _reading(cached, health=health)


def _device(gpu: Device, node: str) -> Device:
    """The part of a GPU that does not change."""
    return Device(**{name: getattr(gpu, name) for name in Device.__dataclass_fields__} | {"node": node})


def _has_hidden_use(
    listed: Sequence[Process], used: int | None, idle_bytes: int, utilization_ratio: float | None
) -> bool:
    """Whether a GPU is used by processes that are not listed. A listed process of a lease accounts for all memory in
    use; any other, such as a desktop's, only for its own."""
    if any(process.lease_id is not None for process in listed):
        return False
    known = [process.memory_bytes for process in listed if process.memory_bytes is not None]
    if used is None or len(known) < len(listed) or used - sum(known) > idle_bytes:
        return True
    return not listed and bool(utilization_ratio)


def _reading(cached: GpuCache, **members: Any) -> GpuReading:
    device = {name: getattr(cached.device, name) for name in Device.__dataclass_fields__}
    return GpuReading(**device, minor_number=cached.minor_number, **members)
