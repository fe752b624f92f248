"""SIGKILL of whatever has a part in a job, in every state of the job: it ends rightly, and nothing of it is left.

Each test brings three torchrun jobs with gloo into the states `starting`, `running` and `stopping`, kills its victim in
all three, and looks at how they end. Three jobs wait behind them, and must get their GPUs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpulease_worker import processes
from tests.daemon import DaemonProcess, daemon, eventually

FINAL = ("succeeded", "failed", "cancelled", "timed_out", "lost")
START_S = 60.0
"""How long torchrun and its ranks may take to be up; two cores import torch nine times."""
RANK = """
import os, signal, sys, time
from pathlib import Path
place = Path(sys.argv[1])
if place.name == "stops":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
kept = torch.ones(1)
dist.all_reduce(kept)
(place / f"up-{os.environ['RANK']}").touch()
while not (place / "go").exists():
    time.sleep(0.02)
os._exit(0)
"""
"""A rank that says that it is up, and ends when it is told to; one that is to be seen stopping ignores SIGTERM. It
leaves by os._exit, because after a gloo collective the interpreter may abort at its end."""


class Training:
    """One job of the matrix."""

    def __init__(self, running: DaemonProcess, directory: Path, name: str) -> None:
        self.running = running
        self.place = directory / name
        self.place.mkdir()
        script = self.place / "rank.py"
        script.write_text(RANK)
        body = {
            "command": [str(script), str(self.place)],
            "gpus": 2,
            "name": name,
            "environment": {"OMP_NUM_THREADS": "1"},
        }
        answer = running.call("POST", "/v1/jobs", body)
        assert answer.status == 201, answer.content
        self.id = answer.json["id"]
        self.lease_id = answer.json["lease_id"]

    @property
    def job(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.running.call("GET", f"/v1/jobs/{self.id}").json
        return shown

    def all_up(self) -> bool:
        return all((self.place / f"up-{rank}").exists() for rank in range(2))

    def marked(self) -> set[int]:
        return {process.pid for process in processes.marked({self.lease_id})}

    def supervisor(self) -> int | None:
        named = [one for one in processes.pids() if f"/{self.id}" in (command(one) or "")]
        return next((one for one in named if "gpulease_worker.supervisor" in (command(one) or "")), None)

    def torchrun(self) -> int | None:
        supervisor = self.supervisor()
        children = [] if supervisor is None else psutil.Process(supervisor).children()
        return next((child.pid for child in children if "torch.distributed.run" in (command(child.pid) or "")), None)

    def rank(self) -> int | None:
        return next((pid for pid in self.marked() if processes.has_rank(pid)), None)

    def finish(self) -> None:
        (self.place / "go").touch()


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DaemonProcess]:
    with daemon(tmp_path, "--simulate", "6") as started:
        yield started


@pytest.fixture
def three(running: DaemonProcess, tmp_path: Path) -> tuple[Training, Training, Training]:
    """Jobs in the states starting, running and stopping, in this order."""
    runs, stops = Training(running, tmp_path, "runs"), Training(running, tmp_path, "stops")
    eventually(lambda: runs.all_up() and stops.all_up(), START_S, lambda: f"{runs.job} {stops.job} {running.story()}")
    starts = Training(running, tmp_path, "starts")
    running.call("POST", f"/v1/jobs/{stops.id}/cancel", {"grace_s": 3})
    eventually(lambda: starts.torchrun() is not None, START_S, running.story)
    assert [training.job["state"] for training in (starts, runs, stops)] == ["starting", "running", "stopping"]
    return starts, runs, stops


def waiting(running: DaemonProcess) -> list[str]:
    """Three jobs that wait for the GPUs of those."""
    body = {"command": ["true"], "launcher": "plain", "gpus": 2}
    return [running.call("POST", "/v1/jobs", body).json["id"] for _ in range(3)]


def conclude(running: DaemonProcess, three: tuple[Training, ...], behind: list[str], expected: tuple[str, ...]) -> None:
    """Every job ends as expected, with no process of it alive, and those behind it have run."""
    eventually(lambda: all(one.job["state"] in FINAL for one in three), 60, lambda: str([one.job for one in three]))
    assert tuple(one.job["state"] for one in three) == expected, [one.job for one in three]
    assert [one.marked() for one in three] == [set(), set(), set()]
    path = "/v1/jobs/{}"
    eventually(
        lambda: all(running.call("GET", path.format(one)).json["state"] == "succeeded" for one in behind),
        30,
        lambda: str(running.call("GET", "/v1/gpus").json),
    )


def kill(find: Callable[[], int | None]) -> None:
    """SIGKILL to a process, once it is there."""
    found: list[int] = []

    def look() -> bool:
        pid = find()
        found.extend([] if pid is None else [pid])
        return bool(found)

    eventually(look, START_S)
    os.kill(found[0], signal.SIGKILL)


def test_the_daemon_dies_and_the_jobs_go_on(running: DaemonProcess, three: tuple[Training, ...]) -> None:
    behind = waiting(running)
    running.kill()
    running.start()
    for training in three:
        training.finish()
    conclude(running, three, behind, ("succeeded", "succeeded", "cancelled"))


def test_the_worker_dies_and_the_jobs_go_on(running: DaemonProcess, three: tuple[Training, ...]) -> None:
    behind = waiting(running)
    assert running.process is not None
    (worker,) = [one for one in psutil.Process(running.process.pid).children() if "worker" in command(one.pid)]
    worker.kill()
    for training in three:
        training.finish()
    conclude(running, three, behind, ("succeeded", "succeeded", "cancelled"))


def test_the_supervisors_die_and_the_worker_cleans_up(running: DaemonProcess, three: tuple[Training, ...]) -> None:
    behind = waiting(running)
    for training in three:
        kill(training.supervisor)
    conclude(running, three, behind, ("failed", "failed", "cancelled"))
    assert all("supervisor died" in str(one.job["reason"]) for one in three[:2]), [one.job for one in three]


def test_torchrun_dies_and_its_ranks_with_it(running: DaemonProcess, three: tuple[Training, ...]) -> None:
    behind = waiting(running)
    for training in three:
        kill(training.torchrun)
    conclude(running, three, behind, ("failed", "failed", "cancelled"))
    assert [one.job["exit_code"] for one in three[:2]] == [137, 137]


def test_one_rank_dies_and_the_job_names_it(running: DaemonProcess, three: tuple[Training, ...]) -> None:
    behind = waiting(running)
    for training in reversed(three):
        kill(training.rank)
    conclude(running, three, behind, ("failed", "failed", "cancelled"))
    for one in three[:2]:
        assert one.job["exit_code"] == 137, one.job
        assert "failed first: it was ended by SIGKILL" in one.job["reason"], one.job
