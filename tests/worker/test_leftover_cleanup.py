"""Processes that an ended lease left running: which are ended, and which are not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease_protocol.model import GpuReading, LeaseState, Process
from gpulease_worker.processes.lease_cache import CachedLease
from gpulease_worker.processes.leftover_cleanup import LeftoverCleanup
from tests.worker.build import GPUS, under, until


def ended(lease_id: str, *, job: bool = False, state: LeaseState = LeaseState.ENDED) -> CachedLease:
    return CachedLease(id=lease_id, state=state, gpus=(GPUS[0],), job_id="job-1" if job else None)


def on_gpu(*pids: int) -> GpuReading:
    return GpuReading(uuid=GPUS[0], node="n", index=0, processes=tuple(Process(pid=pid) for pid in pids))


def look_until(
    leftovers: LeftoverCleanup, lease: CachedLease, gpu: GpuReading, condition: Callable[[], bool], looks_most: int = 10
) -> bool:
    """Look as the exchange does until a condition holds; false if it did not within so many looks after the grace."""

    async def looks() -> bool:
        for _ in range(looks_most):
            leftovers.clean_up([lease], [gpu])
            await leftovers.close()
            if condition():
                return True
            await asyncio.sleep(0.05)
        return False

    return asyncio.run(looks())


def marked(lease_id: str) -> subprocess.Popen[bytes]:
    process = under(lease_id)
    until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", "it has begun")
    return process


@pytest.mark.parametrize(
    ("lease", "users_too", "listed", "ends"),
    [
        ({"job": True}, False, False, True),
        ({}, False, True, False),
        ({}, True, True, True),
        ({}, True, False, False),
        ({"job": True, "state": LeaseState.ACTIVE}, True, True, False),
    ],
    ids=["a job's", "a user's", "a user's, configured", "a user's that is not on the GPU", "an active lease's"],
)
def test_which_leftovers_are_ended(lease: dict, users_too: bool, listed: bool, ends: bool) -> None:
    mine = f"lease-{os.urandom(4).hex()}"
    with marked(mine) as process, marked("another") as stranger:
        try:
            gpu = on_gpu(process.pid, stranger.pid) if listed else on_gpu(stranger.pid)
            leftovers = LeftoverCleanup(users_too, 0.0)
            looks_most = 400 if ends else 10
            has_ended = look_until(leftovers, ended(mine, **lease), gpu, lambda: process.poll() is not None, looks_most)
            assert has_ended is ends
            assert stranger.poll() is None, "a stranger on the GPU was ended"
        finally:
            process.kill()
            stranger.kill()


def test_no_process_is_ended_within_the_grace_period() -> None:
    mine = f"lease-{os.urandom(4).hex()}"
    with marked(mine) as process:
        begun = time.monotonic()
        leftovers = LeftoverCleanup(False, 1.0)
        try:
            while not look_until(leftovers, ended(mine, job=True), on_gpu(), lambda: process.poll() is not None):
                assert time.monotonic() - begun < 60
            assert time.monotonic() - begun >= 1.0
        finally:
            process.kill()
