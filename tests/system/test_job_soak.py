"""SIGKILL at random instants, round after round: a job ends correctly and leaves nothing, whichever process dies when.

`GPULEASE_SOAK_ROUNDS=50` makes more rounds than the few that every run of the tests has; `GPULEASE_SOAK_SEED` repeats
the instants of one, though not what the machine made of them.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gpulease_protocol.host import process_tree
from gpulease_worker.processes import lease_claims, procfs
from tests.daemon import FINAL, DaemonProcess, daemon, eventually

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("GPULEASE_SOAK_ROUNDS", "6"))
SEED = os.environ.get("GPULEASE_SOAK_SEED") or str(time.time_ns())
INSTANTS_S = (0.0, 1.5)
"""When something dies, after the submission: before the supervisor is up, while the job runs, when it has ended."""
JOB = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep, start_new_session=True)
subprocess.Popen(["setsid", "--fork", *sleep])
time.sleep(0.7)
"""
"""A job that leaves processes behind, one of them with neither its session nor its parent."""
ALLOWED = {
    "daemon": {"succeeded"},
    "worker": {"succeeded"},
    # Dead before its start was recorded, it is started again; after the end was recorded, no one misses it.
    "supervisor": {"succeeded", "failed"},
    "launcher": {"succeeded", "failed"},
    "cancel": {"succeeded", "cancelled"},
}


def named(word: str, root: int | None = None) -> list[int]:
    """Processes, of all or below one, whose command line has this word."""
    everyone = process_tree.all_pids() if root is None else [one.pid for one in process_tree.descendants(root)]
    return [pid for pid in everyone if word in (procfs.command_of(pid) or "")]


def strike(running: DaemonProcess, victim: str, job_id: str) -> None:
    """Let one die now, if it is there."""
    assert running.process is not None
    if victim == "cancel":
        running.call("POST", f"/v1/jobs/{job_id}/cancel", {"grace_s": 0.5})
    elif victim == "daemon":
        running.kill()
        running.start()
    elif victim == "worker":
        for worker in psutil.Process(running.process.pid).children():
            worker.kill()
    else:
        for supervisor in named(f"/jobs/{job_id}"):
            launchers = [child.pid for child in psutil.Process(supervisor).children()] if victim == "launcher" else []
            for pid in launchers or [supervisor] * (victim == "supervisor"):
                os.kill(pid, signal.SIGKILL)


def play(running: DaemonProcess, victim: str, at_s: float, told: str) -> None:
    """Submit a job, have someone die after so long, and look at how it ends."""
    job = running.job(running.submit(sys.executable, "-c", JOB))
    time.sleep(at_s)  # the instant itself, and nothing that is waited for
    with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it was over sooner
        strike(running, victim, job["id"])
    eventually(lambda: running.job(job["id"])["state"] in FINAL, 90, lambda: told + running.story())
    ended = running.job(job["id"])
    assert ended["state"] in ALLOWED[victim], (told, ended)
    assert not lease_claims.claimants({job["lease_id"]: None}), told


@pytest.mark.timeout(60 + 90 * ROUNDS)
def test_a_job_ends_correctly_whichever_process_dies_at_any_instant(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    with daemon(tmp_path, "--simulate", "1") as running:
        for number in range(ROUNDS):
            victim, at_s = chance.choice(sorted(ALLOWED)), chance.uniform(*INSTANTS_S)
            play(running, victim, at_s, f"seed {SEED}, round {number}: {victim} at {at_s:.3f} s")
