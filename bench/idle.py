"""What does an idle host pay for the daemon, its worker and its probe?

8 simulated GPUs, all free, and no one asks. Processor time from /proc/PID/stat, memory from /proc/PID/smaps_rollup
(PSS: pages that processes share count in part).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.daemon import InstalledDaemon, installed
from bench.table.load import cpu_s, pss_bytes
from bench.table.rows import Row, Target

GPUS = 8
SETTLE_S, MEASURED_S = 5.0, 60.0
QUICK_S = 10.0


def idle(quick: bool) -> list[Row]:
    """The rows of the table."""
    with tempfile.TemporaryDirectory() as place, installed(Path(place), "--simulate", str(GPUS)) as running:
        time.sleep(SETTLE_S)
        percent, mib = percent_of_a_core(running, QUICK_S if quick else MEASURED_S), mebibytes(running)
    what = f"idle, {GPUS} GPUs read at 1 Hz: daemon, worker and probe"
    return [
        Row(
            question=f"{what}, of a core",
            formerly="2.3 %",
            target=Target(bound=0.7),
            figure=sum(percent.values()),
            unit="%",
            beside=parts(percent, "%"),
        ),
        Row(
            question=f"{what}, memory (PSS)",
            formerly="120 MiB",
            target=Target(bound=80.0),
            figure=sum(mib.values()),
            unit="MiB",
            beside=parts(mib, "MiB"),
        ),
    ]


def percent_of_a_core(running: InstalledDaemon, seconds: float) -> dict[str, float]:
    """What each process takes over so many seconds."""
    pids = running.parts()
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    begun_s = time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - begun_s
    return {name: (cpu_s(pid) - before[name]) / took_s * 100 for name, pid in pids.items()}


def mebibytes(running: InstalledDaemon) -> dict[str, float]:
    """Memory of each process (PSS)."""
    return {name: pss_bytes(pid) / 2**20 for name, pid in running.parts().items()}


def parts(figures: dict[str, float], unit: str) -> str:
    """What each process takes."""
    return ", ".join(f"{name} {figure:.2f} {unit}" for name, figure in figures.items())
