"""SIGKILL of each process of a job, in every state of the job: it ends rightly, and no process of it is left.

Each test brings three jobs into the states `starting`, `running` and `stopping`, kills its victim in all three, and
looks at how they end. One job waits behind them, and must get all their GPUs. A small program stands in for an
interpreter with torchrun, so that a state lasts as long as a test needs it; `test_job_restarts.py` has the real one.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpulease_protocol.host import process_tree
from gpulease_worker.processes import lease_claims, procfs
from tests.daemon import FINAL, DaemonProcess, eventually, workers_of

OPTIONS = ("--simulate", "6")
GRACE_S = 20.0
"""It must last until the job that stops has its turn, on a busy machine too."""
WITHIN_S = 60.0
TORCHRUN = f"""#!{sys.executable} -IS
import fcntl, os, signal, sys
if sys.argv[1] == "-c":  # asked whether it has torch
    sys.exit()
place, asked = sys.argv[-1], []
if place.endswith("/stops"):
    signal.signal(signal.SIGTERM, lambda *_: (asked.append(True), open(place + "/asked", "w").close()))
with open(place + "/start") as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
ignores = "trap '' TERM;" if place.endswith("/stops") else ""
rank_does = ignores + 'touch "$0/up-$RANK"; exec flock -s "$0/go" true'
command = ["sh", "-c", rank_does, place]
ranks = [os.posix_spawn("/bin/sh", command, dict(os.environ, RANK=str(rank))) for rank in range(2)]
while ranks:
    ended, status = os.wait()
    ranks.remove(ended)
    if status not in (0, signal.SIGTERM):
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        sys.exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
sys.exit(143 if asked else 0)
"""
"""Starts two ranks when it is told to. They end when they are told to; those of the job `stops` do not on SIGTERM.

The test tells it by unlocking a file, because a program that looks for one again and again loads the machine. It is no
shell script: the `wait -n` of a shell misses a rank that was killed before it.
"""


class Training:
    """One job of the matrix."""

    def __init__(self, running: DaemonProcess, directory: Path, name: str) -> None:
        self.running = running
        self.place = directory / name
        self.place.mkdir()
        # One of its own for each job: a program that runs cannot be written.
        torchrun, script = self.place / "python", self.place / "train.py"
        script.touch()
        torchrun.write_text(TORCHRUN)
        torchrun.chmod(0o755)
        self.gates = {name: (self.place / name).open("w") for name in ("start", "go")}
        for gate in self.gates.values():
            fcntl.flock(gate, fcntl.LOCK_EX)
        command = [str(script), str(self.place)]
        self.id = running.submit(*command, gpus=2, name=name, launcher="torchrun", interpreter=str(torchrun))
        self.lease_id = self.job["lease_id"]

    @property
    def job(self) -> dict[str, Any]:
        return self.running.job(self.id)

    def start_ranks(self) -> None:
        self.gates["start"].close()

    def all_up(self) -> bool:
        return all((self.place / f"up-{rank}").exists() for rank in range(2))

    def marked(self) -> set[int]:
        return {process.pid for process in lease_claims.claimants({self.lease_id: None})}

    def supervisor(self) -> int | None:
        named = [one for one in process_tree.all_pids() if f"/{self.id}" in (command(one) or "")]
        return next((one for one in named if "gpulease_worker.jobs.supervisor" in (command(one) or "")), None)

    def torchrun(self) -> int | None:
        supervisor = self.supervisor()
        children = [] if supervisor is None else psutil.Process(supervisor).children()
        return next((child.pid for child in children if "torch.distributed.run" in (command(child.pid) or "")), None)

    def rank(self) -> int | None:
        return next((pid for pid in self.marked() if procfs.has_rank(pid)), None)

    def finish(self) -> None:
        for gate in self.gates.values():
            gate.close()


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def three(running: DaemonProcess, tmp_path: Path) -> Iterator[tuple[Training, Training, Training]]:
    """Jobs in the states starting, running and stopping, in this order."""
    starts, runs, stops = (Training(running, tmp_path, name) for name in ("starts", "runs", "stops"))
    runs.start_ranks()
    stops.start_ranks()
    eventually(lambda: runs.all_up() and stops.all_up(), WITHIN_S, lambda: f"{runs.job} {stops.job} {running.story()}")
    running.call("POST", f"/v1/jobs/{stops.id}/cancel", {"grace_s": GRACE_S})
    eventually(lambda: starts.torchrun() is not None and (stops.place / "asked").exists(), WITHIN_S, running.story)
    expected = ["starting", "running", "stopping"]
    eventually(lambda: [one.job["state"] for one in (starts, runs, stops)] == expected, WITHIN_S, running.story)
    yield starts, runs, stops
    for one in (starts, runs, stops):
        one.finish()


def waiting(running: DaemonProcess) -> str:
    """A job that waits for all their GPUs."""
    return running.submit("true", gpus=6)


def conclude(running: DaemonProcess, three: tuple[Training, ...], behind: str, expected: tuple[str, ...]) -> None:
    """Every job ends as expected, with no process of it alive, and the one behind them has run."""
    eventually(lambda: all(one.job["state"] in FINAL for one in three), 60, lambda: str([one.job for one in three]))
    assert tuple(one.job["state"] for one in three) == expected, [one.job for one in three]
    assert [one.marked() for one in three] == [set(), set(), set()]
    assert running.wait_job(behind)["state"] == "succeeded"


def kill(find: Callable[[], int | None]) -> None:
    """SIGKILL to a process, once it is there."""
    found: list[int] = []

    def look() -> bool:
        pid = find()
        found.extend([] if pid is None else [pid])
        return bool(found)

    eventually(look, WITHIN_S)
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
    (worker,) = workers_of(running.process.pid)
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


@pytest.mark.slow
def test_torchrun_dies_and_its_ranks_with_it(running: DaemonProcess, three: tuple[Training, ...]) -> None:
    behind = waiting(running)
    for training in three:
        kill(training.torchrun)
    conclude(running, three, behind, ("failed", "failed", "cancelled"))
    assert [one.job["exit_code"] for one in three[:2]] == [137, 137]


def test_one_rank_dies_and_the_job_with_it(running: DaemonProcess, three: tuple[Training, ...]) -> None:
    behind = waiting(running)
    three[0].start_ranks()
    for training in reversed(three):
        kill(training.rank)
    conclude(running, three, behind, ("failed", "failed", "cancelled"))
    assert [one.job["exit_code"] for one in three[:2]] == [137, 137]
