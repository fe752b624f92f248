"""The queue's one bargain: who fits may go first, so often and so long, and then GPUs are held for who does not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from gpulease_protocol.errors import NotNow
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.model import ComputeMode, GpuState, Lease, LeaseState, NodeMode, Selection
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_server.core import backfill, reservation_view
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import gpu_view
from tests.core.build import GIB, World, gpu, gpu_views, uuid
from tests.core.test_arrays import submit

LONG_S = 100_000.0


def world_of(max_bypass: int = 3, max_bypass_s: float = LONG_S, *, easy_backfill: bool = False, **nodes: Any) -> World:
    world = World(policy=Policy(max_bypass=max_bypass, max_bypass_s=max_bypass_s, easy_backfill=easy_backfill))
    for name, gpus in (nodes or {"a": 4}).items():
        world.node(name, gpus=gpus)
    return world


def ask(world: World, count: int = 1, **what: Any) -> Lease:
    return world.lease(count, **{"ttl_s": LONG_S, **what})


def explained(world: World, lease: Lease) -> Explanation:
    return explain(world.ledger, world.ledger.leases[lease.id], world.now, world.policy)


def is_active(world: World, *leases: Lease) -> list[bool]:
    return [world.now_of(lease).state is LeaseState.ACTIVE for lease in leases]


def give_back(world: World, lease: Lease) -> None:
    """Released, and its GPUs seen clean."""
    node = world.now_of(lease).gpus[0].node
    world.release(world.now_of(lease))
    world.report(node)


def pass_by(world: World, times: int, **what: Any) -> None:
    """So many newer requests come, get a GPU, and give it back."""
    for _ in range(times):
        newer = ask(world, **what)
        assert newer.state is LeaseState.ACTIVE
        give_back(world, newer)


def older_of_four(world: World, *, held_index: int = 3) -> tuple[Lease, Lease]:
    """A lease on one GPU of node a, and a request for all four that waits because of it."""
    held = ask(world, selection=Selection.LISTED, indices=(held_index,), node="a")
    older = ask(world, 4, node="a")
    assert older.state is LeaseState.QUEUED
    return held, older


def test_a_request_is_passed_so_often_and_then_gpus_are_held_for_it() -> None:
    world = world_of(max_bypass=3)
    held, older = older_of_four(world)
    pass_by(world, 3)
    newer = ask(world)
    assert newer.state is LeaseState.QUEUED, "passed more often than it may be"
    assert [world.state(index) for index in range(3)] == [GpuState.FREE] * 3
    give_back(world, held)
    assert is_active(world, older, newer) == [True, False]
    give_back(world, older)
    assert is_active(world, newer) == [True]


def test_what_comes_in_one_turn_does_not_pass_more_often_either() -> None:
    world = world_of(max_bypass=2)
    older_of_four(world)
    world.at_s += 1.0
    calls = [world.ask(ttl_s=LONG_S) for _ in range(3)]
    world.report()
    answers = [world.answers[call] for call in calls]
    assert [answer.state.value for answer in answers if isinstance(answer, Lease)] == ["active", "active", "queued"]


def test_a_request_is_passed_for_so_long_and_then_gpus_are_held_for_it() -> None:
    world = world_of(max_bypass=1000, max_bypass_s=60.0)
    _, older = older_of_four(world)
    world.pass_time(100)
    pass_by(world, 1)
    world.pass_time(50)
    pass_by(world, 1)
    assert (explained(world, older).passed, round(explained(world, older).passed_s or 0)) == (2, 50)
    world.pass_time(10)
    assert ask(world).state is LeaseState.QUEUED


@pytest.mark.parametrize("policy", [{"max_bypass": 0}, {"max_bypass_s": 0.0}])
def test_with_none_of_either_no_one_is_ever_passed(policy: dict[str, Any]) -> None:
    world = world_of(**policy)
    _, older = older_of_four(world)
    assert ask(world).state is LeaseState.QUEUED
    assert explained(world, older).passed == 0


def test_an_endless_stream_of_small_requests_starves_no_gang() -> None:
    """Before every release two more requests for one GPU come; no one ever stops asking."""
    world = world_of(max_bypass=5, a=8)
    stream = [ask(world) for _ in range(8)]
    gang = ask(world, 8)
    releases = 0
    while not is_active(world, gang)[0]:
        stream += [ask(world), ask(world)]
        give_back(world, next(lease for lease in stream if is_active(world, lease)[0]))
        releases += 1
        assert releases <= 5 + 8, "5 may pass it, and it lacks 8 GPUs"
    assert releases == 5 + 8
    give_back(world, gang)
    assert sum(is_active(world, *stream)) == 8, "GPUs stay idle after the gang"


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"count": 2, "gpu_model": "A100"}, {"gpu_model": "H100"}),
        ({"count": 2, "min_free_memory_bytes": 60 * GIB}, {"among": (uuid(2), uuid(3))}),
        ({"count": 2, "node": "a", "min_free_memory_bytes": 60 * GIB}, {"node": "b"}),
        ({"count": 2, "gpu_model": "A100"}, {}),
        ({"selection": Selection.LISTED, "count": 2, "indices": (0, 1), "node": "a"}, {"among": (uuid(2), uuid(3))}),
        ({"count": 2, "among": (uuid(0), uuid(1))}, {"among": (uuid(2), uuid(3))}),
    ],
)
def test_only_what_the_older_can_use_is_held(older: dict[str, Any], newer: dict[str, Any]) -> None:
    small = {"name": "NVIDIA H100", "memory_total_bytes": 40 * GIB}
    big = {"name": "NVIDIA A100", "memory_total_bytes": 80 * GIB}
    world = world_of(max_bypass=0, a=[gpu(0, **big), gpu(1, **big), gpu(2, **small), gpu(3, **small)])
    world.node("b", gpus=[gpu(index, "b", **small) for index in range(2)])
    ask(world, selection=Selection.LISTED, uuids=(uuid(1),))
    waiting = ask(world, **older)
    assert waiting.state is LeaseState.QUEUED
    assert explained(world, waiting).held == (uuid(0),)
    assert ask(world, **newer).state is LeaseState.ACTIVE
    assert ask(world, among=(uuid(0),)).state is LeaseState.QUEUED


def show(world: World, **what: Any) -> None:
    world.node(gpus=[*(gpu(index) for index in range(3)), gpu(3, **what)])


def leave_something_behind(world: World) -> None:
    """GPU 3 drains for longer than any driver retains memory."""
    holder = ask(world, selection=Selection.LISTED, indices=(3,))
    show(world, pids=(7,), lease=holder.id)
    world.release(holder)
    world.pass_time(61)


OUT_OF_USE: dict[str, Any] = {
    "foreign": lambda world: show(world, pids=(4242,)),
    "unhealthy": lambda world: show(world, health="xid:79"),
    "prohibited": lambda world: show(world, compute_mode=ComputeMode.PROHIBITED),
    "cordoned": lambda world: world.cordon(3),
    "draining for long": leave_something_behind,
}


@pytest.mark.parametrize("what", list(OUT_OF_USE))
def test_nothing_is_held_while_a_gpu_is_missing_that_no_lease_keeps_and_then_at_once(what: str) -> None:
    world = world_of(max_bypass=1)
    OUT_OF_USE[what](world)
    older = ask(world, 4)
    pass_by(world, 3)
    assert (explained(world, older).passed, explained(world, older).held) == (3, ())
    last = ask(world)
    world.cordon(3, cordoned=False)
    world.node(gpus=4)
    assert explained(world, older).held == (uuid(1), uuid(2), uuid(3))
    assert ask(world).state is LeaseState.QUEUED
    give_back(world, last)
    assert is_active(world, older) == [True]


def test_nothing_is_held_beside_a_leased_gpu_that_is_cordoned_after_its_lease() -> None:
    world = world_of(max_bypass=0)
    _, older = older_of_four(world)
    world.cordon(3)
    assert explained(world, older).held == ()
    assert ask(world).state is LeaseState.ACTIVE


@pytest.mark.parametrize("away", ["silent", "paused", "drained"])
def test_nothing_is_held_for_who_waits_for_a_node_that_is_away(away: str) -> None:
    world = world_of(max_bypass=0, a=2, b=2)
    ask(world, 1, node="a")
    older = ask(world, 2, node="a")
    if away == "silent":
        world.pass_time(4, silent=("a",))
    else:
        world.set_mode(NodeMode.PAUSED if away == "paused" else NodeMode.DRAINING, force=True)
        world.report("b")
    assert explained(world, older).held == ()
    assert ask(world, 2, node="b").state is LeaseState.ACTIVE


def test_a_request_that_has_become_impossible_says_so_and_holds_nothing() -> None:
    world = world_of(max_bypass=0)
    _, older = older_of_four(world)
    assert explained(world, older).held
    world.node(gpus=[gpu(index) for index in (1, 2, 3)])
    assert explained(world, older).verdict == "not_now", "one reading that leaves a GPU out says nothing of ever"
    world.pass_time(world.policy.gone_after_s + 0.5)
    explanation = explained(world, older)
    assert (explanation.verdict, explanation.held) == ("never", ())
    assert ask(world).state is LeaseState.ACTIVE


def test_several_olders_hold_in_order_and_different_gpus() -> None:
    world = world_of(max_bypass=0, a=6)
    busy = [ask(world, selection=Selection.LISTED, indices=(index,)) for index in range(3)]
    first = ask(world, 2, selection=Selection.LISTED, indices=(2, 3))
    second = ask(world, 4)
    assert explained(world, first).held == (uuid(3),)
    assert explained(world, second).held == (uuid(4), uuid(5))
    assert explained(world, second).behind == (first.id,)
    third = ask(world)
    assert explained(world, third).behind == (first.id, second.id)
    give_back(world, busy[2])
    assert is_active(world, first, second) == [True, False]
    give_back(world, busy[0])
    give_back(world, busy[1])
    assert is_active(world, second, third) == [True, False]


def test_gpus_are_held_on_the_best_node_first_and_then_on_twice_as_many() -> None:
    """Three nodes could serve a request for three GPUs, and lack one, two and three of them forever."""
    world = world_of(max_bypass=2, a=3, b=3, c=3)
    for name, index in [("a", 2), ("b", 2), ("b", 1), ("c", 2), ("c", 1), ("c", 0)]:
        ask(world, selection=Selection.LISTED, uuids=(uuid(index, name),))
    older = ask(world, 3)
    on_b = {"node": "b"}
    assert explained(world, older).held == ()
    pass_by(world, 2, **on_b)
    assert explained(world, older).held == (uuid(0, "a"), uuid(1, "a"))
    pass_by(world, 2, **on_b)
    assert explained(world, older).held == (uuid(0, "a"), uuid(1, "a"), uuid(0, "b"))
    assert ask(world).state is LeaseState.QUEUED
    assert explained(world, older).passed == 4


def test_who_is_refused_for_the_sake_of_an_older_is_told_which() -> None:
    world = world_of(max_bypass=0)
    _, older = older_of_four(world)
    refused = world.answers[world.ask(queue=False)]
    assert isinstance(refused, NotNow)
    explanation = refused.extra["explanation"]
    assert explanation.behind == (older.id,)
    assert f"GPU 0 of a is held for the earlier {older.id} (user ann)." in refused.detail


def test_explain_says_how_often_it_was_passed_what_is_held_and_what_not_yet() -> None:
    world = world_of(max_bypass=2, max_bypass_s=300.0)
    _, older = older_of_four(world)
    assert explained(world, older).passed == 0
    assert "passed" not in explained(world, older).sentence
    pass_by(world, 1)
    world.pass_time(7)
    said = explained(world, older).sentence
    assert "1 newer request started first, 7 s ago. After 2 such requests, or 300 s, GPUs are held" in said
    pass_by(world, 1)
    explanation = explained(world, older)
    assert (
        "2 newer requests started first, the first of them 7 s ago. Held for it: GPUs 0, 1, 2 of a."
        in explanation.sentence
    )
    assert explanation.held == (uuid(0), uuid(1), uuid(2))
    newer = explained(world, ask(world))
    assert (newer.position, newer.passed, newer.held, newer.behind) == (2, 0, (), (older.id,))


def shown(world: World) -> list[tuple[GpuState, str | None]]:
    """State and reason of every GPU, in a list; and each by itself says the same."""
    found = [(gpu.state, gpu.reason) for gpu in gpu_views(world)]
    single = [gpu_view(world.ledger, gpu, world.now, world.policy) for gpu in world.ledger.gpus.values()]
    assert sorted((gpu.state, str(gpu.reason)) for gpu in single) == sorted((state, str(why)) for state, why in found)
    return found


def test_a_free_gpu_that_is_held_is_shown_as_free_and_says_for_whom() -> None:
    world = world_of(max_bypass=1)
    held, older = older_of_four(world, held_index=2)
    assert [why for state, why in shown(world) if state is GpuState.FREE] == [None] * 3
    pass_by(world, 1)
    kept = (GpuState.FREE, f"Held for {older.id} (user ann)")
    holding = (GpuState.LEASED, f"Held by {held.id} (user ann)")
    assert shown(world) == [kept, kept, holding, kept]
    assert explained(world, older).held == (uuid(0), uuid(1), uuid(3))
    world.release(older)
    assert [why for state, why in shown(world) if state is GpuState.FREE] == [None] * 3


def test_two_olders_hold_and_each_gpu_says_for_which() -> None:
    world = world_of(max_bypass=0, a=2, b=2)
    for node in "ab":
        ask(world, selection=Selection.LISTED, indices=(1,), node=node)
    first, second = ask(world, 2, node="b"), ask(world, 2, node="a", user="bob")
    assert [why for state, why in shown(world) if state is GpuState.FREE] == [
        f"Held for {second.id} (user bob)",
        f"Held for {first.id} (user ann)",
    ]


def test_nothing_is_held_for_whom_a_limit_keeps_out_of_the_queue() -> None:
    world = World(policy=Policy(max_bypass=0, limits=UserLimits(leases=1))).node("a", gpus=4)
    older_of_four(world)
    assert [why for state, why in shown(world) if state is GpuState.FREE] == [None] * 3
    assert ask(world, user="bob").state is LeaseState.ACTIVE


def test_nothing_is_held_for_whom_a_limit_keeps_out_although_an_older_asks_for_the_same() -> None:
    world = World(policy=Policy(max_bypass=1, max_bypass_s=LONG_S, limits=UserLimits(leases=1)))
    for node, user in (("a", "bob"), ("b", "cleo"), ("c", "ann")):
        world.node(node, gpus=1 if node == "c" else 2)
        ask(world, selection=Selection.LISTED, indices=(0,), node=node, user=user)
    older, kept_out = ask(world, 2, user="dan"), ask(world, 2, user="ann")
    pass_by(world, 1, user="eve")
    assert set(world.ledger.bypasses) == {older.id}, f"{kept_out.id} is not passed: it takes no part"
    held = [why for state, why in shown(world) if state is GpuState.FREE]
    assert sorted(held, key=str) == [f"Held for {older.id} (user dan)", None]
    assert ask(world, user="frank").state is LeaseState.ACTIVE


def test_a_list_of_gpus_does_not_cost_a_walk_over_them_for_each_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(max_bypass=1000, a=8)
    ask(world, selection=Selection.LISTED, indices=(7,), node="a")
    for number in range(3 * reservation_view.MAX_SHOWN_DEMANDS):
        ask(world, 8, min_free_memory_bytes=GIB + number)
    walks: list[str] = []
    for module, name in ((reservation_view, "place"), (backfill, "can_have")):
        walk = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *what, walk=walk, name=name, **more: walks.append(name) or walk(*what, **more)
        )
    gpu_views(world)
    assert 0 < len(walks) <= reservation_view.MAX_SHOWN_DEMANDS


def test_a_job_whose_array_is_at_its_limit_is_not_passed() -> None:
    world = world_of(max_bypass=0, a=2)
    submit(world, count=3, at_most=1)
    newer = ask(world)
    assert newer.state is LeaseState.ACTIVE
    world.jobs["a"] = [JobReport(job_id="array-job-0", state=RunState.EXITED, exit_code=0)]
    world.report()
    world.report()
    assert world.ledger.bypasses == {}


def restarted(world: World) -> World:
    """The same world under a new daemon: only what is stored is known."""
    ledger = Ledger()
    ledgers = world.ledger.nodes, world.ledger.gpus, world.ledger.leases, world.ledger.calendar.entries
    for record in itertools.chain.from_iterable(records.values() for records in ledgers):
        ledger.apply(record)
    again = World(policy=world.policy, ledger=ledger, at_s=5.0, ids=world.ids)
    for name, gpus in world.nodes.items():
        again.node(name, gpus=gpus)
    return again


def test_a_restart_does_not_forget_how_often_a_request_was_passed() -> None:
    world = world_of(max_bypass=3)
    held, older = older_of_four(world)
    other = ask(world, 4)
    pass_by(world, 2)
    world = restarted(world)
    assert (explained(world, older).passed, explained(world, other).passed) == (2, 2)
    pass_by(world, 1)
    assert ask(world).state is LeaseState.QUEUED
    world = restarted(world)
    assert explained(world, older).held == (uuid(0), uuid(1), uuid(2))
    give_back(world, held)
    assert is_active(world, older) == [True]


@pytest.mark.parametrize(("user", "counted"), [("bob", 0), ("ann", 1)])
def test_a_restart_counts_no_grant_to_another_user_where_usage_orders(user: str, counted: int) -> None:
    world = world_of(max_bypass=1)
    ask(world, 3)
    older, newer = ask(world, 2), ask(world, user=user)
    assert is_active(world, newer) == [True]
    world.policy = replace(world.policy, fair_share=True)
    assert explained(restarted(world), older).passed == counted


def test_a_restart_counts_only_newer_ones_that_took_what_it_could_use() -> None:
    world = world_of(max_bypass=3, a=4, b=2)
    ask(world, 1, node="b")
    _, older = older_of_four(world)
    ask(world, 1, node="b")
    assert explained(restarted(world), older).passed == 0


@pytest.mark.parametrize(("reserved", "counted"), [(True, 0), (False, 1)])
def test_a_restart_counts_no_grant_of_a_gpu_that_is_closed_to_the_older_one(reserved: bool, counted: int) -> None:
    world = world_of(max_bypass=3, a=2)
    if reserved:
        world.reserve(uuid(0), user="ada")
    ask(world, user="bob")
    older, newer = ask(world, 2, user="bob"), ask(world, user="ada")
    assert is_active(world, older, newer) == [False, True]
    assert explained(restarted(world), older).passed == explained(world, older).passed == counted
