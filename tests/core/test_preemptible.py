"""`preemptible`: work of any priority that has agreed to end for others; and nothing ends for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulease_protocol.model import Demand, JobState, Lease, Priority
from gpulease_protocol.node_protocol import OwnerState
from gpulease_server.core.placement import find_candidates
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import job_view
from gpulease_server.replay.recorded_requests import RecordedRequest, with_priorities
from tests.core.build import World, gpu
from tests.core.test_adoption import adoption
from tests.core.test_preemption import (
    AFTER_S,
    RULES,
    TTL_S,
    ask,
    give_back,
    job,
    of,
    preempted_ids,
    scavenge,
    state,
    stop,
    why,
    world,
)

INTERACTIVE, NORMAL, SCAVENGE = Priority
OPEN = {"priority": NORMAL, "preemptible": True}


def opted_in(here: World, count: int = 1, **what: Any) -> Lease:
    return scavenge(here, count, **OPEN | what)


@pytest.mark.parametrize(
    ("held", "waiting", "preempts"),
    [
        (OPEN, {}, True),
        (OPEN, {"priority": INTERACTIVE, "time_s": 60.0}, True),
        (OPEN | {"priority": INTERACTIVE}, {}, True),
        ({"priority": NORMAL}, {}, False),
        ({"priority": NORMAL}, {"priority": INTERACTIVE, "time_s": 60.0}, False),
        ({"priority": INTERACTIVE}, {}, False),
        (OPEN, OPEN, False),
        (OPEN, OPEN | {"priority": INTERACTIVE, "time_s": 60.0}, False),
        ({}, OPEN, False),
    ],
)
def test_what_opted_in_ends_for_the_first_that_has_not_whatever_their_priorities_are(
    held: dict[str, Any], waiting: dict[str, Any], preempts: bool
) -> None:
    here = world(gpus=1)
    lease = scavenge(here, **held)
    here.pass_time(AFTER_S + 1.0)
    ask(here, **waiting)
    here.pass_time(5.0)
    assert preempted_ids(here) == ([lease.id] if preempts else [])


def test_two_that_have_opted_in_wait_for_each_other_and_the_one_behind_them_for_the_first() -> None:
    here = world(gpus=1)
    held = opted_in(here)
    here.pass_time(AFTER_S + 1.0)
    first, second = opted_in(here, user="eve", ttl_s=600.0), ask(here)
    here.pass_time(5.0)
    assert not preempted_ids(here), "the second passes no one, and the first has opted in"
    assert "asked for 1 GPU, preemptible; number 1 in the queue" in why(here, first.id)
    assert here.position(second) == 2

    give_back(here, held)
    here.report()
    here.pass_time(AFTER_S + 2.0)
    assert preempted_ids(here) == [first.id], "now the second is the first that waits"


def test_a_job_goes_on_from_its_old_place_before_those_of_its_priority_and_nothing_ends_for_it() -> None:
    here = world(gpus=2)
    other = opted_in(here, ttl_s=600.0)
    here.pass_time(1.0)
    job_id = job(here, **OPEN)
    here.pass_time(AFTER_S)
    firm = [ask(here), ask(here)]
    here.pass_time(2.0)
    assert preempted_ids(here) == [of(here, job_id).job.lease_id]
    stop(here, job_id)
    assert here.now_of(firm[0]).granted_at is not None

    again = of(here, job_id)
    assert (again.job.state, again.job.preempted) == (JobState.QUEUED, 1)
    next_lease = here.ledger.leases[again.job.lease_id].lease
    assert (next_lease.demand.priority, next_lease.demand.preemptible) == (NORMAL, True)
    assert [here.position(one) for one in (next_lease, firm[1])] == [1, 2]
    here.pass_time(5.0)
    assert len(preempted_ids(here)) == 1, "the first has opted in: nothing ends for it, nor for those behind it"
    assert "It is preemptible: after a notice, it may end for the first request that waits." in why(here, other.id)

    give_back(here, firm[0])
    here.report()
    assert of(here, job_id).job.state is JobState.STARTING
    here.pass_time(3.0)
    assert preempted_ids(here)[1:] == [other.id], "the second firm one is the first that waits"


def test_explain_says_of_what_is_preemptible_that_it_is_spared() -> None:
    here = world(gpus=2)
    assert "ends for no one: with a `ttl_s` of over 15 minutes" in why(here, opted_in(here, ttl_s=901.0).id)
    job_id = job(here, **OPEN)
    for _ in range(2):
        assert "it may end for the first request that waits" in why(here, of(here, job_id).job.lease_id)
        here.pass_time(AFTER_S)
        waits = ask(here)
        here.pass_time(2.0)
        stop(here, job_id)
        give_back(here, waits)
        here.report()
        here.run_job(job_id)
    assert why(here, of(here, job_id).job.lease_id).endswith(" It is not preempted again, as its job was twice.")


def test_the_record_says_what_holds() -> None:
    here = world(gpus=3)
    assert scavenge(here).demand.preemptible is True
    assert opted_in(here).demand.preemptible is True
    firm = ask(here)
    assert firm.demand.preemptible is False
    assert "preemptible" not in why(here, firm.id)
    job_ids = [here.submit(priority=SCAVENGE), here.submit(preemptible=True), here.submit()]
    assert [job_view(of(here, one)).preemptible for one in job_ids] == [True, True, False]


def test_where_it_is_off_nothing_ends_and_no_one_is_told_that_it_may() -> None:
    here = world(gpus=1, preemption=False)
    held = opted_in(here)
    here.pass_time(AFTER_S + 1.0)
    ask(here)
    here.pass_time(5.0)
    assert not preempted_ids(here)
    assert "preemptible" not in why(here, held.id)


def test_an_adopted_process_has_not_opted_in() -> None:
    here = World(policy=Policy(**RULES)).node(gpus=[gpu(0, pids=(42,))])
    here.owners[42] = OwnerState.ALIVE
    request = replace(adoption(here, 42), demand=Demand(preemptible=True), ttl_s=TTL_S)
    here.turn(request)
    here.answer_wanted()
    adopted = here.answers[request.cause]
    assert isinstance(adopted, Lease)
    assert adopted.demand.preemptible is False


def test_it_changes_no_place_in_the_queue_nor_the_gpus_that_are_looked_at() -> None:
    here = world(gpus=1)
    held = ask(here)
    waiting = [ask(here, preemptible=number % 2 == 0) for number in range(4)]
    assert [here.position(one) for one in waiting] == [1, 2, 3, 4]
    known = {id(find_candidates(here.ledger, one.demand)) for one in waiting}
    assert len(known) == 1, "one walk over the GPUs serves both"
    for lease in (held, *waiting):
        assert str(state(here, lease)) == "active"
        give_back(here, lease)
        here.report()


@pytest.mark.parametrize(
    ("recorded", "as_if", "expected"),
    [
        (Demand(priority=SCAVENGE, preemptible=True), NORMAL, Demand()),
        (Demand(priority=NORMAL, preemptible=True), INTERACTIVE, Demand(priority=INTERACTIVE, preemptible=True)),
        (Demand(), SCAVENGE, Demand(priority=SCAVENGE)),
    ],
)
def test_a_replay_of_another_priority_takes_the_consent_of_that(
    recorded: Demand, as_if: Priority, expected: Demand
) -> None:
    request = RecordedRequest(id="1", asked_at_s=0.0, duration_s=1.0, demand=recorded, user="ada")
    assert [one.demand for one in with_priorities([request], {"ada": as_if})] == [expected]
