"""A request that says when it ends may start first where it delays no one, and counts for no one."""

from __future__ import annotations

import random
import re
from datetime import timedelta
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.model import Demand, Event, GpuState, Holder, Lease, LeaseState, Liveness, NodeMode, Selection
from gpulease_server.core import backfill, queue, queue_walk
from gpulease_server.core.explain.dry_run import dry_run
from gpulease_server.core.happenings import CancelRequested, Ticked
from gpulease_server.core.policy import Policy
from gpulease_server.core.shadow_time import END_S, JOB_GRACE_S, JOB_START_S
from tests.core.build import GIB, World, gpu, uuid
from tests.core.test_bypass import LONG_S, ask, explained, give_back, is_active, pass_by, world_of
from tests.core.test_held_time import restart

SETTLES_S = 2 * Policy().retained_memory_s + END_S
"""What passes from the end of a declared time until its GPUs are surely free."""
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def listed(world: World, *indices: int, node: str = "a", **what: Any) -> Lease:
    """A lease on these GPUs."""
    lease = ask(world, len(indices), selection=Selection.LISTED, indices=indices, node=node, **what)
    assert lease.state is LeaseState.ACTIVE
    return lease


def waits_for_all(world: World, *, held_s: float | None = HOUR_S) -> Lease:
    """A request for all four GPUs of node a, while one of them is leased for so long."""
    listed(world, 3, time_s=held_s)
    first = ask(world, 4, node="a")
    assert first.state is LeaseState.QUEUED
    return first


def withdraw(world: World, *leases: Lease) -> None:
    """They no longer wait."""
    for lease in leases:
        world.release(world.now_of(lease))


def pass_time(world: World, seconds: float) -> None:
    """So much later: leases have ended by their times, and every node reports."""
    world.at_s += seconds
    world.turn(Ticked(cause=f"tick-{next(world.ids)}", since_last_s=0.25))
    for _ in range(2):
        for node in world.nodes:
            world.report(node)


def passed(world: World, lease: Lease) -> int:
    return world.ledger.bypasses.get(lease.id, (0, 0.0))[0]


def test_one_that_ends_before_the_first_can_start_counts_no_bypass() -> None:
    world = world_of(easy_backfill=True, max_bypass=3)
    first = waits_for_all(world)

    pass_by(world, 5, time_s=HOUR_S / 2)

    assert passed(world, first) == 0


def test_it_may_have_gpus_that_are_held_for_the_first() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    first = waits_for_all(world)
    longer = ask(world)
    assert longer.state is LeaseState.QUEUED
    withdraw(world, longer)

    shorter = ask(world, 2, time_s=HOUR_S / 2)

    assert shorter.state is LeaseState.ACTIVE
    assert set(explained(world, first).held) == {uuid(index) for index in range(3)} - {one.uuid for one in shorter.gpus}


@pytest.mark.parametrize(
    ("time_s", "starts"), [(HOUR_S - SETTLES_S - 1.0, True), (HOUR_S - SETTLES_S + 1.0, False), (None, False)]
)
def test_its_gpus_must_be_free_again_by_the_end_of_the_lease_that_the_first_waits_for(
    time_s: float | None, *, starts: bool
) -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    waits_for_all(world)

    assert (ask(world, time_s=time_s).state is LeaseState.ACTIVE) is starts


def test_what_already_waits_starts_when_it_can_end_in_time() -> None:
    """It is granted out of the queue, with all others of its kind for which there is room."""
    world = world_of(easy_backfill=True, max_bypass=0, a=4)
    own = listed(world, 0, 1, time_s=60.0)
    listed(world, 3, time_s=HOUR_S)
    first = ask(world, 4)
    shorter = [ask(world, time_s=HOUR_S / 2) for _ in range(4)]
    assert is_active(world, *shorter) == [True, False, False, False]

    give_back(world, own)

    assert is_active(world, first, *shorter) == [False, True, True, True, False]


def test_where_an_end_is_unknown_the_bounds_hold_as_they_are() -> None:
    world = world_of(easy_backfill=True, max_bypass=3)
    first = waits_for_all(world, held_s=None)
    pass_by(world, 3, time_s=1.0)
    assert passed(world, first) == 3
    assert ask(world, time_s=1.0).state is LeaseState.QUEUED


@pytest.mark.parametrize("what", ["leased", "foreign", "cordoned", "drains for long"])
def test_a_gpu_whose_end_is_unknown_may_be_free_at_any_moment(what: str) -> None:
    """All others that the first needs are held for it. Who ran ahead on these would delay it by hours."""
    world = world_of(easy_backfill=True, max_bypass=0, a=8)
    listed(world, 4, 5, 6, 7, time_s=10 * HOUR_S)
    on_three = listed(world, 3) if what in ("leased", "drains for long") else None
    if what == "foreign":
        world.node("a", gpus=[*world.nodes["a"][:3], gpu(3, pids=(99,)), *world.nodes["a"][4:]])
    elif what == "cordoned":
        world.cordon(3)
    elif on_three is not None and what == "drains for long":
        world.nodes["a"][3] = gpu(3, pids=(77,), lease=on_three.id)
        world.report()
        world.release(world.now_of(on_three))
        pass_time(world, 2 * world.policy.retained_memory_s + 1)
    first, shorter = ask(world, 4), ask(world, 3, time_s=9 * HOUR_S)
    assert is_active(world, first, shorter) == [False, False]

    world.nodes["a"][3] = gpu(3)
    if on_three is not None and what == "leased":
        give_back(world, on_three)
    elif what == "cordoned":
        world.cordon(3, cordoned=False)
    pass_time(world, 1)

    assert is_active(world, first) == [True]


def test_such_a_grant_counts_where_the_first_may_be_passed() -> None:
    world = world_of(easy_backfill=True, max_bypass=3, a=8)
    listed(world, 4, 5, 6, 7, time_s=10 * HOUR_S)
    listed(world, 3)
    first = ask(world, 4)

    assert ask(world, 3, time_s=9 * HOUR_S).state is LeaseState.ACTIVE
    assert passed(world, first) == 1


@pytest.mark.parametrize("time_s", [9 * HOUR_S, HOUR_S / 2])
def test_who_waits_behind_the_first_is_delayed_by_no_one_either(time_s: float) -> None:
    """The first holds GPUs on both nodes, and starts on a; then those of b are for the second."""
    world = world_of(easy_backfill=True, max_bypass=0, a=4, b=4)
    listed(world, 3, node="a", time_s=HOUR_S)
    listed(world, 3, node="b", time_s=10 * HOUR_S)
    first, second = ask(world, 4), ask(world, 3, node="b")

    assert ask(world, 3, node="b", time_s=time_s).state is LeaseState.QUEUED
    pass_time(world, HOUR_S + 1)

    assert is_active(world, first, second) == [True, True]


def test_who_waits_behind_the_first_is_passed_as_often_as_without_times() -> None:
    world = world_of(easy_backfill=True, max_bypass=2)
    first = waits_for_all(world)
    pass_by(world, 2)
    second = ask(world, 2)
    assert is_active(world, first, second) == [False, False]

    pass_by(world, 2, time_s=60.0)

    assert [passed(world, first), passed(world, second)] == [2, 2]
    assert ask(world, time_s=60.0).state is LeaseState.QUEUED, "the second was passed as often as it may be"


@pytest.mark.parametrize("time_s", [100 * HOUR_S, None])
def test_a_gpu_that_the_first_can_do_without_is_for_who_waits_next(time_s: float | None) -> None:
    world = world_of(easy_backfill=True, max_bypass=0, a=8)
    listed(world, 4, 5, 6, 7, time_s=HOUR_S)
    listed(world, 3, time_s=1000 * HOUR_S)
    first, second = ask(world, 4), ask(world, 3)

    assert ask(world, time_s=time_s).state is LeaseState.QUEUED
    pass_time(world, HOUR_S + 1)

    assert is_active(world, first, second) == [True, True]


def test_a_lease_ends_by_the_budget_of_its_token_too() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    budget = Budget(max_lease_s=HOUR_S)
    listed(world, 3, time_s=10 * HOUR_S, token="t", budget=budget)
    first = ask(world, 4, user="ann")

    longer, shorter = ask(world, 3, user="eve", time_s=9 * HOUR_S), None
    withdraw(world, longer)
    shorter = ask(world, 2, user="eve", time_s=HOUR_S / 2)

    assert is_active(world, first, shorter) == [False, True]
    assert longer.state is LeaseState.QUEUED
    assert "in 61.1 min, at the latest" in sentence(world, first)


def test_gpu_hours_of_a_day_may_end_a_lease_at_any_moment() -> None:
    """The token may be used for more GPUs, and its hours are spent sooner."""
    world = world_of(easy_backfill=True, max_bypass=0)
    listed(world, 3, time_s=10 * HOUR_S, token="t", budget=Budget(gpu_hours_per_day=5.0))
    ask(world, 4, user="ann")

    assert ask(world, user="eve", time_s=60.0).state is LeaseState.QUEUED


def leaves_a_process(world: World, lease: Lease) -> int:
    """The time of a lease on one GPU has passed, and its process goes on. The index of the GPU."""
    index = lease.gpus[0].index
    world.nodes["a"][index] = gpu(index, pids=(66,), lease=lease.id)
    world.report()
    pass_time(world, (lease.demand.time_s or 0.0) + 1)
    assert world.state(index) is GpuState.DRAINING
    return index


def test_what_is_left_of_one_that_ran_ahead_lets_no_one_else_in() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    first = waits_for_all(world, held_s=10 * HOUR_S)
    left = leaves_a_process(world, ask(world, user="eve", time_s=60.0))

    pass_time(world, 10 * world.policy.retained_memory_s)

    assert ask(world, 2, user="fay").state is LeaseState.QUEUED
    assert len(explained(world, first).held) == 2
    world.nodes["a"][left] = gpu(left)
    pass_time(world, 1)
    assert len(explained(world, first).held) == 3
    assert world.ledger.ran_ahead == {}


def test_who_leaves_something_behind_runs_ahead_of_no_one() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    waits_for_all(world, held_s=10 * HOUR_S)
    left = leaves_a_process(world, ask(world, user="eve", time_s=60.0))
    pass_time(world, world.policy.leftover_after_s)

    again = ask(world, user="eve", time_s=60.0)
    withdraw(world, again)

    assert again.state is LeaseState.QUEUED
    assert ask(world, user="fay", time_s=60.0).state is LeaseState.ACTIVE
    world.nodes["a"][left] = gpu(left)
    pass_time(world, 1)
    assert ask(world, user="eve", time_s=60.0).state is LeaseState.ACTIVE


def test_a_step_of_the_clock_after_a_restart_moves_no_end_of_a_job() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    world.submit(1, timeout_s=2 * HOUR_S)
    pass_time(world, HOUR_S)
    restart(world)

    world.wall_jump_s = -3 * HOUR_S
    ask(world, 4)

    assert ask(world, 2, time_s=1.5 * HOUR_S).state is LeaseState.QUEUED


def test_no_one_follows_those_who_ran_ahead_once_all_else_is_given_back() -> None:
    """Else requests that declare a day and take minutes could keep the first out for a day."""
    world = world_of(easy_backfill=True, max_bypass=0)
    long = listed(world, 3, time_s=DAY_S)
    first = ask(world, 4)
    ahead = [ask(world, time_s=20 * HOUR_S) for _ in range(3)]
    assert all(is_active(world, *ahead))
    give_back(world, long)

    give_back(world, ahead[0])

    assert ask(world, time_s=60.0).state is LeaseState.QUEUED
    for one in ahead[1:]:
        give_back(world, one)
    assert is_active(world, first) == [True]


def test_a_lease_that_ran_ahead_of_others_has_an_end_for_those_who_come_later() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    first = waits_for_all(world)
    assert ask(world, time_s=HOUR_S / 2).state is LeaseState.ACTIVE
    pass_time(world, 1)
    withdraw(world, first)
    ask(world, 3)

    assert ask(world, time_s=HOUR_S / 4).state is LeaseState.ACTIVE


def test_many_that_never_fit_keep_no_one_from_running_ahead() -> None:
    world = world_of(easy_backfill=True, max_bypass=0, a=8)
    listed(world, 7, time_s=10 * HOUR_S)
    ask(world, 8, user="ann")
    for number in range(32):
        ask(world, 8, user="mal", time_s=1.0 + number)
    said = re.search(r"With a `time_s` of at most (\d+) s it could start now", sentence(world, ask(world, user="bea")))
    withdraw(world, *(one.lease for one in world.ledger.leases.values() if one.lease.holder.user == "bea"))

    assert said is not None
    assert ask(world, user="eve", time_s=float(said.group(1))).state is LeaseState.ACTIVE


def test_behind_too_many_kinds_of_requests_no_one_runs_ahead_and_no_one_is_told_so() -> None:
    world = world_of(easy_backfill=True, max_bypass=0, a=8)
    listed(world, 7, time_s=10 * HOUR_S)
    for number in range(queue_walk.MAX_AHEAD + 1):
        ask(world, 8, min_free_memory_bytes=1 + number)

    later = ask(world)

    assert "With a" not in sentence(world, later)
    assert ask(world, time_s=60.0).state is LeaseState.QUEUED


@pytest.mark.parametrize("seed", range(8))
def test_the_first_starts_when_it_could_have_started_whatever_runs_ahead(seed: int) -> None:
    chance = random.Random(seed)
    world = world_of(easy_backfill=True, max_bypass=0, a=4, b=4)
    ends: dict[str, float] = {"a": 0.0, "b": 0.0}
    for node, index in [(node, index) for node in "ab" for index in range(chance.choice([1, 2]))]:
        time_s = chance.choice([200.0, 300.0, 400.0])
        listed(world, index, node=node, time_s=time_s)
        ends[node] = max(ends[node], time_s)
    asked_at_s, first, ahead = world.at_s, ask(world, 4, time_s=LONG_S), 0
    while not is_active(world, first)[0]:
        assert world.at_s - asked_at_s <= min(ends.values()) + 6.0
        shorter = ask(world, chance.choice([1, 1, 2]), time_s=chance.choice([20.0, 80.0, 150.0, 5000.0]))
        ahead += shorter.state is LeaseState.ACTIVE
        if shorter.state is LeaseState.QUEUED:
            world.release(shorter)
        world.at_s += 5.0
        world.turn(Ticked(cause="tick", since_last_s=5.0))
        for node in ("a", "b"):
            world.report(node)
    assert ahead > 2


def test_a_gang_is_delayed_on_none_of_its_nodes() -> None:
    world = world_of(easy_backfill=True, max_bypass=0, a=2, b=2)
    listed(world, 0, node="a", time_s=HOUR_S)
    listed(world, 0, node="b", time_s=2 * HOUR_S)
    gang = ask(world, 2, nodes=2)

    over_b = ask(world, node="b", time_s=1.5 * HOUR_S)
    over_a = ask(world, node="a", time_s=1.5 * HOUR_S)
    assert over_a.state is LeaseState.QUEUED
    withdraw(world, over_a)
    within_a = ask(world, node="a", time_s=0.5 * HOUR_S)

    assert is_active(world, gang, over_b, within_a) == [False, True, True]


@pytest.mark.parametrize(("early_s", "state"), [(-1.0, "queued"), (1.0, "starting")])
def test_a_job_must_end_with_its_grace_and_its_start(early_s: float, state: str) -> None:
    """One that is new, as one that waited."""
    world = world_of(easy_backfill=True, max_bypass=0)
    waits_for_all(world)

    job = world.submit(1, timeout_s=HOUR_S - SETTLES_S - JOB_START_S - JOB_GRACE_S - early_s)

    assert world.ledger.jobs[job].job.state.value == state
    world.report()
    assert world.ledger.jobs[job].job.state.value == state


def test_a_job_that_ran_ahead_has_no_more_time_when_it_is_cancelled() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    first = waits_for_all(world)
    job = world.submit(1, timeout_s=HOUR_S - 300.0)
    before = re.search(r"starts by [^,]*", sentence(world, first))

    world.turn(CancelRequested(cause="cancel", job_id=job, grace_s=HOUR_S))

    assert before is not None
    assert before.group() in sentence(world, first)


def test_the_end_of_a_job_counts_as_that_of_a_lease() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    world.submit(1, timeout_s=HOUR_S)
    ask(world, 4)

    assert ask(world, time_s=HOUR_S / 2).state is LeaseState.ACTIVE
    assert ask(world, time_s=HOUR_S).state is LeaseState.QUEUED


def test_on_a_node_that_can_not_serve_the_first_anyway_it_is_not_delayed() -> None:
    world = world_of(easy_backfill=True, max_bypass=3)
    first = waits_for_all(world)
    world.cordon(2)
    pass_by(world, 1, time_s=60.0)
    assert passed(world, first) == 0, "it needs GPU 3, with or without GPU 2"
    world.cordon(2, cordoned=False)
    world.set_mode(NodeMode.DRAINING)
    assert ask(world, time_s=60.0).state is LeaseState.QUEUED


@pytest.mark.parametrize("kind", ["user", "group"])
def test_one_with_a_limit_in_common_delays_the_first(kind: str) -> None:
    """It would keep that from GPUs of b, of which nothing else keeps it once they are given back."""
    world = world_of(easy_backfill=True, max_bypass=3, a=4, b=4)
    name, members = ("ann", ()) if kind == "user" else ("lab", ("ann", "cat"))
    world.limit(name, kind, members=members, max_gpus=4)
    listed(world, 3, node="a", time_s=10 * HOUR_S, user="dan")
    listed(world, 3, node="b", time_s=HOUR_S, user="dan")
    first = ask(world, 4, user="ann")

    pass_by(world, 1, node="a", time_s=5 * HOUR_S, user="bob")
    assert passed(world, first) == 0
    pass_by(world, 1, node="a", time_s=5 * HOUR_S, user="ann" if kind == "user" else "cat")
    assert passed(world, first) == 1


def test_under_a_limit_of_gpu_hours_no_one_runs_ahead() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    world.limit("ann", gpu_hours=100.0)
    waits_for_all(world)

    limited = ask(world, time_s=60.0, user="ann")
    withdraw(world, limited)

    assert limited.state is LeaseState.QUEUED
    assert ask(world, time_s=60.0, user="bob").state is LeaseState.ACTIVE


@pytest.mark.parametrize("max_bypass", [0, 3])
def test_a_turn_looks_for_gpus_only_for_those_who_may_have_some(
    max_bypass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(easy_backfill=True, max_bypass=max_bypass, a=16)
    listed(world, 15, time_s=HOUR_S)
    ask(world, 16)
    pass_by(world, max_bypass)
    searches, place, reserve = [], queue.place, backfill.Reservations._gpus_to_reserve
    monkeypatch.setattr(queue, "place", lambda *args, **more: searches.append(args) or place(*args, **more))
    monkeypatch.setattr(
        backfill.Reservations, "_gpus_to_reserve", lambda *args: searches.append(args) or reserve(*args)
    )
    calls = [world.ask(16, time_s=100.0 + number) for number in range(20)]
    calls += [world.ask(1, time_s=2 * HOUR_S + number) for number in range(20)]
    world.answer_wanted()
    assert all(world.answers[call].state is LeaseState.QUEUED for call in calls)
    searches.clear()

    world.report()

    assert len(searches) == 2, "once for the first, and once to hold GPUs for it"


def test_requests_that_differ_in_time_alone_are_looked_for_once() -> None:
    world = world_of(easy_backfill=True)
    waits_for_all(world)
    for number in range(20):
        ask(world, 4, time_s=100.0 + number)

    assert len(world.ledger.fleet.candidates) <= 3


def test_a_gpu_that_lacks_the_memory_may_have_it_at_any_moment() -> None:
    full = gpu(1, memory_used_bytes=70 * GIB)
    world = world_of(easy_backfill=True, max_bypass=3, a=[gpu(0), full, gpu(2), gpu(3)])
    listed(world, 3, time_s=HOUR_S)
    first = ask(world, 3, min_free_memory_bytes=40 * GIB)

    pass_by(world, 1, time_s=60.0)

    assert passed(world, first) == 1


def sentence(world: World, lease: Lease) -> str:
    return explained(world, lease).sentence


def test_the_first_is_told_by_when_it_starts_and_who_runs_ahead() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    first = waits_for_all(world)
    by = world.now.at + timedelta(seconds=HOUR_S + SETTLES_S)
    assert f"it starts by {by:%Y-%m-%d %H:%M}" in sentence(world, first)

    shorter = ask(world, time_s=60.0)

    assert f"{shorter.id} has started ahead of it" in sentence(world, first)
    assert f"It was granted before {first.id}, which it does not delay" in sentence(world, shorter)
    give_back(world, shorter)
    assert "ahead" not in sentence(world, first)


def test_before_the_bound_is_reached_it_is_not_promised() -> None:
    world = world_of(easy_backfill=True, max_bypass=3)
    first = waits_for_all(world)

    assert "could start by" in sentence(world, first)
    assert "unless newer requests start first" in sentence(world, first)


def test_nothing_is_told_where_an_end_is_unknown() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)

    first = waits_for_all(world, held_s=None)

    assert "declared" not in sentence(world, first) + sentence(world, ask(world))


def test_one_that_waits_is_told_what_to_declare_so_that_it_starts_now() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    waits_for_all(world)
    later = ask(world, 2)
    said = re.search(r"With a `time_s` of at most (\d+) s it could start now", sentence(world, later))
    assert said is not None
    longest_s = float(said.group(1))

    behind = ask(world, 3)
    assert "With a" not in sentence(world, later), "who asks again comes behind another one"
    withdraw(world, later, behind)
    longer = ask(world, 2, time_s=longest_s + 2.0)
    withdraw(world, longer)

    assert longer.state is LeaseState.QUEUED
    assert ask(world, 2, time_s=longest_s).state is LeaseState.ACTIVE
    assert "With a" not in sentence(world, ask(world, 2)), "too few GPUs are left"


@pytest.mark.parametrize(("time_s", "verdict"), [(60.0, "fits_now"), (2 * HOUR_S, "not_now"), (None, "not_now")])
def test_a_dry_run_knows_who_would_run_ahead(time_s: float | None, verdict: str) -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    waits_for_all(world)
    unmade = Lease(
        id="dry",
        state=LeaseState.QUEUED,
        demand=Demand(count=2, time_s=time_s),
        holder=Holder(user="ann"),
        liveness=Liveness.HEARTBEAT,
        ttl_s=LONG_S,
        created_at=world.now.at,
    )

    said = dry_run(world.ledger, unmade, world.now, world.policy)

    assert getattr(said, "verdict", None) == verdict
    assert is_active(world, ask(world, 2, time_s=time_s)) == [verdict == "fits_now"]


@pytest.mark.parametrize("max_bypass", [0, 1])
def test_by_when_the_first_starts_is_promised_only_where_gpus_are_held_for_it(max_bypass: int) -> None:
    world = world_of(easy_backfill=True, max_bypass=max_bypass, a=4, b=4)
    listed(world, 2, 3, node="a", time_s=HOUR_S)
    held = listed(world, 3, node="b", time_s=None if max_bypass else 9 * HOUR_S)
    first = ask(world, 4)
    pass_by(world, max_bypass, node="b")

    assert ("it starts by" in sentence(world, first)) is (max_bypass == 0)
    assert ("could start by" in sentence(world, first)) is (max_bypass == 1)
    assert (ask(world, 2, node="a").state is LeaseState.ACTIVE) is (max_bypass == 1)
    assert is_active(world, held) == [True]


def test_the_event_of_the_grant_names_whom_it_passed() -> None:
    world = world_of(easy_backfill=True, max_bypass=0)
    first = waits_for_all(world)

    shorter = ask(world, time_s=60.0)

    reasons = [one.reason for one in world.changes if isinstance(one, Event) and one.lease_id == shorter.id]
    assert f"runs ahead of {first.id}, with no delay for them" in reasons


def test_it_is_off_by_default() -> None:
    """What is held for the first is for no one else, whatever they declare."""
    world = world_of(max_bypass=0)
    first = waits_for_all(world)
    assert is_active(world, ask(world, 1, time_s=60.0)) == [False]
    assert "could start now" not in explained(world, ask(world, 1, time_s=60.0)).sentence
    assert passed(world, first) == 0
