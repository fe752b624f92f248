"""Builds the stand-in for the driver's library, says what is the matter with it, and asks a probe on it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpulease import wire
from gpulease.exchange import NodeLease
from gpulease.model import ComputeMode, GpuLink, GpuReading, Process, ProcessType
from gpulease_worker.source import Pace, Reading, Start
from tests.worker.build import python

SOURCE = Path(__file__).with_name("stand_in_nvml.c")
GIB = 1024**3
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, MISMATCH, UNKNOWN = (
    3,
    4,
    9,
    15,
    16,
    18,
    999,
)
OPERATING_SYSTEM, MEMORY, NOT_READY = 17, 20, 27
"""Errors of NVML."""
HANGS = -1
"""In place of an error: the call never comes back."""
EVERY = -1
"""In place of an index: every GPU, or no GPU in particular."""

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
"""The GPU that cannot tell much: what is not supported is None."""
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
"""The GPU that tells everything and is in use."""
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
"""A whole one that is idle; there is one when the stand-in is told that it has three."""
LINKS = (GpuLink(first=POOR.uuid, second=WHOLE.uuid, path="numa_node", peer_to_peer=False),)


def silent(gpu: GpuReading, health: str) -> GpuReading:
    """What is left of a reading when the GPU does not answer: its name."""
    kept = ("uuid", "node", "index", "pci_bus_id", "name", "memory_total_bytes", "minor_number")
    return GpuReading(**{name: getattr(gpu, name) for name in kept}, health=health)


class Driver:
    """A stand-in of one generation. What is the matter with it may change while a probe runs on it."""

    def __init__(self, directory: Path, *flags: str, library: str = "libnvidia-ml.so.1") -> None:
        self.directory = directory
        self._matters = directory / "matters"
        compiler = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(directory / library), str(SOURCE)]
        subprocess.run([*compiler, *(f"-D{flag}" for flag in flags)], check=True)
        self.says()
        self._kernel(("0000:1a:00.0", -1), ("0000:3b:00.0", 0), ("0000:50:00.0", 1))
        self.variables = {
            "LD_LIBRARY_PATH": str(directory),
            "STAND_IN_NVML": str(self._matters),
            "GPULEASE_PCI_DEVICES": str(directory / "devices"),
        }
        """What has a program use it."""
        self.environment = {**os.environ, **self.variables}

    def _kernel(self, *devices: tuple[str, int]) -> None:
        """What /sys says of NUMA nodes, beside the library; -1 is a host without any."""
        for name, node in devices:
            place = self.directory / "devices" / name
            place.mkdir(parents=True, exist_ok=True)
            (place / "numa_node").write_text(f"{node}\n")

    def says(self, *matters: tuple[str, int, object]) -> None:
        """From now on: (call or word, index, code or value), as the C source explains."""
        new = self._matters.with_suffix(".new")
        new.write_text("".join(f"{call} {index} {value}\n" for call, index, value in matters))
        new.rename(self._matters)

    @contextmanager
    def probe(
        self, pace: Pace | None = None, prelude: str = "", within: Sequence[str] = (), **start: Any
    ) -> Iterator[Asked]:
        """A probe on it. `prelude` is Python that runs before it, `within` a command that starts it, `start` what it is
        told beside its pace."""
        words = json.dumps(wire.to_json(Start(pace=pace or Pace(call_deadline_s=20), **start)))
        code = f"import sys; {prelude or 'pass'}; from gpulease_worker import probe; sys.exit(probe.main(sys.argv[1:]))"
        process = subprocess.Popen(
            [*within, *python("-c", code, words, "n")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            text=True,
        )
        asked = Asked(process)
        try:
            yield asked
        finally:
            process.kill()
            process.communicate()

    def read(self, *leases: NodeLease, prelude: str = "") -> Reading:
        """The first reading of a new probe."""
        with self.probe(prelude=prelude) as asked:
            return asked.read(leases)


class Asked:
    """A probe that is asked one question at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self._line() == {"ready": True}

    def read(self, leases: Sequence[NodeLease] = (), fresh: bool = True) -> Reading:
        """Its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"leases": [wire.to_json(one) for one in leases], "fresh": fresh}) + "\n")
        self.process.stdin.flush()
        return wire.from_json(Reading, self._line())

    def _line(self) -> Any:
        """The next answer; that a call takes long is said before it."""
        assert self.process.stdout is not None
        while "under_way" in (line := json.loads(self.process.stdout.readline())):
            pass
        return line
