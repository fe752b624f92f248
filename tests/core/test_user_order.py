"""Among the requests of one user: an older one that the user's limit keeps out is passed so often, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from gpulease_protocol.errors import NotNow
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.model import Lease, LeaseState, NodeMode
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from tests.core.build import World

LONG_S = 100_000.0


def world_of(limit: int = 4, max_bypass: int = 2, max_bypass_s: float = LONG_S, **nodes: int) -> World:
    limits = UserLimits(gpus=limit)
    world = World(policy=Policy(limits=limits, max_bypass=max_bypass, max_bypass_s=max_bypass_s))
    for name, gpus in (nodes or {"a": 8}).items():
        world.node(name, gpus=gpus)
    return world


def ask(world: World, count: int = 1, **what: Any) -> Lease:
    lease = world.lease(count, **{"ttl_s": LONG_S, **what})
    world.check()
    return lease


def is_active(world: World, lease: Lease) -> bool:
    return world.now_of(lease).state is LeaseState.ACTIVE


def give_back(world: World, lease: Lease) -> None:
    node = world.now_of(lease).gpus[0].node
    world.release(world.now_of(lease))
    world.report(node)


def explained(world: World, lease: Lease) -> Explanation:
    return explain(world.ledger, world.ledger.leases[lease.id], world.now, world.policy)


def sweep(world: World, older: Lease, running: list[Lease], members: int = 30, **what: Any) -> int:
    """Members of a sweep come, and each time one that runs ends. How many started before `older` was granted."""
    waiting: list[Lease] = []
    started = 0
    for _ in range(members):
        waiting.append(ask(world, **what))
        if running:
            give_back(world, running.pop(0))
        if is_active(world, older):
            return started
        begun = [lease for lease in waiting if is_active(world, lease)]
        started += len(begun)
        running += begun
        waiting = [lease for lease in waiting if lease not in begun]
    return started


def test_a_sweep_of_small_requests_does_not_starve_a_large_one_of_the_same_user() -> None:
    world = world_of(limit=4, max_bypass=2)
    running = [ask(world) for _ in range(4)]
    older = ask(world, 4)
    assert sweep(world, older, running) == 2
    assert is_active(world, older)


def test_what_fits_in_one_turn_does_not_pass_more_often_either() -> None:
    world = world_of(limit=4, max_bypass=1)
    large = ask(world, 3)
    ask(world)
    ask(world, 4)
    members = [ask(world) for _ in range(3)]
    give_back(world, large)
    assert [is_active(world, member) for member in members] == [True, False, False]


def test_who_waits_for_the_bound_is_told_how_often_and_who_waits_behind_it_is_told_for_what() -> None:
    world = world_of(limit=4, max_bypass=1)
    running = [ask(world) for _ in range(4)]
    older, first, second = ask(world, 4), ask(world), ask(world)
    assert explained(world, older).passed == 0
    give_back(world, running[0])
    assert is_active(world, first)
    told = explained(world, older)
    assert told.passed == 1
    assert "user ann has 4 GPUs and asks for 4 more; the limit is 4 at a time; number 1 in the queue." in told.sentence
    assert "1 newer request of this user started first" in told.sentence
    give_back(world, running[1])
    behind = explained(world, second)
    assert behind.behind == (older.id,)
    assert "4 of the 4 that one user may have are kept for the older request " + older.id in behind.sentence


def test_other_users_are_not_delayed_by_it() -> None:
    world = world_of(limit=4, max_bypass=0)
    ask(world, 2)
    older = ask(world, 4)
    assert not is_active(world, ask(world)), "with 0 no newer one of the same user starts first"
    assert is_active(world, ask(world, 4, user="bob"))
    assert not is_active(world, older)


def test_it_is_passed_for_so_long() -> None:
    world = world_of(limit=4, max_bypass=1000, max_bypass_s=60.0)
    running = [ask(world) for _ in range(4)]
    older = ask(world, 4)
    assert sweep(world, older, running, members=3) == 3
    world.pass_time(61)
    assert sweep(world, older, running) == 0
    assert is_active(world, older)


def test_while_others_have_the_gpus_that_it_needs_its_users_sweep_goes_on_and_then_the_bound_begins() -> None:
    world = world_of(limit=4, max_bypass=2, a=4, b=8)
    theirs = ask(world, 4, node="a", user="bob")
    running = [ask(world, node="b") for _ in range(4)]
    older = ask(world, 4, node="a")
    assert sweep(world, older, running, members=12, node="b") == 12
    assert explained(world, older).passed == 0
    give_back(world, theirs)
    assert sweep(world, older, running, node="b") == 2
    assert is_active(world, older)


def test_what_is_kept_stays_kept_when_another_user_takes_its_gpus_in_between() -> None:
    """Within its limit again, it waits like any other; its own user's newer ones do not use the limit up again."""
    world = world_of(limit=4, max_bypass=1, a=4, b=8)
    running = [ask(world, node="b") for _ in range(4)]
    older, first = ask(world, 4, node="a"), ask(world, node="b")
    give_back(world, running[0])
    assert is_active(world, first)
    theirs = ask(world, 1, node="a", user="cleo")
    assert is_active(world, theirs)
    for lease in (*running[1:], first):
        give_back(world, lease)
    assert not is_active(world, ask(world, node="b"))
    give_back(world, theirs)
    assert is_active(world, older)


def test_nothing_is_kept_for_one_that_no_node_could_serve() -> None:
    world = world_of(limit=4, max_bypass=1, a=4, b=8)
    running = [ask(world, node="b") for _ in range(4)]
    older = ask(world, 4, node="a")
    assert sweep(world, older, running, members=2, node="b") == 1
    world.set_mode(NodeMode.DRAINING, "a")
    assert sweep(world, older, running, members=6, node="b") >= 6
    world.set_mode(NodeMode.ACTIVE, "a")
    newer = ask(world, node="b")
    assert not is_active(world, newer)
    for record in list(world.ledger.leases.values()):
        if record.lease.state is LeaseState.ACTIVE:
            give_back(world, record.lease)
    assert is_active(world, older)


def test_small_limits_of_two_users_do_not_mix() -> None:
    world = world_of(limit=2, max_bypass=0)
    ask(world)
    ask(world, user="bob")
    ask(world, 2)
    assert is_active(world, ask(world, user="bob"))


@pytest.mark.parametrize("withdrawn", [True, False])
def test_the_limit_is_free_again_when_the_older_request_ends(withdrawn: bool) -> None:
    world = world_of(limit=4, max_bypass=0)
    held = ask(world)
    older, newer = ask(world, 4), ask(world)
    assert not is_active(world, newer)
    if withdrawn:
        world.release(older)
        world.answer_wanted()
        world.report()
    else:
        give_back(world, held)
        assert is_active(world, older)
        give_back(world, older)
    assert is_active(world, newer)
    assert not any(world.ledger.limit_bypasses.values())


def test_a_request_that_does_not_wait_is_not_passed_and_keeps_nothing() -> None:
    world = world_of(limit=4, max_bypass=0)
    ask(world, 2)
    refused, newer = world.ask(4, queue=False), world.ask(1)
    world.answer_wanted()
    assert isinstance(world.answers[refused], NotNow)
    granted = world.answers[newer]
    assert isinstance(granted, Lease)
    assert is_active(world, granted)
    assert not any(world.ledger.limit_bypasses.values())
