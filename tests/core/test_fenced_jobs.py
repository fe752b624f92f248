"""A job with a fence is tried again once its node has ended it for certain, and no moment earlier."""

from __future__ import annotations

from typing import Any

import pytest

from gpulease_protocol.job_fence import MARGIN_S, certain_after_s
from gpulease_protocol.model import EndReason, Job, JobState
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_server.core.happenings import Ticked
from gpulease_server.core.node import desired_state
from gpulease_server.core.policy import Policy
from tests.core.build import World

FENCE_S = 60.0
CERTAIN_S = certain_after_s(FENCE_S)


def world_of() -> World:
    """Two nodes with a GPU each, of which neither is given up within hours."""
    return World(policy=Policy(node_lost_after_s=36000.0)).node("a", gpus=1).node("b", gpus=1)


def running(world: World, *, confirmed: float | None = FENCE_S, **what: Any) -> tuple[str, str]:
    """A job with a fence that runs, and its node. `confirmed`: the fence that its node says it keeps."""
    job_id = world.submit(1, **{"fence_s": FENCE_S, "retries": 1} | what)
    node = job_of(world, job_id).gpus[0].node
    report = JobReport(job_id=job_id, state=RunState.RUNNING, log_directory="/j", fence_s=confirmed)
    world.jobs[node] = [report]
    world.report(node)
    assert job_of(world, job_id).state is JobState.RUNNING
    return job_id, node


def job_of(world: World, job_id: str) -> Job:
    return world.ledger.jobs[job_id].job


def test_it_is_tried_again_elsewhere_once_its_node_has_ended_it_for_certain() -> None:
    world = world_of()
    job_id, node = running(world)
    lease_id = job_of(world, job_id).lease_id
    world.pass_time(CERTAIN_S - 0.5, silent=(node,))
    assert job_of(world, job_id).state is JobState.RUNNING, "it may still run"
    world.pass_time(10, silent=(node,))
    job = job_of(world, job_id)
    assert world.ledger.leases[lease_id].lease.end_reason is EndReason.NODE_LOST
    assert job.attempts == 2
    assert job.gpus[0].node != node, "GPUs of the silent node are not granted"
    assert f"node {node} has been silent for over" in str(job.attempt_history[0].reason)
    assert "the job's fence is 60 s" in str(job.attempt_history[0].reason)
    world.jobs[node] = [JobReport(job_id=job_id, state=RunState.EXITED, exit_code=143, log_directory="/j")]
    world.report(node)
    assert desired_state(world.ledger, node, 1).jobs == ()
    assert job_of(world, job_id).attempts == 2, "what the node says of the attempt before decides nothing"
    world.check()


def test_without_a_retry_it_is_lost_and_a_cancelled_one_is_cancelled() -> None:
    world = world_of()
    job_id, node = running(world, retries=0)
    other, _ = running(world)
    world.cancel(other)
    world.pass_time(CERTAIN_S + 10, silent=("a", "b"))
    assert job_of(world, job_id).state is JobState.LOST
    assert job_of(world, other).state is JobState.CANCELLED
    assert node in str(job_of(world, job_id).reason)


@pytest.mark.parametrize("confirmed", [None, FENCE_S / 2])
def test_a_fence_that_its_node_has_not_confirmed_is_none(confirmed: float | None) -> None:
    """A worker of an older release starts the job without, and would go on forever."""
    world = world_of()
    job_id, node = running(world, confirmed=confirmed)
    world.pass_time(3 * CERTAIN_S, silent=(node,))
    assert job_of(world, job_id).state is JobState.RUNNING


def test_a_job_without_a_fence_survives() -> None:
    world = world_of()
    job_id, node = running(world, fence_s=None, confirmed=None)
    world.pass_time(3 * CERTAIN_S, silent=(node,))
    assert job_of(world, job_id).state is JobState.RUNNING


def test_each_report_begins_the_time_again() -> None:
    world = world_of()
    job_id, node = running(world)
    for _ in range(3):
        world.pass_time(CERTAIN_S - 1, silent=(node,))
        world.report(node)
    assert job_of(world, job_id).state is JobState.RUNNING


def test_the_time_begins_again_with_the_daemon_which_does_not_know_when_the_node_last_reported() -> None:
    world = world_of()
    job_id, node = running(world)
    world.pass_time(CERTAIN_S - 1, silent=(node,))
    world.lose_reports()
    world.ledger.silent_s.clear()
    world.pass_time(CERTAIN_S - 1, silent=(node,))
    assert job_of(world, job_id).state is JobState.RUNNING
    world.pass_time(10, silent=(node,))
    assert job_of(world, job_id).attempts == 2


def test_a_tick_that_comes_late_adds_no_silence() -> None:
    world = world_of()
    job_id, node = running(world)
    world.pass_time(4, silent=(node,))
    world.turn(Ticked(cause="late", since_last_s=10 * CERTAIN_S))
    assert job_of(world, job_id).state is JobState.RUNNING


def test_the_next_attempt_has_to_be_confirmed_again() -> None:
    world = world_of()
    job_id, node = running(world, retries=5)
    world.pass_time(CERTAIN_S + 10, silent=(node,))
    second = job_of(world, job_id).gpus[0].node
    assert job_of(world, job_id).attempts == 2
    assert not world.ledger.jobs[job_id].fenced
    world.jobs[second] = [JobReport(job_id=job_id, attempt=2, state=RunState.RUNNING, log_directory="/j")]
    world.report(second)
    world.pass_time(3 * CERTAIN_S, silent=("a", "b"))
    assert job_of(world, job_id).attempts == 2


@pytest.mark.parametrize(
    ("fence_reached", "retries", "state"),
    [(True, 1, JobState.QUEUED), (True, 0, JobState.FAILED), (False, 1, JobState.FAILED)],
)
def test_one_that_was_not_launched_yet_at_its_fence_is_tried_again(
    fence_reached: bool, retries: int, state: JobState
) -> None:
    """What else keeps a job from its start, it will lack again."""
    world = world_of()
    job_id = world.submit(1, fence_s=FENCE_S, retries=retries)
    node = job_of(world, job_id).gpus[0].node
    why = "No daemon has answered this node for 60 s, which is the job's fence (fence_s)."
    world.jobs[node] = [
        JobReport(job_id=job_id, state=RunState.EXITED, reason=why, fence_reached=fence_reached, log_directory="/j")
    ]
    world.report(node)
    job = job_of(world, job_id)
    assert job.state is state
    assert [one.reason for one in job.attempt_history] == ([why] if state is JobState.QUEUED else [])
    world.check()


def test_the_margin_covers_what_a_supervisor_may_take_and_how_far_two_clocks_may_drift() -> None:
    from gpulease_worker.jobs import fence, supervisor  # noqa: PLC0415 - the other side of the promise

    assert MARGIN_S > fence.CHECK_S + fence.GRACE_S + supervisor.UNKILLABLE_AFTER_S
    week_s = 7 * 24 * 3600.0
    assert certain_after_s(week_s) - week_s - MARGIN_S > week_s * 0.0012
