"""How many jobs of no work get through a second, and what does each cost?

Beside it, in the same run: the same commands as plain subprocesses, 8 at a time, as GNU parallel does (nothing leased,
recorded or watched), and what `torchrun` alone takes to start two ranks that do nothing: what a real training pays
before its first line.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.daemon import DaemonProcess

JOBS = 100
AT_ONCE = 8
TORCHRUNS = 3


def through_the_daemon(running: DaemonProcess) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from the submission of all, as one array, to the end of the last, and the jobs as they ended."""
    body = {"command": ["sleep", "0"], "launcher": "plain", "array": {"indices": f"0-{JOBS - 1}"}}
    begun = time.perf_counter()
    array = running.call("POST", "/v1/jobs", body).json["array_id"]
    path = f"/v1/jobs?array={array}&limit={JOBS}"
    while len(running.call("GET", f"{path}&state=succeeded").json["items"]) < JOBS:
        assert time.perf_counter() - begun < 300, running.story()
        time.sleep(0.1)
    return time.perf_counter() - begun, running.call("GET", path).json["items"]


def plainly() -> float:
    """Seconds that the same commands take without gpulease."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda _: subprocess.run(["sleep", "0"], check=True), range(JOBS)))
    return time.perf_counter() - begun


def torchrun() -> float:
    """Seconds of torchrun with two ranks that do nothing, started by itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    begun = time.perf_counter()
    subprocess.run([*command, "true"], check=True, capture_output=True)
    return time.perf_counter() - begun


def stages(running: DaemonProcess, job: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds from grant to start, from start to end, and from end to clean GPU."""
    lease = running.call("GET", f"/v1/leases/{job['lease_id']}").json
    granted, started, ended, released = (
        datetime.fromisoformat(at)
        for at in (lease["granted_at"], job["started_at"], job["ended_at"], lease["ended_at"])
    )
    return ((started - granted).total_seconds(), (ended - started).total_seconds(), (released - ended).total_seconds())


def main() -> None:
    """Print the table of bench/README.md."""
    with tempfile.TemporaryDirectory() as place:
        running = DaemonProcess(Path(place) / "d", "--simulate", str(AT_ONCE)).start()
        try:
            took_s, jobs = through_the_daemon(running)
            parts = [stages(running, job) for job in jobs]
        finally:
            running.stop()
    plain_s = plainly()
    torchrun_s = statistics.median(torchrun() for _ in range(TORCHRUNS))
    medians = [statistics.median(column) for column in zip(*parts, strict=True)]
    lines = [
        f"{JOBS} jobs of `sleep 0` through {AT_ONCE} GPUs: {JOBS / took_s:.1f} jobs/s ({took_s:.1f} s)",
        f"the same as plain subprocesses, {AT_ONCE} at a time: {JOBS / plain_s:.0f} /s ({plain_s:.2f} s)",
        f"torchrun alone, two ranks that do nothing: {torchrun_s:.2f} s each",
        "median seconds of a job: "
        + json.dumps(dict(zip(("grant to start", "start to end", "end to report"), medians, strict=True))),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
