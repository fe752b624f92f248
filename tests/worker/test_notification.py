"""Who is told of a job's end: once, as the job's user, without delaying that end."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.model import Job, JobState, Launcher
from gpulease_protocol.node_protocol import JobOrder, JobReport, RunState
from gpulease_worker.jobs import job_records, notification_process
from gpulease_worker.jobs.notification import job_at_end
from tests.worker.build import order, spec, until
from tests.worker.play import Worker, play, soon
from tests.worker.strangers import ROOT, STRANGER, passable, refused


def told_order(job_id: str, *command: str, notify: str, retries: int = 0, attempt: int = 1, **members: Any) -> JobOrder:
    job = Job(
        id=job_id,
        name="digits",
        state=JobState.STARTING,
        lease_id="lease-1",
        launcher=Launcher.PLAIN,
        command=command,
        retries=retries,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    made = order(job_id, spec(*command, notify=notify, retries=retries), attempt=attempt, **members)
    return replace(made, job=job)


def end_of(data_dir: Path, job: JobOrder) -> JobReport:
    found: list[JobReport] = []

    async def story(worker: Worker) -> None:
        found.append(await worker.end_of(job))

    play(data_dir, story)
    return found[0]


def notify_log(report: JobReport) -> str:
    return (Path(report.log_directory or "") / job_records.NOTIFY_LOG).read_text()


class Listener:
    """An HTTP server that answers in turn what it is told to, and notes what it is sent."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        statuses_left, listener = list(statuses), self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.bodies.append(json.loads(body))
                listener.paths.append(self.path)
                self.send_response(statuses_left.pop(0) if statuses_left else 204)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/done"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    made = Listener(*getattr(request, "param", ()))
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_url_gets_the_job_as_it_ended(tmp_path: Path, listener: Listener) -> None:
    end_of(tmp_path, told_order("j", "sh", "-c", "exit 3", notify=listener.url))
    until(lambda: listener.bodies, "a POST")
    (body,) = listener.bodies
    assert (body["id"], body["name"], body["state"], body["exit_code"]) == ("j", "digits", "failed", 3)
    assert body["ended_at"] is not None
    assert body["attempts"] == 1


@pytest.mark.parametrize("listener", [(302,)], indirect=True)
def test_a_redirect_is_not_followed(tmp_path: Path, listener: Listener) -> None:
    report = end_of(tmp_path, told_order("j", "true", notify=listener.url))
    until(lambda: notify_log(report), "the reason")
    assert "it answered 302" in notify_log(report)
    assert listener.paths == ["/done"]


@pytest.mark.parametrize("listener", [(503,)], indirect=True)
def test_a_url_that_is_away_is_called_again(tmp_path: Path, listener: Listener) -> None:
    end_of(tmp_path, told_order("j", "true", notify=listener.url))
    until(lambda: len(listener.bodies) == 2, "two POSTs")


def test_a_command_finds_how_the_job_ended_and_neither_its_lease_nor_its_gpus(tmp_path: Path) -> None:
    there = tmp_path / "told"
    names = "GPULEASE_JOB_ID GPULEASE_JOB_STATE GPULEASE_JOB_EXIT_CODE GPULEASE_JOB_NAME GPULEASE_LEASE_ID"
    names += " CUDA_VISIBLE_DEVICES"
    script = f"for name in {names}; do eval echo $name=\\$$name; done >{there}.new; mv {there}.new {there}"
    report = end_of(tmp_path, told_order("j", "sh", "-c", "exit 4", notify=f"echo said; {script}"))
    until(there.exists, "the command")
    assert there.read_text().splitlines() == [
        "GPULEASE_JOB_ID=j",
        "GPULEASE_JOB_STATE=failed",
        "GPULEASE_JOB_EXIT_CODE=4",
        "GPULEASE_JOB_NAME=digits",
        "GPULEASE_LEASE_ID=",
        "CUDA_VISIBLE_DEVICES=",
    ]
    until(lambda: "said" in notify_log(report), "its output")


def test_the_end_of_the_job_does_not_wait_for_a_command_that_hangs(tmp_path: Path) -> None:
    begun_s = time.monotonic()
    pid_file = tmp_path / "pid"
    end_of(tmp_path, told_order("j", "true", notify=f"echo $$ >{pid_file}; exec sleep 300"))
    pid = int(until(lambda: pid_file.exists() and pid_file.read_text(), "the command"))
    assert time.monotonic() - begun_s < 30
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, 9)
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in _state(pid), "its end with the one that waits for it")


def test_a_user_has_so_many_notifications_under_way_and_no_more(tmp_path: Path) -> None:
    locks, there = tmp_path / notification_process.LOCKS, tmp_path / "told"
    locks.mkdir()
    held = [(locks / f"{os.getuid()}-{number}").open("w") for number in range(notification_process.MAX_AT_ONCE)]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_EX)
    end_of(tmp_path, told_order("j", "true", notify=f"touch {there}"))
    log = tmp_path / "jobs" / "j" / "supervisor.log"
    until(lambda: "notifications of its user are under way" in log.read_text(), "the reason")
    assert not there.exists()
    held[3].close()
    end_of(tmp_path, told_order("k", "true", notify=f"touch {there}"))
    until(there.exists, "the command of the next job")
    for file in held:
        file.close()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize(
    ("code", "retries", "attempt", "told"), [(1, 1, 1, False), (1, 1, 2, True), (0, 1, 1, True), (1, 0, 1, True)]
)
def test_an_attempt_that_is_tried_again_is_no_end(
    tmp_path: Path, code: int, retries: int, attempt: int, told: bool
) -> None:
    """The marker of a second notification shows that the first would have come."""
    there, second = tmp_path / "told", tmp_path / "second"
    made = told_order("j", "sh", "-c", f"exit {code}", notify=f"touch {there}", retries=retries, attempt=attempt)
    end_of(tmp_path, made)
    if told:
        until(there.exists, "the command")
        return
    end_of(tmp_path, told_order("k", "true", notify=f"touch {second}"))
    until(second.exists, "the second command")
    assert not there.exists()


@pytest.mark.parametrize(
    ("code", "stop", "told"),
    [
        (0, {}, "cancelled"),
        (7, {}, "cancelled"),
        (0, {"again": True}, None),
        (7, {"again": True}, None),
        (0, {"again": True, "cancelled": True}, "cancelled"),
        (0, {"failure": "On node b: exit code 3."}, "failed"),
        (7, {"failure": "On node b: exit code 3.", "cancelled": True}, "cancelled"),
        (7, {"failure": "On node b: exit code 3.", "retries": 1}, None),
    ],
    ids=[
        "saved, then cancelled",
        "cancelled",
        "saved, to start again",
        "to start again",
        "cancelled after all",
        "failed on another node",
        "cancelled when it had failed",
        "failed on another node, to be tried again",
    ],
)
def test_a_job_that_is_stopped_is_told_of_as_what_it_is_in_the_end(
    tmp_path: Path, code: int, stop: dict[str, Any], told: str | None
) -> None:
    there, ready, second = tmp_path / "told", tmp_path / "ready", tmp_path / "second"
    loop = f"until test $told && test -f {ready}; do sleep 0.02; done; exit {code}"
    script = f"told=; trap told=1 TERM; touch {tmp_path}/traps; {loop}"
    retries = stop.get("retries", 0)
    made = told_order("j", "sh", "-c", script, notify=f'echo "$GPULEASE_JOB_STATE" >{there}', retries=retries)

    async def story(worker: Worker) -> None:
        await worker.until([made], RunState.RUNNING)
        await soon((tmp_path / "traps").exists, "the program")
        stopped = replace(made, stop=True, again=stop.get("again", False), failure=stop.get("failure"), grace_s=50.0)
        worker.jobs.reconcile([stopped])
        if stop.get("cancelled"):
            stopped = replace(made, stop=True, grace_s=55.0)
            worker.jobs.reconcile([stopped])
        ready.touch()
        assert (await worker.end_of(stopped)).exit_code == code

    play(tmp_path, story)
    if told is not None:
        until(lambda: there.exists() and there.read_text(), "the command")
        assert there.read_text().strip() == told
        return
    end_of(tmp_path, told_order("k", "true", notify=f"touch {second}"))
    until(second.exists, "the second command")
    assert not there.exists()


@pytest.mark.parametrize(("code", "told"), [(143, None), (0, JobState.SUCCEEDED)])
def test_a_job_whose_node_leaves_has_not_ended_unless_it_was_done(code: int, told: JobState | None) -> None:
    job = told_order("j", "true", notify="true").job
    assert job is not None
    ended = JobReport(job_id="j", state=RunState.EXITED, exit_code=code, reason="It was stopped on request.")
    found = job_at_end(job, ended, job_records.StopRecord(grace_s=1.0, node_left=True))
    assert (None if found is None else found.state) is told


def test_one_that_could_not_start_is_told_of(tmp_path: Path) -> None:
    there = tmp_path / "told"
    end_of(tmp_path, told_order("j", "no-such-program", notify=f"echo $GPULEASE_JOB_REASON >{there}"))
    until(lambda: there.exists() and there.read_text(), "the command")
    assert "'no-such-program' was not found on PATH" in there.read_text()


def test_a_root_worker_tells_as_the_user_of_the_job(listener: Listener) -> None:
    with passable() as directory:
        there = directory / "open"
        there.mkdir()
        there.chmod(0o777)
        who = f"id -u >{there}/who; cat /proc/self/status >{there}/status"
        report = end_of(directory, told_order("j", "true", notify=who, uid=STRANGER, gid=STRANGER))
        if not ROOT:
            assert refused(report)
            return
        until(lambda: (there / "status").exists() and (there / "status").read_text(), "the command")
        assert (there / "who").read_text().strip() == str(STRANGER)
        status = dict(line.split(":", 1) for line in (there / "status").read_text().splitlines())
        assert set(status["Uid"].split()) == {str(STRANGER)}
        assert set(status["Gid"].split()) == {str(STRANGER)}
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
        assert status["Groups"].split() == [str(STRANGER)]
        report = end_of(directory, told_order("k", "true", notify=listener.url, uid=STRANGER, gid=STRANGER))
        until(lambda: listener.bodies, "a POST")
        assert report.exit_code == 0


def test_the_order_of_an_older_daemon_tells_no_one(tmp_path: Path) -> None:
    there = tmp_path / "told"
    made = order("j", spec("true", notify=f"touch {there}"))
    end_of(tmp_path, made)
    second = tmp_path / "second"
    end_of(tmp_path, told_order("k", "true", notify=f"touch {second}"))
    until(second.exists, "that of a newer one")
    assert not there.exists()
