"""Usage: counted exactly from what leases hold, and what it makes of the order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import pytest

from gpulease_protocol.model import Demand, Event, Holder, Lease, LeaseState, Liveness, Priority
from gpulease_server.core.explain.dry_run import dry_run
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order_records import UsageRecord
from gpulease_server.core.policy import Policy
from gpulease_server.core.usage import STEP, ordering_s, step_of, usage_of
from gpulease_server.runtime.outage import copy_ledger
from tests.core.build import World, gpu

HOUR_S = 3600.0
WEEK_S = 7 * 24 * HOUR_S
LONG_S = 1e9


def world_of(gpus: int = 8, **what: Any) -> World:
    policy = Policy(**{"fair_share": True, "max_bypass_s": LONG_S} | what)
    return World(policy=policy).node(gpus=gpus)


def ask(world: World, count: int = 1, user: str = "ann", **what: Any) -> Lease:
    world.report()
    lease = world.lease(count, **{"ttl_s": LONG_S, "user": user, **what})
    world.check()
    return lease


def give_back(world: World, lease: Lease) -> None:
    world.report()
    world.release(world.now_of(lease))
    world.report()
    world.check()


def is_active(world: World, lease: Lease) -> bool:
    return world.now_of(lease).state is LeaseState.ACTIVE


def use(world: World, user: str, gpus: int, hours: float) -> None:
    """The user holds so many GPUs for so long."""
    lease = ask(world, gpus, user)
    world.at_s += hours * HOUR_S
    give_back(world, lease)


def used_hours(world: World, user: str) -> float:
    return usage_of(world.ledger, user, world.now, world.policy).used_s / HOUR_S


def from_the_records(world: World, user: str) -> float:
    """GPU-hours of a user's leases decayed to now, summed second by second of the formula, from the events alone."""
    held: dict[str, tuple[datetime, int]] = {}
    found, rate = 0.0, math.log(2) / world.policy.usage_half_life_s

    def add(since: datetime, until: datetime, gpus: int) -> float:
        ages = ((world.now.at - moment).total_seconds() for moment in (since, until))
        begun, ended = (math.exp(-rate * age) for age in ages)
        return gpus * (ended - begun) / rate / HOUR_S

    mine = {one.lease.id for one in world.ledger.leases.values() if one.lease.holder.user == user}
    for event in (change for change in world.changes if isinstance(change, Event) and change.lease_id in mine):
        if event.kind == "lease.granted":
            held[event.lease_id or ""] = (event.at, len(event.gpus))
        elif event.kind == "lease.ended" and event.gpus:
            since, gpus = held.pop(event.lease_id or "")
            found += add(since, event.at, gpus)
    return found + sum(add(since, world.now.at, gpus) for since, gpus in held.values())


@pytest.mark.parametrize("seed", range(8))
def test_usage_is_what_the_records_of_leases_say(seed: int) -> None:
    drawn = random.Random(seed)
    world = world_of(usage_half_life_s=drawn.choice([HOUR_S, WEEK_S]), fair_share=drawn.random() < 0.5)
    leases: list[Lease] = []
    for _ in range(40):
        if leases and drawn.random() < 0.5:
            lease = leases.pop(drawn.randrange(len(leases)))
            give_back(world, lease)
        else:
            leases.append(ask(world, drawn.randint(1, 3), drawn.choice(["ann", "bob"])))
        world.at_s += drawn.choice([1.0, 600.0, 30 * HOUR_S])
    for user in ("ann", "bob"):
        assert used_hours(world, user) == pytest.approx(from_the_records(world, user), rel=1e-9, abs=1e-9)


def test_half_of_what_was_used_a_half_life_ago_counts() -> None:
    world = world_of()
    use(world, "ann", 4, 1.0)
    assert used_hours(world, "ann") == pytest.approx(4.0, rel=0.01)
    world.at_s += WEEK_S
    assert used_hours(world, "ann") == pytest.approx(2.0, rel=0.01)


def test_models_count_as_they_are_weighted() -> None:
    world = world_of(gpu_weights=(("H100", 2.0), ("100", 0.5)))
    world.node("b", gpus=[gpu(0, "b", name="NVIDIA A100"), gpu(1, "b", name="Tesla T4")])
    leases = []
    for node, count in (("a", 1), ("b", 2)):
        world.report("b")
        leases.append(ask(world, count, node=node))
    world.at_s += HOUR_S
    assert used_hours(world, "ann") == pytest.approx(2.0 + 0.5 + 1.0, rel=0.01)


def test_who_has_used_less_goes_first_and_others_in_order_of_arrival() -> None:
    world = world_of()
    use(world, "ann", 8, 10.0)
    use(world, "bob", 4, 10.0)
    full = ask(world, 8, "eve")
    waiting = {user: ask(world, 8, user) for user in ("ann", "bob", "cleo", "dan")}
    order = []
    for _ in range(4):
        give_back(world, full)
        (user,) = [user for user, lease in waiting.items() if is_active(world, lease)]
        full = waiting.pop(user)
        order.append(user)
    assert order == ["cleo", "dan", "bob", "ann"]


def test_priorities_go_before_usage() -> None:
    world = world_of(gpus=1)
    use(world, "ann", 1, 50.0)
    full = ask(world, 1, "eve")
    low = ask(world, 1, "bob", priority=Priority.SCAVENGE)
    middle = ask(world, 1, "ann")
    give_back(world, full)
    assert is_active(world, middle)
    assert not is_active(world, low)


def test_differences_of_less_than_a_step_keep_the_order_of_arrival() -> None:
    world = world_of(gpus=2)
    use(world, "ann", 1, 0.9)
    full = ask(world, 2, "eve")
    first, second = ask(world, 2, "ann"), ask(world, 2, "bob")
    give_back(world, full)
    assert is_active(world, first), "both have used less than what counts"
    assert not is_active(world, second)


def test_free_gpus_are_shared_within_one_turn() -> None:
    """Each grant counts at once, so that who has a little less does not take all."""
    world = world_of()
    use(world, "bob", 2, 1.0)
    full = ask(world, 8, "eve")
    ann, bob = ([ask(world, 1, user) for _ in range(8)] for user in ("ann", "bob"))
    give_back(world, full)
    counts = [sum(is_active(world, lease) for lease in leases) for leases in (ann, bob)]
    assert counts in ([5, 3], [4, 4]), counts


def shares(world: World, pieces: Iterable[int], *, cancels: int = 0, hours: float = 60.0) -> float:
    """Ann asks for four GPUs in these pieces again and again, Bob for four at once; both want all the time. Ann's share
    of what was granted."""
    held: list[tuple[str, Lease]] = [("eve", ask(world, 4, "eve"))]
    waiting: dict[str, list[Lease]] = {"ann": [], "bob": []}
    served = {"ann": 0.0, "bob": 0.0}
    wants = {"ann": list(pieces), "bob": [4]}
    for round_number in range(int(hours)):
        for user, sizes in wants.items():
            for size in sizes if len(waiting[user]) < 2 * len(sizes) else ():
                waiting[user].append(ask(world, size, user))
        for _ in range(cancels):
            world.release(world.now_of(waiting["ann"].pop(round_number % len(waiting["ann"]))))
            waiting["ann"].append(ask(world, wants["ann"][0], "ann"))
        world.at_s += HOUR_S
        for user, lease in held:
            if user in served:
                served[user] += len(world.now_of(lease).gpus)
            give_back(world, lease)
        held = []
        for user, leases in waiting.items():
            begun = [lease for lease in leases if is_active(world, lease)]
            held += [(user, lease) for lease in begun]
            waiting[user] = [lease for lease in leases if lease not in begun]
    return served["ann"] / (served["ann"] + served["bob"])


@pytest.mark.parametrize(("pieces", "cancels"), [([4], 0), ([2, 2], 0), ([1, 1, 1, 1], 0), ([4], 1), ([1, 1, 1, 1], 2)])
def test_no_one_gets_more_by_splitting_requests_or_by_asking_again(pieces: list[int], cancels: int) -> None:
    assert 0.4 <= shares(world_of(gpus=4), pieces, cancels=cancels) <= 0.55


def test_without_usage_in_the_order_who_splits_gets_as_much_as_they_ask_for() -> None:
    """What the test above would show if nothing kept the shares equal."""
    assert shares(world_of(gpus=4, fair_share=False, max_bypass=1000), [1] * 12) > 0.6


def test_a_request_that_is_cancelled_charges_nothing() -> None:
    world = world_of(gpus=1)
    ask(world, 1, "eve")
    waiting = ask(world, 1, "ann")
    before = usage_of(world.ledger, "ann", world.now, world.policy)
    world.release(world.now_of(waiting))
    assert ordering_s(usage_of(world.ledger, "ann", world.now, world.policy)) == ordering_s(before) == 0.0


def test_an_entry_charge_of_at_most_an_hour_counts_while_a_lease_is_held() -> None:
    world = world_of()
    short, long = ask(world, 2, time_s=600.0), ask(world, 3, time_s=7200.0)
    assert ordering_s(usage_of(world.ledger, "ann", world.now, world.policy)) == pytest.approx(
        2 * 600.0 + 3 * 3600.0, rel=1e-3
    )
    give_back(world, short)
    give_back(world, long)
    left = usage_of(world.ledger, "ann", world.now, world.policy)
    assert left.entry_s == 0.0
    assert left.used_s < 1.0


def test_the_step_of_a_usage_that_only_decays_stays() -> None:
    policy = Policy(usage_half_life_s=WEEK_S)
    steps = {step_of(1e7 * 2 ** (-at_s / WEEK_S), at_s, policy) for at_s in (0.0, 1e3, 1e5, 1e6)}
    assert len(steps) <= 2, "a rounding at a border is none of the usage"
    assert step_of(1e7 * 1.2, 0.0, policy) - step_of(1e7, 0.0, policy) in (3, 4)
    assert pytest.approx(0.0704, abs=1e-4) == STEP


def reloaded(world: World, away_s: float) -> World:
    """The world after a restart that took so long: what is stored, and nothing else."""
    ledger = copy_ledger(world.ledger)
    ledger.usage = {
        user: UsageRecord(user=user, used_s=one.used_s, held=one.held, entry_s=one.entry_s, counted_at=one.counted_at)
        for user, one in world.ledger.usage.items()
    }
    ledger.usage_recounted = False
    ledger.steps_counted_at_s = None
    ledger.demand_classes.set_steps([(user, 0) for user in ledger.demand_classes.steps], 0)
    again = World(policy=world.policy, ledger=ledger, at_s=50.0, nodes=world.nodes)
    again.wall_jump_s = world.at_s + world.wall_jump_s + away_s - again.at_s
    again.lose_reports()
    again.ids = world.ids
    again.report()
    return again


def test_a_restart_goes_on_with_what_was_used_and_counts_the_time_between() -> None:
    world = world_of()
    use(world, "bob", 8, 5.0)
    ask(world, 4, "ann")
    world.at_s += HOUR_S
    again = reloaded(world, 2 * HOUR_S)
    assert used_hours(again, "ann") == pytest.approx(3 * 4, rel=0.02)
    assert used_hours(again, "bob") == pytest.approx(used_hours(world, "bob"), rel=0.02)
    again.at_s += HOUR_S
    assert used_hours(again, "ann") == pytest.approx(4 * 4, rel=0.02)


def test_the_order_after_a_restart_is_as_before() -> None:
    world = world_of(gpus=1)
    use(world, "ann", 1, 20.0)
    full = ask(world, 1, "eve")
    waiting = [ask(world, 1, "ann"), ask(world, 1, "bob")]
    again = reloaded(world, 10.0)
    give_back(again, full)
    assert [is_active(again, lease) for lease in waiting] == [False, True]


def test_the_first_start_of_a_version_that_counts_begins_with_what_is_held() -> None:
    world = world_of()
    ask(world, 4, "ann")
    world.ledger.usage.clear()
    again = reloaded(world, 0.0)
    again.at_s += HOUR_S
    assert used_hours(again, "ann") == pytest.approx(4.0, rel=0.01)


def test_usage_that_has_decayed_to_nothing_is_forgotten() -> None:
    world = world_of()
    use(world, "ann", 1, 1.0)
    again = reloaded(world, 60 * WEEK_S)
    assert "ann" not in again.ledger.usage


def test_usage_is_counted_and_orders_nothing_unless_wanted() -> None:
    world = world_of(gpus=1, fair_share=False)
    use(world, "ann", 1, 100.0)
    full = ask(world, 1, "eve")
    first, second = ask(world, 1, "ann"), ask(world, 1, "bob")
    give_back(world, full)
    assert is_active(world, first)
    assert not is_active(world, second)
    assert used_hours(world, "ann") > 60
    assert not world.ledger.demand_classes.steps


def test_explain_says_it_in_numbers() -> None:
    world = world_of(gpus=1)
    use(world, "ann", 1, 87.0)
    use(world, "bob", 1, 41.0)
    ask(world, 1, "eve")
    mine, other = ask(world, 1, "ann"), ask(world, 1, "bob")
    ledger: Ledger = world.ledger
    said = explain(ledger, ledger.leases[mine.id], world.now, world.policy)
    assert (said.position, [one.user for one in said.recent_usage]) == (2, ["ann", "bob"])
    ann, bob = (one.gpu_hours for one in said.recent_usage)
    assert f"of recent GPU-hours bob has {bob:.1f}, and ann {ann:.1f}, so those go first" in said.sentence
    assert bob < ann
    first = explain(ledger, ledger.leases[other.id], world.now, world.policy)
    assert (first.position, [one.user for one in first.recent_usage]) == (1, ["bob"])


def test_who_waits_while_others_use_goes_first_in_time_without_any_event_of_theirs() -> None:
    """Eve's usage grows while Eve holds a GPU and waits for another; the steps of all who wait are found again."""
    world = world_of(gpus=2)
    use(world, "bob", 1, 30.0)
    ask(world, 1, "eve")
    full = ask(world, 1, "fay")
    eve, bob = ask(world, 1, "eve"), ask(world, 1, "bob")
    world.at_s += 40 * HOUR_S
    give_back(world, full)
    assert [is_active(world, lease) for lease in (eve, bob)] == [False, True]


def test_a_dry_run_knows_what_those_use_who_hold_gpus_and_do_not_wait() -> None:
    world = world_of(gpus=8, max_bypass=0)
    use(world, "bob", 4, 2.0)
    ask(world, 4, "ann")
    world.at_s += 20 * HOUR_S
    ask(world, 8, "bob")  # what is free is held for it
    asked = Lease(
        id="unmade",
        state=LeaseState.QUEUED,
        holder=Holder(user="ann"),
        demand=Demand(),
        ttl_s=60.0,
        liveness=Liveness.HEARTBEAT,
        created_at=world.now.at,
    )
    assert getattr(dry_run(world.ledger, asked, world.now, world.policy), "verdict", None) == "not_now"
    assert ask(world, 1, "ann").state is LeaseState.QUEUED


@pytest.mark.parametrize("others", [1, 5])
def test_no_flood_of_users_who_have_used_nothing_starves_anyone(others: int) -> None:
    world = world_of(gpus=1, max_overtakes=6)
    use(world, "ann", 1, 1000.0)
    held = ask(world, 1, "eve")
    target = ask(world, 1, "ann")
    for number in range(40):
        newer = [ask(world, 1, f"user {number} {other}") for other in range(others)]
        give_back(world, held)
        if is_active(world, target):
            break
        active = [one.lease for one in world.ledger.leases.values() if one.lease.state is LeaseState.ACTIVE]
        (held,) = active
        assert newer
    assert 6 <= number <= 8


def day_of_a_sweep(world: World) -> float:
    """Ann submits a sweep of 200 jobs of 10 minutes on four GPUs; half an hour later Bob asks for all four. Hours that
    Bob waits."""
    sweep = [ask(world, 1, "ann") for _ in range(200)]
    bob: Lease | None = None
    for rounds in range(60):
        if rounds == 3:
            bob = ask(world, 4, "bob")
        world.at_s += 600.0
        for lease in [lease for lease in sweep if is_active(world, lease)]:
            give_back(world, lease)
        if bob is not None and is_active(world, bob):
            return (rounds - 2) / 6
    raise AssertionError("the sweep has ended")


def test_a_training_does_not_wait_for_the_sweep_that_came_before() -> None:
    assert day_of_a_sweep(world_of(gpus=4)) < 1
    assert day_of_a_sweep(world_of(gpus=4, fair_share=False)) > 7
