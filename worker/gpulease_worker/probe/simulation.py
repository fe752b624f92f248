"""Simulates GPUs: `--simulate N`, a plausible machine, or `--simulate FILE`, which is read again at every reading.

Only the readings are simulated. A real process of a lease's user with the lease's marker in its environment counts as a
compute process on that lease's GPUs, so occupancy, draining and leftovers behave as on hardware. A pid in the file that
does not exist stands for a foreign process and is kept.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from gpulease_protocol.gpu_uuid import canonical_uuid, is_valid_uuid
from gpulease_protocol.model import ComputeMode, GpuLink, GpuReading, Process, ProcessType
from gpulease_protocol.node_protocol import NodeLease
from gpulease_protocol.requests import MAX_COUNT
from gpulease_worker.probe import gpu_health
from gpulease_worker.probe.probe_protocol import (
    ComputeModeChange,
    ComputeModeNotSet,
    Reading,
    ReadingFailed,
    with_proc_details,
)
from gpulease_worker.processes import lease_claims

GIB = 1024**3
DRIVER_VERSION = "580.95.05"
MODEL = "NVIDIA H100 80GB HBM3"
MEMORY_TOTAL_BYTES = 80 * GIB
PROCESS_BYTES = GIB
"""GPU memory in use by each real process with a marker."""
HANG_POLL_S = 0.05
"""How often a simulated driver that hangs checks whether it still should."""
BUSY_RATIO = 0.9
"""Utilization of a GPU with a process, under `--simulate N`."""

PATHS = ("nvlink", "same_board", "one_switch", "several_switches", "host_bridge", "numa_node", "system", "pcie")
"""How two GPUs may be connected, as in `GpuLink.path`."""
LINK_RULE = f"must be a list of [position of a GPU, position of another, one of {', '.join(PATHS)}]"
Check = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _natural_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _health(value: Any) -> bool:
    return isinstance(value, str) and (
        value in gpu_health.HEALTH_WORDS or re.fullmatch(r"xid:\d{1,4}", value) is not None
    )


def _link(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and _natural_number(value[0])
        and _natural_number(value[1])
        and value[2] in PATHS
    )


GPU_FIELDS: Mapping[str, tuple[Check, str]] = {
    "uuid": (
        lambda value: _text(value) and is_valid_uuid(spelled := canonical_uuid(value)) and spelled.startswith("GPU-"),
        "must be a string that begins with GPU- and has no spaces, commas or slashes",
    ),
    "name": (_text, "must be a string"),
    "pci_bus_id": (_text, "must be a string"),
    "memory_total_bytes": (_natural_number, "must be an integer number of bytes, at least 0"),
    "memory_used_bytes": (_natural_number, "must be an integer number of bytes, at least 0"),
    "utilization_ratio": (lambda value: _number(value) and 0 <= value <= 1, "must be a number from 0 to 1"),
    "temperature_c": (_number, "must be a number"),
    "power_w": (lambda value: _number(value) and value >= 0, "must be a number, at least 0"),
    "compute_mode": (
        lambda value: value in list(ComputeMode),
        f"must be one of {', '.join(ComputeMode)}",
    ),
    "health": (_health, f"must be {', '.join(gpu_health.HEALTH_WORDS)} or xid:N"),
    "warnings": (
        lambda value: isinstance(value, list) and all(word in gpu_health.WARNINGS for word in value),
        f"must be a list of {', '.join(gpu_health.WARNINGS)}",
    ),
    "numa_node": (_natural_number, "must be an integer, at least 0"),
    "processes": (lambda value: isinstance(value, list), "must be a list"),
}
"""Fields of a GPU in the file. Null stands for what a driver cannot tell; see `NOT_NULL`."""
PROCESS_FIELDS: Mapping[str, tuple[Check, str]] = {
    "pid": (lambda value: _natural_number(value) and value > 0, "must be a process id, greater than 0"),
    "type": (lambda value: value in list(ProcessType), f"must be one of {', '.join(ProcessType)}"),
    "memory_bytes": (_natural_number, "must be an integer number of bytes, at least 0"),
    "user": (_text, "must be a string"),
    "command": (_text, "must be a string"),
}
FILE_FIELDS: Mapping[str, tuple[Check, str]] = {
    "gpus": (
        lambda value: isinstance(value, list) and len(value) <= MAX_COUNT,
        f"must be a list of at most {MAX_COUNT} GPUs",
    ),
    "links": (lambda value: isinstance(value, list) and all(map(_link, value)), LINK_RULE),
    "driver_version": (_text, "must be a string"),
    "hang_s": (lambda value: _number(value) and value >= 0, "must be a number of seconds, at least 0"),
}
REQUIRED = {"gpus", "uuid", "pid"}
NOT_NULL = REQUIRED | {"health", "processes", "type"}


class SimulatedReader:
    """Reads simulated GPUs.

    Args:
        spec: A number of GPUs, or the path of a file.
        node: Makes the UUIDs of counted GPUs differ between nodes.
    """

    def __init__(self, spec: str, node: str) -> None:
        self._count = int(spec) if re.fullmatch(r"\d{1,9}", spec) else None
        self._path = Path(spec)
        self._node = node
        self.under_way: tuple[str, float] | None = None
        self._modes: dict[str, ComputeModeChange] = {}
        if self._count is not None and self._count > MAX_COUNT:
            raise ReadingFailed(f"--simulate {spec} asks for too many GPUs; simulate at most {MAX_COUNT}.")

    def read(self, leases: Sequence[NodeLease], complete: bool = True, reread: Collection[str] = ()) -> Reading:
        """The GPUs as currently described, always completely. Raises ReadingFailed if the file cannot be used."""
        return self._read(leases)

    def _read(self, leases: Sequence[NodeLease], only: Collection[str] | None = None) -> Reading:
        """The GPUs, or these alone."""
        if self._count is not None:
            counted = (gpu for gpu in idle_gpus(self._count, self._node) if only is None or gpu.uuid in only)
            return Reading(
                gpus=self._with_processes(tuple(counted), leases), driver_version=DRIVER_VERSION, simulated=True
            )
        machine = read_file(self._path)
        self._hang(machine.get("hang_s") or 0)
        described = (gpu for gpu in gpus_from(machine["gpus"]) if only is None or gpu.uuid in only)
        return Reading(
            gpus=self._with_processes(tuple(described), leases),
            links=links_from(machine),
            driver_version=machine.get("driver_version", DRIVER_VERSION),
            simulated=True,
        )

    def read_some(self, uuids: Collection[str], leases: Sequence[NodeLease]) -> Reading:
        """These GPUs as currently described. Raises ReadingFailed if the file cannot be used."""
        # A walk through all processes looks for those of these GPUs' leases alone.
        some = frozenset(uuids)
        reading = self._read([lease for lease in leases if not some.isdisjoint(lease.gpus)], some)
        return replace(reading, whole=False, reread=tuple(sorted(gpu.uuid for gpu in reading.gpus)))

    def _hang(self, seconds: float) -> None:
        """Hang for this long, or until the file says otherwise; then continue as if nothing had happened."""
        begun_s = time.monotonic()
        self.under_way = ("the simulated driver", begun_s)
        version = _file_version(self._path)
        while (left_s := begun_s + seconds - time.monotonic()) > 0:
            time.sleep(min(left_s, HANG_POLL_S))
            if _file_version(self._path) != version:
                version = _file_version(self._path)
                with suppress(ReadingFailed):
                    seconds = read_file(self._path).get("hang_s") or 0
        self.under_way = None

    def change_compute_mode(self, change: ComputeModeChange) -> ComputeMode | None:
        """Change a GPU's mode if it is as expected. Returns the mode before. Raises ComputeModeNotSet.

        The mode is kept in memory until the file names another, as if an administrator had set it.
        """
        gpus = {gpu.pci_bus_id: gpu for gpu in self.read(()).gpus}
        if change.pci_bus_id not in gpus:
            raise ComputeModeNotSet(f"there is no GPU at {change.pci_bus_id}", refused=True)
        before = gpus[change.pci_bus_id].compute_mode
        if before is change.expected:
            earlier = self._modes.get(change.pci_bus_id, change)
            self._modes[change.pci_bus_id] = replace(change, expected=earlier.expected)
        return before

    def _mode(self, gpu: GpuReading) -> ComputeMode | None:
        changed = self._modes.get(gpu.pci_bus_id or "")
        if changed is not None and changed.expected is gpu.compute_mode:
            return changed.mode
        self._modes.pop(gpu.pci_bus_id or "", None)
        return gpu.compute_mode

    def _with_processes(self, gpus: Sequence[GpuReading], leases: Sequence[NodeLease]) -> tuple[GpuReading, ...]:
        """The GPUs with the real processes of their leases added, and every process described from /proc."""
        working: dict[str, list[Process]] = {}
        leased = {lease.id: lease.gpus for lease in leases if lease.gpus}
        uids = lease_claims.uids_of(lease for lease in leases if lease.id in leased)
        for process, lease_id in lease_claims.claimants(uids, lease_claims.Budget()).items():
            shown = with_proc_details(Process(pid=process.pid, memory_bytes=PROCESS_BYTES, lease_id=lease_id))
            for gpu in leased[lease_id]:
                working.setdefault(gpu, []).append(shown)
        return tuple(self._with_process_usage(gpu, working.get(gpu.uuid, ())) for gpu in gpus)

    def _with_process_usage(self, gpu: GpuReading, working: Sequence[Process]) -> GpuReading:
        real = {process.pid for process in working}
        listed = [with_proc_details(process) for process in gpu.processes if process.pid not in real]
        used = gpu.memory_used_bytes
        if used is not None:
            used += len(working) * PROCESS_BYTES
            used = (
                used
                if gpu.memory_total_bytes is None
                else min(used, max(gpu.memory_total_bytes, gpu.memory_used_bytes or 0))
            )
        busy, mode = self._count is not None and bool(working), self._mode(gpu)
        if not (listed or working or gpu.processes) and mode is gpu.compute_mode and gpu.node == self._node:
            return gpu
        return replace(
            gpu,
            node=self._node,
            compute_mode=mode,
            processes=(*listed, *sorted(working, key=lambda process: process.pid)),
            memory_used_bytes=used,
            utilization_ratio=BUSY_RATIO if busy else gpu.utilization_ratio,
        )


def _file_version(path: Path) -> tuple[int, int] | None:
    """Inode and modification time: differ once the file was rewritten or replaced. None if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


@cache
def idle_gpus(count: int, node: str) -> tuple[GpuReading, ...]:
    """`count` idle GPUs. Their UUIDs derive from the node's name, so that two simulated nodes differ."""
    entries = [{"uuid": f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{node}.gpulease')}"} for index in range(count)]
    return tuple(replace(gpu, node=node) for gpu in gpus_from(entries))


def gpus_from(entries: Sequence[Mapping[str, Any]]) -> list[GpuReading]:
    """The GPUs of a checked description, in PCI bus order. A missing field is as on a plausible idle GPU."""
    gpus = []
    for position, entry in enumerate(entries):
        mode = entry.get("compute_mode", "default")
        reading = GpuReading(
            uuid=canonical_uuid(entry["uuid"]),
            node="",
            index=position,
            pci_bus_id=entry.get("pci_bus_id", f"{position // 200:08X}:{position % 200 + 0x10:02X}:00.0"),
            name=entry.get("name", MODEL),
            memory_total_bytes=entry.get("memory_total_bytes", MEMORY_TOTAL_BYTES),
            memory_used_bytes=entry.get("memory_used_bytes", 0),
            utilization_ratio=entry.get("utilization_ratio", 0.0),
            temperature_c=entry.get("temperature_c", 35),
            power_w=entry.get("power_w", 70),
            compute_mode=None if mode is None else ComputeMode(mode),
            health=gpu_health.without_harmless_xid(entry.get("health", "ok")),
            warnings=tuple(entry.get("warnings") or ()),
            numa_node=entry.get("numa_node"),
            processes=tuple(
                Process(**{**process, "type": ProcessType(process.get("type", "compute"))})
                for process in entry.get("processes", ())
            ),
        )
        gpus.append(reading)
    gpus.sort(key=lambda gpu: (gpu.pci_bus_id or "").upper())
    return [replace(gpu, index=index, minor_number=index) for index, gpu in enumerate(gpus)]


def links_from(machine: Mapping[str, Any]) -> tuple[GpuLink, ...]:
    """The links of a checked description, which names GPUs by their position in the file."""
    uuids = [canonical_uuid(entry["uuid"]) for entry in machine["gpus"]]
    return tuple(
        GpuLink(first=uuids[first], second=uuids[second], path=path, peer_to_peer=path == "nvlink" or None)
        for first, second, path in machine.get("links") or ()
    )


def read_file(path: Path) -> dict[str, Any]:
    """The checked content of a simulation file. Raises ReadingFailed, which names the file and its fault."""
    try:
        machine = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        _check(machine, FILE_FIELDS, "the file")
        for position, gpu in enumerate(machine["gpus"]):
            _check(gpu, GPU_FIELDS, f"gpus[{position}]")
            for index, process in enumerate(gpu.get("processes", ())):
                _check(process, PROCESS_FIELDS, f"gpus[{position}].processes[{index}]")
        names = [canonical_uuid(gpu["uuid"]) for gpu in machine["gpus"]]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise ValueError(f"two GPUs have the uuid {duplicate}")
        for first, second, _ in machine.get("links") or ():
            if first == second or max(first, second) >= len(names):
                raise ValueError(f"links: [{first}, {second}, ...] does not name two GPUs of the file")
    except OSError as error:
        raise ReadingFailed(
            f"The simulation file {path} cannot be read: {error.strerror}. Make it readable."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ReadingFailed(f"The simulation file {path} is broken: {error}. Correct it; it is read again.") from error
    checked: dict[str, Any] = machine
    return checked


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number in JSON")


def _check(entry: Any, allowed: Mapping[str, tuple[Check, str]], where: str) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object with the fields {', '.join(allowed)}")
    for name in allowed:
        if name in REQUIRED and name not in entry:
            raise ValueError(f"{where} has no {name}")
    for name, value in entry.items():
        if name not in allowed:
            raise ValueError(f"{where} has the unknown field {name!r}; the known fields are {', '.join(allowed)}")
        check, rule = allowed[name]
        if not (value is None and name not in NOT_NULL) and not check(value):
            raise ValueError(f"{where}: {name} {rule}, not {str(value)[:60]!r}")
