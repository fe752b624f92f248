"""GPUs that do not exist: `--simulate N`, a plausible machine, or `--simulate FILE`, read again at every reading.

Only the readings are made up. A real process with a lease's marker in its environment counts as a compute process on
that lease's GPUs, so occupancy, draining and orphans behave as on hardware. A pid that the file lists and that does
not exist stands for a foreign process and is kept as it is.
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
from pathlib import Path
from typing import Any

from gpulease.exchange import NodeLease
from gpulease.model import ComputeMode, GpuLink, GpuReading, Process, ProcessType
from gpulease.wire import MAX_COUNT, addressable, spell_uuid
from gpulease_worker import health, processes
from gpulease_worker.source import ModeChange, ModeNotSet, Reading, ReadingFailed, attribute

GIB = 1024**3
DRIVER_VERSION = "580.95.05"
MODEL = "NVIDIA H100 80GB HBM3"
MEMORY_TOTAL_BYTES = 80 * GIB
PROCESS_BYTES = GIB
"""GPU memory that a real process with a marker is shown to hold."""
HANG_LOOK_S = 0.05
"""How often a simulated driver that hangs looks whether it still should."""
BUSY_RATIO = 0.9
"""Utilization of a GPU of `--simulate N` that has a process."""

PATHS = ("nvlink", "same_board", "one_switch", "several_switches", "host_bridge", "numa_node", "system", "pcie")
"""How two GPUs may be connected, as in `GpuLink.path`."""
LINK_RULE = f"must be a list of [position of a GPU, position of another, one of {', '.join(PATHS)}]"
Check = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _health(value: Any) -> bool:
    return isinstance(value, str) and (value in health.WORDS or re.fullmatch(r"xid:\d{1,4}", value) is not None)


def _link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and _whole(value[0]) and _whole(value[1]) and value[2] in PATHS


GPU_FIELDS: Mapping[str, tuple[Check, str]] = {
    "uuid": (
        lambda value: _text(value) and addressable(spelled := spell_uuid(value)) and spelled.startswith("GPU-"),
        "must be a text that begins with GPU-, without spaces, commas and slashes",
    ),
    "name": (_text, "must be a text"),
    "pci_bus_id": (_text, "must be a text"),
    "memory_total_bytes": (_whole, "must be a whole number of bytes, 0 or more"),
    "memory_used_bytes": (_whole, "must be a whole number of bytes, 0 or more"),
    "utilization_ratio": (lambda value: _number(value) and 0 <= value <= 1, "must be a number from 0 to 1"),
    "temperature_c": (_number, "must be a number"),
    "power_w": (lambda value: _number(value) and value >= 0, "must be a number, 0 or more"),
    "compute_mode": (
        lambda value: value in list(ComputeMode),
        f"must be one of {', '.join(ComputeMode)}",
    ),
    "health": (_health, f"must be {', '.join(health.WORDS)} or xid:N"),
    "warnings": (
        lambda value: isinstance(value, list) and all(word in health.WARNINGS for word in value),
        f"must be a list of {', '.join(health.WARNINGS)}",
    ),
    "numa_node": (_whole, "must be a whole number, 0 or more"),
    "processes": (lambda value: isinstance(value, list), "must be a list"),
}
"""What a GPU of the file may say. Null stands for what a driver cannot tell; see `NOT_NULL`."""
PROCESS_FIELDS: Mapping[str, tuple[Check, str]] = {
    "pid": (lambda value: _whole(value) and value > 0, "must be a process id, over 0"),
    "type": (lambda value: value in list(ProcessType), f"must be one of {', '.join(ProcessType)}"),
    "memory_bytes": (_whole, "must be a whole number of bytes, 0 or more"),
    "user": (_text, "must be a text"),
    "command": (_text, "must be a text"),
}
FILE_FIELDS: Mapping[str, tuple[Check, str]] = {
    "gpus": (
        lambda value: isinstance(value, list) and len(value) <= MAX_COUNT,
        f"must be a list of at most {MAX_COUNT} GPUs",
    ),
    "links": (lambda value: isinstance(value, list) and all(map(_link, value)), LINK_RULE),
    "driver_version": (_text, "must be a text"),
    "hang_s": (lambda value: _number(value) and value >= 0, "must be a number of seconds, 0 or more"),
}
REQUIRED = {"gpus", "uuid", "pid"}
NOT_NULL = REQUIRED | {"health", "processes", "type"}


class Simulation:
    """A source of made-up readings. `what` is a count or a file's path; `node` makes the UUIDs of a count differ."""

    def __init__(self, what: str, node: str) -> None:
        self._count = int(what) if re.fullmatch(r"\d{1,9}", what) else None
        self._path = Path(what)
        self._node = node
        self.under_way: tuple[str, float] | None = None
        self._modes: dict[str, ModeChange] = {}
        if self._count is not None and self._count > MAX_COUNT:
            raise ReadingFailed(f"--simulate {what} is too many GPUs; simulate at most {MAX_COUNT}.")

    def read(self, leases: Sequence[NodeLease], fresh: bool = True, anew: Collection[str] = ()) -> Reading:
        """The machine as it is described now, always whole. Raises ReadingFailed when the file cannot be used."""
        if self._count is not None:
            return Reading(
                gpus=self._occupied(plausible(self._count, self._node), leases),
                driver_version=DRIVER_VERSION,
                simulated=True,
            )
        machine = read_file(self._path)
        self._hang(machine.get("hang_s") or 0)
        return Reading(
            gpus=self._occupied(described(machine["gpus"]), leases),
            links=linked(machine),
            driver_version=machine.get("driver_version", DRIVER_VERSION),
            simulated=True,
        )

    def _hang(self, seconds: float) -> None:
        """Hang for so long, or until the file says otherwise: a driver that hung goes on as if nothing had been."""
        begun_s = time.monotonic()
        self.under_way = ("the simulated driver", begun_s)
        written = _written(self._path)
        while (left_s := begun_s + seconds - time.monotonic()) > 0:
            time.sleep(min(left_s, HANG_LOOK_S))
            if _written(self._path) != written:
                written = _written(self._path)
                with suppress(ReadingFailed):
                    seconds = read_file(self._path).get("hang_s") or 0
        self.under_way = None

    def change_compute_mode(self, change: ModeChange) -> ComputeMode | None:
        """Change a GPU's mode if it is as expected; what it was before. Raises ModeNotSet.

        The mode is kept in memory, until the file names another: then an administrator has set it.
        """
        gpus = {gpu.pci_bus_id: gpu for gpu in self.read(()).gpus}
        if change.pci_bus_id not in gpus:
            raise ModeNotSet(f"there is no GPU at {change.pci_bus_id}", refused=True)
        found = gpus[change.pci_bus_id].compute_mode
        if found is change.expected:
            before = self._modes.get(change.pci_bus_id, change)
            self._modes[change.pci_bus_id] = replace(change, expected=before.expected)
        return found

    def _mode(self, gpu: GpuReading) -> ComputeMode | None:
        changed = self._modes.get(gpu.pci_bus_id or "")
        if changed is not None and changed.expected is gpu.compute_mode:
            return changed.mode
        self._modes.pop(gpu.pci_bus_id or "", None)
        return gpu.compute_mode

    def _occupied(self, gpus: Sequence[GpuReading], leases: Sequence[NodeLease]) -> tuple[GpuReading, ...]:
        """The GPUs with the real processes of their leases added, and what is known of each from /proc."""
        working: dict[str, list[Process]] = {}
        leased = {lease.id: lease.gpus for lease in leases if lease.gpus}
        for process, lease_id in processes.marked(leased).items():
            shown = attribute(Process(pid=process.pid, memory_bytes=PROCESS_BYTES, lease_id=lease_id))
            for gpu in leased[lease_id]:
                working.setdefault(gpu, []).append(shown)
        return tuple(self._with(gpu, working.get(gpu.uuid, ())) for gpu in gpus)

    def _with(self, gpu: GpuReading, working: Sequence[Process]) -> GpuReading:
        real = {process.pid for process in working}
        listed = [attribute(process) for process in gpu.processes if process.pid not in real]
        used = gpu.memory_used_bytes
        if used is not None:
            used += len(working) * PROCESS_BYTES
            used = (
                used
                if gpu.memory_total_bytes is None
                else min(used, max(gpu.memory_total_bytes, gpu.memory_used_bytes or 0))
            )
        busy = self._count is not None and bool(working)
        return replace(
            gpu,
            node=self._node,
            compute_mode=self._mode(gpu),
            processes=(*listed, *sorted(working, key=lambda process: process.pid)),
            memory_used_bytes=used,
            utilization_ratio=BUSY_RATIO if busy else gpu.utilization_ratio,
        )


def _written(path: Path) -> tuple[int, int] | None:
    """What differs when a file was written anew, or another put in its place."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def plausible(count: int, node: str) -> list[GpuReading]:
    """`count` idle GPUs, with UUIDs derived from the node's name so that two simulated nodes differ."""
    spelled = [{"uuid": f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{node}.gpulease')}"} for index in range(count)]
    return described(spelled)


def described(entries: Sequence[Mapping[str, Any]]) -> list[GpuReading]:
    """The GPUs of a checked description, in PCI bus order. What an entry leaves out is as on a plausible idle GPU."""
    gpus = []
    for position, entry in enumerate(entries):
        mode = entry.get("compute_mode", "default")
        reading = GpuReading(
            uuid=spell_uuid(entry["uuid"]),
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
            health=health.without_harmless_xid(entry.get("health", "ok")),
            warnings=tuple(entry.get("warnings") or ()),
            numa_node=entry.get("numa_node"),
            processes=tuple(
                Process(**{**process, "type": ProcessType(process.get("type", "compute"))})
                for process in entry.get("processes", ())
            ),
        )
        gpus.append(reading)
    gpus.sort(key=lambda gpu: (gpu.pci_bus_id or "").upper())
    return [replace(gpu, index=index) for index, gpu in enumerate(gpus)]


def linked(machine: Mapping[str, Any]) -> tuple[GpuLink, ...]:
    """The links of a checked description; its positions are those of the GPUs in the file."""
    uuids = [spell_uuid(entry["uuid"]) for entry in machine["gpus"]]
    return tuple(
        GpuLink(first=uuids[first], second=uuids[second], path=path, peer_to_peer=path == "nvlink" or None)
        for first, second, path in machine.get("links") or ()
    )


def read_file(path: Path) -> dict[str, Any]:
    """The checked content of a simulation file. Raises ReadingFailed that names the file and what is wrong with it."""
    try:
        machine = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        _check(machine, FILE_FIELDS, "the file")
        for position, gpu in enumerate(machine["gpus"]):
            _check(gpu, GPU_FIELDS, f"gpus[{position}]")
            for place, process in enumerate(gpu.get("processes", ())):
                _check(process, PROCESS_FIELDS, f"gpus[{position}].processes[{place}]")
        names = [spell_uuid(gpu["uuid"]) for gpu in machine["gpus"]]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two GPUs have the uuid {twice}")
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
            raise ValueError(f"{where} has the unknown field {name!r}; known are {', '.join(allowed)}")
        check, rule = allowed[name]
        if not (value is None and name not in NOT_NULL) and not check(value):
            raise ValueError(f"{where}: {name} {rule}, not {str(value)[:60]!r}")
