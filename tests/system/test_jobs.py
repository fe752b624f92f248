"""Jobs through the whole of it: daemon, worker, supervisor, real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, events, eventually

WAIT = "?wait_s=60&wait_while="


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_job_runs_bound_to_its_gpus_and_gives_them_back(running: DaemonProcess) -> None:
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['GPULEASE_LEASE_ID'])"
    done = running.wait_job(running.submit(*python(code), gpus=2))
    assert (done["state"], done["exit_code"], done["attempts"]) == ("succeeded", 0, 1)
    lease = running.lease(done["lease_id"])
    assert lease["end_reason"] == "job_finished"
    printed = running.call("GET", f"/v1/jobs/{done['id']}/logs").content.decode().split()
    assert printed == [",".join(gpu["uuid"] for gpu in done["gpus"]), done["lease_id"]]
    running.wait_free()


def test_three_jobs_of_two_gpus_on_four_take_turns(running: DaemonProcess, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    wait = python(f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)")
    jobs = [running.submit(*wait, gpus=2) for _ in range(3)]
    eventually(lambda: [running.job(item)["state"] for item in jobs] == ["running", "running", "queued"], 60)
    assert running.gpu_states() == ["leased"] * 4
    gate.touch()
    assert [running.wait_job(item)["state"] for item in jobs] == ["succeeded"] * 3
    holding: set[str] = set()
    for event in events(running):
        if event["kind"] == "lease.granted":
            assert not holding & set(event["gpus"])
            holding |= set(event["gpus"])
        elif event["kind"] == "lease.ended":
            holding -= set(event["gpus"])


@pytest.mark.parametrize(
    ("command", "what", "reason"),
    [
        (["/no/such/program"], {}, "/no/such/program"),
        (["no-such-program"], {}, "no-such-program"),
        (["no_such_script.py"], {"launcher": "torchrun"}, "no_such_script.py"),
        (["true"], {"working_directory": "/no/such/directory"}, "/no/such/directory"),
        (["x.py"], {"launcher": "torchrun", "interpreter": "/no/such/python"}, "/no/such/python"),
    ],
)
def test_a_command_that_cannot_start_fails_with_that_reason(
    running: DaemonProcess, command: list[str], what: dict[str, Any], reason: str
) -> None:
    done = running.wait_job(running.submit(*command, **what))
    assert done["state"] == "failed"
    assert reason in done["reason"]
    running.wait_free()


def test_a_job_that_fails_shows_its_exit_code(running: DaemonProcess) -> None:
    done = running.wait_job(running.submit(*python("raise SystemExit(7)")))
    assert (done["state"], done["exit_code"]) == ("failed", 7)


def test_a_job_that_takes_too_long_is_ended(running: DaemonProcess) -> None:
    done = running.wait_job(running.submit("sleep", "600", timeout_s=0.5))
    assert done["state"] == "timed_out"


def test_a_cancelled_job_ends_with_all_its_processes(running: DaemonProcess) -> None:
    job_id = running.submit("sh", "-c", "setsid sleep 600 & sleep 600")
    eventually(lambda: running.job(job_id)["state"] == "running", 60)
    eventually(lambda: len(marked(running.job(job_id)["lease_id"])) >= 3, 60)
    running.call("POST", f"/v1/jobs/{job_id}/cancel", {"grace_s": 1})
    done = running.wait_job(job_id)
    assert done["state"] == "cancelled"
    assert not marked(done["lease_id"]), "processes of the job are left"
    running.wait_free()


def test_a_running_job_survives_the_daemon_and_is_found_again(running: DaemonProcess, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    code = f"import os, time\nprint(os.getpid(), flush=True)\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    job_id = running.submit(*python(code))
    eventually(lambda: running.call("GET", f"/v1/jobs/{job_id}/logs").content.strip().isdigit(), 60)
    running.wait_job(job_id, "running")  # it prints before its worker has reported it
    pid = int(running.call("GET", f"/v1/jobs/{job_id}/logs").content)
    for _ in range(2):
        running.kill()
        running.start()
        assert running.job(job_id)["state"] == "running"
        assert Path(f"/proc/{pid}").exists()
        assert "leased" in running.gpu_states()
    gate.touch()
    done = running.wait_job(job_id)
    assert (done["state"], done["attempts"]) == ("succeeded", 1)
    assert running.call("GET", f"/v1/jobs/{job_id}/logs").content.split() == [str(pid).encode()], "it ran twice"


def test_jobs_submitted_before_a_crash_run_after_it(running: DaemonProcess) -> None:
    jobs = [running.submit("true", gpus=4) for _ in range(3)]
    running.kill()
    running.start()
    assert [running.wait_job(item)["state"] for item in jobs] == ["succeeded"] * 3


def test_a_gpu_drains_while_a_child_of_its_holder_lives(running: DaemonProcess) -> None:
    lease = running.request_lease(wait_s=60)
    child = subprocess.Popen(["sleep", "600"], env=os.environ | lease["env"])
    try:
        uuid = lease["gpus"][0]["uuid"]
        eventually(lambda: running.call("GET", f"/v1/gpus/{uuid}").json["activity"] in ("active", "idle"), 30)
        running.release(lease)
        waiting = running.call("POST", "/v1/leases", {"devices": [uuid]}).json
        shown = running.call("GET", f"/v1/gpus/{uuid}").json
        assert shown["state"] == "draining"
        eventually(lambda: f"pid {child.pid}" in (running.call("GET", f"/v1/gpus/{uuid}").json["reason"] or ""), 30)
        assert running.lease(waiting["id"])["state"] == "queued"
    finally:
        child.kill()
        child.wait()
    granted = running.call("GET", f"/v1/leases/{waiting['id']}{WAIT}queued").json
    assert granted["state"] == "active"


def marked(lease_id: str) -> list[int]:
    """Processes that carry the lease's mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"GPULEASE_LEASE_ID={lease_id}".encode() in environment:
                found.append(int(entry.name))
    return found
