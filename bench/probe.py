"""What does one reading of the GPUs cost, and which call is the expensive one?

On this host's GPUs where there are any. Beside it, always: the same calls on the stand-in library of the tests, which
answers at once, so that what is left is nvidia-ml-py and this project (the limit of the binding). `--load`: while
processes create and destroy contexts on an otherwise unused GPU, which is when a driver's locks are held.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpulease_worker.probe import nvml_check
from gpulease_worker.probe.nvml_binding import GpuFailed, LibraryFailed, Nvml
from gpulease_worker.probe.nvml_reader import NvmlReader
from tests.gpu.subjects import choose, churners

ROUNDS = 300
WITHIN_S = 4.0
"""Fewer rounds are made if they take longer than this."""
CHURNERS = 12
"""Processes that make and drop contexts under load: more than the ranks of a host that start together."""
STAND_IN = Path(__file__).parents[1] / "tests" / "worker" / "stand_in_nvml.c"
STAND_IN_GPUS = 8


class Timed(Nvml):
    """A session that notes how long each call took, in microseconds by the name of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.took: dict[str, list[float]] = {}

    def call(self, call: str, *words: Any, **named: Any) -> Any:
        """As `Nvml.call`."""
        with self._noted(call):
            return super().call(call, *words, **named)

    def _required_call(self, call: str) -> Any:
        with self._noted(call):
            return super()._required_call(call)

    @contextmanager
    def _noted(self, call: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.took.setdefault(call, []).append((time.perf_counter() - begun) * 1e6)


def timed(action: Callable[[], object], rounds: int = ROUNDS, within_s: float = WITHIN_S) -> list[float]:
    """Microseconds that each of `rounds` calls took; fewer calls if they take long."""
    found: list[float] = []
    until_s = time.monotonic() + within_s
    while len(found) < rounds and (not found or time.monotonic() < until_s):
        begun = time.perf_counter()
        action()
        found.append((time.perf_counter() - begun) * 1e6)
    return found


def figures(microseconds: list[float]) -> tuple[str, str, str]:
    """Median, 99th percentile and maximum."""
    ordered = sorted(microseconds)
    return (
        f"{statistics.median(ordered):.0f}",
        f"{ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]:.0f}",
        f"{ordered[-1]:.0f}",
    )


def row(name: str, microseconds: list[float]) -> str:
    """A line of the table."""
    return f"| {name} | {' | '.join(figures(microseconds))} |"


def no_xids(nvml: Nvml, events: Any) -> str | None:
    """Why the driver does not tell of Xids, as under gVisor; None when it does."""
    if events is None:
        return "it has no event sets"
    try:
        nvml.wait_for_xid(events, 0.0)
    except (LibraryFailed, GpuFailed) as failed:
        return str(failed)
    return None


def by_call(nvml: Nvml, handle: Any, within_s: float = WITHIN_S) -> dict[str, list[float]]:
    """What each part of a reading of one GPU costs."""
    events = nvml.register_xids([handle])
    parts: dict[str, Callable[[], object]] = {
        "handle": lambda: nvml.handle(0),
        "memory": lambda: nvml.memory(handle),
        "memory, utilization, temperature, power, compute mode": lambda: nvml.activity(handle),
        "process lists (compute, MPS, graphics)": lambda: nvml.processes(handle),
        "recovery action, remapped rows, MIG": lambda: nvml.health_facts(handle),
        "ECC counts, throttle reasons, NUMA node": lambda: nvml.condition(handle),
    }
    why = no_xids(nvml, events)
    if why is None:
        parts["wait for an Xid, 0 s"] = lambda: nvml.wait_for_xid(events, 0.0)
    else:
        print(f"The driver tells of no Xids: {why}.\n")
    found = {name: timed(part, within_s=within_s) for name, part in parts.items()}
    if events is not None:
        nvml.free_xid_events(events)
    return found


def by_reading(within_s: float = WITHIN_S) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """What whole readings of all GPUs cost, and those between; and each call of NVML in them, by its name."""
    source, session = NvmlReader("bench"), Timed()
    source._nvml = session
    source.read(())
    session.took.clear()  # the first opens the driver, which is another matter
    found = {
        "a whole reading": timed(lambda: source.read(()), within_s=within_s),
        "one between, without processes": timed(lambda: source.read((), complete=False), within_s=within_s),
    }
    source._stop()
    return found, session.took


def measure() -> None:
    """Print the tables for the library that this process loads."""
    nvml = Nvml()
    nvml.open()
    print(f"\ndriver {nvml.driver_version()}, {nvml.count()} x {nvml.name(nvml.handle(0))}\n")
    parts = by_call(nvml, nvml.handle(0))
    print("| what | median us | p99 us | max us |\n|---|---|---|---|")
    for name, found in parts.items():
        print(row(f"one GPU: {name}", found))
    nvml.close()
    readings, calls = by_reading()
    for name, found in readings.items():
        print(row(f"all GPUs: {name}", found))
    for name, found in sorted(calls.items()):
        print(row(f"`{name}`", found))


def under_load() -> None:
    """The same while processes create and destroy contexts on an otherwise unused GPU."""
    gpu, why = choose(NvmlReader("bench").read(()))
    if gpu is None:
        print(f"No GPU to load: {why}")
        return
    with churners(CHURNERS, gpu.uuid):
        measure()


def main() -> None:
    """Print the tables of bench/README.md."""
    if "--here" in sys.argv:
        measure()
        return
    if "--load" in sys.argv:
        under_load()
        return
    here = [sys.executable, "-m", "bench.probe", "--here"]
    missing = nvml_check.unavailable_reason()
    if missing is None:
        subprocess.run(here, check=True)
    else:
        print(f"No GPU at hand: {missing}")
    with tempfile.TemporaryDirectory() as place:
        library, matters = Path(place) / "libnvidia-ml.so.1", Path(place) / "matters"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(STAND_IN)], check=True)
        matters.write_text(f"count -1 {STAND_IN_GPUS}\n")
        environment = {**os.environ, "LD_LIBRARY_PATH": place, "STAND_IN_NVML": str(matters)}
        subprocess.run(here, env=environment, check=True)


if __name__ == "__main__":
    main()
