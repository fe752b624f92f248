"""Per-user limits: a request at its user's limit waits and delays no one; one that could never be served is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpulease_protocol.errors import LeaseLost, NotNow, OverQuota
from gpulease_protocol.model import EndReason, Lease, LeaseState, Selection
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from tests.core.build import World


def world(size: int = 8, **limits: int) -> World:
    return World(policy=Policy(limits=UserLimits(**limits))).node(gpus=size)


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
def test_a_request_at_its_users_limit_waits_until_that_user_releases_something(
    limits: dict[str, int], first: int, second: int
) -> None:
    here = world(**limits)
    held = [here.lease(first), here.lease(1)]
    waits = here.lease(second)
    assert waits.state is LeaseState.QUEUED
    other = here.lease(second, user="bob")
    assert other.state is LeaseState.ACTIVE, "the request delays no one"
    here.release(held[0])
    here.pass_time(1.0)
    assert state(here, waits) is LeaseState.ACTIVE
    here.check()


def test_a_request_that_waits_at_a_limit_has_no_gpus_held_for_it() -> None:
    here = World(policy=Policy(limits=UserLimits(gpus=2), max_bypass=0)).node(gpus=4)
    here.lease(2)
    waits = here.lease(2)
    assert here.lease(2, user="bob").state is LeaseState.ACTIVE
    explanation = explain(here.ledger, here.ledger.leases[waits.id], here.now, here.policy)
    assert explanation.verdict == "not_now"
    assert "user ann has 2 GPUs and asks for 2 more; the limit is 2" in explanation.sentence
    assert explanation.position == 1


def test_a_request_that_does_not_wait_is_told_of_the_limit() -> None:
    here = world(leases=1)
    here.lease()
    answer = asked(here, queue=False)
    assert isinstance(answer, NotNow)
    assert "user ann has 1 lease; the limit is 1" in answer.detail


def test_a_request_over_what_its_user_may_ever_have_is_refused_for_good() -> None:
    here = world()
    here.policy = Policy(limits=UserLimits(gpus=4))
    for what in ({"count": 5}, {"count": 1, "selection": Selection.ALL}):
        answer = asked(here, **what)
        assert isinstance(answer, OverQuota)
        assert (answer.code, answer.status) == ("over_quota", 422)
        assert "may have 4" in answer.detail
    assert not here.ledger.queue


def test_auto_takes_no_more_than_its_user_may_have() -> None:
    here = World(policy=Policy(limits=UserLimits(gpus=3))).node(gpus=8)
    first = here.lease(1)
    assert len(here.lease(1, selection=Selection.AUTO).gpus) == 2
    here.release(first)


@pytest.mark.parametrize("fresher", ["a", "b"])
def test_a_whole_node_is_one_that_its_user_may_have_whichever_was_read_last(fresher: str) -> None:
    """Another node that is larger than the limit does not stand for it."""
    here = World(policy=Policy(limits=UserLimits(gpus=4))).node("a", gpus=8).node("b", gpus=4)
    here.at_s += 2
    here.report(fresher)
    answer = asked(here, selection=Selection.ALL, queue=False)
    assert isinstance(answer, Lease)
    assert {device.node for device in answer.gpus} == {"b"}


def test_who_asks_for_a_whole_node_is_told_which_the_limit_excludes() -> None:
    here = World(policy=Policy(limits=UserLimits(gpus=4))).node("a", gpus=8).node("b", gpus=4)
    here.lease(4, node="b", user="bob")
    answer = asked(here, selection=Selection.ALL, queue=False)
    assert isinstance(answer, NotNow)
    assert "Node a has 8 GPUs for it, and user ann may have 4 more." in answer.detail
    assert "GPU 0 of b is held by" in answer.detail
    assert {one.code for one in answer.extra["explanation"].obstacles} == {"over_limit", "leased"}


def test_a_request_for_a_whole_node_does_not_stand_for_that_of_a_user_with_more_room() -> None:
    here = World(policy=Policy(limits=UserLimits(gpus=8), max_bypass=0)).node("a", gpus=8).node("b", gpus=4)
    here.lease(4, node="b", user="cleo")
    here.node("c", gpus=2)
    here.lease(2, node="c")
    older = here.lease(1, selection=Selection.ALL, min_free_memory_bytes=1)
    assert older.state is LeaseState.QUEUED, "6 are left of ann's 8, and the node of 4 is in use"
    other = here.lease(1, selection=Selection.ALL, min_free_memory_bytes=1, user="bob")
    assert {device.node for device in other.gpus} == {"a"}, "nothing of that node is held for ann"


def test_a_job_that_pauses_before_its_retry_says_so() -> None:
    here = world()
    job = here.submit(retries=1)
    lease_id = here.ledger.jobs[job].job.lease_id
    here.ledger.not_before[lease_id] = here.at_s + 30
    record = here.ledger.leases[lease_id]
    queued = replace(record, lease=replace(record.lease, state=LeaseState.QUEUED))
    told = explain(here.ledger, queued, here.now, here.policy)
    assert f"job {job} pauses for another 30 s before its next attempt" in told.sentence


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


def test_reviving_an_expired_lease_does_not_pass_the_limit() -> None:
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
    assert isinstance(here.renew(first), Lease), "within the limit it is allowed"
