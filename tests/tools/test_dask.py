"""The dask plugin: its page, twenty tasks with more threads than GPUs, and what is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.docs.pages import ROOT, blocks
from tests.tools.sweep import FREED_WITHIN_S, Sweep, freed, leases_of

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, dask, trial
from distributed import Client, LocalCluster
from gpulease.integrations.dask_plugin import GpuleasePlugin

def one(number):
    trial.hold(number)
    return number, os.getppid()

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=4, dashboard_address=None) as cluster, Client(cluster) as client:
        client.register_plugin(GpuleasePlugin())
        workers = set(client.run(os.getpid).values())
        with dask.annotate(executor="gpulease"):
            if sys.argv[1:]:
                client.gather(client.map(one, range(4), pure=False))
            trials = client.map(one, range(20))
            dies = client.submit(die)
        assert client.submit(os.getpid).result() in workers, "other tasks run in a worker"
        done = client.gather(trials)
        assert [number for number, _ in done] == list(range(20))
        assert {parent for _, parent in done} == workers, "both have run some"
        print("died:", type(dies.exception()).__name__)
        client.unregister_worker_plugin("gpulease")
        with dask.annotate(executor="gpulease"):
            print(client.submit(os.getppid, pure=False).exception())
"""


@pytest.mark.budget(90)
def test_twenty_tasks_wait_for_four_gpus(sweep: Sweep) -> None:
    printed = sweep.run(SCRIPT)
    assert "died: ProcessDied" in printed
    assert "Invalid executor 'gpulease'" in printed
    sweep.check(20, at_once=4)


@pytest.mark.parametrize("victim", ["a task", "its worker", "the program"])
def test_the_gpus_of_what_is_killed_are_free_within_seconds(sweep: Sweep, running: DaemonProcess, victim: str) -> None:
    program = sweep.start(SCRIPT, "four", TRIAL_S="300")
    try:
        tasks = sweep.wait_for_trials(4)
        worker = int(Path(f"/proc/{tasks[0].pid}/stat").read_text().rpartition(")")[2].split()[1])
        pid = {"a task": tasks[0].pid, "its worker": worker, "the program": program.pid}[victim]
        held = {
            "a task": [lease["id"] for lease in running.leases("active") if indices(lease) == tasks[0].gpus],
            "its worker": leases_of(running, worker),
            "the program": leases_of(running),
        }[victim]
        after = freed(running, held, lambda: os.kill(pid, signal.SIGKILL))
        if victim == "the program":
            eventually(lambda: not any(Path(f"/proc/{task.pid}/exe").exists() for task in tasks), 60)
    finally:
        program.kill()
        program.wait(60)
        sweep.close()
    assert after.seconds < FREED_WITHIN_S
    assert after.draining == {}


def indices(lease: dict[str, Any]) -> set[str]:
    return {str(gpu["index"]) for gpu in lease["gpus"]}


def test_the_page_is_as_it_says(sweep: Sweep) -> None:
    script, command = blocks(ROOT / "docs" / "tools" / "dask.md")
    (sweep.place / str(script.note("saved as"))).write_text(script.text)
    assert "best 6" in sweep.run_command(["bash", "-ec", command.text])
