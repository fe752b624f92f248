"""A node that ends: nothing is placed there that may take longer. A node that leaves: its jobs are tried elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from gpulease_protocol.model import EndReason, GpuState, Job, JobState, Lease, LeaseState, NodeMode
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.job import MAX_HISTORY
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import node_view
from tests.core.build import World

HOUR_S = 3600.0


def job_of(world: World, job_id: str) -> Job:
    return world.ledger.jobs[job_id].job


def running(world: World, node: str = "a", **what: Any) -> str:
    """A job that runs on that node."""
    job_id = world.submit(1, **what)
    job = job_of(world, job_id)
    assert [device.node for device in job.gpus] == [node]
    world.jobs[node] = [JobReport(job_id=job_id, attempt=job.attempts, state=RunState.RUNNING, log_directory="/j")]
    world.report(node)
    return job_id


def stopped(world: World, job_id: str, code: int | None = 143, **what: Any) -> JobReport:
    attempt = job_of(world, job_id).attempts
    return JobReport(job_id=job_id, attempt=attempt, state=RunState.EXITED, exit_code=code, node_left=True, **what)


def leave(world: World, node: str = "a") -> None:
    """The last report of the node, which is gone then."""
    world.report(node, leaving=True, left=True, problem="the node has left")
    del world.nodes[node]


class TestEnds:
    def test_a_job_that_may_outlast_a_node_is_placed_on_another(self) -> None:
        world = World().node("a", gpus=1).node("b", gpus=2)
        world.report("a", available_s=HOUR_S)
        assert job_of(world, world.submit(1, timeout_s=2 * HOUR_S)).gpus[0].node == "b"
        assert job_of(world, world.submit(1, timeout_s=HOUR_S / 2)).gpus[0].node == "a"
        world.check()

    @pytest.mark.parametrize("available_s", [1e12, float("inf"), float("nan")])
    def test_an_end_that_no_calendar_has_is_none(self, available_s: float) -> None:
        world = World().node("a", gpus=1)
        world.report("a", available_s=available_s)
        assert node_view(world.ledger, world.ledger.nodes["a"], world.now, world.policy).available_until is None

    def test_one_without_a_declared_end_is_placed_there(self) -> None:
        world = World().node("a", gpus=1)
        world.report("a", available_s=HOUR_S)
        assert job_of(world, world.submit(1)).state is JobState.STARTING

    def test_one_that_asks_for_a_part_of_a_node_by_name_waits_too(self) -> None:
        """Both ways to look for GPUs: by their number alone, and on each node."""
        world = World().node("a", gpus=2)
        world.report("a", available_s=HOUR_S)
        for _ in range(3):  # from the second on, nodes are ranked
            assert job_of(world, world.submit(1, timeout_s=2 * HOUR_S)).state is JobState.QUEUED
        world.check()

    def test_explain_names_the_node_and_both_times(self) -> None:
        world = World().node("a", gpus=2)
        world.report("a", available_s=HOUR_S)
        record = world.ledger.leases[job_of(world, world.submit(1, timeout_s=5 * HOUR_S)).lease_id]
        told = explain(world.ledger, record, world.now, world.policy)
        assert told.verdict == "not_now", "the allocation may be made longer, and other nodes may come"
        assert {one.code for one in told.obstacles} == {"ends_too_soon"}
        assert told.sentence.count("Node a goes at ") == 1
        assert "in 60 min, and this may take 5 h." in told.sentence

    def test_it_keeps_no_gpu_from_others_that_it_can_never_have(self) -> None:
        world = World().node("a", gpus=1)
        world.report("a", available_s=HOUR_S)
        world.submit(1, timeout_s=2 * HOUR_S)
        for _ in range(world.policy.max_bypass + 5):
            world.release(world.lease(1))
            world.report("a", available_s=HOUR_S)
        world.at_s += world.policy.max_bypass_s + 1
        world.report("a", available_s=HOUR_S)
        assert world.lease(1).state is LeaseState.ACTIVE

    def test_it_starts_when_the_allocation_is_made_longer(self) -> None:
        world = World().node("a", gpus=1)
        world.report("a", available_s=HOUR_S)
        job_id = world.submit(1, timeout_s=2 * HOUR_S)
        world.report("a", available_s=3 * HOUR_S)
        world.report("a", available_s=3 * HOUR_S)
        assert job_of(world, job_id).state is JobState.STARTING

    def test_a_node_shows_its_end_which_does_not_move_with_each_report(self) -> None:
        world = World().node("a", gpus=1)
        world.report("a", available_s=HOUR_S)
        view = node_view(world.ledger, world.ledger.nodes["a"], world.now, world.policy)
        world.at_s += 1.0
        world.report("a", available_s=HOUR_S - 0.4)
        again = node_view(world.ledger, world.ledger.nodes["a"], world.now, world.policy)
        assert view.available_until is not None
        assert again.available_until == view.available_until
        world.report("a", available_s=60.0)
        cut = node_view(world.ledger, world.ledger.nodes["a"], world.now, world.policy)
        assert (cut.available_until or view.available_until) < view.available_until
        world.report("a")
        assert node_view(world.ledger, world.ledger.nodes["a"], world.now, world.policy).available_until is None


class TestLeaves:
    def test_nothing_is_granted_on_a_node_that_leaves(self) -> None:
        world = World().node("a", gpus=1)
        world.report("a", leaving=True)
        assert world.state(0) is GpuState.CORDONED
        call = world.ask(1)
        lease = world.answers[call]
        assert isinstance(lease, Lease)
        assert lease.state is LeaseState.QUEUED
        told = explain(world.ledger, world.ledger.leases[lease.id], world.now, world.policy)
        assert "GPU 0 of a is on node a, which leaves." in told.sentence
        assert node_view(world.ledger, world.ledger.nodes["a"], world.now, world.policy).leaving
        world.check()

    @pytest.mark.parametrize("code", [143, 3, None], ids=["by SIGTERM", "with its own code", "before it started"])
    def test_its_jobs_are_tried_elsewhere_without_a_retry(self, code: int | None) -> None:
        world = World().node("a", gpus=1)
        job_id = running(world)
        first = job_of(world, job_id).lease_id
        world.jobs["a"] = [stopped(world, job_id, code)]
        world.report("a", leaving=True)
        job = job_of(world, job_id)
        assert job.state is JobState.QUEUED
        assert (
            job.reason == "attempt 1 does not count: its node a left; the next one joins the queue after a pause of 2 s"
        )
        assert world.ledger.leases[first].lease.end_reason is EndReason.NODE_LOST
        leave(world)
        world.node("b", gpus=1)
        world.pass_time(3)
        assert job_of(world, job_id).gpus[0].node == "b"
        world.ended(job_id, 1, "b")
        assert job_of(world, job_id).state is JobState.FAILED, "a fault of its own counts, and it has no retry"
        assert [one.node_left for one in job_of(world, job_id).attempt_history] == [True]
        world.check()

    def test_a_retry_that_it_has_is_still_there_afterwards(self) -> None:
        world = World().node("a", gpus=1)
        job_id = running(world, retries=1)
        world.jobs["a"] = [stopped(world, job_id)]
        world.report("a", leaving=True)
        leave(world)
        world.node("b", gpus=1)
        world.pass_time(3)
        world.ended(job_id, 1, "b")
        assert job_of(world, job_id).state is JobState.QUEUED

    def test_one_that_ends_well_meanwhile_has_succeeded_and_a_cancelled_one_is_cancelled(self) -> None:
        world = World().node("a", gpus=2)
        done, unwanted = world.submit(1), world.submit(1)
        world.cancel(unwanted)
        world.jobs["a"] = [stopped(world, done, 0), stopped(world, unwanted)]
        world.report("a", leaving=True)
        assert job_of(world, done).state is JobState.SUCCEEDED
        assert job_of(world, done).reason is None
        assert job_of(world, unwanted).state is JobState.CANCELLED

    def test_nodes_that_leave_do_not_start_a_job_forever(self) -> None:
        world = World(policy=Policy(retry_pause_s=(0.1, 0.1))).node("a", gpus=1)
        job_id = running(world)
        for _ in range(MAX_HISTORY + 5):
            if job_of(world, job_id).state is JobState.FAILED:
                break
            world.jobs["a"] = [stopped(world, job_id)]
            world.report("a")
            world.jobs["a"] = []
            world.report()
            world.pass_time(0.3)
        assert job_of(world, job_id).state is JobState.FAILED
        assert job_of(world, job_id).attempts == MAX_HISTORY + 1

    def test_a_node_that_has_left_is_no_more_and_its_leases_have_ended(self) -> None:
        world = World().node("a", gpus=2).node("b", gpus=1)
        held, job_id = world.lease(1, node="a"), world.submit(1)
        node = job_of(world, job_id).gpus[0].node
        world.report("a", leaving=True)
        leave(world)
        assert set(world.ledger.nodes) == {"b"}
        assert {gpu.device.node for gpu in world.ledger.gpus.values()} == {"b"}
        assert world.now_of(held).end_reason is EndReason.NODE_LOST
        assert job_of(world, job_id).state is (JobState.QUEUED if node == "a" else JobState.STARTING)
        world.check()

    def test_what_an_administrator_said_of_it_stays(self) -> None:
        world = World().node("a", gpus=1)
        world.set_mode(NodeMode.DRAINING, reason="new driver")
        leave(world)
        view = node_view(world.ledger, world.ledger.nodes["a"], world.now, world.policy)
        assert (view.mode, view.mode_reason, view.reason) == (NodeMode.DRAINING, "new driver", "node a has left")
        world.node("a", gpus=1, report=False)
        world.report("a", worker="next", age_s=0.0)
        assert world.state(0) in (GpuState.CORDONED, GpuState.UNKNOWN)
        world.check()

    def test_the_next_worker_of_its_name_is_taken_at_once(self) -> None:
        world = World().node("a", gpus=1)
        leave(world)
        world.node("a", gpus=1, report=False)
        assert world.report("a", worker="next") is None
        assert world.lease(1).state is LeaseState.ACTIVE

    def test_a_worker_that_has_been_replaced_cannot_make_the_node_leave(self) -> None:
        world = World().node("a", gpus=1)
        lease = world.lease(1)
        world.report("a", worker="old", leaving=True, left=True, problem="the node has left")
        assert world.now_of(lease).state is LeaseState.ACTIVE
        assert "a" in world.ledger.nodes
