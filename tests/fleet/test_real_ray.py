"""A pool on real raylets: whatever is killed, its jobs run once at a time, and no GPU is granted twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.daemon import daemon, eventually
from tests.fleet import ray_cluster as clusters
from tests.fleet.ray_cluster import GPUS, WITHIN_S, RayFleet, ray_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.busy,
    pytest.mark.skipif(clusters.missing() is not None, reason=str(clusters.missing())),
]
TRAINING = (b"sleep", b"87654")
"""The command that stands for a training; no other test has it."""
LOOK_S = 0.3


def trainings() -> set[int]:
    """The pids of the trainings that run."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and tuple((entry / "cmdline").read_bytes().split(b"\0")[:2]) == TRAINING:
                found.add(int(entry.name))
    return found


@contextmanager
def ray_fleet(place: Path, **of_ray: object) -> Iterator[RayFleet]:
    """A cluster of two nodes, and a pool of two. Fails at its end when a job ran twice at once, or a GPU was in two
    leases."""
    with daemon(place, "--no-worker") as running, ray_cluster(**of_ray) as cluster:
        fleet, stopped, wrong = RayFleet(running, place, cluster), threading.Event(), list[str]()

        def look() -> None:
            while not stopped.wait(LOOK_S):
                if len(found := trainings()) > 1:
                    wrong.append(f"two attempts at once: {found}")
                with suppress(OSError):
                    held = Counter(gpu["uuid"] for lease in running.leases("active") for gpu in lease["gpus"])
                    wrong.extend(f"{uuid} is in {times} leases" for uuid, times in held.items() if times > 1)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            with fleet.up("--nodes", "2"):
                wait(fleet, "two nodes are ready after `up`", lambda: len(fleet.ready()) == 2)
                yield fleet
            down = fleet.type("down", "--tick", "1s")
            assert down.returncode == 0, down.stderr
            assert fleet.nodes() == {}
        finally:
            stopped.set()
            looking.join()
        assert not wrong, wrong[:5]
        assert not trainings()


def wait(fleet: RayFleet, what: str, condition: Callable[[], bool]) -> None:
    """Wait for something, and print how long it took."""
    began = time.monotonic()
    eventually(condition, WITHIN_S, fleet.story)
    print(f"{what}: {time.monotonic() - began:.1f} s")


def running_training(fleet: RayFleet, job: str, attempt: int) -> tuple[str, int]:
    """The node and the process of an attempt of a job, once it runs."""

    def runs() -> bool:
        shown = fleet.running.job(job)
        return shown["state"] == "running" and shown["attempts"] == attempt and len(trainings()) == 1

    wait(fleet, f"attempt {attempt} runs", runs)
    return str(fleet.running.job(job)["gpus"][0]["node"]), trainings().pop()


@pytest.mark.budget(150)
def test_whatever_of_ray_is_killed_its_jobs_go_on_and_no_gpu_is_granted_twice(tmp_path: Path) -> None:
    """A worker; the GCS, which keeps its state; an actor; a raylet."""
    kept = {"gcs_storage": "rocksdb", "gcs_storage_path": str(tmp_path / "gcs")}
    with ray_fleet(tmp_path, **kept) as fleet:
        running, cluster = fleet.running, fleet.cluster
        leases = [running.wait_active(running.request_lease(GPUS)["id"], WITHIN_S) for _ in range(2)]
        assert {lease["gpus"][0]["node"] for lease in leases} == set(fleet.ready())
        for lease in leases:
            running.release(lease)
        job = running.submit(*map(bytes.decode, TRAINING), gpus=2, retries=3)
        node, training = running_training(fleet, job, 1)

        worker = fleet.worker(node)
        os.kill(worker, signal.SIGKILL)
        wait(fleet, "worker killed, another one", lambda: fleet.worker(node) != worker and node in fleet.ready())
        os.kill(cluster.gcs, signal.SIGKILL)
        cluster.ask("gcs")
        assert running_training(fleet, job, 1) == (node, training), "it runs on"

        os.kill(fleet.actor(node), signal.SIGKILL)
        node, _ = running_training(fleet, job, 2)
        wait(fleet, "actor killed, two nodes again", lambda: len(fleet.ready()) == 2)

        os.kill(fleet.raylet(node), signal.SIGKILL)
        running_training(fleet, job, 3)
        cluster.ask("raylet")
        wait(fleet, "raylet killed, two nodes again", lambda: len(fleet.ready()) == 2)
        assert [one["node_left"] for one in running.job(job)["attempt_history"][:2]] == [True, True]
        generations = [int(str(pilot["generation"])) for pilot in fleet.pilots()]
        assert sum(generations) == 4, "only a lost actor or raylet takes a new pilot"
