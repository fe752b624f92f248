"""Preemption while something else happens: nothing ends without effect, and a restart changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulease_protocol.explanation import Preempts
from gpulease_protocol.model import (
    Demand,
    EndReason,
    Holder,
    JobSpec,
    JobState,
    Lease,
    LeaseState,
    NodeMode,
    Selection,
    TopologyMode,
)
from gpulease_server.core import victim_choice
from gpulease_server.core.elastic_growth import GROW_AFTER_S
from gpulease_server.core.happenings import JobSubmitted, SubmittedJob, Ticked
from gpulease_server.core.preempted_gpus import preemptions_under_way
from gpulease_server.core.records import NotBefore
from gpulease_server.runtime.outage import copy_ledger, reset_deadlines
from tests.core.build import World, uuid
from tests.core.test_elastic_jobs import elastic
from tests.core.test_preemption import (
    AFTER_S,
    NOTICE_S,
    TTL_S,
    ask,
    ends_in_s,
    give_back,
    job,
    keep,
    of,
    preempt_at,
    preempted_ids,
    preempts,
    scavenge,
    state,
    stop,
    why,
    world,
)
from tests.core.topologies import A100_BRIDGES


def noticed(count: int = 1, **asked: Any) -> tuple[World, Lease, Lease]:
    """A lease of all GPUs of node `a` that was told to end, and the request for which it is."""
    here = world(gpus=count)
    held = scavenge(here, count)
    here.pass_time(AFTER_S)
    waits = ask(here, count, **asked)
    here.pass_time(1.5)
    assert preempted_ids(here) == [held.id]
    return here, held, waits


def left_s(here: World, held: Lease) -> float:
    return float((preempt_at(here, held) - here.now.at).total_seconds())


def restart(here: World, down_s: float = 0.0) -> None:
    """Another process begins with what is in the database; no node has reported to it."""
    here.ledger = copy_ledger(here.ledger)
    here.lose_reports()
    here.ledger.bypasses_recounted = False
    for one in list(here.ledger.preemptions.values()):
        here.ledger.apply(replace(one, end_s=float("inf")))
    here.at_s += down_s
    reset_deadlines(here.ledger, here.now)


def test_explain_says_when_a_reservation_has_closed_what_was_held_to_the_request() -> None:
    here = world(gpus=1)
    held = scavenge(here, time_s=1000.0)
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(1.5)
    assert "GPU 0 of a is held for it" in why(here, waits.id)
    assert not isinstance(here.reserve(uuid(0), user="zoe"), Exception)
    assert "GPU 0 of a is no longer held for it" in why(here, waits.id)
    assert preempts(here, waits) == Preempts(leases=(held.id,), by=preempt_at(here, held))


def test_explain_names_no_gpu_as_held_that_was_cordoned_since() -> None:
    here = world(gpus=2)
    held = [scavenge(here, time_s=1000.0), scavenge(here, time_s=1000.0)]
    here.pass_time(AFTER_S)
    waits = ask(here, 2)
    here.pass_time(1.5)
    assert "GPUs 0, 1 of a are held for it" in why(here, waits.id)
    here.cordon(0)
    assert "GPU 1 of a is held for it; GPU 0 of a is no longer held for it." in why(here, waits.id)
    told = preempt_at(here, held[0])
    assert preempts(here, waits) == Preempts(leases=tuple(one.id for one in held), by=told, gpus=(uuid(1),))
    here.set_mode(NodeMode.DRAINING)
    assert "GPUs 0, 1 of a are no longer held for it" in why(here, waits.id)
    assert preempts(here, waits) == Preempts(leases=tuple(one.id for one in held), by=told)


def test_a_standby_that_does_not_know_when_a_lease_ends_by_its_own_clock_says_no_seconds() -> None:
    here, held, _ = noticed()
    assert ends_in_s(here, held) == pytest.approx(left_s(here, held), abs=0.11)
    for one in list(here.ledger.preemptions.values()):
        here.ledger.apply(replace(one, end_s=float("inf")))
    assert ends_in_s(here, held) is None
    assert preempt_at(here, held) is not None


def submit_array(here: World) -> None:
    """Two jobs of one GPU each, of which one may run at once."""
    spec = JobSpec(command=("train.py",), gpus=1)
    jobs = tuple(SubmittedJob(job_id=f"job-{at}", lease_id=f"lease-{at}", index=at, spec=spec) for at in ("x", "y"))
    here.turn(
        JobSubmitted(
            cause="array",
            jobs=jobs,
            name="",
            demand=Demand(count=1),
            holder=Holder(user="ada"),
            array_id="array",
            array_at_most=1,
        )
    )


def tick(here: World, *, stalled_s: float = 0.0) -> None:
    here.turn(Ticked(cause=f"tick-{next(here.ids)}", since_last_s=0.25 + stalled_s, stalled_s=stalled_s))


def spared(here: World, held: Lease, waits: Lease, why: str) -> None:
    """The lease goes on, as the request could not start."""
    keep(here, held, left_s(here, held) + 2.0)
    assert state(here, held) is LeaseState.ACTIVE
    assert why in str([one.reason for one in here.events("lease.preemption_withdrawn")])
    assert state(here, waits) is LeaseState.QUEUED


@pytest.mark.parametrize("has_heard", [True, False])
def test_a_restart_after_the_moment_neither_withdraws_it_nor_ends_a_lease_of_which_the_holder_has_not_heard(
    has_heard: bool,
) -> None:
    here, held, waits = noticed()
    moment = preempt_at(here, held)
    if has_heard:
        assert isinstance(here.renew(held), Lease)
    restart(here, left_s(here, held) + 5.0)
    tick(here)
    keep(here, held, TTL_S - 5.0)
    assert state(here, held) is LeaseState.ACTIVE
    assert preempt_at(here, held) == moment, "it is never moved"
    keep(here, held, 10.0)
    assert state(here, waits) is LeaseState.ACTIVE


def test_the_time_in_which_the_daemon_did_not_run_is_no_part_of_the_notice() -> None:
    here, held, waits = noticed()
    before_s = left_s(here, held)
    here.at_s += 3600.0
    tick(here, stalled_s=3600.0)
    assert preempt_at(here, held) is not None
    keep(here, held, before_s - 5.0)
    assert state(here, held) is LeaseState.ACTIVE
    keep(here, held, 10.0)
    assert state(here, waits) is LeaseState.ACTIVE


def test_nothing_ends_for_a_request_that_a_limit_keeps_out_by_then() -> None:
    here = world(gpus=1).node("b", gpus=1)
    ask(here, node="b")
    held = scavenge(here, node="a")
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(1.5)
    assert preempted_ids(here) == [held.id]
    here.limit("ada", max_gpus=1)
    spared(here, held, waits, "limit is 1")


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_held_beside_a_lease_that_goes_on_is_let_go_with_the_notice(restarts: bool) -> None:
    here = world(gpus=2)
    held, job_id = scavenge(here), job(here)
    here.pass_time(AFTER_S)
    waits, newer = ask(here, 2), ask(here, user="eve")
    here.pass_time(1.5)
    assert len(preempted_ids(here)) == 2
    stop(here, job_id)
    here.limit("ada", max_gpus=1)
    if restarts:
        restart(here)
        here.report()
    keep(here, held, here.ledger.preemptions[waits.id].end_s - here.at_s - 3.0)
    assert state(here, newer) is LeaseState.QUEUED, "the GPU of the job is held"
    keep(here, held, 5.0)
    assert state(here, held) is LeaseState.ACTIVE
    assert state(here, newer) is LeaseState.ACTIVE
    assert not any(preemptions_under_way(here.ledger, here.now, here.policy))
    here.limit("ada")
    give_back(here, held)
    give_back(here, newer)
    here.report()
    assert state(here, waits) is LeaseState.ACTIVE, "it waits as any"


def test_the_notice_is_withdrawn_where_the_array_of_a_job_runs_as_many_jobs_as_it_may_by_then() -> None:
    here = world(gpus=1)
    held = scavenge(here)
    here.pass_time(AFTER_S)
    submit_array(here)
    here.ledger.apply(NotBefore("lease-x", here.at_s + 5.0))  # as before a retry
    here.pass_time(2.0)
    assert list(here.ledger.preemptions) == ["lease-y"]
    assert preempted_ids(here) == [held.id]
    keep(here, held, 5.0)
    here.node("b", gpus=1)
    assert of(here, "job-x").job.state is JobState.STARTING
    spared(here, held, here.ledger.leases["lease-y"].lease, "array array runs as many jobs as it may at once")
    here.run_job("job-x", "b")
    here.ended("job-x", node="b")
    assert of(here, "job-y").job.state is JobState.STARTING, "on the GPU of the first, as nothing is held for it"
    keep(here, held, TTL_S)
    assert state(here, held) is LeaseState.ACTIVE


def test_a_newer_request_of_the_same_user_leaves_what_one_that_preempts_needs_of_their_limit() -> None:
    here = world(gpus=2)
    here.limit("ada", max_gpus=2)
    job_id = job(here, 2)
    here.pass_time(AFTER_S)
    waits = ask(here, 2)
    here.pass_time(1.5)
    here.node("b", gpus=1)
    newer, other = ask(here, 1), ask(here, 1, user="eve")
    assert state(here, newer) is LeaseState.QUEUED
    assert state(here, other) is LeaseState.ACTIVE
    stop(here, job_id)
    assert state(here, waits) is LeaseState.ACTIVE


def test_an_array_runs_no_more_jobs_than_it_may_on_the_gpus_that_are_held_for_one_of_them() -> None:
    here = world(gpus=1)
    job_id = job(here)
    here.pass_time(AFTER_S)
    submit_array(here)
    here.ledger.apply(NotBefore("lease-x", here.at_s + 5.0))  # as before a retry
    here.pass_time(2.0)
    assert list(here.ledger.preemptions) == ["lease-y"]
    here.pass_time(5.0)
    here.node("b", gpus=1)
    assert of(here, "job-x").job.state is JobState.STARTING
    stop(here, job_id)
    here.pass_time(1.0)
    assert of(here, "job-y").job.state is JobState.QUEUED


def test_nothing_ends_for_a_request_with_a_gpu_that_has_gone_back_to_its_former_holder() -> None:
    here = world(gpus=2)
    held, former = scavenge(here), ask(here)
    here.pass_time(AFTER_S)
    here.ledger.deadlines[former.id] = here.at_s
    here.ledger.due.push(former.id, here.ledger.deadlines)
    tick(here)
    assert here.now_of(former).end_reason is EndReason.EXPIRED
    here.report()
    waits = ask(here, 2)
    here.pass_time(1.5)
    assert preempted_ids(here) == [held.id]
    assert isinstance(here.renew(former), Lease)
    spared(here, held, waits, "GPU 1 of a")


def test_nothing_ends_beside_a_job_that_does_not_die() -> None:
    here = world(gpus=2)
    held, job_id = scavenge(here), job(here)
    here.pass_time(AFTER_S)
    waits = ask(here, 2)
    here.pass_time(1.5)
    assert len(preempted_ids(here)) == 2
    here.jobs["a"] = [replace(one, unkillable=(99,)) for one in here.jobs["a"]]
    spared(here, held, waits, job_id)


@pytest.mark.parametrize("what", ["reserved", "the node goes"])
def test_nothing_is_told_to_end_for_a_request_that_would_not_be_done_in_time_once_it_could_start(what: str) -> None:
    here = world(gpus=1)
    job(here, timeout_s=600.0)
    here.pass_time(AFTER_S)
    time_s, until_s = 600.0, 600.0 + (420.0 if what == "reserved" else 0.0) + NOTICE_S / 2
    if what == "reserved":
        assert not isinstance(here.reserve(here.nodes["a"][0].uuid, after_s=until_s, user="zoe"), Exception)
    else:
        here.report(available_s=until_s)
    waits = ask(here, time_s=time_s)
    here.turn(Ticked(cause="look", since_last_s=1.0, stalled_s=0.0))
    assert state(here, waits) is LeaseState.QUEUED
    assert not preempted_ids(here)


def test_a_job_that_was_preempted_twice_goes_first_until_it_is_granted_and_not_in_its_retries() -> None:
    here = world(gpus=1)
    job_id = job(here, retries=1)
    for _ in range(2):
        here.pass_time(AFTER_S)
        waits = ask(here)
        here.pass_time(2.0)
        stop(here, job_id)
        give_back(here, waits)
        here.report()
        here.run_job(job_id)
    stop(here, job_id, exit_code=1, reason="exit code 1")
    assert of(here, job_id).job.state is JobState.QUEUED
    assert of(here, job_id).job.lease_id not in here.ledger.go_first


def test_a_preempted_attempt_was_passed_by_no_one_while_it_ran() -> None:
    here = world(gpus=2)
    job_id = job(here)
    for _ in range(3):
        give_back(here, scavenge(here, user="eve"))
        here.report()
    ask(here, user="eve")
    here.pass_time(AFTER_S)
    ask(here)
    here.pass_time(2.0)
    stop(here, job_id)
    assert here.ledger.bypasses == {}
    restart(here)
    here.pass_time(1.0)
    assert here.ledger.bypasses == {}


def test_it_starts_on_held_gpus_and_others_together_and_then_nothing_ends() -> None:
    here = world(gpus=3)
    held, other = scavenge(here), ask(here, user="eve")
    here.pass_time(AFTER_S)
    waits = ask(here, 2)
    here.pass_time(1.5)
    assert preempted_ids(here) == [held.id]
    give_back(here, other)
    here.report()
    assert state(here, waits) is LeaseState.ACTIVE
    keep(here, held, TTL_S + NOTICE_S)
    assert state(here, held) is LeaseState.ACTIVE


def test_an_elastic_job_does_not_grow_onto_gpus_that_are_held() -> None:
    here = world(gpus=2).node("b", gpus=2).node("c", gpus=2)
    held, job_id = scavenge(here, 2, node="c"), elastic(here, user="bob")
    here.pass_time(AFTER_S)
    waits = ask(here, 2)
    here.pass_time(1.5)
    assert preempted_ids(here) == [held.id]
    here.limit("ada", max_gpus=1)
    give_back(here, held)
    here.pass_time(GROW_AFTER_S + 5.0)
    assert state(here, waits) is LeaseState.QUEUED
    assert of(here, job_id).job.state is JobState.RUNNING, "it does not start again with node c"


@pytest.mark.parametrize(("most_sets", "node"), [(1, None), (2, "a"), (12, "b")])
def test_the_search_for_the_smallest_set_is_bounded_for_all_nodes_together(
    most_sets: int, node: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(victim_choice, "MAX_SETS", most_sets)
    here = World(policy=world(0).policy)
    report = here.report
    monkeypatch.setattr(here, "report", lambda name: report(name, links=A100_BRIDGES.links(name)))
    for name in ("a", "b"):
        here.node(name, gpus=A100_BRIDGES.readings(name))
        for index in (0, 2, 1, 3):  # so that the two that have held their GPUs for the least time have no bridge
            scavenge(here, node=name, indices=(index,), selection=Selection.LISTED)
            here.pass_time(1.0)
    here.pass_time(AFTER_S)
    ask(here, 2, topology=TopologyMode.REQUIRED)
    here.pass_time(1.5)
    on = {device.node for lease_id in preempted_ids(here) for device in here.ledger.leases[lease_id or ""].lease.gpus}
    assert on == ({node} if node else set())
