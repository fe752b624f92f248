"""Preemption: what has opted in ends for the first that waits, after a notice; and nothing else does."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from gpulease_protocol.errors import LeaseLost
from gpulease_protocol.explanation import Preempts
from gpulease_protocol.model import Demand, EndReason, GpuState, JobState, Lease, LeaseState, Priority
from gpulease_protocol.node_protocol import JobReport, OwnerState, RunState
from gpulease_server.core.calendar import END_MARGIN_S
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.happenings import CancelRequested, WaiterPolled
from gpulease_server.core.job_orders import job_order
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import lease_view
from gpulease_server.core.records import JobRecord
from gpulease_server.runtime.outage import copy_ledger, reset_deadlines
from tests.core.build import World, gpu, uuid
from tests.core.test_adoption import adoption

AFTER_S, NOTICE_S = 60.0, 20.0
RULES = {"preemption": True, "preempt_after_s": AFTER_S, "preempt_notice_s": NOTICE_S}
TTL_S = 90.0
SOON_S = 2 * NOTICE_S
STOPPED = "It was stopped on request."


def world(gpus: int = 2, **policy: Any) -> World:
    return World(policy=Policy(**RULES | policy)).node(gpus=gpus)


def scavenge(here: World, count: int = 1, **what: Any) -> Lease:
    lease = here.lease(count, **{"ttl_s": TTL_S, "priority": Priority.SCAVENGE, "user": "bob"} | what)
    here.check()
    return lease


def ask(here: World, count: int = 1, **what: Any) -> Lease:
    lease = here.lease(count, **{"ttl_s": 1e6, "user": "ada"} | what)
    here.check()
    return lease


def keep(here: World, lease: Lease, seconds: float) -> None:
    """Its holder renews it, as long as it has it."""
    until_s = here.at_s + seconds
    while here.at_s < until_s:
        if state(here, lease) is LeaseState.ACTIVE:
            assert isinstance(here.renew(here.now_of(lease)), Lease)
        here.pass_time(min(TTL_S / 3, until_s - here.at_s))


def job(here: World, gpus: int = 1, node: str = "a", **what: Any) -> str:
    """A scavenge job that runs."""
    job_id = here.submit(gpus, **{"priority": Priority.SCAVENGE, "user": "bob"} | what)
    here.run_job(job_id, node)
    return job_id


def stop(here: World, job_id: str, node: str = "a", **what: Any) -> None:
    """Its processes end, as they were told to; then the node is read again."""
    ends: dict[str, Any] = {"state": RunState.EXITED, "exit_code": 0, "reason": STOPPED, "ended_at": here.now.at}
    here.jobs[node] = [replace(one, **ends | what) if one.job_id == job_id else one for one in here.jobs[node]]
    here.report(node)
    here.jobs[node] = [one for one in here.jobs[node] if one.job_id != job_id]
    here.report(node)
    here.check()


def of(here: World, job_id: str) -> JobRecord:
    return here.ledger.jobs[job_id]


def is_stopped(here: World, job_id: str, node: str = "a") -> bool:
    return job_order(here.ledger, of(here, job_id), node, simulated=False).stop


def is_to_start_again(here: World, job_id: str) -> bool:
    return job_order(here.ledger, of(here, job_id), "a", simulated=False).again


def state(here: World, lease: Lease) -> LeaseState:
    return here.now_of(lease).state


def give_back(here: World, lease: Lease) -> None:
    assert isinstance(here.release(here.now_of(lease)), Lease)


def preempt_at(here: World, lease: Lease) -> Any:
    return lease_view(here.ledger, here.ledger.leases[lease.id], here.now, here.policy).preempt_at


def why(here: World, lease_id: str) -> str:
    return explain(here.ledger, here.ledger.leases[lease_id], here.now, here.policy).sentence


def ends_in_s(here: World, lease: Lease) -> float | None:
    return lease_view(here.ledger, here.ledger.leases[lease.id], here.now, here.policy).ends_in_s


def preempts(here: World, lease: Lease) -> Preempts | None:
    return explain(here.ledger, here.ledger.leases[lease.id], here.now, here.policy).preempts


def preempted_ids(here: World) -> list[str | None]:
    return [one.lease_id for one in here.events("lease.preempting")]


def test_a_job_saves_ends_and_goes_on_from_its_old_place_when_the_request_is_done() -> None:
    here = world(gpus=1)
    job_id = job(here)
    first = of(here, job_id).job.lease_id
    later = scavenge(here, user="eve")
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(2.0)

    noticed = of(here, job_id)
    assert noticed.job.state is JobState.STOPPING
    assert is_stopped(here, job_id)
    assert is_to_start_again(here, job_id), "so no one is told that it has ended"
    assert noticed.grace_s == NOTICE_S
    assert noticed.job.preempt_at is not None
    left_s = (noticed.job.preempt_at - here.now.at).total_seconds()
    assert NOTICE_S - 3.0 < left_s <= NOTICE_S
    assert state(here, waits) is LeaseState.QUEUED
    assert f"It preempts job {job_id} of user bob" in why(here, waits.id)
    assert f"so that {waits.id} of user ada with priority normal can start" in why(here, first)
    assert ends_in_s(here, here.ledger.leases[first].lease) is None, "its processes are told by SIGTERM"

    stop(here, job_id)
    assert state(here, waits) is LeaseState.ACTIVE
    again = of(here, job_id)
    assert (again.job.state, again.job.preempted, again.job.preempt_at) == (JobState.QUEUED, 1, None)
    assert again.job.attempt_history[-1].preempted
    assert again.grace_s == JobRecord(job=again.job, spec=again.spec, number=1).grace_s
    assert here.ledger.leases[first].lease.end_reason is EndReason.PREEMPTED
    assert not here.ledger.preemptions or here.pass_time(0.5) is None

    assert here.position(here.ledger.leases[again.job.lease_id].lease) == 1
    assert here.position(later) == 2, "it was behind the job, and still is"
    give_back(here, waits)
    here.report()
    assert of(here, job_id).job.state is JobState.STARTING
    assert of(here, job_id).job.attempts == 2


def test_a_lease_without_a_job_hears_of_it_when_it_renews_and_has_the_whole_notice_from_then() -> None:
    here = world(gpus=1)
    held = scavenge(here)
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(1.5)
    told = preempt_at(here, held)
    assert told is not None
    assert (told - here.now.at).total_seconds() > TTL_S - 3.0, "who does not hear of it may trust the last renewal"
    answer = here.renew(held)
    assert isinstance(answer, Lease)
    assert answer.preempt_at == told
    assert answer.ends_in_s == pytest.approx((told - here.now.at).total_seconds(), abs=0.11)

    keep(here, held, (told - here.now.at).total_seconds() - 1.0)
    assert preempt_at(here, held) == told, "the moment is never moved"
    assert ends_in_s(here, held) == 2.0, "it may still be withdrawn, so the holder asks again"
    assert state(here, held) is LeaseState.ACTIVE
    here.pass_time(2.0)
    assert here.now_of(held).end_reason is EndReason.PREEMPTED
    assert state(here, waits) is LeaseState.ACTIVE
    lost = here.renew(held)
    assert isinstance(lost, LeaseLost)
    assert "(preempted)" in str(lost)
    assert [one.lease_id for one in here.events("lease.preempted")] == [held.id]


@pytest.mark.parametrize("off", [True, False])
def test_it_is_off_unless_it_was_switched_on(off: bool) -> None:
    here = world(gpus=1, preemption=not off)
    scavenge(here)
    here.pass_time(AFTER_S)
    ask(here)
    here.pass_time(5.0)
    assert bool(preempted_ids(here)) is not off


@pytest.mark.parametrize(
    ("held", "waiting", "preempts"),
    [
        ({}, {}, True),
        ({}, {"priority": Priority.INTERACTIVE, "time_s": 60.0}, True),
        ({}, {"priority": Priority.SCAVENGE}, False),
        ({"priority": Priority.NORMAL}, {"priority": Priority.INTERACTIVE, "time_s": 60.0}, False),
        ({"ttl_s": 901.0}, {}, False),
        ({"time_s": AFTER_S + 1e4}, {}, True),
    ],
)
def test_only_what_opted_in_can_be_told_and_is_of_lower_priority_ends(
    held: dict[str, Any], waiting: dict[str, Any], preempts: bool
) -> None:
    here = world(gpus=1)
    scavenge(here, **held)
    here.pass_time(AFTER_S + 1.0)
    ask(here, **waiting)
    here.pass_time(5.0)
    assert bool(preempted_ids(here)) is preempts


def test_nothing_is_preempted_before_it_has_held_its_gpus_for_the_minimum() -> None:
    here = world(gpus=1)
    held = scavenge(here)
    ask(here)
    here.pass_time(AFTER_S - 1.0)
    assert not preempted_ids(here)
    here.pass_time(3.0)
    assert preempted_ids(here) == [held.id]


def test_an_adopted_process_is_never_preempted_whatever_was_asked_for() -> None:
    here = World(policy=Policy(**RULES)).node(gpus=[gpu(0, pids=(42,))])
    here.owners[42] = OwnerState.ALIVE
    request = replace(adoption(here, 42), demand=Demand(priority=Priority.SCAVENGE), ttl_s=TTL_S)
    here.turn(request)
    here.answer_wanted()
    adopted = here.answers[request.cause]
    assert isinstance(adopted, Lease)
    assert adopted.demand.priority is Priority.NORMAL
    here.pass_time(AFTER_S + 1.0)
    ask(here)
    here.pass_time(5.0)
    assert not preempted_ids(here)


def test_the_smallest_set_ends_and_of_those_the_one_of_which_the_least_is_lost() -> None:
    here = world(gpus=4)
    old, first = scavenge(here, 2), scavenge(here)
    here.pass_time(1.0)
    last = scavenge(here)
    here.pass_time(AFTER_S)
    ask(here, 1)
    here.pass_time(1.5)
    assert preempted_ids(here) == [last.id], "one GPU, for the least time"
    assert state(here, first) is LeaseState.ACTIVE
    assert state(here, old) is LeaseState.ACTIVE


def test_one_large_lease_ends_rather_than_two_small_ones() -> None:
    here = world(gpus=4)
    large = scavenge(here, 2)
    for _ in range(2):
        scavenge(here)
    here.pass_time(AFTER_S)
    ask(here, 2)
    here.pass_time(1.5)
    assert preempted_ids(here) == [large.id]


def test_gpus_that_are_free_or_soon_will_be_by_what_was_declared_count_and_no_more_end_than_needed() -> None:
    here = world(gpus=3, retained_memory_s=1.0)
    held = scavenge(here)
    ask(here, time_s=AFTER_S + 20.0)
    here.pass_time(AFTER_S)
    assert here.state(2) is GpuState.FREE
    waits = ask(here, 3)
    here.pass_time(1.5)
    assert preempted_ids(here) == [held.id]
    assert set(here.ledger.preemptions[waits.id].gpus) == {uuid(index) for index in range(3)}


def test_nothing_ends_for_a_request_that_the_set_would_not_start() -> None:
    here = world(gpus=3)
    scavenge(here)
    scavenge(here)
    ask(here, user="eve")  # normal, without a time
    here.pass_time(AFTER_S)
    waits = ask(here, 3)
    here.pass_time(5.0)
    assert not preempted_ids(here)
    assert "preempts" not in why(here, waits.id)


@pytest.mark.parametrize(("time_s", "preempts"), [(AFTER_S + 20.0, False), (AFTER_S + 3600.0, True)])
def test_nothing_ends_for_a_request_that_starts_soon_elsewhere(time_s: float, preempts: bool) -> None:
    here = world(gpus=1, retained_memory_s=1.0).node("b", gpus=1)
    scavenge(here, node="a")
    ask(here, node="b", time_s=time_s, user="eve")
    here.pass_time(AFTER_S)
    ask(here)
    here.pass_time(5.0)
    assert bool(preempted_ids(here)) is preempts


def test_only_the_first_that_waits_for_leases_preempts() -> None:
    here = world(gpus=2)
    ask(here, user="eve")
    scavenge(here)
    here.pass_time(AFTER_S)
    first = ask(here, 2, user="eve")  # waits for a normal lease: no set would start it
    second = ask(here, 1)
    here.pass_time(5.0)
    assert not preempted_ids(here)
    give_back(here, first)
    here.pass_time(2.0)
    assert list(here.ledger.preemptions) == [second.id]


def test_one_that_a_limit_keeps_out_preempts_no_one_and_does_not_keep_others_from_it() -> None:
    here = world(gpus=2)
    here.limit("eve", max_gpus=1)
    ask(here, user="eve")
    scavenge(here)
    here.pass_time(AFTER_S)
    ask(here, user="eve")
    second = ask(here)
    here.pass_time(2.0)
    assert list(here.ledger.preemptions) == [second.id]


def test_one_set_at_a_time() -> None:
    here = world(gpus=2)
    first_job, second_job = job(here), job(here)
    here.pass_time(AFTER_S)
    ask(here)
    ask(here)
    here.pass_time(5.0)
    assert len(preempted_ids(here)) == 1
    stopped = next(one for one in (first_job, second_job) if of(here, one).job.preempt_at is not None)
    stop(here, stopped)
    here.pass_time(3.0)
    assert len(preempted_ids(here)) == 2


def test_one_of_higher_priority_that_comes_meanwhile_preempts_when_the_first_has_started() -> None:
    here = world(gpus=2)
    jobs = [job(here), job(here)]
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(1.5)
    second = ask(here, priority=Priority.INTERACTIVE, time_s=3600.0, user="eve")
    assert here.position(second) == 1
    here.pass_time(3.0)
    assert list(here.ledger.preemptions) == [waits.id]
    stop(here, next(one for one in jobs if of(here, one).job.preempt_at is not None))
    assert state(here, waits) is LeaseState.ACTIVE
    here.pass_time(2.0)
    assert list(here.ledger.preemptions) == [second.id]


def test_a_request_for_which_others_have_ended_without_effect_preempts_no_one_else() -> None:
    here = world(gpus=1, retained_memory_s=1.0)
    job_id = job(here)
    here.pass_time(AFTER_S)
    here.node("b", gpus=1)
    spared = scavenge(here, node="b")
    ask(here)
    here.pass_time(1.5)
    here.jobs["a"] = [replace(one, unkillable=(99,)) for one in here.jobs["a"]]
    keep(here, spared, 200.0)
    assert of(here, job_id).job.state is JobState.STOPPING
    assert len(preempted_ids(here)) == 1
    assert state(here, spared) is LeaseState.ACTIVE


def test_the_freed_gpus_are_held_for_the_request_also_from_one_that_goes_before_it() -> None:
    here = world(gpus=2)
    jobs = [job(here), job(here)]
    here.pass_time(AFTER_S)
    waits = ask(here, 2)
    here.pass_time(1.5)
    stop(here, jobs[0])
    assert here.state(0) is GpuState.FREE
    first = ask(here, priority=Priority.INTERACTIVE, time_s=60.0, user="eve")
    small = scavenge(here, user="eve", time_s=1.0)
    assert {state(here, one) for one in (first, small)} == {LeaseState.QUEUED}
    assert f"held for the earlier {waits.id}" in why(here, first.id)
    stop(here, jobs[1])
    assert state(here, waits) is LeaseState.ACTIVE


def test_gpus_of_the_set_that_do_not_come_are_held_for_a_bounded_time() -> None:
    here = world(gpus=2, retained_memory_s=1.0)
    jobs = [job(here), job(here)]
    here.pass_time(AFTER_S)
    waits = ask(here, 2)
    here.pass_time(1.5)
    stop(here, jobs[0])
    hangs = [replace(one, unkillable=(99,)) for one in here.jobs["a"]]
    here.jobs["a"] = hangs
    here.pass_time(3 * NOTICE_S + 55.0)
    small = ask(here, 1, user="eve")
    assert state(here, small) is LeaseState.QUEUED
    assert "GPUs 0, 1 of a are held for it" in why(here, waits.id)
    told = here.ledger.preemptions[waits.id].preempt_at
    assert preempts(here, waits) == Preempts(leases=(of(here, jobs[1]).job.lease_id,), by=told, gpus=(uuid(0), uuid(1)))
    here.pass_time(15.0)
    assert preempts(here, waits) == Preempts(leases=(of(here, jobs[1]).job.lease_id,), by=told)
    assert "GPUs 0, 1 of a are no longer held for it" in why(here, waits.id)
    assert state(here, small) is LeaseState.ACTIVE
    assert state(here, waits) is LeaseState.QUEUED
    assert len(preempted_ids(here)) == 2, "it preempts once"


@pytest.mark.parametrize("by", ["reservation", "limit"])
def test_one_behind_another_that_is_kept_out_since_preempts_although_no_gpu_is_free(by: str) -> None:
    """Both ask for the same, and no walk through the queue has told them apart since."""
    here = world(gpus=2)
    job(here, 2, timeout_s=3600.0)
    here.pass_time(AFTER_S - 2.0)
    ask(here, 2, user="eve")
    behind = ask(here, 2, user="ada")
    if by == "reservation":
        assert here.reserve(uuid(0), uuid(1), user="ada", after_s=4100.0) is None
    else:
        here.limit("eve", max_gpus=1)
    here.pass_time(4.0)
    assert list(here.ledger.preemptions) == [behind.id]


@pytest.mark.parametrize(("slack_s", "preempts"), [(90.0, False), (120.0, True)])
def test_nothing_ends_for_a_request_that_a_reservation_closes_out_before_it_could_start(
    slack_s: float, preempts: bool
) -> None:
    here = world(gpus=1)
    assert here.reserve(uuid(0), user="eve", after_s=7200.0) is None
    job(here, timeout_s=3600.0)
    here.pass_time(AFTER_S)
    ask(here, time_s=7200.0 - AFTER_S - END_MARGIN_S - slack_s)
    here.pass_time(2.0)
    assert bool(preempted_ids(here)) is preempts


def test_nothing_is_held_for_a_request_to_which_a_reservation_has_closed_the_set_since() -> None:
    here = world(gpus=2)
    job(here)
    here.pass_time(AFTER_S)
    waits = ask(here, 2)
    here.pass_time(1.5)
    assert set(here.ledger.preemptions[waits.id].gpus) == {uuid(0), uuid(1)}
    assert here.reserve(uuid(1), user="eve", after_s=0.0) is None
    assert state(here, ask(here, user="eve")) is LeaseState.ACTIVE, "it is reserved for eve, and closed to ada"


def test_the_notice_is_withdrawn_when_the_request_leaves() -> None:
    here = world(gpus=2)
    held, job_id = scavenge(here), job(here)
    here.pass_time(AFTER_S)
    waits = ask(here, 2)
    here.pass_time(1.5)
    assert preempt_at(here, held) is not None
    give_back(here, waits)
    here.pass_time(0.5)
    assert preempt_at(here, held) is None
    assert [one.lease_id for one in here.events("lease.preemption_withdrawn")] == [held.id]
    assert not here.ledger.preemptions
    keep(here, held, TTL_S + 2 * NOTICE_S)
    assert state(here, held) is LeaseState.ACTIVE
    stop(here, job_id)
    assert of(here, job_id).job.state is JobState.STARTING, "it was told, and is back at once"


def test_the_notice_is_withdrawn_when_the_request_is_granted_elsewhere() -> None:
    here = world(gpus=1)
    held = scavenge(here)
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(1.5)
    here.node("b", gpus=1)
    assert state(here, waits) is LeaseState.ACTIVE
    here.pass_time(0.5)
    assert preempt_at(here, held) is None
    keep(here, held, TTL_S + NOTICE_S)
    assert state(here, held) is LeaseState.ACTIVE


@pytest.mark.parametrize("what", ["cordoned", "silent"])
def test_a_lease_is_spared_at_the_last_moment_if_its_end_would_not_help(what: str) -> None:
    here = world(gpus=1)
    held = scavenge(here)
    here.pass_time(AFTER_S)
    waits = ask(here, time_s=7200.0)
    here.pass_time(1.5)
    at = preempt_at(here, held)
    left_s = (at - here.now.at).total_seconds()
    if what == "cordoned":
        here.cordon(0)
    keep(here, held, left_s - 10.0)
    here.pass_time(15.0, silent=("a",) if what == "silent" else ())
    assert state(here, held) is LeaseState.ACTIVE
    assert preempt_at(here, held) is None
    assert len(here.events("lease.preemption_withdrawn")) == 1
    assert state(here, waits) is LeaseState.QUEUED


@pytest.mark.parametrize("jump_s", [-3600.0, 0.0, 3600.0])
def test_a_restart_within_the_notice_changes_nothing_nor_does_a_step_of_the_clock(jump_s: float) -> None:
    here = world(gpus=1)
    held = scavenge(here)
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(1.5)
    told = preempt_at(here, held)
    here.ledger = copy_ledger(here.ledger)
    here.lose_reports()
    one = here.ledger.preemptions[waits.id]
    here.ledger.apply(replace(one, end_s=float("inf")))
    here.wall_jump_s = jump_s
    reset_deadlines(here.ledger, here.now)
    here.pass_time(1.0)
    assert preempt_at(here, held) == told
    keep(here, held, (one.preempt_at - one.noticed_at).total_seconds() - 5.0)
    assert state(here, held) is LeaseState.ACTIVE
    here.pass_time(10.0)
    assert here.now_of(held).end_reason is EndReason.PREEMPTED
    assert state(here, waits) is LeaseState.ACTIVE


def test_a_step_of_the_clock_within_the_notice_changes_nothing() -> None:
    here = world(gpus=1)
    held = scavenge(here)
    here.pass_time(AFTER_S)
    ask(here)
    here.pass_time(1.5)
    here.wall_jump_s = 3600.0
    keep(here, held, TTL_S - 5.0)
    assert state(here, held) is LeaseState.ACTIVE
    here.pass_time(10.0)
    assert here.now_of(held).end_reason is EndReason.PREEMPTED


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({}, JobState.QUEUED),
        ({"exit_code": 1}, JobState.QUEUED),
        ({"exit_code": 137}, JobState.QUEUED),
        ({"reason": None}, JobState.SUCCEEDED),
        ({"exit_code": 143, "timed_out": True, "reason": "It ran longer."}, JobState.TIMED_OUT),
    ],
)
def test_how_a_preempted_job_ends(end: dict[str, Any], expected: JobState) -> None:
    here = world(gpus=1)
    job_id = job(here, retries=0)
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(1.5)
    stop(here, job_id, **end)
    assert of(here, job_id).job.state is expected
    assert state(here, waits) is LeaseState.ACTIVE


def test_a_preempted_job_that_its_user_cancels_is_not_queued_again() -> None:
    here = world(gpus=1)
    job_id = job(here)
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(1.5)
    assert "queued again" in why(here, of(here, job_id).job.lease_id)
    here.turn(CancelRequested(cause="cancel", job_id=job_id, grace_s=5.0))
    assert of(here, job_id).job.reason == "cancelled"
    assert not is_to_start_again(here, job_id)
    told = why(here, of(here, job_id).job.lease_id), why(here, waits.id)
    assert not any("queued again" in said or "it may end" in said for said in told), "nor is anyone told so"
    stop(here, job_id, exit_code=143)
    assert (of(here, job_id).job.state, of(here, job_id).job.preempt_at) == (JobState.CANCELLED, None)


def test_being_preempted_uses_up_no_retry() -> None:
    here = world(gpus=1)
    job_id = job(here, retries=1)
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(1.5)
    stop(here, job_id)
    give_back(here, waits)
    here.report()
    here.run_job(job_id)
    stop(here, job_id, exit_code=1, reason="exit code 1")
    assert of(here, job_id).job.state is JobState.QUEUED
    assert "joins the queue after a pause of 2 s" in str(of(here, job_id).job.reason)
    here.pass_time(2.5)
    here.run_job(job_id)
    stop(here, job_id, exit_code=1, reason="exit code 1")
    assert of(here, job_id).job.state is JobState.FAILED


def test_what_was_preempted_twice_goes_first_and_is_not_preempted_again_also_after_a_restart() -> None:
    here = world(gpus=1)
    job_id = job(here)
    for times in (1, 2):
        here.pass_time(AFTER_S)
        waits = ask(here, key=None)
        here.pass_time(2.0)
        stop(here, job_id)
        assert of(here, job_id).job.preempted == times
        assert state(here, waits) is LeaseState.ACTIVE
        if times == 1:
            give_back(here, waits)
            here.report()
            here.run_job(job_id)
    next_lease = of(here, job_id).job.lease_id
    assert next_lease in here.ledger.go_first
    ahead = ask(here, priority=Priority.INTERACTIVE, time_s=60.0, user="eve")
    assert here.position(ahead) == 2
    restarted = World().ledger
    for record in here.ledger.leases.values():
        restarted.apply(record)
    restarted.apply(of(here, job_id))
    assert next_lease in restarted.go_first

    give_back(here, waits)
    here.report()
    here.run_job(job_id)
    here.pass_time(AFTER_S + 5.0)
    assert of(here, job_id).job.state is JobState.RUNNING
    assert len(preempted_ids(here)) == 2


def test_the_places_of_two_preempted_jobs_are_those_of_their_arrival() -> None:
    here = world(gpus=2)
    jobs = [job(here), job(here)]
    here.pass_time(AFTER_S)
    ask(here, 2)
    here.pass_time(1.5)
    stop(here, jobs[1])
    stop(here, jobs[0])
    leases = [here.ledger.leases[of(here, one).job.lease_id].lease for one in jobs]
    assert [here.position(lease) for lease in leases] == [1, 2]
    numbers = [record.number for record in here.ledger.leases.values()]
    assert len(set(numbers)) == len(numbers)


def test_a_gang_that_is_preempted_ends_on_all_of_its_nodes() -> None:
    here = world(gpus=1).node("b", gpus=1)
    job_id = here.submit(1, nodes=2, priority=Priority.SCAVENGE, user="bob")
    for node in ("a", "b"):
        here.jobs[node] = [JobReport(job_id=job_id, state=RunState.PREPARED, log_directory="/x")]
        here.report(node)
    for node in ("a", "b"):
        here.run_job(job_id, node)
    assert of(here, job_id).job.state is JobState.RUNNING
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(1.5)
    assert all(is_stopped(here, job_id, node) for node in ("a", "b"))
    ended = JobReport(job_id=job_id, state=RunState.EXITED, exit_code=0, reason=STOPPED, follows=True)
    for node in ("a", "b"):
        here.jobs[node] = [ended]
        here.report(node)
        here.jobs[node] = []
        here.report(node)
    assert state(here, waits) is LeaseState.ACTIVE
    assert (of(here, job_id).job.state, of(here, job_id).job.preempted) == (JobState.QUEUED, 1)


def test_a_lease_whose_gpu_someone_else_uses_too_is_no_victim() -> None:
    here = world(gpus=1)
    held = scavenge(here)
    here.pass_time(1.0)
    here.node("a", gpus=[gpu(0, pids=(77,))])
    here.pass_time(AFTER_S)
    ask(here)
    here.pass_time(5.0)
    assert not preempted_ids(here)
    assert state(here, held) is LeaseState.ACTIVE


def test_every_preemption_of_many_random_days_lets_its_request_start() -> None:
    assert sum(_random_day(seed) for seed in range(2)) > 5


def _random_day(seed: int) -> int:
    """How many requests have preempted others."""
    chance, here = random.Random(seed), world(gpus=4, max_bypass=2, retained_memory_s=1.0).node("b", gpus=2)
    leases, noticed = list[Lease](), dict[str, float]()
    for _ in range(40):
        priority = chance.choice([Priority.SCAVENGE, Priority.SCAVENGE, Priority.NORMAL])
        most, time_s = (2, None) if priority is Priority.SCAVENGE else (4, chance.choice([None, 20.0, 60.0]))
        leases.append(here.lease(chance.randint(1, most), ttl_s=90.0, priority=priority, time_s=time_s))
        here.pass_time(chance.choice([1.0, 10.0, 25.0]))
        for lease in map(here.now_of, leases):
            if lease.state is LeaseState.ACTIVE:
                is_done = lease.demand.priority is Priority.NORMAL and chance.random() < 0.3
                here.release(lease) if is_done else here.renew(lease)
            elif lease.state is LeaseState.QUEUED:
                here.turn(WaiterPolled(cause="poll", lease_id=lease.id))
        here.check()
        for waiting_id, one in here.ledger.preemptions.items():
            noticed.setdefault(waiting_id, one.end_s)
    here.pass_time(200.0)
    for waiting_id, end_s in noticed.items():
        lease = here.ledger.leases[waiting_id].lease
        assert lease.granted_at is not None or lease.state is LeaseState.ENDED, (seed, waiting_id)
        if lease.granted_at is not None:
            assert lease.granted_at <= here.now.at - timedelta(seconds=here.at_s - end_s - 60.0), (seed, waiting_id)
    for event in here.events("lease.preempting"):
        lease = here.ledger.leases[event.lease_id or ""].lease
        assert lease.demand.priority is Priority.SCAVENGE
        assert lease.granted_at is not None
        assert (event.at - lease.granted_at).total_seconds() >= AFTER_S
    return len(noticed)


def test_a_preempted_attempt_has_passed_no_one_as_a_restart_counts() -> None:
    here = world(gpus=1)
    job_id = job(here)
    waits = scavenge(here, user="eve")
    here.pass_time(AFTER_S)
    ask(here)
    here.pass_time(2.0)
    stop(here, job_id)
    assert here.position(waits) == 2
    assert here.ledger.bypasses == {}

    here.ledger.bypasses_recounted = False  # as it is read from the database
    here.pass_time(1.0)

    assert here.ledger.bypasses == {}
