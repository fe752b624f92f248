"""Promise 12: a worker that stays away loses its jobs, starts none of them again, and ends what still runs of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from gpulease_protocol.host.process_id import ProcessId
from tests.daemon import USUAL, DaemonProcess, daemon, eventually
from tests.worker.build import number_in


@contextmanager
def worker(running: DaemonProcess, place: Path) -> Iterator[None]:
    """The worker of a second node with two GPUs; killed in the end. Its jobs go on."""
    with killed_in_the_end(command(running, place)):
        eventually(lambda: free(running) == 2, 60, running.story)
        yield


@contextmanager
def killed_in_the_end(start: list[str], errors: IO[bytes] | None = None) -> Iterator[None]:
    """A program; killed in the end."""
    with subprocess.Popen(start, stderr=errors) as process:
        try:
            yield
        finally:
            process.kill()


def command(running: DaemonProcess, place: Path) -> list[str]:
    """Starts that worker."""
    start = [sys.executable, "-m", "gpulease_cli", "worker", "--url", running.url, "--node", "n2"]
    return [*start, "--data-dir", str(place), "--simulate", "2"]


def free(running: DaemonProcess) -> int:
    gpus = running.call("GET", "/v1/gpus").json["items"]
    return sum(gpu["node"] == "n2" and gpu["state"] == "free" for gpu in gpus)


@pytest.mark.budget(30)
def test_a_node_that_stays_away_loses_its_jobs_and_its_worker_ends_them_when_it_is_back(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with daemon(tmp_path, "--simulate", "1", "--node", "n1", "--node-lost-after", "6", **USUAL) as running:
        with worker(running, tmp_path / "n2"):
            job = running.submit("sh", "-c", f"echo $$ > {pid_file}; exec sleep 600", gpus=2, retries=3, timeout_s=1000)
            running.wait_job(job, "running")
            eventually(lambda: number_in(pid_file) > 0, 60, running.story)
        training = ProcessId.of(number_in(pid_file))
        assert training is not None

        lost = running.wait_job(job, "lost")
        assert lost["reason"] == "node n2 has been silent for over 6 s; how the job ended is not known"
        assert running.lease(lost["lease_id"])["end_reason"] == "node_lost"
        assert training.alive(), "it was only cut off, so it must not be tried again elsewhere"
        assert free(running) == 0

        with worker(running, tmp_path / "n2"):
            assert not training.alive()
            assert running.job(job)["state"] == "lost"
            assert running.call("POST", "/v1/nodes/n2/forget").problem() == (409, "in_use")

        eventually(lambda: running.call("POST", "/v1/nodes/n2/forget").status == 200, 60, running.story)
        assert [node["name"] for node in running.call("GET", "/v1/nodes").json["items"]] == ["n1"]
        assert running.call("POST", "/v1/nodes/n2/forget").problem() == (404, "not_found")


@pytest.mark.budget(30)
def test_a_worker_on_another_data_directory_loses_no_job_of_its_node(tmp_path: Path) -> None:
    pid_file, said = tmp_path / "pid", tmp_path / "said"
    with daemon(tmp_path, "--simulate", "1", "--node", "n1", **USUAL) as running:
        with worker(running, tmp_path / "n2"):
            job = running.submit("sh", "-c", f"echo $$ > {pid_file}; exec sleep 600", gpus=2)
            running.wait_job(job, "running")
            eventually(lambda: number_in(pid_file) > 0, 60, running.story)
        training = ProcessId.of(number_in(pid_file))
        assert training is not None

        refusal = f"Job {job} runs on node n2 under another data directory, and would be lost."
        remedy = f"Start the worker with --data-dir {tmp_path / 'n2'}, or wait until the job has ended."
        with said.open("wb") as errors, killed_in_the_end(command(running, tmp_path / "moved"), errors):
            eventually(lambda: f"{refusal} {remedy}" in said.read_text(), 60, running.story)
        assert running.job(job)["state"] == "running"
        assert training.alive()

        with killed_in_the_end(command(running, tmp_path / "n2")):
            running.call("POST", f"/v1/jobs/{job}/cancel", {"grace_s": 1})
            running.wait_job(job, "cancelled")
        assert not training.alive()
