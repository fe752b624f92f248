"""A node that is gone for good holds nothing; one that is only silent loses nothing; silence starts no job again."""

from __future__ import annotations

from typing import Any

import pytest

from gpulease_protocol.errors import InUse, LeaseLost, NotFound
from gpulease_protocol.model import (
    EndReason,
    Event,
    GpuState,
    Job,
    JobState,
    Lease,
    LeaseState,
    Liveness,
    NodeMode,
)
from gpulease_protocol.node_protocol import JobReport, OwnerState, RunState
from gpulease_server.core.happenings import Ticked
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.node import desired_state
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Deadline
from tests.core.build import World, gpu

BOUND_S = 60.0
DEAD = BOUND_S + 5.0
ANN = 7


def world_of(**policy: Any) -> World:
    """Two nodes, `a` with two GPUs and `b` with one."""
    return World(policy=Policy(node_lost_after_s=BOUND_S, **policy)).node("a", gpus=2).node("b", gpus=1)


def running(world: World, *, gpus: int = 2, **what: Any) -> str:
    """A job that runs."""
    job_id = world.submit(gpus, **what)
    node = job_of(world, job_id).gpus[0].node
    world.jobs[node] = [JobReport(job_id=job_id, state=RunState.RUNNING, log_directory="/j")]
    world.report(node)
    assert job_of(world, job_id).state is JobState.RUNNING
    return job_id


def job_of(world: World, job_id: str) -> Job:
    return world.ledger.jobs[job_id].job


def kinds(world: World, node: str = "a") -> list[str]:
    events = [one for one in world.changes if isinstance(one, Event) and one.node == node]
    return [event.kind for event in events if event.kind.startswith("node.")]


def test_a_job_of_a_node_that_stays_silent_is_lost_and_not_started_elsewhere() -> None:
    world = world_of()
    job_id = running(world, gpus=1, retries=3, timeout_s=5.0)
    lease = world.ledger.leases[job_of(world, job_id).lease_id].lease
    node = lease.gpus[0].node
    world.pass_time(BOUND_S - 1, silent=(node,))
    assert job_of(world, job_id).state is JobState.RUNNING, "silent is not gone"
    world.pass_time(6, silent=(node,))
    job = job_of(world, job_id)
    assert job.state is JobState.LOST
    assert job.reason == f"node {node} has been silent for over 60 s; how the job ended is not known"
    assert world.now_of(lease).end_reason is EndReason.NODE_LOST
    assert not world.ledger.queue, "it may run on in a partition, and must not run twice"
    assert kinds(world, node)[-1] == "node.lost"
    world.check()


def test_gpus_of_a_lost_node_drain_until_they_are_seen_clean() -> None:
    world = world_of()
    job_id = running(world)
    world.pass_time(DEAD, silent=("a",))
    call = world.ask(2)
    assert isinstance(world.answers[call], Lease)
    waiting = world.now_of(world.answers[call])
    assert waiting.state is LeaseState.QUEUED
    old = job_of(world, job_id).lease_id
    world.node("a", gpus=[gpu(0, pids=(9,), lease=old), gpu(1)])  # back, and the job runs on
    assert world.state(0) is GpuState.DRAINING
    assert desired_state(world.ledger, "a", 1).jobs == (), "what it still runs of it is not ordered, so it is stopped"
    assert world.now_of(waiting).state is LeaseState.QUEUED
    world.jobs["a"] = []
    world.node("a", gpus=2)
    assert world.now_of(waiting).state is LeaseState.ACTIVE
    assert job_of(world, job_id).state is JobState.LOST
    world.check()


def test_what_a_node_that_comes_back_reports_of_a_lost_job_changes_nothing() -> None:
    world = world_of()
    job_id = running(world, retries=1)
    world.pass_time(DEAD, silent=("a",))
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.EXITED, exit_code=0)]
    world.report()
    assert job_of(world, job_id).state is JobState.LOST


@pytest.mark.parametrize("started", [True, False])
def test_a_cancelled_job_of_a_lost_node_is_over(started: bool) -> None:
    world = world_of()
    job_id = running(world) if started else world.submit(2)
    world.pass_time(4, silent=("a",))
    world.cancel(job_id)
    assert job_of(world, job_id).state is JobState.STOPPING
    world.pass_time(DEAD, silent=("a",))
    assert job_of(world, job_id).state is JobState.LOST


def test_quotas_count_a_lost_job_no_more() -> None:
    world = world_of(limits=UserLimits(gpus=2))
    running(world)
    call = world.ask(1, user=None)  # type: ignore[arg-type]
    waiting = world.answers[call]
    assert isinstance(waiting, Lease)
    assert waiting.state is LeaseState.QUEUED, "the limit"
    world.pass_time(0.25)
    for _ in range(20):  # its client goes on waiting
        world.pass_time(4, silent=("a",))
        world.ledger.apply(Deadline(waiting.id, world.at_s + 60))
    assert world.now_of(waiting).state is LeaseState.ACTIVE
    assert world.now_of(waiting).gpus[0].node == "b"


def test_a_lease_of_a_lost_node_ends_long_before_its_ttl() -> None:
    world = world_of()
    lease = world.lease(2, ttl_s=30 * 24 * 3600.0)
    world.pass_time(DEAD, silent=("a",))
    assert world.now_of(lease).end_reason is EndReason.NODE_LOST
    assert world.state(0) is GpuState.UNKNOWN
    world.report()
    assert world.state(0) is GpuState.FREE


def test_a_holder_that_goes_on_renewing_keeps_its_lease() -> None:
    world = world_of()
    lease = world.lease(2, ttl_s=30.0)
    for _ in range(30):
        world.pass_time(10, silent=("a",))
        assert not isinstance(world.renew(lease), Exception), "its worker was away, and it was not"
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(31, silent=("a",))
    assert world.now_of(lease).end_reason is EndReason.EXPIRED


def test_a_holder_that_stops_renewing_loses_a_long_lease_within_two_bounds() -> None:
    world = world_of()
    lease = world.lease(2, ttl_s=30 * 24 * 3600.0)
    world.pass_time(BOUND_S / 2, silent=("a",))
    world.renew(lease)
    world.pass_time(BOUND_S / 2 + 5, silent=("a",))
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(BOUND_S, silent=("a",))
    assert world.now_of(lease).end_reason is EndReason.NODE_LOST


def test_a_holder_whose_node_was_lost_has_its_lease_back_by_a_late_renewal() -> None:
    world = world_of()
    lease = world.lease(2, ttl_s=3600.0)
    world.pass_time(DEAD, silent=("a",))
    world.report()
    renewed = world.renew(lease)
    assert isinstance(renewed, Lease)
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.check()


def test_and_has_it_not_once_a_gpu_of_it_was_granted_again() -> None:
    world = world_of()
    lease = world.lease(2, ttl_s=3600.0)
    world.pass_time(DEAD, silent=("a",))
    world.report()
    world.lease(2)
    assert isinstance(world.renew(lease), LeaseLost)


def test_no_renewal_revives_the_lease_of_a_lost_job() -> None:
    world = world_of()
    job_id = running(world)
    lease = world.ledger.leases[job_of(world, job_id).lease_id].lease
    world.pass_time(DEAD, silent=("a",))
    assert isinstance(world.renew(lease), LeaseLost)


def test_a_watched_holder_keeps_its_lease_for_the_bound_and_no_longer() -> None:
    world = world_of()
    lease = world.lease(2, owner=ANN, ttl_s=2.0)
    world.owners[ANN] = OwnerState.ALIVE
    world.report()
    world.pass_time(BOUND_S - 1, silent=("a",))
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(6, silent=("a",))
    assert world.now_of(lease).end_reason is EndReason.NODE_LOST


def test_a_holder_elsewhere_whose_watcher_is_lost_must_renew() -> None:
    world = world_of()
    lease = world.lease(1, owner=ANN, ttl_s=20.0, node="b")
    world.owners[ANN] = OwnerState.ALIVE
    world.report()
    for _ in range(8):
        world.pass_time(10, silent=("a",))
        world.renew(lease)
    assert world.now_of(lease).liveness is Liveness.HEARTBEAT
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(21, silent=("a",))
    assert world.now_of(lease).end_reason is EndReason.EXPIRED


def test_with_a_bound_of_zero_silence_ends_nothing() -> None:
    world = World(policy=Policy(node_lost_after_s=0.0)).node("a", gpus=2)
    job_id = running(world)
    lease = world.ledger.leases[job_of(world, job_id).lease_id].lease
    for _ in range(100):
        world.at_s += 3600
        world.turn(Ticked(cause="t", since_last_s=3600.0))
    assert job_of(world, job_id).state is JobState.RUNNING
    assert world.now_of(lease).state is LeaseState.ACTIVE


def test_the_bound_begins_again_with_the_daemon_and_with_each_report() -> None:
    world = world_of()
    job_id = running(world)
    for _ in range(3):
        world.pass_time(BOUND_S - 5, silent=("a",))
        world.report()
    for _ in range(3):
        world.pass_time(BOUND_S - 5, silent=("a",))
        world.lose_reports()  # a restart
        world.ledger.silent_s.clear()
    assert job_of(world, job_id).state is JobState.RUNNING
    world.pass_time(DEAD, silent=("a",))
    assert job_of(world, job_id).state is JobState.LOST, "also when it never reported to this daemon"


def test_time_in_which_the_daemon_was_stopped_is_no_silence_of_a_node() -> None:
    world = world_of()
    job_id = running(world)
    world.pass_time(10, silent=("a",))
    for _ in range(10):
        world.at_s += 3600
        world.turn(Ticked(cause="t", since_last_s=3600.0, stalled_s=3600.0))
    assert job_of(world, job_id).state is JobState.RUNNING
    world.pass_time(BOUND_S - 5, silent=("a",))
    assert job_of(world, job_id).state is JobState.LOST, "it goes on from where it was"


def test_a_jump_of_the_wall_clock_loses_nothing() -> None:
    world = world_of()
    job_id = running(world)
    world.wall_jump_s = 10 * 365 * 24 * 3600.0
    world.pass_time(10, silent=("a",))
    assert job_of(world, job_id).state is JobState.RUNNING


# forget


def test_a_node_that_reports_is_not_forgotten() -> None:
    world = world_of()
    refused = world.forget()
    assert isinstance(refused, InUse)
    assert "Node a reports" in refused.detail
    assert set(world.ledger.nodes) == {"a", "b"}
    assert isinstance(world.forget("z"), NotFound)


def test_a_daemon_that_has_just_started_waits_whether_the_node_reports() -> None:
    world = world_of()
    world.lose_reports()  # a restart
    world.pass_time(1, silent=("a",))
    assert isinstance(world.forget(), InUse)
    world.pass_time(4, silent=("a",))
    assert world.forget() is None


def test_a_forgotten_node_takes_its_name_its_gpus_and_all_that_held_them_with_it() -> None:
    world = world_of()
    lease = world.lease(2, ttl_s=3600.0)
    world.cordon(1)
    world.pass_time(4, silent=("a",))
    assert world.forget() is None
    assert world.now_of(lease).end_reason is EndReason.NODE_LOST
    assert set(world.ledger.nodes) == set(world.ledger.node_observations) == {"b"}
    assert {one.device.node for one in world.ledger.gpus.values()} == {"b"}
    assert kinds(world)[-2:] == ["node.lost", "node.forgotten"]
    assert isinstance(world.renew(lease), LeaseLost)
    world.check()
    world.node("a", gpus=2)
    assert world.lease(2).gpus[0].node == "a", "the name is free for another host"


def test_a_drained_or_paused_node_can_be_forgotten_too() -> None:
    world = world_of()
    world.set_mode(NodeMode.DRAINING)
    world.pass_time(4, silent=("a",))
    assert world.forget() is None


def test_the_jobs_of_a_forgotten_node_are_tried_again_elsewhere() -> None:
    world = World(policy=Policy(node_lost_after_s=BOUND_S)).node("a", gpus=1)
    job_id = running(world, gpus=1, retries=1)
    first = job_of(world, job_id).lease_id
    world.node("b", gpus=1)
    world.pass_time(4, silent=("a",))
    assert world.forget() is None
    assert world.ledger.leases[first].lease.end_reason is EndReason.NODE_LOST
    assert job_of(world, job_id).state is JobState.QUEUED
    world.pass_time(3, silent=("a",))
    job = job_of(world, job_id)
    assert (job.state, job.attempts, job.gpus[0].node) == (JobState.STARTING, 2, "b")
    world.node("a", gpus=[gpu(0, pids=(9,), lease=first)])  # its host was not off, and the first attempt runs on
    assert desired_state(world.ledger, "a", 1).jobs == ()
    assert world.state(0, "a") is GpuState.FOREIGN
    assert job_of(world, job_id).state is JobState.STARTING
    world.check()


def test_a_job_of_a_forgotten_node_without_a_retry_is_lost_and_a_cancelled_one_cancelled() -> None:
    world = World(policy=Policy(node_lost_after_s=BOUND_S)).node("a", gpus=2)
    lost, cancelled = world.submit(1), world.submit(1, retries=2)
    world.pass_time(4, silent=("a",))
    world.cancel(cancelled)
    world.forget()
    assert job_of(world, lost).state is JobState.LOST
    assert job_of(world, lost).reason == "node a was forgotten by user root; how the job ended is not known"
    assert job_of(world, cancelled).state is JobState.CANCELLED


def test_what_was_lost_by_silence_stays_lost_when_its_node_is_forgotten() -> None:
    world = world_of()
    job_id = running(world, retries=3)
    world.pass_time(DEAD, silent=("a",))
    assert world.forget() is None
    assert job_of(world, job_id).state is JobState.LOST
    assert set(world.ledger.nodes) == {"b"}
    gone = world.events("gpu.gone")
    assert len(gone) == 2, "the log must say why they need not be seen clean"
