"""GNU parallel, and plain subprocesses: starting commands, and nothing else."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from bench.peers import program


def parallel_s(jobs: int, at_once: int) -> float:
    """Seconds that GNU parallel takes for so many `true`. Raises NotInstalled."""
    path = program("parallel", "parallel")
    command = [path, "--will-cite", "-j", str(at_once), "-n0", "true", ":::", *map(str, range(jobs))]
    begun_s = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun_s


def subprocesses_s(jobs: int, at_once: int) -> float:
    """Seconds that so many `true` take as subprocesses of this process."""
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda _: subprocess.run(["true"], check=True), range(jobs)))
    return time.perf_counter() - begun_s
