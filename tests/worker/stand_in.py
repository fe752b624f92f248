"""Builds the stand-in for the driver's library, injects faults, and reads it through a probe."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol import codec
from gpulease_protocol.model import ComputeMode, GpuLink, GpuReading, Process, ProcessType
from gpulease_protocol.node_protocol import NodeLease
from gpulease_worker.probe import driver_check
from gpulease_worker.probe.probe_protocol import Pace, ProbeSetup, Reading
from tests.shared_library import compiled
from tests.worker.build import python

SOURCE = Path(__file__).with_name("stand_in_nvml.c")
GIB = 1024**3
VERSION = driver_check.module_version() or "580.95.05"
"""Of the driver that it is: what fits this host's kernel module, if it has one (`driver_version.h`)."""
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, MISMATCH, UNKNOWN = (
    3,
    4,
    9,
    15,
    16,
    18,
    999,
)
UNINITIALIZED, OPERATING_SYSTEM, MEMORY, NOT_READY = 1, 17, 20, 27
"""Errors of NVML."""
HANGS = -1
"""Instead of an error: the call never returns."""
EVERY = -1
"""Instead of an index: every GPU, or no particular GPU."""

POOR = GpuReading(
    uuid="GPU-abcdef00-0000-0000-0000-000000000001",
    node="n",
    index=0,
    pci_bus_id="00000000:1A:00.0",
    name="Stand-in 1",
    temperature_c=41,
    compute_mode=ComputeMode.PROHIBITED,
    minor_number=1,
)
"""A GPU that reports little: unsupported values are None."""
WHOLE = GpuReading(
    uuid="GPU-abcdef00-0000-0000-0000-000000000000",
    node="n",
    index=1,
    pci_bus_id="00000000:3B:00.0",
    name="Stand-in 0",
    memory_total_bytes=80 * GIB,
    memory_used_bytes=3 * GIB,
    utilization_ratio=0.73,
    temperature_c=40,
    power_w=250.5,
    compute_mode=ComputeMode.EXCLUSIVE_PROCESS,
    processes=(
        Process(pid=4194305, memory_bytes=2 * GIB),
        Process(pid=4194306),
        Process(pid=4194307, type=ProcessType.GRAPHICS, memory_bytes=GIB),
    ),
    minor_number=0,
    numa_node=0,
    mig=False,
    recovery_action="none",
    ecc_corrected=7,
    ecc_uncorrected=0,
    remapped_rows=3,
    throttle_reasons=("sw_power_cap",),
)
"""A GPU that reports everything and is in use."""
THIRD = replace(
    WHOLE,
    uuid="GPU-abcdef00-0000-0000-0000-000000000002",
    index=2,
    pci_bus_id="00000000:50:00.0",
    name="Stand-in 2",
    memory_used_bytes=0,
    utilization_ratio=0.0,
    temperature_c=42,
    compute_mode=ComputeMode.DEFAULT,
    processes=(),
    minor_number=2,
    numa_node=1,
    throttle_reasons=(),
)
"""A GPU like WHOLE that is idle; present if the stand-in has three GPUs."""
LINKS = (GpuLink(first=POOR.uuid, second=WHOLE.uuid, path="numa_node", peer_to_peer=False),)


def silent(gpu: GpuReading, health: str) -> GpuReading:
    """The reading of a GPU that does not answer: its identity."""
    kept = ("uuid", "node", "index", "pci_bus_id", "name", "memory_total_bytes", "minor_number")
    return GpuReading(**{name: getattr(gpu, name) for name in kept}, health=health)


class Driver:
    """A stand-in of one driver generation. Its faults may change while a probe runs on it."""

    def __init__(self, directory: Path, *flags: str, library: str = "libnvidia-ml.so.1") -> None:
        self.directory = directory
        self._matters = directory / "matters"
        (directory / library).write_bytes(compiled(SOURCE, *(f"-D{flag}" for flag in flags)))
        self.says()
        self._kernel(("0000:1a:00.0", -1), ("0000:3b:00.0", 0), ("0000:50:00.0", 1))
        self.variables = {
            "LD_LIBRARY_PATH": str(directory),
            "STAND_IN_NVML": str(self._matters),
            "GPULEASE_PCI_DEVICES": str(directory / "devices"),
            # Tests at the same time have GPUs of the same UUIDs; the name of a claim depends on this, too.
            "GPULEASE_DEVICE_FILES": str(directory / "nvidia"),
        }
        """Variables that make a program use it."""
        self.environment = {**os.environ, **self.variables}

    def _kernel(self, *devices: tuple[str, int]) -> None:
        """Write sysfs's NUMA nodes; -1 stands for a host without any."""
        for name, node in devices:
            place = self.directory / "devices" / name
            place.mkdir(parents=True, exist_ok=True)
            (place / "numa_node").write_text(f"{node}\n")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let processes that this test starts load the library."""
        for name, value in self.variables.items():
            monkeypatch.setenv(name, value)

    def says(self, *matters: tuple[str, int, object]) -> None:
        """Set the faults from now on: (call or word, index, code or value), as the C source explains."""
        new = self._matters.with_suffix(".new")
        new.write_text("".join(f"{call} {index} {value}\n" for call, index, value in matters))
        new.rename(self._matters)

    @contextmanager
    def probe(
        self, pace: Pace | None = None, prelude: str = "", within: Sequence[str] = (), **setup: Any
    ) -> Iterator[ProbeProcess]:
        """A probe on it.

        `prelude`: Python that runs before it; `within`: a command that starts it; `setup`: the rest of its setup.
        """
        words = json.dumps(codec.to_json(ProbeSetup(pace=pace or Pace(call_deadline_s=20), **setup)))
        run = "from gpulease_worker.probe import main; sys.exit(main.main(sys.argv[1:]))"
        code = f"import sys; {prelude or 'pass'}; {run}"
        process = subprocess.Popen(
            [*within, *python("-c", code, words, "n")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            text=True,
        )
        probe = ProbeProcess(process)
        try:
            yield probe
        finally:
            process.kill()
            process.communicate()

    def read(self, *leases: NodeLease, prelude: str = "") -> Reading:
        """The first reading of a new probe."""
        with self.probe(prelude=prelude) as probe:
            return probe.read(leases)


class ProbeProcess:
    """A probe that is sent one request at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self._line() == {"ready": True}

    def read(self, leases: Sequence[NodeLease] = (), complete: bool = True) -> Reading:
        """Request a reading."""
        return self._ask({"leases": [codec.to_json(one) for one in leases], "complete": complete})

    def read_some(self, *uuids: str, leases: Sequence[NodeLease] = ()) -> Reading:
        """Request a reading of these GPUs alone."""
        return self._ask({"leases": [codec.to_json(one) for one in leases], "only": uuids})

    def _ask(self, request: dict[str, Any]) -> Reading:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return codec.from_json(Reading, self._line())

    def _line(self) -> Any:
        """The next answer; notices of long calls before it are skipped."""
        assert self.process.stdout is not None
        while "under_way" in (line := json.loads(self.process.stdout.readline())):
            pass
        return line
