"""What one user may have: who is at his limit waits and is in nobody's way; who could never be served is refused."""

from __future__ import annotations

import pytest

from gpulease.errors import LeaseLost, NotNow, OverQuota
from gpulease.model import EndReason, Lease, LeaseState, Selection
from gpulease_server.core.explain import explain
from gpulease_server.core.quota import Limits
from gpulease_server.core.turn import Policy
from tests.core.build import World


def world(size: int = 8, **limits: int) -> World:
    return World(policy=Policy(limits=Limits(**limits))).node(gpus=size)


def asked(world: World, count: int = 1, **what: object) -> object:
    """The answer to a request, after every reading that was wanted for it."""
    call = world.ask(count, **what)  # type: ignore[arg-type]
    world.answer_wanted()
    world.check()
    return world.answers[call]


def state(world: World, lease: Lease) -> LeaseState:
    return world.now_of(lease).state


@pytest.mark.parametrize(
    ("limits", "first", "second"),
    [({"leases": 2}, 1, 1), ({"gpus": 4}, 2, 3), ({"gpus": 2}, 1, 1), ({"leases": 2, "gpus": 100}, 3, 3)],
)
def test_who_is_at_his_limit_waits_until_he_gives_something_back(
    limits: dict[str, int], first: int, second: int
) -> None:
    here = world(**limits)
    held = [here.lease(first), here.lease(1)]
    waits = here.lease(second)
    assert waits.state is LeaseState.QUEUED
    other = here.lease(second, user="bob")
    assert other.state is LeaseState.ACTIVE, "he delays nobody"
    here.release(held[0])
    here.pass_time(1.0)
    assert state(here, waits) is LeaseState.ACTIVE
    here.check()


def test_a_request_that_waits_at_a_limit_has_no_gpus_held_for_it() -> None:
    here = World(policy=Policy(limits=Limits(gpus=2), max_bypass=0)).node(gpus=4)
    here.lease(2)
    waits = here.lease(2)
    assert here.lease(2, user="bob").state is LeaseState.ACTIVE
    explanation = explain(here.ledger, here.ledger.leases[waits.id], here.now, here.policy)
    assert explanation.verdict == "not_now"
    assert "user ann has 2 GPUs, asks for 2, and may have 2" in explanation.sentence
    assert explanation.position == 1


def test_who_would_not_wait_is_told_of_his_limit() -> None:
    here = world(leases=1)
    here.lease()
    answer = asked(here, queue=False)
    assert isinstance(answer, NotNow)
    assert "user ann has 1 lease, and may have 1" in answer.detail


def test_a_request_over_what_its_user_may_ever_have_is_refused_for_good() -> None:
    here = world()
    here.policy = Policy(limits=Limits(gpus=4))
    for what in ({"count": 5}, {"count": 1, "selection": Selection.ALL}):
        answer = asked(here, **what)
        assert isinstance(answer, OverQuota)
        assert (answer.code, answer.status) == ("over_quota", 422)
        assert "may have 4" in answer.detail
    assert not here.ledger.queue


def test_auto_takes_no_more_than_its_user_may_have() -> None:
    here = World(policy=Policy(limits=Limits(gpus=3))).node(gpus=8)
    first = here.lease(1)
    assert len(here.lease(1, selection=Selection.AUTO).gpus) == 2
    here.release(first)


def test_one_user_does_not_fill_the_queue() -> None:
    here = world(1, queued=2)
    here.lease()
    waiting = [here.lease() for _ in range(2)]
    answer = asked(here)
    assert isinstance(answer, OverQuota)
    assert answer.status == 429
    assert here.lease(user="bob").state is LeaseState.QUEUED
    here.release(waiting[0])
    assert here.lease().state is LeaseState.QUEUED


def test_many_requests_of_one_turn_are_counted_one_by_one() -> None:
    here = world(4, leases=2)
    calls = [here.ask() for _ in range(4)]
    here.answer_wanted()
    states = [here.answers[call].state for call in calls]  # type: ignore[union-attr]
    assert sorted(states) == [LeaseState.ACTIVE] * 2 + [LeaseState.QUEUED] * 2
    here.check()


def test_the_jobs_of_a_user_count() -> None:
    here = world(leases=1)
    here.submit()
    second = here.submit()
    assert here.ledger.jobs[second].job.state.value == "queued"


def test_a_lease_is_revoked_without_its_token_and_its_holder_learns_of_it() -> None:
    here = World().node(gpus=2)
    lease = here.lease()
    ended = here.revoke(lease)
    assert isinstance(ended, Lease)
    assert (ended.state, ended.end_reason) == (LeaseState.ENDED, EndReason.REVOKED)
    assert here.revoke(lease) == ended, "saying it twice is answered the same twice"
    assert getattr(here.release(lease), "code", None) == "lease_lost"
    assert getattr(here.renew(lease), "code", None) == "lease_lost"
    kinds = [change.kind for change in here.changes if hasattr(change, "kind")]
    assert [kind for kind in kinds if kind.startswith("lease.")] == [
        "lease.granted",
        "lease.revoked",
        "lease.ended",
        "lease.lost",
    ]


def test_a_wrong_token_revokes_nothing() -> None:
    here = World().node(gpus=2)
    lease = here.lease()
    assert getattr(here.revoke(lease, token=77), "code", None) == "stale_token"
    assert state(here, lease) is LeaseState.ACTIVE


def test_a_waiting_request_can_be_revoked() -> None:
    here = World().node(gpus=1)
    here.lease()
    waits = here.lease()
    here.revoke(waits)
    assert here.now_of(waits).end_reason is EndReason.REVOKED
    here.check()


def test_nobody_gets_past_his_limit_by_reviving_what_has_expired() -> None:
    here = world(gpus=2)
    first = here.lease(2, ttl_s=5.0)
    here.pass_time(6.0)
    assert state(here, first) is LeaseState.ENDED
    for index in (0, 1):
        here.cordon(index)
    second = here.lease(2, ttl_s=60.0)
    for index in (0, 1):
        here.cordon(index, cordoned=False)
    assert second.state is LeaseState.ACTIVE
    assert not set(first.gpus) & set(second.gpus), "else the lease could not be revived anyway"
    assert isinstance(here.renew(first), LeaseLost)
    here.release(second)
    here.pass_time(1.0)
    assert isinstance(here.renew(first), Lease), "within his limit he may"
