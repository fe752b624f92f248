"""Priorities: who goes first, what interactive requests cost, and why no one starves."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gpulease_protocol.errors import LeaseLost, OverQuota
from gpulease_protocol.model import Demand, EndReason, Holder, JobSpec, Lease, LeaseState, Priority
from gpulease_server.core.demand_classes import DemandClasses
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.happenings import JobSubmitted, SubmittedJob
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.order import Positions, in_order, position
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import LeaseRecord, NotBefore
from gpulease_server.runtime.outage import reset_deadlines
from tests.core.build import World

LONG_S = 1e7
INTERACTIVE, NORMAL, SCAVENGE = Priority
HOUR_S = 3600.0


def world_of(gpus: int = 1, **what: Any) -> World:
    return World(policy=Policy(**{"max_bypass_s": LONG_S} | what)).node(gpus=gpus)


def ask(world: World, count: int = 1, priority: Priority = NORMAL, **what: Any) -> Lease:
    lease = world.lease(count, **{"ttl_s": LONG_S, "priority": priority, **what})
    world.check()
    return lease


def give_back(world: World, lease: Lease) -> None:
    node = world.now_of(lease).gpus[0].node
    world.release(world.now_of(lease))
    world.report(node)
    world.check()


def is_active(world: World, lease: Lease) -> bool:
    return world.now_of(lease).state is LeaseState.ACTIVE


def granted_in_turn(world: World, held: Lease, waiting: list[Lease]) -> list[Lease]:
    """The requests in the order of their grants, where one GPU is given back after the other."""
    found: list[Lease] = []
    while len(found) < len(waiting):
        give_back(world, held)
        (held,) = [lease for lease in waiting if is_active(world, lease)]
        found.append(held)
    return found


def test_higher_priorities_go_first_and_each_in_order_of_arrival() -> None:
    world = world_of()
    held = ask(world)
    low = [ask(world, priority=SCAVENGE, user=user) for user in ("ann", "bob")]
    middle = [ask(world, user=user) for user in ("ann", "bob")]
    high = [ask(world, priority=INTERACTIVE, user=user) for user in ("ann", "bob")]
    expected = [*high, *middle, *low]
    assert [world.position(lease) for lease in expected] == [1, 2, 3, 4, 5, 6]
    assert [record.lease.id for record in in_order(world.ledger)] == [lease.id for lease in expected]
    assert [one.id for one in granted_in_turn(world, held, expected)] == [one.id for one in expected]


def test_a_lower_priority_takes_what_the_higher_one_cannot_use_now_but_not_for_long() -> None:
    world = world_of(gpus=4, max_bypass=2)
    held = ask(world, 3)
    large = ask(world, 2)
    small = [ask(world, priority=SCAVENGE) for _ in range(4)]
    assert [is_active(world, lease) for lease in small] == [True, False, False, False], "the free GPU is too little"
    give_back(world, small[0])
    assert is_active(world, small[1])
    give_back(world, small[1])
    assert not is_active(world, small[2]), "the GPU is held for the request of higher priority, which was passed twice"
    give_back(world, held)
    assert is_active(world, large)


def test_a_newer_request_of_higher_priority_is_no_bypass_of_an_older_one() -> None:
    world = world_of(gpus=2, max_bypass=1)
    held = [ask(world), ask(world)]
    older = ask(world, 2, priority=SCAVENGE)
    for _ in range(3):
        newer = ask(world, user="bob")
        give_back(world, held.pop(0))
        assert is_active(world, newer)
        held.append(newer)
    assert older.id not in world.ledger.bypasses


def test_interactive_requests_of_a_user_get_few_gpus_at_a_time_and_delay_no_one() -> None:
    world = world_of(gpus=4)
    first = ask(world, 2, priority=INTERACTIVE)
    second = ask(world, priority=INTERACTIVE)
    assert is_active(world, first)
    assert not is_active(world, second)
    assert (
        "by interactive requests"
        in explain(world.ledger, world.ledger.leases[second.id], world.now, world.policy).sentence
    )
    assert is_active(world, ask(world, user="bob", priority=INTERACTIVE)), "another user has a limit of their own"
    assert is_active(world, ask(world)), "the limit is only one of interactive requests"
    give_back(world, first)
    assert is_active(world, second)


def test_an_interactive_request_that_the_limit_keeps_out_is_not_passed_by_newer_ones_of_its_user() -> None:
    world = world_of(gpus=8)
    held = [ask(world, priority=INTERACTIVE), ask(world, priority=INTERACTIVE)]
    older = ask(world, 2, priority=INTERACTIVE)
    newer = ask(world, priority=INTERACTIVE)
    give_back(world, held[0])
    assert not is_active(world, newer)
    give_back(world, held[1])
    assert is_active(world, older)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"count": 3}, "user ann may have 2 at a time by interactive requests"),
        ({"time_s": 5 * HOUR_S}, "an interactive lease of user ann may last 4 h (14400 s)"),
    ],
)
def test_an_interactive_request_for_too_much_is_refused(what: dict[str, Any], said: str) -> None:
    world = world_of(gpus=8)
    call = world.ask(**{"priority": INTERACTIVE} | what)
    world.answer_wanted()
    refused = world.answers[call]
    assert isinstance(refused, OverQuota), refused
    assert said in refused.detail
    assert refused.status == 422
    assert not world.ledger.leases


def test_without_its_limits_an_interactive_request_is_like_any_other() -> None:
    world = world_of(gpus=8, limits=UserLimits(interactive_gpus=0, interactive_s=0))
    lease = ask(world, 8, priority=INTERACTIVE)
    assert is_active(world, lease)
    assert lease.demand.time_s is None


def test_an_interactive_lease_ends_after_its_time_however_often_it_is_renewed() -> None:
    world = world_of(limits=UserLimits(interactive_s=100.0))
    lease = ask(world, priority=INTERACTIVE)
    world.at_s += 60.0
    renewed = world.renew(lease)
    assert isinstance(renewed, Lease)
    assert renewed.ends_at is not None
    assert abs((renewed.ends_at - world.now.at).total_seconds() - 40.0) < 0.1
    world.pass_time(39.0)
    assert is_active(world, lease)
    world.pass_time(2.0)
    assert world.now_of(lease).end_reason is EndReason.TIME_OVER
    assert isinstance(world.renew(lease), LeaseLost)


def test_a_declared_time_is_kept_after_a_restart() -> None:
    world = world_of()
    lease = ask(world, time_s=100.0, ttl_s=40.0)
    world.at_s += 50.0
    restart(world, lease)
    world.renew(lease)
    world.pass_time(30.0)
    world.renew(lease)
    world.pass_time(15.0)
    assert is_active(world, lease)
    world.pass_time(6.0)
    assert world.now_of(lease).end_reason is EndReason.TIME_OVER


def restart(world: World, lease: Lease) -> None:
    record = world.ledger.leases[lease.id]
    object.__setattr__(record, "granted_at_s", None)  # as it is loaded
    world.ledger.apply(record)
    reset_deadlines(world.ledger, world.now)


def test_a_wall_clock_that_was_put_forward_before_a_restart_leaves_a_holder_the_ttl() -> None:
    world = world_of()
    lease = ask(world, time_s=100.0, ttl_s=20.0)
    world.wall_jump_s = 3600.0
    restart(world, lease)
    world.pass_time(18.0)
    assert is_active(world, lease), "the holder renewed just before"
    world.pass_time(3.0)
    assert world.now_of(lease).end_reason in (EndReason.TIME_OVER, EndReason.EXPIRED)


def test_an_interactive_job_is_ended_by_its_node_after_the_time_of_interactive_requests() -> None:
    world = world_of()
    spec = JobSpec(command=("train.py",), gpus=1, priority=INTERACTIVE)
    world.turn(
        JobSubmitted(
            cause="submit",
            jobs=(SubmittedJob(job_id="job", lease_id="lease", spec=spec),),
            name="",
            demand=Demand(priority=INTERACTIVE),
            holder=Holder(user="ann"),
        )
    )
    world.answer_wanted()
    assert world.ledger.jobs["job"].spec.timeout_s == 4 * HOUR_S
    world.pass_time(1.0)
    assert not world.ledger.ends_s, "the lease of a job ends with its job"


def flood(world: World, target: Lease, held: list[Lease], most: int, **newer: Any) -> int:
    """Newer requests of other users come without end, each as a GPU is given back. How many were granted first."""
    for number in range(most):
        ask(world, user=f"user {number}", **newer)
        give_back(world, held.pop(0))
        if is_active(world, target):
            return number
        held += [
            record.lease
            for record in world.ledger.leases.values()
            if record.lease.state is LeaseState.ACTIVE
            and record.lease not in held
            and record.lease.gpus[0].node in world.nodes
        ]
    raise AssertionError("it starves")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("older", [0, 2])
def test_no_flood_of_higher_priority_starves_a_request(count: int, older: int) -> None:
    world = world_of(gpus=2, max_bypass=3, max_overtakes=5)
    held = [ask(world), ask(world)]
    for _ in range(older):
        ask(world, priority=SCAVENGE)
    target = ask(world, count, priority=SCAVENGE)
    first = flood(world, target, held, 200, priority=INTERACTIVE)
    assert first >= 5, "the higher priority goes first"
    assert first <= (older + 1) * (5 + 1 + 3 * count)


def test_who_has_waited_longest_and_waits_for_an_absent_node_does_not_keep_others_from_their_turn() -> None:
    world = world_of(gpus=1, max_overtakes=4).node("b", gpus=1)
    absent = [ask(world), ask(world, node="b")]
    for_absent = ask(world, priority=SCAVENGE, node="b")
    target = ask(world, priority=SCAVENGE, node="a")
    held = [lease for lease in absent if world.now_of(lease).gpus[0].node == "a"]
    del world.nodes["b"]
    world.pass_time(10.0)
    assert flood(world, target, held, 100, priority=NORMAL, node="a") <= 10
    assert for_absent.id not in world.ledger.go_first


def test_the_request_that_goes_first_says_so_and_is_number_one() -> None:
    world = world_of(max_overtakes=1)
    held = ask(world)
    waiting = [ask(world, priority=SCAVENGE) for _ in range(2)]
    newer = [ask(world, user=user) for user in "bcd"]
    give_back(world, held)
    assert is_active(world, newer[0])
    give_back(world, newer[0])
    assert is_active(world, waiting[0]), "one overtook it, so it went first"
    give_back(world, waiting[0])
    assert is_active(world, newer[1])
    world.turn()
    assert [world.position(lease) for lease in (waiting[1], newer[2])] == [2, 1]


def test_where_all_are_of_one_priority_nothing_is_counted() -> None:
    world = world_of(gpus=2, max_overtakes=1)
    held = [ask(world), ask(world)]
    ask(world, 2)
    for _ in range(4):
        newer = ask(world)
        give_back(world, held.pop(0))
        held.append(newer)
    assert (world.ledger.overtakes, world.ledger.go_first) == (0, {})


def waiting_in_every_way(seed: int) -> World:
    """Requests of all priorities, some of which go first, and some of which pause."""
    drawn = random.Random(seed)
    world = world_of(gpus=2, max_overtakes=3, fair_share=bool(seed % 2))
    ask(world, 2)
    for number in range(40):
        what = {"user": f"user {number % 5}", "priority": drawn.choice(list(Priority)), "time_s": 1000.0 + number % 7}
        ask(world, drawn.choice([1, 1, 2]), **what)
        if number % 4 == 0:
            active = [one.lease for one in world.ledger.leases.values() if one.lease.state is LeaseState.ACTIVE]
            give_back(world, drawn.choice(active))
    for lease_id in drawn.sample([lease_id for _, lease_id in world.ledger.queue], 3):
        world.ledger.apply(NotBefore(lease_id, world.now.mono_s + 60.0))
    return world


@pytest.mark.parametrize("seed", range(4))
def test_the_places_of_many_are_those_of_each(seed: int) -> None:
    ledger = waiting_in_every_way(seed).ledger
    assert ledger.go_first
    positions = Positions(ledger)
    found = [positions.of(record) for record in ledger.queued()]
    assert found == [position(ledger, record) for record in ledger.queued()]
    assert sorted(found) == list(range(1, len(found) + 1))


def test_a_pause_before_a_retry_moves_no_one_of_higher_priority_back() -> None:
    world = world_of(retry_pause_s=(100.0, 100.0))
    job_id = world.submit(retries=1)
    world.run_job(job_id)
    world.ended(job_id, 1)
    ask(world, priority=INTERACTIVE)
    retry, waiting = world.ledger.jobs[job_id].job.lease_id, ask(world, priority=INTERACTIVE, user="bob")
    places = [world.ledger.leases[one] for one in (waiting.id, retry)]
    assert [position(world.ledger, one) for one in places] == [1, 2]
    assert [Positions(world.ledger).of(one) for one in places] == [1, 2]
    assert list(in_order(world.ledger)) == places
    said = [explain(world.ledger, one, world.now, world.policy).sentence for one in places]
    assert "; number 1 in the queue." in said[0]
    assert "; number 2 in the queue, behind 1 of higher priority." in said[1]


def test_the_place_of_one_costs_no_look_at_each_that_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet on which every job fails has thousands of retries, and each answer about a request has its place."""
    world = world_of()
    waiting = [ask(world) for _ in range(40)][1:]
    for lease in waiting[:-1]:
        world.ledger.apply(NotBefore(lease.id, world.now.mono_s + 60.0))
    high, looked_at = ask(world, priority=INTERACTIVE), list[LeaseRecord]()
    place = Ledger.ordered_place
    monkeypatch.setattr(Ledger, "ordered_place", lambda self, one: looked_at.append(one) or place(self, one))
    records = [world.ledger.leases[lease.id] for lease in (high, *waiting)]
    assert [position(world.ledger, one) for one in records] == list(range(1, 41))
    world.release(high)
    assert [position(world.ledger, one) for one in records[1:]] == list(range(1, 40))
    assert len(looked_at) <= len(records)


def test_no_turn_looks_for_a_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs a look at each class of requests, and the writer has none of it: who shows the lease finds its place."""
    monkeypatch.setattr(DemandClasses, "count_before", lambda *_: pytest.fail("within a turn"))
    world = world_of()
    held = ask(world)
    waiting = [ask(world, priority=priority) for priority in (SCAVENGE, NORMAL)]
    give_back(world, held)
    assert is_active(world, waiting[1])
