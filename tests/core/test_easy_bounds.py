"""What those who run ahead can do to the ones that they pass is bounded."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.model import JobState, LeaseState, Priority
from gpulease_server.core import easy_backfill
from gpulease_server.core.policy import Policy
from tests.core.build import World, gpu, uuid
from tests.core.test_bypass import ask, explained, give_back, is_active, pass_by, world_of
from tests.core.test_easy_backfill import (
    DAY_S,
    HOUR_S,
    SETTLES_S,
    leaves_a_process,
    listed,
    pass_time,
    passed,
    sentence,
    waits_for_all,
    withdraw,
)


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_is_held_stays_where_it_is_while_others_run_ahead_there(nodes: int) -> None:
    """Else one without a time takes what moved, and the first waits for that one as long as it likes. `nodes`: a gang
    is served in the same way."""
    world = world_of(easy_backfill=True, max_bypass=2, **{name: 4 for name in "abcd"[: 2 * nodes]})
    near, far = "abcd"[:nodes], "abcd"[nodes : 2 * nodes]
    for name in near:
        listed(world, 3, node=name, time_s=HOUR_S, user="bob")
    for name in far:
        listed(world, 2, 3, node=name, time_s=10 * HOUR_S, user="bob")
    first = ask(world, 4, nodes=nodes)
    pass_by(world, 2, node=far[0], user="eve")
    held = set(explained(world, first).held)
    assert len(held) == 3 * nodes

    ahead = [ask(world, 2, node=name, time_s=HOUR_S / 2, user="eve") for name in near]
    without_time = ask(world, node=near[0], user="eve")
    assert is_active(world, *ahead, without_time) == [True] * nodes + [False]
    assert set(explained(world, first).held) == held - {gpu.uuid for one in ahead for gpu in one.gpus}
    withdraw(world, without_time)
    pass_time(world, HOUR_S + 1)

    assert is_active(world, first) == [True]


def test_what_has_run_ahead_is_kept_for_the_one_that_waits_longest() -> None:
    """Who waits behind it gets GPUs held elsewhere."""
    world = world_of(easy_backfill=True, max_bypass=2, a=4, b=4)
    listed(world, 3, node="a", time_s=HOUR_S, user="bob")
    listed(world, 2, 3, node="b", time_s=HOUR_S, user="bob")
    first, second = ask(world, 4), ask(world, 4)
    pass_by(world, 2, node="b", user="eve")
    assert is_active(world, first, second) == [False, False]

    ahead = ask(world, 3, node="a", time_s=HOUR_S / 2, user="eve")

    assert ahead.state is LeaseState.ACTIVE
    assert (len(explained(world, first).held), len(explained(world, second).held)) == (0, 2)
    give_back(world, ahead)
    assert (len(explained(world, first).held), len(explained(world, second).held)) == (3, 2)
    withdraw(world, first, second)


@pytest.mark.parametrize("max_bypass", [0, 3])
def test_who_has_a_lease_in_the_way_does_not_run_ahead_because_of_its_end(max_bypass: int) -> None:
    """They could give it back at once, and the first would wait for what ran ahead."""
    world = world_of(easy_backfill=True, max_bypass=max_bypass)
    listed(world, 3, time_s=30 * DAY_S, user="eve")
    first = ask(world, 4, user="ann")

    of_another = ask(world, time_s=HOUR_S, user="fay")
    same_user = ask(world, time_s=HOUR_S, user="eve")

    assert is_active(world, of_another, same_user) == [True, max_bypass > 0]
    assert passed(world, first) == (max_bypass > 0), "by the grant to eve, where that is allowed"


def test_nor_because_of_the_end_of_one_that_they_were_granted_in_the_same_turn() -> None:
    world = world_of(easy_backfill=True, max_bypass=3)
    theirs = listed(world, 0, 1, 2, user="fay")
    listed(world, 3, time_s=5 * HOUR_S, user="gil")
    first, longer = ask(world, 4, user="bob"), ask(world, time_s=10 * HOUR_S, user="eve")
    second, shorter = ask(world, 3, user="bob"), ask(world, time_s=4 * HOUR_S, user="eve")

    give_back(world, theirs)

    assert is_active(world, first, longer, second, shorter) == [False, True, False, True]
    assert (passed(world, first), passed(world, second)) == (1, 1), "eve could give back the longer one at once"


@pytest.mark.parametrize("others_wait", [False, True])
def test_where_one_user_waits_their_own_ends_count(others_wait: bool) -> None:
    """Another one may ask for the same behind them."""
    world = world_of(easy_backfill=True, max_bypass=0)
    listed(world, 3, time_s=10 * HOUR_S, user="eve")
    ask(world, 4, user="eve")
    if others_wait:
        ask(world, 4, user="ann")

    assert (ask(world, time_s=HOUR_S, user="eve").state is LeaseState.ACTIVE) is not others_wait


@pytest.mark.parametrize(("over_s", "starts"), [(-1.0, True), (1.0, False)])
def test_no_one_runs_ahead_for_more_than_a_day(over_s: float, *, starts: bool) -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    listed(world, 3, time_s=30 * DAY_S, user="bob")
    first = ask(world, 4)
    asked = ask(world, user="eve")
    said = re.search(r"With a `time_s` of at most (\d+) s it could start now", sentence(world, asked))
    withdraw(world, asked)

    longer = ask(world, time_s=DAY_S - SETTLES_S + over_s, user="eve")

    assert said is not None
    assert float(said.group(1)) == DAY_S - SETTLES_S
    assert is_active(world, first, longer) == [False, starts]


@pytest.mark.parametrize("why", ["its token has a budget", "its user has a lease in the way", "its user is late"])
def test_one_that_may_not_run_ahead_keeps_no_one_from_it_who_asks_for_the_same(why: str) -> None:
    """Not even while it is passed less often than it may be."""
    world = world_of(easy_backfill=True, max_bypass=2)
    listed(world, 3, time_s=10 * HOUR_S, user="eve" if why == "its user has a lease in the way" else "bob")
    if why != "its user is late":
        listed(world, 2, user="cat")
    first = ask(world, 4, user="ann")
    if why == "its user is late":
        leaves_a_process(world, ask(world, user="eve", time_s=60.0))
        pass_time(world, world.policy.leftover_after_s)
    what = {"token": "t", "budget": Budget(gpu_hours_per_day=5.0)} if why == "its token has a budget" else {}
    own = [ask(world, user="cat"), ask(world, user="cat")]
    same = [ask(world, user=user, time_s=60.0, **what) for user, what in (("eve", what), ("fay", {}), ("gus", {}))]
    assert is_active(world, *own, *same) == [True, True, False, False, False]

    for one in own:
        give_back(world, one)

    assert is_active(world, first, *same) == [False, False, True, True]


def test_a_job_keeps_no_lease_with_the_same_time_from_running_ahead() -> None:
    """A lease has its GPUs for less time beside what is declared."""
    world = world_of(easy_backfill=True, max_bypass=2)
    listed(world, 3, time_s=HOUR_S, user="bob")
    listed(world, 2, user="cat")
    first, own = ask(world, 4, user="ann"), [ask(world, user="cat"), ask(world, user="cat")]
    time_s = HOUR_S - SETTLES_S - 60.0
    job, lease = world.submit(1, user="dan", timeout_s=time_s), ask(world, user="eve", time_s=time_s)
    assert is_active(world, *own, lease) == [True, True, False]

    give_back(world, own[0])

    assert is_active(world, first, lease) == [False, True]
    assert world.ledger.jobs[job].job.state is JobState.QUEUED


def test_beside_what_is_left_of_one_that_ran_ahead_gpus_are_held_for_an_hour() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    first = waits_for_all(world, held_s=10 * HOUR_S)
    left = leaves_a_process(world, ask(world, user="eve", time_s=60.0))
    pass_time(world, HOUR_S - 10)
    assert len(explained(world, first).held) == 2

    pass_time(world, 10)

    assert explained(world, first).held == ()
    assert ask(world, 2, user="fay").state is LeaseState.ACTIVE
    world.nodes["a"][left] = gpu(left)
    pass_time(world, 1)
    assert set(explained(world, first).held) == {uuid(left)}


def test_a_turn_looks_once_at_each_node_for_those_who_ask_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever times they declare."""
    world = world_of(easy_backfill=True, max_bypass=0, a=4, b=4, c=4)
    for name in world.nodes:
        listed(world, 3, node=name, time_s=10 * HOUR_S, user="bob")
    for number in range(20):
        ask(world, 4, user="ann", time_s=HOUR_S + number)
    for user in ("eve", "fay", "gus"):
        ask(world, user=user, time_s=20 * HOUR_S)
    looks, look = [], easy_backfill.serves_s
    monkeypatch.setattr(easy_backfill, "serves_s", lambda *args: looks.append(args[2]) or look(*args))

    pass_time(world, 0.0)
    turns = 1 + 2 * len(world.nodes)

    assert len(looks) <= 2 * len(world.nodes) * turns, "once for those who want all GPUs, and once for who wants one"
    assert {*looks} == {*world.nodes}


def test_with_too_much_to_look_at_nothing_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(easy_backfill, "MAX_LOOKS", 20)
    world = world_of(easy_backfill=True, max_bypass=0, a=8)
    listed(world, 7, time_s=10 * HOUR_S, user="bob")
    ask(world, 8, user="ann")
    waiting = [ask(world, 8, user="ann", min_free_memory_bytes=1 + number) for number in range(10)]
    asked = ask(world, user="eve", time_s=60.0)
    assert asked.state is LeaseState.QUEUED
    withdraw(world, *waiting)

    assert is_active(world, asked) == [True]


def test_a_job_that_is_being_stopped_is_waited_for_no_longer() -> None:
    """Its user has given its GPUs back: who starts in its grace would keep the first from them."""
    world = world_of(easy_backfill=True, max_bypass=0)
    job = world.submit(1, timeout_s=20 * HOUR_S, user="bob")
    first = ask(world, 4, user="ann")
    before = ask(world, time_s=HOUR_S, user="eve")
    world.cancel(job)
    assert world.ledger.jobs[job].job.state is JobState.STOPPING

    meanwhile = ask(world, time_s=HOUR_S, user="fay")

    assert is_active(world, first, before, meanwhile) == [False, True, False]
    give_back(world, before)
    world.ended(job)
    assert is_active(world, first) == [True]


@pytest.mark.parametrize(("minutes", "starts"), [(8, True), (12, False)])
def test_a_lease_that_may_be_preempted_is_waited_for_until_then(minutes: int, *, starts: bool) -> None:
    """It would end for the first, but not while what runs ahead keeps that from starting all the same."""
    world = World(policy=Policy(max_bypass=0, easy_backfill=True, preemption=True, preempt_after_s=600.0)).node(gpus=4)
    listed(world, 3, time_s=20 * HOUR_S, user="bob", priority=Priority.SCAVENGE)
    first = ask(world, 4, user="ann")

    ahead = ask(world, time_s=60.0 * minutes, user="eve")

    assert is_active(world, first, ahead) == [False, starts]


def test_a_lease_that_gives_idle_gpus_back_is_not_waited_for() -> None:
    """It may do so for the first at any moment, but not for one that also waits for what runs ahead."""
    world = world_of(easy_backfill=True, max_bypass=0)
    listed(world, 3, time_s=20 * HOUR_S, user="bob", reclaim_idle_after_s=HOUR_S)
    first = ask(world, 4, user="ann")

    assert is_active(world, first, ask(world, time_s=HOUR_S, user="eve")) == [False, False]


def test_one_that_ran_ahead_and_is_revived_opens_nothing() -> None:
    """No one follows it once all else is given back, as if it had never ended."""
    world = world_of(easy_backfill=True, max_bypass=0)
    long = listed(world, 3, time_s=DAY_S, user="bob")
    first = ask(world, 4)
    ahead = ask(world, time_s=10 * HOUR_S, user="eve", ttl_s=60.0)
    pass_time(world, 61.0)
    assert world.ledger.ran_ahead == {}
    world.renew(world.now_of(ahead))
    assert is_active(world, ahead) == [True]

    give_back(world, long)

    assert ask(world, time_s=HOUR_S, user="fay").state is LeaseState.QUEUED
    give_back(world, ahead)
    assert is_active(world, first) == [True]


def test_for_one_that_was_delayed_gpus_are_held_where_it_starts_first() -> None:
    """What ran ahead of another, and past it with a count, is in its way as any lease. What would be held for it on
    that node would be taken from the other one, where it could start ten times sooner."""
    world = world_of(easy_backfill=True, max_bypass=2, a=4, b=4)
    listed(world, 3, node="a", time_s=30 * HOUR_S, user="bob")
    listed(world, 2, 3, node="b", time_s=2 * HOUR_S, user="bob")
    first = ask(world, 4, node="a", user="cat")
    pass_by(world, 2, node="a", user="dan")
    second = ask(world, 3, user="ann")
    ahead = ask(world, 2, node="a", time_s=20 * HOUR_S, user="eve")
    assert is_active(world, second, ahead) == [False, True]
    assert (passed(world, first), passed(world, second)) == (2, 1)
    pass_by(world, 1, node="b", user="dan")

    withdraw(world, first)

    assert set(explained(world, second).held) == {uuid(0, "b"), uuid(1, "b")}
    assert ask(world, 2, node="b", user="gil").state is LeaseState.QUEUED
    pass_time(world, 2 * HOUR_S)
    assert is_active(world, second) == [True]


def test_what_ran_ahead_of_one_opens_nothing_because_another_is_before_it_by_usage() -> None:
    """Both ask for the same, and only the newer one came after what ran ahead."""
    world = World(policy=Policy(max_bypass=0, easy_backfill=True, fair_share=True))
    world.node("a", gpus=4).node("b", gpus=8)
    for user, count in (("bob", 1), ("eve", 3), ("fay", 3)):
        ask(world, count, node="b", user=user)
    long = listed(world, 3, time_s=DAY_S, user="kim")
    pass_time(world, 10 * HOUR_S)
    older = ask(world, 4, node="a", user="bob")
    ahead = ask(world, node="a", time_s=5 * HOUR_S, user="eve")
    assert is_active(world, older, ahead) == [False, True]
    give_back(world, long)
    pass_time(world, 1.0)

    first = ask(world, 4, node="a", user="ann")
    later = ask(world, node="a", time_s=HOUR_S, user="fay")

    assert (world.position(first), world.position(older)) == (1, 2)
    assert later.state is LeaseState.QUEUED


class _CountsLooks(dict[Any, Any]):
    looks = 0

    def get(self, *args: Any) -> Any:
        self.looks += 1
        return super().get(*args)


def test_a_turn_looks_at_the_members_of_a_group_once() -> None:
    """And not once for each of them who waits."""
    world = world_of(easy_backfill=True, max_bypass=0, a=4, b=1)
    users = tuple(f"user-{number}" for number in range(20))
    world.limit("lab", "group", members=users, max_gpus=100)
    listed(world, 3, node="a", time_s=10 * HOUR_S, user="bob")
    for user in users:
        ask(world, 4, node="a", time_s=HOUR_S, user=user)
    counted = world.ledger.demand_classes.of_user = _CountsLooks(world.ledger.demand_classes.of_user)

    world.report("a")

    assert 0 < counted.looks <= 2 * len(users)
