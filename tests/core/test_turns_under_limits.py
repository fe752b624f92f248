"""Every request is granted after boundedly many releases, whatever its priority, its user's usage, and its limits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.model import Lease, LeaseState, Priority
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from tests.core.build import World

LONG_S = 1e7
INTERACTIVE, NORMAL, SCAVENGE = Priority
MAX_OVERTAKES = 4
MEMBERS = ("ann", "bob", "cleo")


def world_of(*, limits: UserLimits | None = None, a: int = 8, **what: Any) -> World:
    limits = limits or UserLimits(interactive_gpus=0, interactive_s=0)
    policy: dict[str, Any] = {"max_bypass_s": LONG_S, "max_bypass": 2, "max_overtakes": MAX_OVERTAKES, **what}
    return World(policy=Policy(limits=limits, **policy)).node(gpus=a)


def ask(world: World, count: int = 1, priority: Priority = NORMAL, **what: Any) -> Lease:
    for name in world.nodes:
        world.report(name)
    lease = world.lease(count, **{"ttl_s": LONG_S, "priority": priority, **what})
    world.check()
    return lease


def is_active(world: World, lease: Lease) -> bool:
    return world.now_of(lease).state is LeaseState.ACTIVE


def active(world: World) -> list[Lease]:
    found = [record.lease for record in world.ledger.leases.values() if record.lease.state is LeaseState.ACTIVE]
    return sorted(found, key=lambda lease: lease.fencing_token or 0)


def give_back(world: World, lease: Lease) -> None:
    world.release(world.now_of(lease))
    for name in world.nodes:
        world.report(name)
    world.check()


def stream(world: World, target: Lease, most: int = 100, by: tuple[str, ...] = ("ann",), **newer: Any) -> int:
    """Newer requests come without end, one as each of these users gives GPUs back. How many came before the grant."""
    for number in range(most):
        user = by[number % len(by)]
        ask(world, user=user, **newer)
        theirs = [lease for lease in active(world) if lease.holder.user in by]
        give_back(world, theirs[0])
        if is_active(world, target):
            return number + 1
    raise AssertionError(f"it starves: {world.ledger.go_first}")


def limited(world: World, kind: str, **numbers: int) -> dict[str, Any]:
    """What a request says so that it is under a limit of this kind."""
    match kind:
        case "user":
            world.limit("ann", **numbers)
        case "group":
            world.limit("lab", "group", members=MEMBERS, **numbers)
        case "token":
            world.limit("t", "token", **numbers)
            return {"token": "t"}
        case "budget":
            return {"token": "t", "budget": Budget(max_gpus=4)}
    return {}


@pytest.mark.parametrize("kind", ["user", "group", "token", "budget"])
@pytest.mark.parametrize("newer", [INTERACTIVE, NORMAL])
def test_no_stream_of_higher_priority_under_the_same_limit_starves_a_large_request(kind: str, newer: Priority) -> None:
    world = world_of()
    more = limited(world, kind, max_gpus=4)
    for _ in range(4):
        ask(world, priority=newer, **more)
    target = ask(world, 4, SCAVENGE, **more)
    assert MAX_OVERTAKES <= stream(world, target, priority=newer, **more) <= MAX_OVERTAKES + 4 + 2


def test_no_stream_of_lighter_users_of_a_group_starves_a_large_request_of_a_heavier_one() -> None:
    world = world_of(fair_share=True)
    limited(world, "group", max_gpus=4)
    used = ask(world, 4, user="ann")
    world.at_s += 4000.0
    give_back(world, used)
    for number in range(4):
        ask(world, user=("bob", "cleo")[number % 2])
    target = ask(world, 4, user="ann")
    assert stream(world, target, by=("bob", "cleo")) <= MAX_OVERTAKES + 4 + 2


def test_a_limit_of_leases_is_claimed_as_one_of_gpus_is() -> None:
    world = world_of()
    limited(world, "group", max_leases=2)
    for user in ("ann", "bob"):
        ask(world, priority=INTERACTIVE, user=user)
    target = ask(world, 1, SCAVENGE, user="cleo")
    assert stream(world, target, by=("ann", "bob"), priority=INTERACTIVE) <= MAX_OVERTAKES + 3


def test_it_is_granted_although_others_take_each_gpu_that_is_given_back() -> None:
    """The limit is short and the GPUs are taken, in turns: neither alone would let it wait for the other."""
    world = world_of(a=8, max_bypass=1)
    limited(world, "group", max_gpus=4)
    for number in range(8):
        ask(world, priority=INTERACTIVE, user=MEMBERS[number % 3] if number < 4 else "dan")
    target = ask(world, 4, SCAVENGE, user="ann")
    for number in range(60):
        ask(world, priority=INTERACTIVE, user="dan" if number % 2 else "bob")
        give_back(world, active(world)[0])
        if is_active(world, target):
            break
    assert is_active(world, target)


def test_others_are_not_delayed_by_the_claim_and_have_their_own_turn() -> None:
    world = world_of(a=5, max_overtakes=2)
    limited(world, "group", max_gpus=4)
    held = [ask(world, 2, user="bob"), ask(world, 2, user="cleo")]
    claims = ask(world, 4, SCAVENGE, user="ann")
    dan = ask(world, user="dan")
    other = ask(world, 1, SCAVENGE, user="eve")
    for _ in range(3):
        ask(world, user="dan")
    for _ in range(3):
        give_back(world, next(lease for lease in active(world) if lease.holder.user in ("dan", "eve")))
    assert world.now_of(other).state is not LeaseState.QUEUED, "none of its limits is claimed"
    assert not is_active(world, claims)
    assert claims.id in world.ledger.go_first
    assert world.now_of(dan).state is LeaseState.ENDED
    for lease in held:
        newer = ask(world, user="bob", priority=INTERACTIVE)
        give_back(world, lease)
        assert not is_active(world, newer), "all of the limit is claimed"
    for _ in range(world.policy.max_bypass + 1):
        if not is_active(world, claims):
            give_back(world, next(lease for lease in active(world) if lease.holder.user == "dan"))
    assert is_active(world, claims)


def test_who_waits_behind_a_claim_of_an_older_one_is_not_chosen_before_it() -> None:
    """`older` waits for its limit, which is claimed for it as often bypassed; grants to others put no one before it."""
    world = world_of(a=8, max_bypass=0)
    world.limit("ann", max_gpus=4)
    ask(world, 2)
    older = ask(world, 4)
    newer = [ask(world) for _ in range(3)]
    assert not any(is_active(world, lease) for lease in newer)
    for _ in range(3 * MAX_OVERTAKES):
        quick = ask(world, priority=INTERACTIVE, user="dan")
        give_back(world, quick)
    assert not any(is_active(world, lease) for lease in newer), "each would take what is claimed for the older one"
    give_back(world, active(world)[0])
    assert is_active(world, older)


def test_an_older_request_of_a_token_is_not_passed_because_others_were_granted() -> None:
    world = world_of(a=8)
    more = limited(world, "budget")
    ask(world, 2, **more)
    older, newer = ask(world, 4, **more), ask(world, **more)
    for _ in range(3 * MAX_OVERTAKES):
        give_back(world, ask(world, priority=INTERACTIVE, user="dan"))
    assert not is_active(world, newer)
    give_back(world, active(world)[0])
    assert is_active(world, older)


def test_what_a_limit_can_never_serve_claims_nothing() -> None:
    world = world_of(a=8)
    world.limit("ann", max_gpus=4)
    ask(world, 3)
    hopeless = ask(world, 4, SCAVENGE)
    world.limit("ann", max_gpus=3)
    limited(world, "group", max_gpus=6)
    for _ in range(3 * MAX_OVERTAKES):
        give_back(world, ask(world, user="bob"))
    assert hopeless.id not in world.ledger.go_first
    assert is_active(world, ask(world, 3, user="bob"))


def test_whose_gpu_hours_are_used_claims_nothing_of_their_group() -> None:
    world = world_of(a=8, max_bypass=1)
    limited(world, "group", max_gpus=4)
    world.limit("ann", gpu_hours=1.0, window_s=86400.0)
    used = ask(world, 4)
    older = ask(world, 4)
    world.at_s += 1000.0
    give_back(world, used)
    assert not is_active(world, older)
    for _ in range(3 * MAX_OVERTAKES):
        newer = ask(world, user="bob", priority=INTERACTIVE)
        assert is_active(world, newer)
        give_back(world, newer)
    assert older.id not in world.ledger.go_first


def test_who_claims_and_who_waits_behind_it_are_told() -> None:
    world = world_of()
    limited(world, "group", max_gpus=4)
    for _ in range(4):
        ask(world)
    target = ask(world, 4, SCAVENGE)
    for _ in range(MAX_OVERTAKES + 1):
        newer = ask(world)
        give_back(world, active(world)[0])
    assert not is_active(world, newer)

    def said(lease: Lease) -> str:
        return explain(world.ledger, world.ledger.leases[lease.id], world.now, world.policy).sentence

    assert "it goes first, because it has waited longest" in said(target)
    assert f"are kept for the older request {target.id}" in said(newer)


@pytest.mark.parametrize("seed", range(20))
def test_a_request_that_waits_is_granted_after_boundedly_many_releases(seed: int) -> None:
    """Whatever is asked for and given back, all of it newer and most of it of higher priority."""
    drawn = random.Random(seed)
    world = world_of(a=4, fair_share=drawn.random() < 0.5, max_bypass=drawn.choice([0, 1, 3])).node("b", gpus=3)
    users = ("ann", "bob", "cleo", "dan")
    for kind, name in (("user", "ann"), ("group", "lab"), ("token", "t")):
        if drawn.random() < 0.7:
            members = MEMBERS[: drawn.randint(1, 3)] if kind == "group" else ()
            numbers = {"max_gpus": drawn.randint(3, 4), "max_leases": drawn.randint(1, 3)}
            world.limit(name, kind, members=members, **dict(drawn.sample(sorted(numbers.items()), drawn.randint(1, 2))))

    def any_request(**what: Any) -> Lease:
        more = {"token": "t"} if drawn.random() < 0.3 else {}
        if drawn.random() < 0.3:
            more |= {"node": drawn.choice("ab")}
        chosen: dict[str, Any] = {"user": drawn.choice(users), "priority": drawn.choice(list(Priority)), **more, **what}
        return ask(world, drawn.randint(1, 3), **chosen)

    for _ in range(12):
        any_request()
    target = any_request(user=drawn.choice(users), priority=SCAVENGE)
    older = len(world.ledger.queue)
    for _ in range(12 * (older + 1) * (MAX_OVERTAKES + 1)):
        if not is_active(world, target):
            any_request(priority=drawn.choice([INTERACTIVE, INTERACTIVE, NORMAL]))
            give_back(world, drawn.choice(active(world)))
    assert world.now_of(target).state is not LeaseState.QUEUED
