"""Fair share between groups: what a group has used comes before what its member has used."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from gpulease_protocol.model import Lease, LeaseState, Priority
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.group_usage import WIDTH, group_usage
from gpulease_server.core.order import in_order
from gpulease_server.core.policy import Policy
from gpulease_server.core.usage import STEP
from tests.core.build import World
from tests.core.test_fair_share import HOUR_S, LONG_S, ask, from_the_records, give_back, is_active, reloaded, use

MANY = 10**6
ENTRY_HOURS = 1.0
"""What counts for each held GPU beside the time that it was held."""


def world_of(
    gpus: int = 8, shares: tuple[tuple[str, float], ...] = (("vision", 1.0), ("nlp", 1.0)), **what: Any
) -> World:
    rules = {"fair_share": True, "max_bypass": MANY, "max_bypass_s": LONG_S, "max_overtakes": MANY}
    world = World(policy=Policy(**rules | {"group_shares": shares} | what)).node(gpus=gpus)
    world.limit("vision", "group", members=("ann", "bob"))
    world.limit("nlp", "group", members=("cleo", "dan"))
    return world


def served(world: World, held: Lease, waiting: dict[str, Lease]) -> list[str]:
    """The users of waiting requests, each for all GPUs, in the order in which they are granted."""
    order = []
    while waiting:
        give_back(world, held)
        (user,) = [user for user, lease in waiting.items() if is_active(world, lease)]
        held = waiting.pop(user)
        order.append(user)
    return order


def expected_order(world: World) -> list[str]:
    """The order of the queue from the events alone: by priority, by the step of the sum of a group, by that of the
    user, and by arrival."""
    policy, ledger = world.policy, world.ledger
    group_of = {user: one.name for one in ledger.limits.records.values() for user in one.members}
    shares = dict(policy.group_shares)

    def hours(user: str) -> float:
        active = [one.lease for one in ledger.leases.values() if one.lease.state is LeaseState.ACTIVE]
        held = sum(len(lease.gpus) for lease in active if lease.holder.user == user)
        return from_the_records(world, user) + held * ENTRY_HOURS

    def step(of_hours: float) -> int:
        passed = world.now.mono_s / policy.usage_half_life_s
        return math.floor((math.log2(max(of_hours, 1.0) * HOUR_S) + passed) / STEP)

    def place(lease: Lease, arrival: int) -> tuple[int, int, int, int]:
        user = lease.holder.user or ""
        group, own = group_of.get(user), hours(user)
        if group in shares:
            members = [member for member, name in group_of.items() if name == group]
            of_group = sum(map(hours, members)) / shares[group]
        else:
            of_group = own
        return list(Priority).index(lease.demand.priority), step(of_group), step(own), arrival

    queued = [(place(one.lease, one.arrival), one.lease.id) for one in ledger.queued()]
    return [lease_id for _, lease_id in sorted(queued)]


@pytest.mark.parametrize("seed", range(6))
def test_the_order_is_that_of_the_sums_of_groups_and_then_of_users(seed: int) -> None:
    drawn = random.Random(seed)
    world = world_of(6, (("vision", drawn.choice([1.0, 2.0, 0.5])), ("nlp", 1.5), ("later", 3.0)))
    users, leases, groups = ["ann", "bob", "cleo", "dan", "eve", "fay"], list[Lease](), 0
    for _ in range(50):
        match drawn.choice(["ask", "ask", "end", "end", "wait", "join"]):
            case "ask":
                priority = drawn.choice([Priority.NORMAL, Priority.NORMAL, Priority.SCAVENGE])
                leases.append(ask(world, drawn.randint(1, 6), drawn.choice(users), priority=priority))
            case "end" if leases:
                give_back(world, leases.pop(drawn.randrange(len(leases))))
            case "join":
                groups += 1
                members = drawn.choice([(), ("eve",), ("eve", "fay")])
                world.limit("later", "group", members=members)
            case _:
                world.at_s += drawn.choice([1.0, 600.0, 30 * HOUR_S])
                world.report()
        for name, members in (("vision", ("ann", "bob")), ("nlp", ("cleo", "dan"))):
            known = group_usage(world.ledger, name, world.now, world.policy).used_s / HOUR_S
            assert known == pytest.approx(sum(from_the_records(world, user) for user in members), rel=1e-9, abs=1e-9)
            steps = world.ledger.demand_classes.steps
            assert len({steps[user] // WIDTH for user in members if user in steps}) <= 1, "a group is on one step"
        world.ledger.steps_counted_at_s = None  # what time alone changes is found again every five minutes
        world.report()
        assert [one.lease.id for one in in_order(world.ledger)] == expected_order(world)
    assert groups


def test_the_group_that_has_used_less_goes_first_and_in_it_who_has_used_less() -> None:
    world = world_of()
    for user, hours in (("ann", 30.0), ("bob", 5.0), ("cleo", 12.0), ("dan", 2.0), ("eve", 20.0)):
        use(world, user, 4, hours)
    full = ask(world, 8, "zoe")
    waiting = {user: ask(world, 8, user) for user in ("ann", "bob", "cleo", "dan", "eve", "fay")}
    # Fay has used nothing; nlp has 14, eve 20, vision 35. Each grant counts, so groups take turns.
    assert served(world, full, waiting)[:3] == ["fay", "dan", "cleo"]


def test_without_shares_groups_play_no_part() -> None:
    world, plain = world_of(shares=()), World(policy=Policy(fair_share=True, max_bypass=MANY, max_bypass_s=LONG_S))
    orders = []
    for one in (world, plain.node(gpus=8)):
        for user, hours in (("ann", 30.0), ("bob", 5.0), ("cleo", 12.0), ("dan", 2.0), ("eve", 20.0)):
            use(one, user, 4, hours)
        full = ask(one, 8, "zoe")
        orders.append(served(one, full, {user: ask(one, 8, user) for user in ("ann", "bob", "cleo", "dan", "eve")}))
    assert orders[0] == orders[1] == ["dan", "bob", "cleo", "eve", "ann"]


def test_a_named_group_that_does_not_exist_changes_nothing() -> None:
    named, plain = world_of(shares=(("nobody", 2.0),)), world_of(shares=())
    for world in (named, plain):
        use(world, "ann", 4, 9.0)
        full = ask(world, 8, "zoe")
        order = served(world, full, {user: ask(world, 8, user) for user in ("ann", "bob", "cleo")})
        assert order == ["bob", "cleo", "ann"]


def test_groups_with_about_as_much_are_served_by_their_users_and_then_by_arrival() -> None:
    world = world_of()
    use(world, "ann", 4, 50.0)
    use(world, "cleo", 4, 42.0)
    ask(world, 8, "zoe")
    for user in ("ann", "dan", "bob"):
        ask(world, 8, user)
    steps = world.ledger.demand_classes.steps
    assert steps["bob"] // WIDTH == steps["dan"] // WIDTH
    assert [one.lease.holder.user for one in in_order(world.ledger)] == ["dan", "bob", "ann"]


def test_a_share_is_for_so_many_users() -> None:
    """A group of two that counts for two is not behind someone alone who has used as much as each of them."""
    for share, expected in ((1.0, ["eve", "ann"]), (2.5, ["ann", "eve"])):
        world = world_of(shares=(("vision", share),))
        for user in ("ann", "bob", "eve"):
            use(world, user, 4, 10.0)
        full = ask(world, 8, "zoe")
        waiting = {user: ask(world, 8, user) for user in ("ann", "eve")}
        assert served(world, full, waiting) == expected


def shared(world: World, asked: dict[str, list[int]], hours: int = 60) -> dict[str, float]:
    """What each user is granted of four GPUs, who all ask for these pieces all the time."""
    held, waiting = list[tuple[str, Lease]](), {user: list[Lease]() for user in asked}
    granted = dict.fromkeys(asked, 0.0)
    for _ in range(hours):
        for user, sizes in asked.items():
            for size in sizes if len(waiting[user]) < 2 * len(sizes) else ():
                waiting[user].append(ask(world, size, user))
        world.at_s += HOUR_S
        for user, lease in held:
            granted[user] += len(world.now_of(lease).gpus)
            give_back(world, lease)
        held = [(user, lease) for user in asked for lease in waiting[user] if is_active(world, lease)]
        waiting = {user: [lease for lease in leases if not is_active(world, lease)] for user, leases in waiting.items()}
        waiting = {
            user: [one for one in leases if world.now_of(one).state is LeaseState.QUEUED]
            for user, leases in waiting.items()
        }
    return granted


@pytest.mark.parametrize("pieces", [[4], [1, 1, 1, 1]])
def test_members_share_what_a_group_gets_however_they_split_their_requests(pieces: list[int]) -> None:
    granted = shared(world_of(4, max_bypass=10), {"ann": pieces, "bob": pieces, "cleo": [4]})
    total = sum(granted.values())
    assert 0.4 <= (granted["ann"] + granted["bob"]) / total <= 0.6
    assert 0.35 <= granted["ann"] / (granted["ann"] + granted["bob"]) <= 0.65


def test_without_shares_two_members_get_twice_as_much() -> None:
    """What the test above would show if nothing counted for groups."""
    granted = shared(world_of(4, shares=()), {"ann": [4], "bob": [4], "cleo": [4]})
    assert (granted["ann"] + granted["bob"]) / sum(granted.values()) > 0.62


def test_free_gpus_are_shared_between_groups_within_one_turn() -> None:
    """Each grant moves all members of the group at once."""
    world = world_of()
    full = ask(world, 8, "zoe")
    waiting = [ask(world, 1, user) for user in ("ann", "bob") for _ in range(8)]
    waiting += [ask(world, 1, "cleo") for _ in range(8)]
    give_back(world, full)
    active = [world.now_of(lease).holder.user for lease in waiting if is_active(world, lease)]
    assert 3 <= active.count("cleo") <= 5, active
    assert active.count("ann") >= 1, active
    assert active.count("bob") >= 1, active


def test_usage_goes_with_a_user_into_another_group() -> None:
    world = world_of()
    use(world, "ann", 4, 30.0)
    use(world, "cleo", 4, 10.0)
    full = ask(world, 8, "zoe")
    waiting = {user: ask(world, 8, user) for user in ("bob", "dan")}
    world.limit("vision", "group", members=("bob",))
    world.limit("nlp", "group", members=("ann", "cleo", "dan"))
    world.check()
    assert [one.lease.holder.user for one in in_order(world.ledger)] == ["bob", "dan"]
    assert served(world, full, waiting) == ["bob", "dan"]


def test_members_that_change_while_no_one_waits_count_at_once() -> None:
    world = world_of(8)
    lease = ask(world, 2, "ann")
    world.limit("vision", "group", members=("bob",))
    assert group_usage(world.ledger, "vision", world.now, world.policy).held == 0.0
    world.limit("vision", "group", members=("bob", "ann"))
    assert group_usage(world.ledger, "vision", world.now, world.policy).held == 2.0
    give_back(world, lease)


def waited_for_a_sweep(world: World) -> tuple[float, list[int]]:
    """Ann and Bob, of one group, submit a sweep of jobs of 10 minutes on four GPUs; half an hour later Cleo asks
    for all four. Hours that Cleo waits, and the steps on which that request was kept."""
    sweep, steps = [ask(world, 1, user) for _ in range(60) for user in ("ann", "bob")], list[int]()
    cleo: Lease | None = None
    for rounds in range(60):
        if rounds == 3:
            cleo = ask(world, 4, "cleo")
        world.at_s += 600.0
        for lease in [lease for lease in sweep if is_active(world, lease)]:
            give_back(world, lease)
        steps += world.ledger.places_kept.values()
        if cleo is not None and is_active(world, cleo):
            return (rounds - 2) / 6, steps
    raise AssertionError("the sweep has ended")


def test_a_training_keeps_its_place_before_a_group_whose_members_ask_in_turns() -> None:
    hours, steps = waited_for_a_sweep(world_of(4, max_bypass=10))
    assert hours < 1
    assert steps, "GPUs were held for it"


def test_what_is_kept_falls_back_with_what_the_group_uses_meanwhile() -> None:
    """Bob waits for a whole node while Ann, of the same group, holds one of its GPUs for a week."""
    world = world_of(4, max_bypass=1)
    ask(world, 1, "ann")
    whole = ask(world, 4, "bob")
    for _ in range(3):
        give_back(world, ask(world, 1, "eve"))
    assert list(world.ledger.places_kept) == [whole.id]
    before = world.ledger.places_kept[whole.id]
    world.at_s += 7 * 24 * HOUR_S
    give_back(world, ask(world, 1, "fay"))
    assert world.ledger.places_kept[whole.id] // WIDTH > before // WIDTH


def test_the_order_after_a_restart_is_as_before() -> None:
    world = world_of(1)
    use(world, "ann", 1, 20.0)
    full = ask(world, 1, "zoe")
    waiting = [ask(world, 1, "bob"), ask(world, 1, "dan")]
    again = reloaded(world, 10.0)
    again.turn()
    sums = [group_usage(one.ledger, "vision", one.now, one.policy).used_s for one in (world, again)]
    assert sums[1] == pytest.approx(sums[0], rel=1e-3)
    give_back(again, full)
    assert [is_active(again, lease) for lease in waiting] == [False, True]


def test_explain_says_it_in_numbers_of_groups() -> None:
    world = world_of(1, (("vision", 2.0), ("nlp", 1.0)))
    for user, hours in (("ann", 100.0), ("bob", 20.0), ("cleo", 40.0)):
        use(world, user, 1, hours)
    ask(world, 1, "zoe")
    bob, ann, dan = (ask(world, 1, user) for user in ("bob", "ann", "dan"))
    ledger = world.ledger
    said = explain(ledger, ledger.leases[ann.id], world.now, world.policy)
    own, *less = said.recent_usage
    assert (said.position, own.group, own.group_share, [one.user for one in less]) == (3, "vision", 2.0, ["dan", "bob"])
    nlp, vision, hours = less[0].group_gpu_hours or 0.0, own.group_gpu_hours or 0.0, less[1].gpu_hours
    assert less[0].gpu_hours == 0.0
    each = f"{vision:.1f} ({vision / 2:.1f} for each of 2 users)"
    assert f"of recent GPU-hours group nlp has {nlp:.1f}, and group vision {each}, so those go first" in said.sentence
    members = f"bob has {hours:.1f}, and ann {own.gpu_hours:.1f}"
    assert f"; of recent GPU-hours in group vision {members}, so those go first" in said.sentence
    assert vision == pytest.approx(own.gpu_hours + hours)
    for lease, place in ((dan, 1), (bob, 2)):
        assert explain(ledger, ledger.leases[lease.id], world.now, world.policy).position == place
