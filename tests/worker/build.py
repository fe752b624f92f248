"""Short builders for what a daemon would send, and one way to wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gpulease_protocol.model import JobSpec, Launcher, LeaseState
from gpulease_protocol.node_protocol import JobOrder, NodeLease
from gpulease_worker.jobs import job_records, launch_plan
from gpulease_worker.processes import lease_claims

Value = TypeVar("Value")

GPUS = ("GPU-00000000-0000-0000-0000-000000000000", "GPU-00000000-0000-0000-0000-000000000001")


def spec(*command: str, **members: object) -> JobSpec:
    """A plain command, unless told otherwise."""
    return JobSpec(**{"command": command, "gpus": 2, "launcher": Launcher.PLAIN} | members)  # type: ignore[arg-type]


def order(job_id: str, job: JobSpec, *, lease: str = "", port: int = 21000, **members: object) -> JobOrder:
    """An order for a job on two GPUs, under a lease that no other test uses."""
    lease = lease or f"lease-{job_id}-{os.urandom(4).hex()}"
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": ",".join(GPUS),
        "GPULEASE_LEASE_ID": lease,
    }
    members = {"uid": os.getuid(), "gid": os.getgid(), "indices": (2, 5)} | members
    return JobOrder(job_id=job_id, lease_id=lease, gpus=GPUS, spec=job, env=env, **members)  # type: ignore[arg-type]


def lease(lease_id: str, *gpus: str, state: LeaseState = LeaseState.ACTIVE) -> NodeLease:
    """A lease with GPUs on the node."""
    return NodeLease(id=lease_id, state=state, gpus=gpus)


def until(condition: Callable[[], Value], what: str, deadline_s: float = 60.0) -> Value:
    """The first true value of a condition. Fails when it does not come true in time."""
    end, pause_s = time.monotonic() + deadline_s, 0.01
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, 0.1)
    return value


def under(lease_id: str, *command: str) -> subprocess.Popen[bytes]:
    """A real process that works under a lease."""
    return subprocess.Popen(command or ("sleep", "60"), env={**os.environ, "GPULEASE_LEASE_ID": lease_id})


def python(*words: str) -> list[str]:
    """A command of the interpreter that runs the tests."""
    return [sys.executable, *words]


def furnished(directory: Path, job: JobOrder) -> Path:
    """A job's directory as the worker makes it."""
    (directory / job_records.LOGS).mkdir(parents=True)
    logs = directory / job_records.LOGS
    plan = launch_plan.plan_launch(job, own=os.environ, url="u", python=sys.executable, work=directory, logs=logs)
    job_records.write(directory, job_records.ORDER, plan)
    return directory


def supervising(directory: Path, fault: str = "") -> subprocess.Popen[bytes]:
    """A real supervisor of a directory, with something that goes wrong in it."""
    lines = (
        "import errno, os, pathlib, sys, time",
        "from gpulease_protocol.host import process_tree",
        "from gpulease_worker.jobs import job_records, spawn, supervisor",
        fault,
        "sys.exit(supervisor.main(sys.argv[1:]))",
    )
    return subprocess.Popen(python("-c", "\n".join(lines), str(directory)))


def living(lease_id: str) -> set[int]:
    """Pids of what lives under a lease."""
    return {process.pid for process in lease_claims.claimants({lease_id: None})}


def number_in(path: Path) -> int:
    """The number that a process wrote into a file; 0 while it has not."""
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else 0


def kill(pid: int) -> None:
    """SIGKILL to one process of the test's own."""
    os.kill(pid, signal.SIGKILL)
