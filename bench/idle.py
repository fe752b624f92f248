"""What does an idle host pay for the daemon, its worker and its probe?

8 simulated GPUs, all free, and no one asks. Processor time from /proc/PID/stat, memory from /proc/PID/smaps_rollup
(PSS: pages that processes share count in part).
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from gpulease_protocol.host import process_tree
from tests.daemon import DaemonProcess

GPUS = 8
SETTLE_S, MEASURED_S = 5.0, 30.0


def main() -> None:
    """Print the table of bench/README.md."""
    with tempfile.TemporaryDirectory() as place:
        running = DaemonProcess(Path(place) / "d", "--simulate", str(GPUS)).start()
        try:
            assert running.process is not None
            time.sleep(SETTLE_S)
            measure(running.process.pid)
        finally:
            running.stop()


def measure(daemon: int) -> None:
    """Watch the daemon and its descendants for a while."""
    pids = [daemon, *sorted(one.pid for one in process_tree.descendants(daemon))]
    before = {pid: cpu_seconds(pid) for pid in pids}
    begun = time.monotonic()
    time.sleep(MEASURED_S)
    took_s = time.monotonic() - begun
    print(f"\n| {GPUS} GPUs, {MEASURED_S:g} s | % of a core | MiB (PSS) |\n|---|---|---|")
    rows = [(name_of(pid, daemon), (cpu_seconds(pid) - before[pid]) / took_s * 100, pss_mib(pid)) for pid in pids]
    rows.append(("together", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    for name, percent, mib in rows:
        print(f"| {name} | {percent:.2f} | {mib:.1f} |")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    status = Path(f"/proc/{pid}/stat").read_text()
    user, system = status[status.rindex(")") + 2 :].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def pss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def name_of(pid: int, daemon: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return "daemon" if pid == daemon else "probe" if "probe" in command else "worker"


if __name__ == "__main__":
    main()
