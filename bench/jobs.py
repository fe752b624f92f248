"""How many jobs of no work get through a second, and what does each cost?

Peers in the same run: Slurm, tuned for short jobs and as it comes, which leases, records and watches as well; GNU
parallel and plain subprocesses, which do not. `torchrun` alone says what a real training pays before its first line.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.daemon import installed
from bench.peers import NotInstalled, ray_tasks
from bench.peers.gnu_parallel import parallel_s, subprocesses_s
from bench.peers.slurm import TUNED, slurm
from bench.table.rows import Row, Target
from tests.daemon import DaemonProcess

JOBS = 100
AT_ONCE = 8
RAY = {"Ray, a process for each task": False, "Ray, which reuses processes": True}
TORCHRUNS = 3


def array_s(running: DaemonProcess, jobs: int) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from the submission of all, as one array, to the end of the last, and the jobs as they ended."""
    body = {"command": ["true"], "launcher": "plain", "array": {"indices": f"0-{jobs - 1}"}}
    begun = time.perf_counter()
    array = running.call("POST", "/v1/jobs", body).json["array_id"]
    path = f"/v1/jobs?array={array}"
    while running.call("GET", f"{path}&state=queued&limit=1").json["items"]:
        assert time.perf_counter() - begun < 300, running.story()
        time.sleep(0.05)
    while len(found := running.call("GET", f"{path}&state=succeeded&limit={jobs}").json["items"]) < jobs:
        assert time.perf_counter() - begun < 300, running.story()
        time.sleep(0.02)
    return time.perf_counter() - begun, found


def torchrun() -> float:
    """Seconds of torchrun with two ranks that do nothing, started by itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    begun = time.perf_counter()
    subprocess.run([*command, "true"], check=True, capture_output=True)
    return time.perf_counter() - begun


def stages(running: DaemonProcess, job: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds from grant to start, from start to end, and from end to clean GPU."""
    lease = running.call("GET", f"/v1/leases/{job['lease_id']}?wait_s=60").json  # it ends after the job
    granted, started, ended, released = (
        datetime.fromisoformat(at)
        for at in (lease["granted_at"], job["started_at"], job["ended_at"], lease["ended_at"])
    )
    return ((started - granted).total_seconds(), (ended - started).total_seconds(), (released - ended).total_seconds())


def jobs(quick: bool) -> list[Row]:
    """The rows of the table."""
    count, rounds = (24, 1) if quick else (JOBS, 5)
    found: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    parts: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        running = stack.enter_context(installed(Path(place), "--simulate", str(AT_ONCE)))
        runs: dict[str, Callable[[], float]] = {
            "GNU parallel": lambda: parallel_s(count, AT_ONCE),
            "plain subprocesses": lambda: subprocesses_s(count, AT_ONCE),
        }
        try:
            tuned = stack.enter_context(slurm(Path(place), TUNED))
            runs["tuned Slurm"] = lambda: tuned.array_s(count)
        except NotInstalled as why:
            missing["tuned Slurm"] = str(why)
        for _ in range(rounds):
            took_s, ended = array_s(running, count)
            found.setdefault("gpulease", []).append(count / took_s)
            parts += [stages(running, job) for job in ended]
            for name, run in runs.items():
                try:
                    found.setdefault(name, []).append(count / run())
                except NotInstalled as why:
                    missing[name] = str(why)
    if "tuned Slurm" in found:
        with tempfile.TemporaryDirectory() as place, slurm(Path(place)) as untuned:
            found["Slurm as it comes"] = [count / untuned.array_s(count)]
    for name, reuse in RAY.items():
        try:
            found[name] = [ray_tasks.rate(count if reuse else 2 * AT_ONCE, reuse=reuse)]
        except NotInstalled as why:
            missing[name] = str(why)
    return rates(count, found, missing, parts)


def rates(
    count: int, found: dict[str, list[float]], missing: dict[str, str], parts: list[tuple[float, float, float]]
) -> list[Row]:
    """Jobs per second and of each peer, and what passes before a job runs."""
    ours = statistics.median(found["gpulease"])
    started, ran, reported = (statistics.median(column) * 1e3 for column in zip(*parts, strict=True))
    what = f"{count} jobs of no work through {AT_ONCE} GPUs, as an array"
    rows = [
        Row(
            question=what,
            formerly="8.9/s",
            target=Target(bound=40.0, at_least=True),
            figure=ours,
            unit="/s",
            beside=", ".join(f"{figure:.1f}/s" for figure in found["gpulease"]),
        )
    ]
    for name, target, formerly in (
        ("tuned Slurm", Target(bound=2.0, at_least=True), "0.49 x"),
        ("Slurm as it comes", None, "1.5 x"),
        *((name, None, "") for name in RAY),
        ("GNU parallel", None, "0.04 x"),
        ("plain subprocesses", None, "0.008 x"),
    ):
        theirs = statistics.median(found[name]) if found.get(name) else None
        rows.append(
            Row(
                question=f"{what}: of {name}",
                formerly=formerly,
                target=target,
                figure=None if theirs is None else ours / theirs,
                beside=missing.get(name, "") if theirs is None else f"gpulease {ours:.1f}/s; {name} {theirs:.1f}/s",
            )
        )
    rows.append(
        Row(
            question="from the grant of a job to its start, median",
            formerly="505 ms",
            target=Target(bound=50.0),
            figure=started,
            unit="ms",
            beside=f"from start to end {ran:.0f} ms; from end to the end of the lease {reported:.0f} ms",
        )
    )
    return rows


def main() -> None:
    """Print what a real training pays before its first line."""
    seconds = statistics.median(torchrun() for _ in range(TORCHRUNS))
    print(f"torchrun alone, two ranks that do nothing: {seconds:.2f} s each")


if __name__ == "__main__":
    main()
