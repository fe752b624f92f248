"""What a step works with: the report, the GPU that it may use, and ways to read it as the probe does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.hardware.findings import Report
from gpulease_protocol.model import GpuReading
from gpulease_worker.probe.nvml_binding import Nvml
from gpulease_worker.probe.nvml_reader import NvmlReader
from gpulease_worker.probe.probe_protocol import Reading
from gpulease_worker.probe.process_attribution import device_file
from gpulease_worker.processes import procfs
from tests.daemon import DaemonProcess, daemon
from tests.gpu.subjects import SubjectFailed, choose, device_files

MIB = 1024**2
LOOK_S = 0.002
"""Pause between two readings where results are in milliseconds."""
NODE = "bench"
GRANT_S = 20.0
"""How long a lease of an unused GPU may take; one that was just released drains first."""


@dataclass(frozen=True)
class Machine:
    """This machine, as a step may use it."""

    report: Report
    """Receives the findings."""
    reading: Reading
    """The GPUs as they were when the command began."""
    gpu: GpuReading | None
    """The GPU that the steps may use; None if none is unused."""
    torch: str | None
    """Why torch cannot use CUDA; None if it can."""
    quick: bool
    """Whether measurements are shorter and less exact."""
    place: Path
    """An empty directory."""

    def taken(self) -> str | None:
        """Why the GPU cannot be used now; None if it can."""
        if self.gpu is None:
            return "no GPU is unused"
        _, why = choose(Reading(gpus=tuple(gpu for gpu in current() if gpu.uuid == self.gpu.uuid)))
        return f"{self.gpu.uuid} is not free any more: {why[self.gpu.uuid]}" if why else None

    def used(self) -> GpuReading:
        """The GPU. Only for steps that require one."""
        if self.gpu is None:
            raise SubjectFailed("no GPU is unused")
        return self.gpu

    def file(self) -> str:
        """The device file of the GPU."""
        return device_file(self.used()) or ""

    def another(self) -> GpuReading | None:
        """A second unused GPU."""
        others = tuple(gpu for gpu in self.reading.gpus if self.gpu is None or gpu.uuid != self.gpu.uuid)
        return choose(Reading(gpus=others))[0]


@dataclass
class Look:
    """A session of NVML, and one GPU in it."""

    nvml: Nvml
    handle: Any

    def lists(self, pid: int) -> bool:
        """True if the driver lists the process on the GPU."""
        return any(one.pid == pid for one in self.nvml.processes(self.handle) or ())

    def used_bytes(self) -> int:
        """Memory in use; 0 if the driver does not tell."""
        found = self.nvml.memory(self.handle)
        return 0 if found is None else found[1]

    def sees(self, pid: int, above_bytes: int) -> bool:
        """True if the GPU is in use: by the process list or, where lists are incomplete, by memory."""
        return self.lists(pid) or (not procfs.sees_the_host() and self.used_bytes() > above_bytes)


@contextmanager
def look(gpu: GpuReading) -> Iterator[Look]:
    """Read a GPU as the probe does."""
    nvml = Nvml()
    nvml.open()
    try:
        yield Look(nvml, nvml.handle_by_bus_id(gpu.pci_bus_id or ""))
    finally:
        nvml.close()


def current() -> tuple[GpuReading, ...]:
    """All GPUs now. Raises ReadingFailed."""
    source = NvmlReader(NODE)
    try:
        return source.read(()).gpus
    finally:
        source._stop()


def until(condition: Callable[[], bool], within_s: float) -> float | None:
    """Seconds until a condition became true; None if it did not in time."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > within_s:
            return None
        time.sleep(LOOK_S)
    return time.monotonic() - begun


def spelled(seconds: float | None, within_s: float) -> str:
    """A duration in readable form."""
    if seconds is None:
        return f"not within {within_s:g} s"
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


@contextmanager
def serving(machine: Machine, name: str = "daemon") -> Iterator[DaemonProcess]:
    """A daemon with this machine's GPUs, which can grant. Raises AssertionError, with its log, if it cannot."""
    (machine.place / name).mkdir()
    with daemon(machine.place / name, "--node", NODE, **device_files()) as running:
        yield running


def state(running: DaemonProcess, uuid: str) -> str:
    """A GPU's state, as the daemon shows it."""
    return str(running.call("GET", f"/v1/gpus/{uuid}").json["state"])


@contextmanager
def leased(running: DaemonProcess, uuid: str) -> Iterator[dict[str, Any]]:
    """A lease of this GPU, released at the end unless it was before. Raises SubjectFailed if it is not granted."""
    asked = {"devices": [uuid], "ttl_s": 600}
    found = running.call("POST", f"/v1/leases?wait_s={GRANT_S:g}", asked).json
    try:
        if found.get("state") != "active":
            why = running.call("GET", f"/v1/gpus/{uuid}").json
            raise SubjectFailed(f"no lease within {GRANT_S:g} s: the GPU is {why.get('state')}: {why.get('reason')}")
        yield found
    finally:
        release(running, found)


def release(running: DaemonProcess, held: dict[str, Any]) -> None:
    """Release a lease, or stop waiting for it. Does nothing if it was released before."""
    proof = {} if held.get("token") is None else {"token": held["token"]}
    running.call("POST", f"/v1/leases/{held.get('id')}/release", proof)


def await_readings(running: DaemonProcess, uuid: str, count: int) -> None:
    """Wait for this many further readings of a GPU. Raises SubjectFailed if they do not arrive."""

    def observed_at() -> str:
        return str(running.call("GET", f"/v1/gpus/{uuid}").json["observed_at"])

    for _ in range(count):
        before = observed_at()
        if until(lambda before=before: observed_at() != before, GRANT_S) is None:  # type: ignore[misc]
            raise SubjectFailed(f"no reading within {GRANT_S:g} s")
