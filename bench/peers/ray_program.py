"""Runs tasks of one GPU each on a local Ray cluster, and prints the seconds. Needs Ray, see `ray_tasks`."""

from __future__ import annotations

import subprocess
import sys
import time

GPUS = 8


def run(tasks: int, reuse: bool, directory: str) -> float:
    """Seconds that so many tasks take, after as many as there are GPUs."""
    import ray  # noqa: PLC0415 - of another environment

    ray.init(num_cpus=GPUS, num_gpus=GPUS, include_dashboard=False, log_to_driver=False,
             object_store_memory=80 * 2**20, _temp_dir=directory)  # fmt: skip

    @ray.remote(num_cpus=1, num_gpus=1, max_calls=0 if reuse else 1)
    def nothing() -> None:
        subprocess.run(["true"], check=True)

    ray.get([nothing.remote() for _ in range(GPUS)])
    begun_s = time.perf_counter()
    ray.get([nothing.remote() for _ in range(tasks)])
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    print(run(int(sys.argv[1]), sys.argv[2] == "reuse", sys.argv[3]))
