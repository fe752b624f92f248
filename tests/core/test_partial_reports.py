"""Reports of GPUs whose leases have just ended, ahead of the reading of all: what they prove, and what they do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulease_protocol.model import GpuState, Lease, LeaseState, NodeMode, Process
from gpulease_server.core.gpu import is_recent
from tests.core.build import GIB, World, gpu, uuid


def released(gpus: int = 2) -> tuple[World, Lease]:
    """A node whose GPU 0 drains."""
    world = World().node(gpus=gpus)
    lease = world.lease()
    world.release(lease)
    world.at_s += 0.01
    return world, lease


def test_a_clean_gpu_is_free_and_granted_with_a_partial_report() -> None:
    world, _ = released(gpus=1)
    waiting = world.answers[world.ask()]
    assert isinstance(waiting, Lease)
    assert waiting.state is LeaseState.QUEUED
    world.report(partial=True, reread=(0,), begun_s=0.005, age_s=9.0)
    assert world.now_of(waiting).state is LeaseState.ACTIVE


@pytest.mark.parametrize(
    "left",
    [
        {"processes": (Process(pid=9),)},
        {"opened_by": (Process(pid=9, lease_id="lease-2"),)},
        {"opened_by": None},
        {"memory_used_bytes": 3 * GIB},
    ],
    ids=["a process", "an open file", "open files are not known", "memory"],
)
def test_a_gpu_that_is_not_clean_drains_on(left: dict[str, Any]) -> None:
    world, _ = released(gpus=1)
    world.nodes["a"] = [gpu(0, **left)]
    world.report(partial=True, reread=(0,), begun_s=0.005, age_s=9.0)
    assert world.state() is GpuState.DRAINING


def test_a_partial_report_proves_nothing_of_other_gpus() -> None:
    world, _ = released()
    world.at_s += 2.0
    world.report(partial=True, reread=(0,), begun_s=0.1, age_s=0.1)
    observation = world.ledger.node_observations["a"]
    assert [is_recent(observation, uuid(index), world.now, world.policy) for index in (0, 1)] == [True, False]
    assert "a" in world.wanted, "the reading of all that was asked for is still owed"
    # GPU 1 is granted only when it was read, too: a stranger has come since.
    world.nodes["a"][1] = gpu(1, pids=(7,))
    call = world.ask(count=2)
    assert world.answers.get(call) is None
    world.report()
    lease = world.answers[call]
    assert isinstance(lease, Lease)
    assert lease.state is LeaseState.QUEUED
    assert world.state(1) is GpuState.FOREIGN


def test_a_gpu_that_a_partial_report_leaves_out_is_not_missing() -> None:
    world, _ = released()
    before = world.ledger.node_observations["a"]
    world.report(partial=True, reread=(0,), begun_s=0.005)
    after = world.ledger.node_observations["a"]
    assert after.gpus[uuid(1)] == before.gpus[uuid(1)]
    assert after.readings[uuid(1)] is before.readings[uuid(1)]
    assert world.state(1) is GpuState.FREE


def test_a_reading_from_before_the_end_of_the_lease_frees_nothing() -> None:
    world, _ = released(gpus=1)
    world.report(partial=True, reread=(0,), begun_s=0.1)
    assert world.state() is GpuState.DRAINING


@pytest.mark.parametrize(
    "what",
    [{"worker": "another"}, {"problem": "the driver hangs"}, {"begun_s": None}],
    ids=["another worker's", "without a reading", "of unknown age"],
)
def test_nothing_is_taken_from_a_report_that_adds_to_no_reading(what: dict[str, Any]) -> None:
    world, _ = released(gpus=1)
    before = world.ledger.node_observations["a"]
    world.report(**{"partial": True, "reread": (0,), "begun_s": 0.005} | what)
    assert world.ledger.node_observations["a"] == before
    assert world.state() is GpuState.DRAINING


def test_a_partial_report_ends_no_silence_and_no_pause() -> None:
    world, _ = released(gpus=1)
    world.set_mode(NodeMode.PAUSED)
    world.report(partial=True, reread=(0,), begun_s=0.005)
    assert world.state() is GpuState.UNKNOWN
    world, _ = released(gpus=1)
    world.at_s += 60.0
    world.report(partial=True, reread=(0,), begun_s=0.005)
    assert world.state() is GpuState.UNKNOWN


def test_a_job_that_a_partial_report_does_not_name_goes_on() -> None:
    world = World().node(gpus=2)
    job = world.submit()
    lease = world.lease()
    world.ledger.apply(replace(world.ledger.jobs[job], log_directory="/logs"))
    world.release(lease)
    world.at_s += 0.01
    world.report(partial=True, reread=(1,), begun_s=0.005)
    assert world.ledger.is_live(job)
    assert world.state(1) is GpuState.FREE


def test_a_reading_that_is_repeated_after_a_gpu_was_removed_is_taken_in() -> None:
    world = World().node(gpus=2)
    world.at_s += 1
    world.nodes["a"].pop()
    world.report()
    world.at_s += 700
    world.report(age_s=0.0)
    assert list(world.ledger.gpus) == [uuid(0)]
    world.report(age_s=0.001, repeated=True)
    assert world.state() is GpuState.FREE
