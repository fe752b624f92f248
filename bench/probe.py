"""What does one look at the GPUs cost, and which call is the dear one?

On this host's GPUs where there are any. Beside it, always: the same calls on the stand-in library of the tests, which
answers at once, so that what is left is nvidia-ml-py and this project (the limit of the binding).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpulease_worker import driver
from gpulease_worker.hardware import Hardware
from gpulease_worker.nvml import Nvml

ROUNDS = 300
STAND_IN = Path(__file__).parents[1] / "tests" / "worker" / "stand_in_nvml.c"
STAND_IN_GPUS = 8


def timed(action: Callable[[], object]) -> list[float]:
    """Microseconds that each of so many calls took."""
    found = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        action()
        found.append((time.perf_counter() - begun) * 1e6)
    return found


def row(name: str, microseconds: list[float]) -> str:
    """Median and 99th percentile."""
    ordered = sorted(microseconds)
    return f"| {name} | {statistics.median(ordered):.0f} | {ordered[int(len(ordered) * 0.99)]:.0f} |"


def by_call(nvml: Nvml, handle: Any) -> dict[str, list[float]]:
    """What each part of a reading of one GPU costs."""
    events = nvml.register_xids([handle])
    parts: dict[str, Callable[[], object]] = {
        "handle": lambda: nvml.handle(0),
        "memory": lambda: nvml.memory(handle),
        "memory, utilization, temperature, power, compute mode": lambda: nvml.activity(handle),
        "process lists (compute, MPS, graphics)": lambda: nvml.processes(handle),
        "recovery action, remapped rows, MIG": lambda: nvml.facts(handle),
        "ECC counts, throttle reasons, NUMA node": lambda: nvml.condition(handle),
        "wait for an Xid, 0 s": lambda: events and nvml.wait_for_xid(events, 0.0),
    }
    return {name: timed(part) for name, part in parts.items()}


def measure() -> None:
    """Print the table for the library that this process loads."""
    nvml = Nvml()
    nvml.open()
    print(f"\ndriver {nvml.driver_version()}, {nvml.count()} x {nvml.name(nvml.handle(0))}\n")
    print("| what | median us | p99 us |\n|---|---|---|")
    for name, found in by_call(nvml, nvml.handle(0)).items():
        print(row(f"one GPU: {name}", found))
    nvml.close()
    source = Hardware("bench")
    source.read(())
    print(row("all GPUs: a whole reading", timed(lambda: source.read(()))))
    print(row("all GPUs: one between, without processes", timed(lambda: source.read((), fresh=False))))


def main() -> None:
    """Print the tables of bench/README.md."""
    if "--here" in sys.argv:
        measure()
        return
    here = [sys.executable, "-m", "bench.probe", "--here"]
    missing = driver.unavailable()
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
