"""A worker with `--leave-s` leaves on SIGTERM: jobs go on elsewhere, and the node is no more. And it shows a part of a
host where it was given one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulease_protocol.host.process_id import ProcessId
from gpulease_worker.jobs import job_records
from gpulease_worker.probe.simulation import idle_gpus
from tests.daemon import DaemonProcess, daemon, eventually
from tests.worker.build import number_in


@contextmanager
def worker(running: DaemonProcess, node: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The worker of a node with four GPUs; killed in the end."""
    command = [sys.executable, "-m", "gpulease_cli", "worker", "--url", running.url, "--node", node, *options]
    process = subprocess.Popen([*command, "--data-dir", str(running.data_dir / node), "--simulate", "4"])
    try:
        eventually(lambda: any(gpu["node"] == node for gpu in running.gpus()), 120, running.story)
        yield process
    finally:
        process.kill()
        process.wait()


def names(running: DaemonProcess) -> list[str]:
    return [node["name"] for node in running.call("GET", "/v1/nodes").json["items"]]


@pytest.mark.budget(30)
def test_a_node_leaves_on_sigterm_and_its_job_goes_on_elsewhere(tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = f"trap 'echo got TERM >> {said}; exit 3' TERM; echo $$ >> {said}; sleep 600 & wait"
    with daemon(tmp_path, "--no-worker") as running, worker(running, "n1", "--leave-s", "20") as first:
        job = running.submit("sh", "-c", script, gpus=2, launcher="plain")
        running.wait_job(job, "running")
        eventually(lambda: number_in(said) > 0, 60, running.story)
        training = ProcessId.of(number_in(said))
        held = running.request_lease(1, wait_s=60)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0
        assert training is not None
        assert not training.alive()
        assert "got TERM" in said.read_text(), "it has its grace period"
        assert names(running) == []
        assert running.lease(held["id"])["end_reason"] == "node_lost"
        queued = running.job(job)
        assert queued["state"] == "queued"
        assert queued["attempt_history"][0]["node_left"] is True
        assert "does not count: its node n1 left" in queued["reason"]
        with worker(running, "n2"):
            assert running.wait_job(job, "running")["gpus"][0]["node"] == "n2"
            running.call("POST", f"/v1/jobs/{job}/cancel", {"grace_s": 1})
            running.wait_job(job, "cancelled")


@pytest.mark.budget(30)
def test_a_job_that_sigterm_of_all_processes_ends_has_not_failed(tmp_path: Path) -> None:
    """As `scancel` does it: the supervisor hears of its own SIGTERM no later than of the launcher's end."""
    with daemon(tmp_path, "--no-worker") as running, worker(running, "n1", "--leave-s", "20") as first:
        job = running.submit("sh", "-c", "trap 'exit 3' TERM; sleep 600 & wait", gpus=1, launcher="plain")
        running.wait_job(job, "running")
        supervisor = job_records.read(running.data_dir / "n1/jobs" / job, job_records.START, job_records.StartRecord)
        assert supervisor is not None
        assert supervisor.launcher is not None
        os.kill(supervisor.supervisor.pid, signal.SIGSTOP)
        for process in (supervisor.launcher, supervisor.supervisor):
            os.kill(process.pid, signal.SIGTERM)
        os.kill(supervisor.supervisor.pid, signal.SIGCONT)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0
        assert running.job(job)["state"] == "queued"


def test_without_that_option_jobs_go_on_without_the_worker(tmp_path: Path) -> None:
    with daemon(tmp_path, "--no-worker") as running, worker(running, "n1") as first:
        job = running.submit("sleep", "600", gpus=1, launcher="plain")
        running.wait_job(job, "running")
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0
        assert names(running) == ["n1"]
        assert running.job(job)["state"] == "running"
        with worker(running, "n1"):
            running.call("POST", f"/v1/jobs/{job}/cancel", {"grace_s": 1})
            running.wait_job(job, "cancelled")


def test_a_worker_that_was_given_a_part_of_a_host_shows_that_part(tmp_path: Path) -> None:
    uuids = [gpu.uuid for gpu in idle_gpus(4, "n1")]
    with daemon(tmp_path, "--no-worker") as running, worker(running, "n1", "--gpus", f"0,{uuids[3]}"):
        assert [gpu["uuid"] for gpu in running.gpus()] == [uuids[0], uuids[3]]
        assert running.call("POST", "/v1/leases", {"count": 3}).problem() == (422, "never_fits")
