"""Whose idle GPUs are taken back, and for whom: no more than those who wait need, and nothing that would not help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpulease_protocol.model import JobState, Lease, LeaseState, Priority
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_server.core.policy import Policy
from gpulease_server.core.reclaim_choice import Choice
from gpulease_server.core.reservation_view import current_reservations
from tests.core.build import World, gpu, uuid
from tests.core.test_arrays import submit
from tests.core.test_reclaim import AFTER_S, NOTICE_S, SHORT_NOTICE, SLACK_S, ended, holds, kinds, works, world


def agreed_job(here: World) -> tuple[str, Lease]:
    """A job on one GPU that runs, and agreed to give it back; with its lease."""
    job_id = here.submit(1)
    record = here.ledger.jobs[job_id].job
    lease = here.ledger.leases[record.lease_id]
    demand = replace(lease.lease.demand, reclaim_idle_after_s=AFTER_S)
    here.ledger.apply(replace(lease, lease=replace(lease.lease, demand=demand)))
    running = JobReport(job_id=job_id, attempt=record.attempts, state=RunState.RUNNING, started_at=here.now.at)
    here.jobs["a"] = [running]
    return job_id, lease.lease


def test_a_free_gpu_counts_for_one_request() -> None:
    here = world(3)
    leases = [holds(here), holds(here)]
    first, second = here.lease(2, ttl_s=1e6), here.lease(2, ttl_s=1e6)
    here.pass_time(AFTER_S + SLACK_S)
    assert [kinds(here, one) for one in leases] == [["reclaim_notice"], []], "the second would lack the free GPU"
    here.pass_time(NOTICE_S + 2 * SLACK_S)
    assert here.now_of(first).state is LeaseState.ACTIVE
    assert not ended(here, leases[1])
    assert here.now_of(second).state is LeaseState.QUEUED


def test_what_is_left_of_a_lease_serves_the_next_request() -> None:
    here = world(3)
    large, small = holds(here, 2), holds(here)
    waits = [here.lease(1, ttl_s=1e6), here.lease(1, ttl_s=1e6)]
    here.pass_time(AFTER_S + NOTICE_S + 3 * SLACK_S)
    assert [here.now_of(one).state for one in waits] == [LeaseState.ACTIVE] * 2
    assert ended(here, large)
    assert kinds(here, small) == []


def test_a_limit_counts_those_who_are_helped() -> None:
    here = world(2)
    leases = [holds(here), holds(here)]
    here.limit("bob", max_gpus=1)
    waits = [here.lease(1, ttl_s=1e6, user="bob") for _ in range(2)]
    here.pass_time(AFTER_S + NOTICE_S + 3 * SLACK_S)
    assert [ended(here, one) for one in leases] == [True, False]
    assert [here.now_of(one).state for one in waits] == [LeaseState.ACTIVE, LeaseState.QUEUED]
    assert kinds(here, leases[1]) == []


def test_the_limit_of_an_array_counts_those_who_are_helped() -> None:
    here = world(3)
    leases = [holds(here), holds(here)]
    works(here, 2, 1.0)
    submit(here, count=4, at_most=2)
    here.pass_time(AFTER_S + SLACK_S)
    assert [kinds(here, one) for one in leases] == [["reclaim_notice"], []], "one of them runs, and one more may"


def test_of_several_leases_that_a_request_needs_none_ends_before_the_moment_of_all_has_come() -> None:
    here = world(2)
    first, second = holds(here), holds(here)
    works(here, 1, 1.0)
    large, small = here.lease(2, ttl_s=1e6), here.lease(1, ttl_s=1e6)
    here.pass_time(2 * SLACK_S)
    works(here, 1, 0.0)
    here.pass_time(AFTER_S + SLACK_S)
    assert [kinds(here, one) for one in (first, second)] == [["reclaim_notice"]] * 2, "not at the same moment"
    here.release(small)
    here.pass_time(NOTICE_S - SLACK_S)  # the moment of the first has come, and that of the second has not
    works(here, 1, 1.0)
    here.pass_time(2 * SLACK_S)
    assert [kinds(here, one) for one in (first, second)] == [["reclaim_notice", "reclaim_withdrawn"]] * 2
    works(here, 1, 0.0)
    here.pass_time(AFTER_S + NOTICE_S + 3 * SLACK_S)
    assert here.now_of(large).state is LeaseState.ACTIVE


def test_the_gpus_of_a_job_that_is_being_stopped_count_as_coming() -> None:
    here = world(2)
    job_id, of_job = agreed_job(here)
    works(here, 1, 1.0)
    lease = holds(here)
    here.lease(1, ttl_s=1e6)
    here.pass_time(SLACK_S)
    works(here, 1, 0.0)
    here.pass_time(AFTER_S + NOTICE_S + SLACK_S)
    assert here.ledger.jobs[job_id].job.state is JobState.STOPPING
    assert kinds(here, of_job) == ["reclaim_notice", "reclaimed"]
    here.pass_time(30.0)
    assert kinds(here, lease) == [], "the job has not ended yet, and does"


def test_a_gpu_that_someone_else_is_on_too_would_help_no_one() -> None:
    here = world(1)
    lease = holds(here)
    here.lease(1, ttl_s=1e6)
    here.nodes["a"][0] = gpu(0, pids=(4242,), utilization_ratio=0.0)
    here.pass_time(AFTER_S + NOTICE_S + 2 * SLACK_S)
    assert kinds(here, lease) == [], "it would drain for as long as that process lives"
    works(here, 0, 0.0, processes=())
    here.pass_time(SLACK_S)
    assert kinds(here, lease) == ["reclaim_notice"]


@pytest.mark.parametrize("max_bypass", [0, 10])
def test_a_gpu_that_would_be_held_for_an_older_request_helps_no_newer_one(max_bypass: int) -> None:
    here = world(2, max_bypass=max_bypass)
    works(here, 1, 1.0)
    lease = holds(here)
    here.lease(1, ttl_s=1e6)
    here.lease(2, ttl_s=1e6)  # waits for the GPU that works, too
    here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + SLACK_S)
    assert kinds(here, lease) == ([] if max_bypass == 0 else ["reclaim_notice"])


@pytest.mark.parametrize("is_there", [True, False])
def test_a_gang_that_could_not_start_anyway_keeps_no_newer_request_from_being_helped(is_there: bool) -> None:
    here = World(policy=Policy(**SHORT_NOTICE, max_bypass=0)).node("a", gpus=1).node("b", gpus=1)
    works(here, 0, 0.0, "a")
    works(here, 0, 1.0, "b")
    lease = holds(here, node="a")
    here.lease(1, ttl_s=1e6, node="b")
    here.lease(1, ttl_s=1e6, nodes=2)
    here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + SLACK_S, silent=() if is_there else ("b",))
    assert kinds(here, lease) == ([] if is_there else ["reclaim_notice"])


def test_where_an_older_request_has_gpus_held_on_another_node_a_newer_one_is_helped() -> None:
    here = World(policy=Policy(**SHORT_NOTICE, max_bypass=1))
    for node in ("a", "b"):
        here.node(node, gpus=3)
        for index in range(3):
            works(here, index, 0.0, node)
    lease = holds(here, node="a")
    here.lease(2, ttl_s=1e6, node="a")
    here.lease(1, ttl_s=1e6, node="b")
    for node, index in (("a", 1), ("a", 2), ("b", 0)):
        works(here, index, 1.0, node)
    here.lease(3, ttl_s=1e6)
    passes = here.lease(1, ttl_s=1e6, node="b")
    assert passes.state is LeaseState.ACTIVE
    here.release(passes)
    here.pass_time(SLACK_S)
    waits = here.lease(1, ttl_s=1e6)
    assert waits.state is LeaseState.QUEUED, "the free GPUs of b are held"
    here.pass_time(AFTER_S + SLACK_S)
    assert kinds(here, lease) == ["reclaim_notice"]
    here.pass_time(NOTICE_S + 2 * SLACK_S)
    assert here.now_of(waits).state is LeaseState.ACTIVE


def test_a_request_that_has_others_preempted_needs_no_idle_lease_and_those_end_once() -> None:
    here = World(policy=Policy(**SHORT_NOTICE, preemption=True, preempt_after_s=0.0, preempt_notice_s=600.0))
    here.node(gpus=2)
    idle, preempted = holds(here), holds(here, ttl_s=600.0, priority=Priority.SCAVENGE)
    for index in range(2):
        works(here, index, 0.0)
    here.lease(1, ttl_s=1e6)
    here.pass_time(5.0)
    assert preempted.id in here.ledger.preempting
    here.pass_time(AFTER_S + 2 * SLACK_S)
    assert kinds(here, idle) == []
    assert kinds(here, preempted) == []


@pytest.mark.parametrize("lent_by", ["another", "itself", None])
def test_gpus_that_another_request_has_lent_to_an_idle_lease_help_no_one_else(lent_by: str | None) -> None:
    """The idle lease ran ahead of that request, which gets its GPUs once it ends."""
    here = world(1)
    idle, waits = holds(here), here.lease(1, ttl_s=1e6)
    record, reservations = here.ledger.leases[waits.id], current_reservations(here.ledger, here.now, here.policy)
    if lent_by is not None:
        reservations.lent[uuid(0)] = waits.id if lent_by == "itself" else "lease-of-another"
    choice = Choice(reservations, [idle.id])
    is_helped = choice.add(record, reservations.users.demand_within(record.lease))
    assert is_helped is (lent_by != "another")
    assert choice.chosen == ({idle.id: waits.id} if is_helped else {})
