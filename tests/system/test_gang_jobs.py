"""Jobs on several nodes: real daemon, workers and processes of two simulated nodes on this host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulease_worker.jobs import job_records
from gpulease_worker.processes import lease_claims
from tests.daemon import DaemonProcess, daemon, eventually
from tests.worker.build import kill


@contextmanager
def worker(running: DaemonProcess, place: Path, node: str = "n2") -> Iterator[subprocess.Popen[bytes]]:
    """The worker of a second node with two GPUs; killed in the end."""
    command = [sys.executable, "-m", "gpulease_cli", "worker", "--url", running.url, "--node", node]
    process = subprocess.Popen([*command, "--data-dir", str(place), "--simulate", "2"])
    try:
        eventually(lambda: free(running, node) == 2, 60, running.story)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon with two nodes of two GPUs each."""
    with daemon(tmp_path, "--simulate", "2", "--node", "n1") as started, worker(started, tmp_path / "n2"):
        yield started


def free(running: DaemonProcess, node: str) -> int:
    gpus = running.call("GET", "/v1/gpus").json["items"]
    return sum(gpu["node"] == node and gpu["state"] == "free" for gpu in gpus)


def logs_of(job: dict, rank: int) -> Path:
    """The log directory of a part: all nodes are on this host, so it can be read."""
    return Path(job["members"][rank]["log_directory"].partition(":")[2] or job["members"][rank]["log_directory"])


@pytest.mark.budget(30)
def test_a_command_runs_once_on_each_node_with_its_rank_and_one_address(running: DaemonProcess) -> None:
    words = "echo $NODE_RANK of $NNODES at $MASTER_ADDR:$MASTER_PORT"
    job = running.wait_job(running.submit("sh", "-c", words, gpus=2, nodes=2), "succeeded")
    assert [(one["node"], one["state"], one["exit_code"]) for one in job["members"]] == [
        ("n1", "exited", 0),
        ("n2", "exited", 0),
    ]
    env = running.lease(job["lease_id"])["env"]
    for rank in range(2):
        said = (logs_of(job, rank) / f"rank-{2 * rank}.log").read_text()
        assert said == f"{rank} of 2 at {env['MASTER_ADDR']}:{env['MASTER_PORT']}\n"
    eventually(lambda: free(running, "n1") + free(running, "n2") == 4, 60, running.story)


@pytest.mark.budget(30)
def test_the_first_failure_ends_the_part_on_the_other_node_and_is_the_jobs(running: DaemonProcess) -> None:
    job = running.submit("sh", "-c", "test $NODE_RANK = 1 && exit 7; exec sleep 600", gpus=2, nodes=2)
    failed = running.wait_job(job, "failed")
    assert (failed["exit_code"], failed["reason"]) == (7, "On node n2: The command exited with code 7.")
    assert not lease_claims.claimants({failed["lease_id"]: None})


@pytest.mark.budget(30)
def test_a_killed_supervisor_ends_both_parts_and_the_job_is_tried_again(running: DaemonProcess) -> None:
    job_id = running.submit("sleep", "600", gpus=2, nodes=2, retries=1)
    job = running.wait_job(job_id, "running")
    start = job_records.read(logs_of(job, 1).parent, job_records.START, job_records.StartRecord)
    assert start is not None
    kill(start.supervisor.pid)
    eventually(lambda: running.job(job_id)["attempts"] == 2, 60, running.story)
    again = running.wait_job(job_id, "running")
    assert again["attempt_history"][0]["reason"] == "On node n2: The job's supervisor died; its processes were killed."
    assert not lease_claims.claimants({job["lease_id"]: None})
    running.call("POST", f"/v1/jobs/{job_id}/cancel", {"grace_s": 1})
    running.wait_job(job_id, "cancelled")
    assert not lease_claims.claimants({again["lease_id"]: None})


@pytest.mark.budget(30)
def test_the_parts_go_on_without_their_workers_and_are_found_again(tmp_path: Path) -> None:
    on = tmp_path / "on"
    with daemon(tmp_path, "--simulate", "2", "--node", "n1") as running:
        with worker(running, tmp_path / "n2"):
            job = running.submit("sh", "-c", f"until test -e {on}; do sleep 0.1; done", gpus=2, nodes=2)
            running.wait_job(job, "running")
        eventually(
            lambda: free(running, "n2") == 0 and "unknown" in str(running.call("GET", "/v1/gpus").json),
            60,
            running.story,
        )
        running.kill()
        running.start()
        with worker_of_running_job(running, tmp_path / "n2"):
            on.touch()
            assert running.wait_job(job, "succeeded")["exit_code"] == 0


@contextmanager
def worker_of_running_job(running: DaemonProcess, place: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "gpulease_cli", "worker", "--url", running.url, "--node", "n2"]
    process = subprocess.Popen([*command, "--data-dir", str(place), "--simulate", "2"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
