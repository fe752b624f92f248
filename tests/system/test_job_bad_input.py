"""Bad input to jobs: each has a clear state and reason, the daemon goes on, and no process is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.host.process_id import ProcessId
from gpulease_worker.processes import lease_claims
from tests.daemon import DaemonProcess, eventually

OPTIONS = ("--simulate", "2")
OUTSIDE = {"launcher": "deepspeed", "command": ["--include", "localhost:0", "t.py"]}


@pytest.fixture(autouse=True)
def gpus_are_free_again(running: DaemonProcess) -> Iterator[None]:
    """After each test the daemon answers and its GPUs are free again."""
    yield
    running.wait_free()


def run_job(running: DaemonProcess, *command: str, **fields: Any) -> dict[str, Any]:
    """Submit a job and wait for its end, after which no process of it may be left."""
    return ended(running, running.submit(*command, **fields))


def ended(running: DaemonProcess, job_id: str) -> dict[str, Any]:
    """Wait for the end of a job, after which no process of it may be left."""
    job = running.wait_job(job_id)
    assert not lease_claims.claimants({job["lease_id"]: None}), "processes of the job are left"
    return job


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"command": []}, "command: must name a script or program"),
        ({"command": [""]}, "command: must name a script or program"),
        ({"command": ["a\0b"]}, "command: must not contain NUL"),
        ({"command": ["x" * 2**17]}, "command: no word may be over 131071 bytes"),
        ({"environment": {f"V{number}": "x" * 2**16 for number in range(17)}}, "must be at most 1048576 bytes (1 MiB)"),
        ({"environment": {"BIG": "x" * 2**17}}, "no variable may be over 131071 bytes, and 'BIG' is 131077"),
        ({"environment": {"A=B": "1"}}, "names must not be empty or contain '='"),
        ({"working_directory": "relative"}, "working_directory: must be absolute"),
        ({"umask": 512}, "umask: must be 0 to 511"),
        ({"retries": -1}, "retries: must be 0 to 100"),
        ({"max_restarts": 1}, "plain cannot restart its ranks"),
        ({"limits": {"files": [1, 2]}}, "limits: knows only as, core"),
        ({"limits": {"nofile": [3, 2]}}, "soft not over hard"),
        ({"limits": {"nofile": [3]}}, "must be [soft, hard]"),
        (OUTSIDE, "would take GPUs outside the lease"),
        ({"launcher": "mpirun"}, "launcher"),
    ],
)
def test_what_cannot_be_a_job_is_refused_and_says_what_to_change(
    running: DaemonProcess, wrong: dict[str, Any], words: str
) -> None:
    answer = running.call("POST", "/v1/jobs", {"command": ["true"], "launcher": "plain"} | wrong)
    assert answer.problem() == (422, "invalid_request")
    assert words in answer.json["detail"]


def test_an_environment_of_just_under_a_mebibyte_is_run(running: DaemonProcess) -> None:
    environment = {f"V{number}": "x" * 65_000 for number in range(16)}
    job = run_job(running, "sh", "-c", "test ${#V15} = 65000", environment=environment)
    assert (job["state"], job["reason"]) == ("succeeded", None)


def test_a_missing_interpreter_and_a_missing_script_are_named(running: DaemonProcess, tmp_path: Path) -> None:
    job = run_job(running, "t.py", launcher="fabric", interpreter="/no/python", working_directory=str(tmp_path))
    assert job["reason"].startswith("The interpreter '/no/python' was not found")
    job = run_job(running, "t.py", launcher="fabric", interpreter=sys.executable, working_directory=str(tmp_path))
    assert job["reason"] == f"The script 't.py' was not found in {tmp_path}."
    assert job["state"] == "failed"


def test_an_interpreter_that_does_not_work_is_the_reason(running: DaemonProcess, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho libpython3.11.so.1.0: cannot open shared object file; exit 127\n")
    broken.chmod(0o755)
    (tmp_path / "t.py").touch()
    job = run_job(running, "t.py", launcher="fabric", interpreter=str(broken), working_directory=str(tmp_path))
    assert (job["state"], job["exit_code"]) == ("failed", None)
    assert "does not work: libpython3.11.so.1.0: cannot open" in job["reason"]


@pytest.mark.parametrize("says", ["a\\000b", "%060000d"], ids=["NUL", "long"])
def test_whatever_an_interpreter_says_the_node_goes_on_reporting(
    running: DaemonProcess, tmp_path: Path, says: str
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\nprintf '{says}'\nexit 1\n")
    interpreter.chmod(0o755)
    (tmp_path / "t.py").touch()
    what = {"launcher": "torchrun", "interpreter": str(interpreter), "working_directory": str(tmp_path)}
    job = run_job(running, "t.py", **what)
    assert job["state"] == "failed"
    assert f"The interpreter {interpreter} does not work: " in job["reason"]
    assert len(job["reason"]) <= 1200


def test_binary_output_is_kept_as_it_is(running: DaemonProcess) -> None:
    job = run_job(running, "sh", "-c", "head -c 300000 /dev/zero; printf '\\377\\376'; exit 4")
    assert (job["state"], job["exit_code"]) == ("failed", 4)
    printed = running.call("GET", f"/v1/jobs/{job['id']}/logs").content
    assert printed == b"\0" * 300_000 + b"\xff\xfe"


def test_a_fork_bomb_of_500_sleepers_is_ended_to_the_last(running: DaemonProcess) -> None:
    script = "i=0; while [ $i -lt 500 ]; do setsid sleep 600 & i=$((i+1)); done; echo all; exit 5"
    job = run_job(running, "sh", "-c", script)
    assert (job["state"], job["exit_code"]) == ("failed", 5)


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(running: DaemonProcess) -> None:
    script = "trap '' TERM; echo up; while :; do sleep 0.1; done"
    job_id = running.submit("sh", "-c", script)
    eventually(lambda: "up" in running.job_log(job_id), 60)
    running.call("POST", f"/v1/jobs/{job_id}/cancel", {"grace_s": 0.3})
    job = ended(running, job_id)
    assert (job["state"], job["exit_code"]) == ("cancelled", 137)


def test_a_rank_that_double_forks_with_setsid_and_drops_the_marker_leaves_nothing(
    running: DaemonProcess, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    orphan = f"env -u GPULEASE_LEASE_ID setsid sh -c 'setsid sleep 600 & echo $! > {note}' &"
    job = run_job(running, "sh", "-c", f"{orphan} until test -s {note}; do sleep 0.01; done; exit 6")
    assert (job["state"], job["exit_code"]) == ("failed", 6)
    assert ProcessId.of(int(note.read_text())) is None


def test_a_traceback_is_kept_and_its_last_line_is_in_the_reason(running: DaemonProcess) -> None:
    job = run_job(running, sys.executable, "-c", "def f(): raise ValueError('no such class')\nf()")
    assert job["reason"] == "The command exited with code 1 (ValueError: no such class)."
    assert job["traceback"].startswith("Traceback (most recent call last):")


def test_a_job_that_fails_once_succeeds_at_its_second_attempt(running: DaemonProcess, tmp_path: Path) -> None:
    once = tmp_path / "once"
    job = run_job(running, "sh", "-c", f"test -e {once} && exit 0; touch {once}; exit 9", retries=1)
    assert (job["state"], job["attempts"], job["exit_code"]) == ("succeeded", 2, 0)
    assert job["lease_id"].endswith("r2")
