"""A request that GPUs are held for keeps its place, whatever the entry charges of others do."""

from __future__ import annotations

import random

import pytest

from gpulease_protocol.model import Lease, Priority
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.order import in_order
from tests.core.build import World
from tests.core.test_easy_backfill import listed, pass_time
from tests.core.test_expected_start import expected
from tests.core.test_fair_share import ask, give_back, is_active, use, world_of

HOUR_S = 3600.0


def releases_until(world: World, target: Lease, running: list[Lease], trials: list[Lease], most: int = 60) -> int:
    """One trial ends after the other, each after some seconds. How many have when the target is granted."""
    for number in range(1, most + 1):
        world.at_s += 1.5
        give_back(world, running.pop(0))
        running += [one for one in trials if one not in running and is_active(world, one)]
        if is_active(world, target):
            return number
        assert world.position(target) == 1
    raise AssertionError("it is not granted")


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize(("sweeper_h", "other_h"), [(0.0, 0.0), (8.0, 9.0)])
def test_a_training_that_gpus_are_held_for_waits_for_no_more_than_what_it_lacks(
    most: int, sweeper_h: float, other_h: float
) -> None:
    """Each end of a trial takes an entry charge from Eve, who is first by arrival without them."""
    world = world_of(4, max_bypass=most)
    for user, hours in (("eve", sweeper_h), ("bob", other_h)):
        if hours:
            use(world, user, 1, hours)
    running = [ask(world, 1, "eve") for _ in range(4)]
    trials = [ask(world, 1, "eve") for _ in range(40)]
    training = ask(world, 4, "bob")
    assert releases_until(world, training, running, trials) == most + 4


def held_for(world: World, *, user: str = "bob") -> tuple[list[Lease], Lease]:
    """Eve holds three of four GPUs, and the fourth is held for a training."""
    running = [ask(world, 1, "eve") for _ in range(4)]
    training = ask(world, 4, user)
    world.at_s += 1.5
    give_back(world, running.pop())
    assert list(world.ledger.places_kept) == [training.id]
    return running, training


def test_who_has_used_less_all_along_still_goes_first() -> None:
    world = world_of(4, max_bypass=0)
    use(world, "bob", 1, 5.0)
    use(world, "eve", 1, 9.0)
    _, training = held_for(world)
    newcomer = ask(world, 1, "dan")
    assert is_active(world, newcomer)
    give_back(world, newcomer)
    assert world.position(training) == 1


def test_higher_priorities_still_go_first() -> None:
    world = world_of(4, max_bypass=0)
    held_for(world)
    assert is_active(world, ask(world, 1, "eve", priority=Priority.INTERACTIVE))


def test_one_request_of_a_user_keeps_its_place() -> None:
    world = world_of(2, max_bypass=0).node("b", gpus=2)
    world.report("b")
    running = [ask(world, 1, "eve", node=node) for node in ("a", "a", "b", "b")]
    first, second = (ask(world, 2, "bob", node=node) for node in ("a", "b"))
    for number in (0, 2):
        world.release(world.now_of(running[number]))
        world.report("b")
        world.report()
    assert list(world.ledger.places_kept) == [first.id]
    world.release(world.now_of(running[1]))
    world.report("b")
    world.report()
    assert is_active(world, first)
    assert list(world.ledger.places_kept) in ([], [second.id])


def test_it_keeps_no_place_once_no_end_of_a_lease_would_help() -> None:
    world = world_of(4, max_bypass=0)
    held_for(world)
    world.cordon(1)
    world.report()
    assert not world.ledger.places_kept
    world.check()


def test_one_that_leaves_keeps_no_place() -> None:
    world = world_of(4, max_bypass=0)
    _, training = held_for(world)
    give_back(world, training)
    assert not world.ledger.places_kept


def test_explain_and_the_position_say_what_the_walk_does() -> None:
    world = world_of(4, max_bypass=0)
    trials: list[Lease] = []
    running = [ask(world, 1, "eve") for _ in range(4)]
    trials = [ask(world, 1, "eve") for _ in range(3)]
    training = ask(world, 4, "bob")
    for _ in range(3):
        give_back(world, running.pop())
    ledger = world.ledger
    assert [one.lease.id for one in in_order(ledger)] == [training.id, *(one.id for one in trials)]
    assert [world.position(one) for one in (training, *trials)] == [1, 2, 3, 4]
    said = [explain(ledger, ledger.leases[one.id], world.now, world.policy).sentence for one in (training, trials[0])]
    assert "number 1 in the queue, and keeps this place, because GPUs were held for it" in said[0]
    assert "number 2 in the queue, behind 1 that GPUs were held for" in said[1]


@pytest.mark.parametrize("seed", range(12))
def test_between_two_users_with_close_usages_few_releases_and_idle_gpus_are_enough(seed: int) -> None:
    drawn = random.Random(seed)
    gpus, most, hours = drawn.randint(2, 6), drawn.choice([0, 2, 5]), drawn.choice([0.0, 0.5, 8.0, 40.0])
    world = world_of(gpus, max_bypass=most)
    for user in ("eve", "bob"):
        if hours:
            use(world, user, 1, hours + drawn.random() * 2)
    running = [ask(world, 1, drawn.choice(["eve", "eve", "bob"])) for _ in range(gpus)]
    waiting = [ask(world, 1, drawn.choice(["eve", "eve", "bob"])) for _ in range(20)]
    big = ask(world, gpus, drawn.choice(["eve", "bob"]))
    kept_at: int | None = None
    for number in range(200):
        world.at_s += drawn.choice([0.5, 30.0])
        give_back(world, running.pop(drawn.randrange(len(running))))
        if drawn.random() < 0.5:
            waiting.append(ask(world, 1, drawn.choice(["eve", "bob"])))
        running += [one for one in waiting if is_active(world, one) and one not in running]
        if is_active(world, big):
            assert kept_at is None or number - kept_at <= 3 * gpus + 6, "GPUs were idle without effect"
            return
        if kept_at is None and big.id in world.ledger.places_kept:
            kept_at = number
        waiting = [one for one in waiting if not is_active(world, one)]
    raise AssertionError("it starves")


@pytest.mark.parametrize("most", [0, 3])
def test_a_training_that_a_limit_of_its_group_is_claimed_for_waits_for_no_more_than_what_it_lacks(most: int) -> None:
    world = world_of(8, max_bypass=most)
    world.limit("lab", "group", members=("eve", "bob"), max_gpus=4)
    running = [ask(world, 1, "eve") for _ in range(4)]
    trials = [ask(world, 1, "eve") for _ in range(40)]
    training = ask(world, 4, "bob")
    assert releases_until(world, training, running, trials) == most + 4


def test_who_waits_for_their_own_lease_keeps_a_node_only_from_those_who_have_used_more() -> None:
    """What a user uses meanwhile counts, but for entry charges: else one long lease would keep a node idle."""
    world = world_of(4, max_bypass=0)
    use(world, "eve", 1, 30.0)
    ask(world, 1, "bob")
    world.at_s += 60.0
    whole = ask(world, 4, "bob")
    assert list(world.ledger.places_kept) == [whole.id]
    world.at_s += 5 * 3600.0
    newcomer = ask(world, 1, "dan")
    assert is_active(world, newcomer)
    give_back(world, newcomer)
    trial = ask(world, 1, "eve")
    assert not is_active(world, trial), "who has used more is behind"
    world.at_s += 60 * 3600.0
    for _ in range(2):  # the second one finds it behind
        world.report()
    assert is_active(world, trial), "until the other one has used as much"


@pytest.mark.parametrize("numbers", [{"max_gpus": 4}, {"max_leases": 1}])
def test_a_limit_of_its_own_user_lets_the_place_go(numbers: dict[str, int]) -> None:
    """Else who is at their own limit could hold the steps of others for as long as they like."""
    world = world_of(4, max_bypass=0)
    running, training = held_for(world)
    world.limit("bob", **numbers)
    own = ask(world, 1, "bob", priority=Priority.INTERACTIVE)
    assert is_active(world, own)
    assert not world.ledger.places_kept
    give_back(world, own)
    for one in running:
        give_back(world, one)
    assert is_active(world, training)


def test_to_ask_again_or_in_parts_gives_no_better_place() -> None:
    world = world_of(4, max_bypass=0)
    use(world, "bob", 1, 2.0)
    running, training = held_for(world, user="bob")
    before = world.ledger.places_kept[training.id]
    parts = [ask(world, count, "bob") for count in (2, 4)]
    assert list(world.ledger.places_kept) == [training.id]
    give_back(world, training)
    assert min(world.ledger.places_kept.values()) >= before
    assert len(world.ledger.places_kept) == 1
    for one in running:
        give_back(world, one)
    assert is_active(world, parts[0])


def test_after_a_restart_the_place_is_kept_again() -> None:
    world = world_of(4, max_bypass=0)
    running, training = held_for(world)
    trials = [ask(world, 1, "eve") for _ in range(8)]
    world.ledger.places_kept.clear()
    world.ledger.overtakes, world.ledger.usage_recounted, world.ledger.steps_counted_at_s = 0, False, None
    world.report()
    assert list(world.ledger.places_kept) == [training.id]
    assert releases_until(world, training, running, trials) == 3


def held_beside_a_declared_time(ahead: int = 0, dan_s: float = HOUR_S) -> tuple[World, Lease, list[Lease], list[Lease]]:
    """Dan has one of four GPUs for so long. Bob's training waits for all, and keeps its place. Eve has asked before it:
    for so many short ones that declare their time, then for two trials that do not. All are behind it once the GPUs of
    Eve are given back, and the short ones run ahead of it."""
    world = world_of(4, max_bypass=0, easy_backfill=True)
    listed(world, 3, time_s=dan_s, user="dan")
    running = [ask(world, 1, "eve") for _ in range(3)]
    shorter = [ask(world, 1, "eve", node="a", time_s=HOUR_S / 4) for _ in range(ahead)]
    trials = [ask(world, 1, "eve", node="a") for _ in range(2)]
    training = ask(world, 4, "bob", node="a")
    for one in running:
        give_back(world, one)
    return world, training, shorter, trials


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_who_runs_ahead_of_one_that_keeps_its_place_delays_it_by_nothing(ahead: int) -> None:
    """Their entry charges come and go, also while no GPU is left to hold: it starts when it would without them."""
    world, training, shorter, trials = held_beside_a_declared_time(ahead)
    assert all(is_active(world, one) for one in shorter)
    assert list(world.ledger.places_kept) == [training.id]

    for one in shorter[:1]:
        give_back(world, one)
    pass_time(world, HOUR_S / 2)
    assert list(world.ledger.places_kept) == [training.id]
    assert training.id not in world.ledger.bypasses
    assert world.position(training) == 1
    pass_time(world, HOUR_S / 2 + 1)

    assert is_active(world, training)
    assert not any(is_active(world, one) for one in trials)


def test_an_older_one_that_is_behind_now_runs_ahead_only_for_as_long_as_any_other() -> None:
    world = world_of(4, max_bypass=0, easy_backfill=True)
    listed(world, 3, time_s=HOUR_S, user="dan")
    running = [ask(world, 1, "eve") for _ in range(3)]
    shorter, longer = (ask(world, 1, "eve", time_s=time_s) for time_s in (HOUR_S / 4, 9 * HOUR_S))
    training = ask(world, 4, "bob")

    for one in running:
        give_back(world, one)

    assert [is_active(world, one) for one in (training, shorter, longer)] == [False, True, False]
    pass_time(world, HOUR_S + 1)
    assert is_active(world, training)


def test_a_forecast_has_the_places_that_requests_keep() -> None:
    """Bob has more by now, and would be behind Eve with what is asked for from here on."""
    world, training, _, trials = held_beside_a_declared_time(dan_s=HOUR_S / 10)
    world.node("b", gpus=8)
    world.report("b")
    assert is_active(world, ask(world, 8, "bob", node="b"))
    last = ask(world, 1, "bob", node="a")
    assert [world.position(one) for one in (training, *trials, last)] == [1, 2, 3, 4]

    starts = expected(world.ledger, world.now, world.policy)

    assert round((starts[training.id].at - world.now.at).total_seconds()) <= HOUR_S / 10
    assert not starts.keys() & {one.id for one in trials}
