"""Promise 14: versions mix. Daemon and worker are upgraded one after the other, in both orders, while clients of both
versions hold leases and wait, and jobs run. After each step everything goes on. With each mix both versions can do
everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.other_version import ROOT, install, other_commit, program

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default:This clone does not have")]

HERE = Path(sys.executable)
TTL_S = 60.0
HOLD = f"""
import sys
from gpulease import Client
client = Client(sys.argv[1], retry_s=300)
with client, client.lease(count=int(sys.argv[2]), ttl_s={TTL_S}, wait_s=3600) as lease:
    print(lease.id, flush=True)
    sys.stdin.read()
    print("lost" if lease.lost.is_set() else "kept", flush=True)
"""
COUNT = """
import pathlib, sys, time
number = 0
while not pathlib.Path(sys.argv[1]).exists():
    print(number, flush=True)
    number += 1
    time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the other version."""
    return install(other_commit(), tmp_path_factory.mktemp("former"))


class Installation:
    """A daemon and a worker beside it, each of a version of its own."""

    def __init__(self, python: Path, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.stack = stack
        self.daemon_python = self.worker_python = python
        self.daemon = _Daemon(directory / "data", "--no-worker", "--max-bypass", "100", "--max-bypass-s", "3000")
        self.daemon.python = python
        self.worker: subprocess.Popen[bytes] | None = None
        self.daemon.data_dir.mkdir()
        stack.callback(self.close)
        self.daemon.start(ready=False)
        self.start_worker()

    def start_worker(self) -> None:
        command = [program(self.worker_python), "worker", "--url", self.daemon.url, "--node", "n"]
        command += ["--data-dir", str(self.directory / "worker"), "--simulate", "7"]
        with (self.directory / "worker.log").open("ab") as output:
            self.worker = subprocess.Popen(command, stdout=output, stderr=output, env=environment())
        eventually(self.is_ready, 60, self.story)

    def is_ready(self) -> bool:
        return [node["state"] for node in self.daemon.get("/v1/nodes").json["items"]] == ["ready"]

    def upgrade(self, part: str) -> None:
        """End a part and start it from this checkout, on the same directory."""
        if part == "daemon":
            assert self.daemon.stop() == 0, self.story()
            self.daemon.python = HERE
            self.daemon.start(ready=False)
            eventually(self.is_ready, 60, self.story)
        else:
            assert self.worker is not None
            self.worker.terminate()
            self.worker.wait(60)
            self.worker_python = HERE
            self.start_worker()

    def close(self) -> None:
        if self.worker is not None and self.worker.poll() is None:
            self.worker.terminate()
            self.worker.wait(60)
        if self.daemon.process is not None:
            self.daemon.stop()

    def story(self) -> str:
        return f"{self.daemon.story()}\nthe worker printed:\n{(self.directory / 'worker.log').read_text()[-4000:]}"

    def program(self, python: Path, *words: str) -> str:
        """Run the program of a version; what it printed."""
        command, url = [program(python), *words], {"GPULEASE_URL": self.daemon.url}
        done = subprocess.run(
            command, env=environment() | url, capture_output=True, text=True, timeout=120, check=False, cwd="/"
        )
        assert done.returncode == 0, f"{words}: {done.returncode} {done.stdout} {done.stderr}\n{self.story()}"
        return done.stdout

    def holder(self, python: Path, count: int) -> subprocess.Popen[str]:
        """A process of a version that holds GPUs, or waits for them, until its input ends."""
        command, pipe = [str(python), "-c", HOLD, self.daemon.url, str(count)], subprocess.PIPE
        held = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment(), cwd="/")
        self.stack.callback(end, held)
        return held


class _Daemon(DaemonProcess):
    """A daemon of a version."""

    python = HERE

    @property
    def command(self) -> list[str]:
        return [program(self.python), *super().command[3:]]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("GPULEASE_", "PYTHON"))}


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_the_other_version_is_another_one(former: Path) -> None:
    where = "import gpulease, gpulease_server; print(gpulease.__file__, gpulease_server.__file__)"
    told = subprocess.run([former, "-c", where], env=environment(), cwd="/", capture_output=True, text=True, check=True)
    assert str(ROOT) not in told.stdout
    assert told.stdout.count(str(former.parent.parent)) == 2


@pytest.mark.budget(200)
@pytest.mark.parametrize("order", [("daemon", "worker"), ("worker", "daemon")])
def test_leases_and_jobs_go_on_while_daemon_and_worker_are_upgraded(
    order: tuple[str, str], former: Path, tmp_path: Path, stack: ExitStack
) -> None:
    both, flag = (former, HERE), tmp_path / "flag"
    here = Installation(former, tmp_path, stack)
    stack.callback(flag.touch)  # ends the jobs also where the test fails
    holders = [here.holder(python, 1) for python in both]
    leases = [line(holder) for holder in holders]
    waiting = [here.holder(python, 6) for python in both]
    eventually(lambda: len(here.daemon.leases("queued")) == 2, 60, here.story)
    jobs = [
        here.program(python, "submit", "-n", "1", "--launcher", "plain", "--", str(HERE), "-uc", COUNT, str(flag))
        for python in both
    ]
    jobs = [printed.split()[0] for printed in jobs]
    for job in jobs:
        here.daemon.wait_job(job, "running")

    if order[0] == "daemon":  # the other order begins as this one
        everything_works(here, former, leases, jobs)
    for part in order:
        here.upgrade(part)
        if order[0] == "daemon" or part == order[0]:  # the other order ends as this one
            everything_works(here, former, leases, jobs)
        else:
            with going_on(here, leases, jobs):
                pass

    flag.touch()
    for job in jobs:
        assert (here.daemon.wait_job(job)["state"], here.daemon.job(job)["attempts"]) == ("succeeded", 1)
    for holder in holders:
        kept, _ = holder.communicate(timeout=60)
        assert (kept.strip(), holder.returncode) == ("kept", 0)
    for holder in waiting:  # whichever is granted first gives way to the other
        assert holder.stdin is not None
        holder.stdin.close()
        holder.stdin = None
    for holder in waiting:
        granted, kept = holder.communicate(timeout=120)[0].split()
        assert (granted.startswith("lease-"), kept) == (True, "kept")
    here.daemon.wait_free()
    kinds = [event["kind"] for event in here.daemon.get("/v1/events?limit=1000").json["items"]]
    assert "lease.lost" not in kinds
    assert "job.retried" not in kinds


def everything_works(here: Installation, former: Path, leases: list[str], jobs: list[str]) -> None:
    """What was there goes on, and each version can do everything."""
    with going_on(here, leases, jobs):
        for python in (former, HERE):
            here.program(python, "run", "-n", "1", "--wait", "60s", "--", "/bin/true")
            submit = ("submit", "-n", "1", "--launcher", "plain", "--", "/bin/echo", "done")
            job = here.program(python, *submit).split()[0]
            here.program(python, "wait", job)
            assert "done" in here.program(python, "logs", job)
            here.program(python, "status")
            listed: list[dict[str, Any]] = json.loads(here.program(python, "leases", "--json"))["items"]
            assert set(leases) <= {lease["id"] for lease in listed}


@contextmanager
def going_on(here: Installation, leases: list[str], jobs: list[str]) -> Iterator[None]:
    """What was there goes on, with what is done meanwhile."""
    before = {lease_id: expires_at(here.daemon.lease(lease_id)) for lease_id in leases}
    logs = {job: here.daemon.job_log(job) for job in jobs}
    yield
    for lease_id in leases:
        eventually(
            lambda lease_id=lease_id: expires_at(here.daemon.lease(lease_id)) > before[lease_id],  # type: ignore[misc]
            TTL_S,
            here.story,
        )
        assert here.daemon.lease(lease_id)["state"] == "active"
    for job in jobs:
        assert here.daemon.job(job)["state"] == "running"
        eventually(lambda job=job: len(here.daemon.job_log(job)) > len(logs[job]), 60, here.story)  # type: ignore[misc]
    assert len(here.daemon.leases("queued")) == 2


def expires_at(lease: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(lease["expires_at"])
