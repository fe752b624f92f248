"""An older request that nothing that ends would help claims no limit: others under it go on."""

from __future__ import annotations

from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.model import Lease, LeaseState, NodeMode, Priority, Selection
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from tests.core.build import World, gpu

LONG_S = 1e7


def world_of(gpus: int = 8, max_bypass: int = 2, interactive_gpus: int = 0, **what: Any) -> World:
    limits = UserLimits(interactive_gpus=interactive_gpus)
    policy = Policy(limits=limits, max_bypass=max_bypass, **{"max_bypass_s": LONG_S} | what)
    return World(policy=policy).node(gpus=gpus)


def ask(world: World, count: int = 1, user: str = "ada", **what: Any) -> Lease:
    lease = world.lease(count, user=user, **{"ttl_s": LONG_S} | what)
    world.check()
    return lease


def is_active(world: World, *leases: Lease) -> bool:
    return all(world.now_of(lease).state is LeaseState.ACTIVE for lease in leases)


def give_back(world: World, *leases: Lease) -> None:
    for lease in leases:
        node = world.now_of(lease).gpus[0].node
        world.release(world.now_of(lease))
        world.report(node)


def sentence(world: World, lease: Lease) -> str:
    return explain(world.ledger, world.ledger.leases[lease.id], world.now, world.policy).sentence


def pass_it(world: World, user: str, times: int, **what: Any) -> None:
    """Newer requests of a user begin and end."""
    for _ in range(times):
        newer = ask(world, user=user, **what)
        assert is_active(world, newer)
        give_back(world, newer)


@pytest.mark.parametrize("before", [True, False])
def test_one_whose_other_limit_was_set_below_what_it_asks_for_holds_no_one_up(before: bool) -> None:
    world = world_of()
    world.limit("ada", max_gpus=4)
    world.limit("vision", "group", members=("ada",), max_gpus=8)
    held = ask(world, 2)
    never = ask(world, 4)
    if before:
        world.limit("vision", "group", members=("ada",), max_gpus=3)
    pass_it(world, "ada", 2)
    world.limit("vision", "group", members=("ada",), max_gpus=3)
    if before:
        pass_it(world, "ada", 5)
    give_back(world, held)
    newer = ask(world)
    assert is_active(world, newer)
    assert "No more do" not in sentence(world, never)
    # It counts again once it can be granted.
    world.limit("vision", "group", members=("ada",), max_gpus=8)
    assert not is_active(world, ask(world))
    assert "No more do, unless the limit has room for both" in sentence(world, never)


def test_nor_do_those_of_another_user_of_its_group_wait_for_it() -> None:
    world = world_of()
    world.limit("vision", "group", members=("ada", "bob"), max_gpus=4)
    held = ask(world, user="bob")
    ask(world, 4, "ada")
    pass_it(world, "bob", 2)
    assert not is_active(world, bobs := ask(world, user="bob"))
    world.limit("ada", max_gpus=2)
    world.pass_time(0.25)
    world.answer_wanted()
    assert is_active(world, bobs)
    give_back(world, held)


def test_one_whose_token_has_used_its_hours_claims_nothing_of_its_users_limit() -> None:
    world = world_of()
    world.limit("ada", max_gpus=4)
    spent = ask(world, token="t", budget=Budget(gpu_hours_per_day=0.1))
    held = ask(world)
    ask(world, 4, token="t", budget=Budget(gpu_hours_per_day=0.1))
    pass_it(world, "ada", 2, count=2)
    world.pass_time(400.0)
    assert world.now_of(spent).state is LeaseState.ENDED
    world.report()
    give_back(world, held)
    assert is_active(world, ask(world))


def overtake(world: World, times: int = 8) -> None:
    """Interactive requests of someone else begin and end on node `a`."""
    pass_it(world, "eve", times, node="a", priority=Priority.INTERACTIVE)


def with_h200(world: World, gpus: int = 1) -> Lease:
    """Add a node with GPUs of another model, which someone holds. Their lease."""
    world.node("b", gpus=[gpu(index, "b", name="H200") for index in range(gpus)])
    return ask(world, gpus, "zoe", node="b")


@pytest.mark.parametrize("budget", [Budget(max_gpus=4), Budget(max_lease_s=1e5), Budget(gpu_hours_per_day=1e4)])
def test_one_that_goes_first_leaves_the_rest_of_its_budget_to_the_sweep_of_its_token(budget: Budget) -> None:
    world = world_of(max_overtakes=3, max_bypass=0)
    theirs = with_h200(world)
    older = ask(world, token="t", budget=budget, gpu_model="H200")
    overtake(world)
    assert list(world.ledger.go_first) == [older.id]
    sweep = [ask(world, token="t", budget=budget) for _ in range(4)]
    assert is_active(world, *sweep[:3])
    assert is_active(world, sweep[3]) is (budget.max_gpus is None)
    if budget.max_gpus is not None:
        assert f"1 of the 4 that token t may have are kept for the older request {older.id}" in sentence(
            world, sweep[3]
        )
    give_back(world, theirs)
    assert is_active(world, older)


def test_a_request_behind_such_a_claim_holds_up_no_newer_one_of_the_token() -> None:
    world, budget = world_of(max_overtakes=3, max_bypass=0), Budget(max_gpus=4)
    theirs = with_h200(world, 2)
    older = ask(world, 2, token="t", budget=budget, gpu_model="H200")
    overtake(world)
    assert list(world.ledger.go_first) == [older.id]
    behind = ask(world, 3, token="t", budget=budget)
    small = ask(world, 1, token="t", budget=budget)
    assert is_active(world, small)
    assert not is_active(world, behind)
    fits = ask(world, 2, token="t", budget=budget)  # with what is kept there is room for it: it waits for `small`
    newer = ask(world, 1, token="t", budget=budget)
    assert not is_active(world, fits)
    assert not is_active(world, newer)
    give_back(world, small)
    assert is_active(world, fits)
    assert not is_active(world, newer)
    give_back(world, theirs, fits)
    assert is_active(world, older)
    give_back(world, older)
    assert is_active(world, behind, newer)


@pytest.mark.parametrize("silent", [(), ("b",)])
def test_who_may_have_another_node_than_the_one_that_goes_first_has_its_turn_too(silent: tuple[str, ...]) -> None:
    world = World(policy=Policy(limits=UserLimits(interactive_gpus=0), max_overtakes=3, max_bypass=2))
    world.node("a", gpus=4).node("b", gpus=2)
    world.limit("ada", max_gpus=2)
    ask(world, 2, "zoe", node="b")
    running = [ask(world, user="eve", priority=Priority.INTERACTIVE, node="a") for _ in range(4)]
    first = ask(world, selection=Selection.ALL, priority=Priority.SCAVENGE)

    def go_on(times: int, until: Lease | None = None) -> int:
        """The GPUs of `a` change hands. After how many times the request was granted."""
        for number in range(times):
            running.append(ask(world, user="eve", priority=Priority.INTERACTIVE, node="a"))
            give_back(world, running.pop(0))
            world.pass_time(0.25, silent=silent)
            if until is not None and is_active(world, until):
                return number
            if not is_active(world, running[0]):
                break
        return times

    go_on(8)
    assert list(world.ledger.go_first) == [first.id]
    world.pass_time(5.0, silent=silent)
    other = ask(world, user="bob", selection=Selection.ALL, priority=Priority.SCAVENGE)
    assert go_on(30, until=other) < 30


@pytest.mark.parametrize("what", ["silent", "draining", "cordoned", "whole node"])
def test_one_that_no_lease_that_ends_would_help_holds_up_no_other_of_its_token(what: str) -> None:
    world, budget = world_of(), Budget(max_gpus=4)
    world.node("b", gpus=[gpu(index, "b", name="H200") for index in range(2)])
    held = ask(world, 3, token="t", budget=budget, node="a")
    asked = {"selection": Selection.ALL} if what == "whole node" else {"count": 2, "gpu_model": "H200"}
    older = ask(world, token="t", budget=budget, **asked)
    newer = ask(world, token="t", budget=budget, node="a")
    assert not is_active(world, newer)  # `older` waits for `held`, and can have `b` then
    silent = ("b",) if what in ("silent", "whole node") else ()
    if what == "draining":
        world.set_mode(NodeMode.DRAINING, "b")
    elif what == "cordoned":
        world.cordon(0, "b")
    world.pass_time(60.0, silent=silent)
    world.answer_wanted()
    assert is_active(world, newer)
    world.pass_time(1.0)
    world.set_mode(NodeMode.ACTIVE, "b")
    world.cordon(0, "b", cordoned=False)
    give_back(world, newer)
    assert not is_active(world, ask(world, token="t", budget=budget, node="a"))  # it is the first again
    give_back(world, held)
    world.pass_time(1.0)
    assert is_active(world, older)


def test_nor_an_interactive_one_that_waits_for_a_silent_node_another_of_its_user() -> None:
    world = world_of(interactive_gpus=2)
    world.node("b", gpus=[gpu(index, "b", name="H200") for index in range(2)])
    ask(world, priority=Priority.INTERACTIVE, node="a")
    ask(world, 2, priority=Priority.INTERACTIVE, node="b")
    newer = ask(world, priority=Priority.INTERACTIVE, node="a")
    assert not is_active(world, newer)
    world.pass_time(60.0, silent=("b",))
    world.answer_wanted()
    assert is_active(world, newer)


def test_while_others_have_its_gpus_the_rest_of_its_group_goes_on() -> None:
    world = world_of(max_overtakes=3)
    theirs = with_h200(world, 4)
    world.limit("vision", "group", members=("ada", "bob"), max_gpus=4)
    first = ask(world, 4, gpu_model="H200", priority=Priority.SCAVENGE)
    overtake(world)
    assert list(world.ledger.go_first) == [first.id]
    running = [ask(world, user="bob") for _ in range(4)]
    assert is_active(world, *running), "its GPUs are held by someone else, for as long as they please"
    give_back(world, theirs)
    newer = ask(world, user="bob")
    for lease in running:
        assert not is_active(world, first)
        give_back(world, lease)
    assert is_active(world, first), "now the claim holds"
    assert not is_active(world, newer)


def test_it_is_granted_although_others_take_its_gpus_each_time_that_its_limit_keeps_it_out() -> None:
    world = world_of(max_overtakes=3)
    theirs = with_h200(world, 2)
    world.limit("vision", "group", members=("ada", "bob"), max_gpus=2)
    first = ask(world, 2, gpu_model="H200", priority=Priority.SCAVENGE)
    overtake(world)
    running = [ask(world, user="bob"), ask(world, user="bob")]
    for _ in range(10):
        following = ask(world, 2, "zoe", node="b")
        give_back(world, theirs)
        if is_active(world, first):
            break
        assert is_active(world, following)
        theirs = following
        running += [ask(world, user="bob"), ask(world, user="bob")]
        for lease in [one for one in running if is_active(world, one)]:
            give_back(world, lease)
    assert is_active(world, first)


def test_of_many_under_one_limit_whose_gpus_others_have_one_at_a_time_goes_first() -> None:
    """Each costs every walk a look."""
    world = world_of(max_overtakes=10)
    theirs = with_h200(world)
    world.limit("vision", "group", members=("ada", "bob"), max_gpus=1)
    held = ask(world, user="bob", node="a")
    waiting = [ask(world, gpu_model="H200", priority=Priority.SCAVENGE, time_s=1000.0 + number) for number in range(6)]
    overtake(world, 15)
    assert list(world.ledger.go_first) == [waiting[0].id]
    overtake(world, 10)
    assert list(world.ledger.go_first) == [waiting[0].id, waiting[1].id]
    give_back(world, held, theirs)
    assert is_active(world, waiting[0])


@pytest.mark.parametrize("reserved", [True, False])
def test_it_misses_no_grant_of_gpus_that_are_reserved_for_who_gets_them(reserved: bool) -> None:
    world = world_of(max_overtakes=3)
    theirs = with_h200(world, 2)
    world.limit("vision", "group", members=("ada", "bob"), max_gpus=2)
    first = ask(world, 2, gpu_model="H200", priority=Priority.SCAVENGE)
    overtake(world)
    assert list(world.ledger.go_first) == [first.id]
    if reserved:
        assert world.reserve(node="b", user="zoe") is None
    held = [ask(world, user="bob"), ask(world, user="bob")]
    for _ in range(4):
        give_back(world, theirs)
        theirs = ask(world, 2, "zoe", node="b")
        assert is_active(world, theirs)
    assert is_active(world, *held)
    assert (world.ledger.go_first[first.id] == 0) is reserved
