"""Why a request has no GPUs: one row foreverything that can be in the way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.errors import NeverFits, NotNow
from gpulease_protocol.explanation import Explanation, Obstacle
from gpulease_protocol.model import ComputeMode, Demand, GpuReading, Lease, NodeMode, Selection
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_protocol.status_table import describe_demand as in_a_table
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.policy import Policy
from gpulease_server.core.wording import describe_demand
from tests.core.build import GIB, World, gpu, uuid

HOUR_S = 3600.0


def explained(world: World, lease_id: str) -> Explanation:
    return explain(world.ledger, world.ledger.leases[lease_id], world.now, world.policy)


def refused(world: World, count: int = 1, **what: Any) -> Explanation:
    """Why a request that would not wait was refused."""
    refusal = world.answers[world.ask(count, queue=False, **what)]
    assert isinstance(refusal, NotNow | NeverFits), refusal
    explanation: Explanation = refusal.extra["explanation"]
    assert refusal.detail == explanation.sentence
    return explanation


def only(explanation: Explanation) -> Obstacle:
    (obstacle,) = explanation.obstacles
    assert obstacle.sentence in explanation.sentence
    return obstacle


def hold(world: World) -> None:
    world.lease(ttl_s=HOUR_S)


def end_dirty(world: World) -> None:
    lease = world.lease()
    world.node(gpus=[gpu(0, pids=(4242,), lease=lease.id)])
    world.release(lease)
    world.report()


def run_job(world: World) -> None:
    world.submit()


def hold_and_cordon(world: World) -> None:
    hold(world)
    world.cordon(0)


def hold_and_drain(world: World) -> None:
    hold(world)
    world.set_mode(NodeMode.DRAINING, reason="new driver")


def be_silent(world: World) -> None:
    world.pass_time(4, silent=("a",))


def show(**what: Any) -> Callable[[World], None]:
    return lambda world: world.node(gpus=[gpu(0, **what)]) and None


@pytest.mark.parametrize(
    ("happens", "code", "said"),
    [
        (hold, "leased", ["is held by lease-", "user ann", "until 2026-01-01 13:16:40 UTC unless it is renewed"]),
        (run_job, "leased", ["is held by lease-", "(job-"]),
        (hold_and_cordon, "leased", ["is held by lease-", "and cordoned after that"]),
        (
            hold_and_drain,
            "leased",
            ["is held by lease-", ", and on node a, which is being drained by root: new driver."],
        ),
        (end_dirty, "draining", ["is being cleaned after lease-", "user ann", "pid 4242"]),
        (show(pids=(4242,)), "foreign", ["is in use without a lease by pid 4242"]),
        (show(compute_mode=ComputeMode.PROHIBITED), "prohibited", ["PROHIBITED", "nvidia-smi -c DEFAULT"]),
        (show(health="lost"), "unhealthy", ["is unhealthy: lost"]),
        (show(health="xid:79"), "unhealthy", ["xid:79"]),
        (lambda world: world.cordon(0), "cordoned", ["is cordoned by an administrator"]),
        (lambda world: world.set_mode(NodeMode.DRAINING), "cordoned", ["node a, which is being drained by root"]),
        (lambda world: world.set_mode(NodeMode.PAUSED), "unknown", ["node a, which is paused by root"]),
        (lambda world: world.report(problem="the probe hangs"), "unknown", ["is unknown: the probe hangs"]),
        (be_silent, "unknown", ["has been silent for over 3 s"]),
    ],
)
def test_what_is_in_the_way_of_a_gpu(happens: Callable[[World], object], code: str, said: list[str]) -> None:
    world = World().node(gpus=1)
    happens(world)
    explanation = refused(world)
    assert explanation.verdict == "not_now"
    assert explanation.sentence.startswith("Not now: asked for 1 GPU.")
    obstacle = only(explanation)
    assert (obstacle.code, obstacle.uuid, obstacle.node, obstacle.index) == (code, uuid(0), "a", 0)
    for words in said:
        assert words in obstacle.sentence


def test_the_facts_are_there_for_programs_too() -> None:
    world = World().node(gpus=2)
    held = world.view(world.lease(ttl_s=HOUR_S))
    world.node(gpus=[gpu(0, pids=(7,), lease=held.id), gpu(1, pids=(4242,))])
    first, second = refused(world, 2).obstacles
    assert (first.lease_id, first.pids) == (held.id, (7,))
    assert first.holder is not None
    assert first.holder.user == "ann"
    assert first.until == held.expires_at
    assert (second.lease_id, second.holder, second.pids, second.until) == (None, None, (4242,), None)


def test_a_job_with_a_time_limit_says_when_it_ends_at_the_latest() -> None:
    world = World().node(gpus=1)
    job_id = world.submit(timeout_s=HOUR_S)
    before = only(refused(world))
    assert (before.until, "latest" in before.sentence) == (None, False)  # it has not begun yet
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.RUNNING, started_at=world.now.at)]
    world.report()
    found = only(refused(world))
    assert found.until is not None
    assert 3590 < (found.until - world.now.at).total_seconds() <= HOUR_S
    assert "UTC at the latest" in found.sentence
    assert found.since == world.ledger.leases[found.lease_id or ""].lease.granted_at
    assert found.job_id == job_id


def test_a_lease_with_a_watched_process_is_held_as_long_as_that_lives() -> None:
    world = World().node(gpus=1)
    world.lease(owner=4242)
    found = only(refused(world))
    assert "pid 4242" in found.sentence
    assert "until" not in found.sentence


def test_a_renewal_moves_the_time_until_which_a_gpu_is_held() -> None:
    world = World().node(gpus=1)
    held = world.lease(ttl_s=HOUR_S)
    before = only(refused(world)).until
    world.pass_time(60)
    world.renew(held)
    after = only(refused(world)).until
    assert before is not None
    assert after is not None
    assert 59 < (after - before).total_seconds() < 61


def test_explain_shows_the_position_and_what_is_reserved_for_older_requests() -> None:
    world = World(policy=Policy(max_bypass=0)).node(gpus=2)
    world.lease(selection=Selection.LISTED, indices=(1,))
    older, newer = world.lease(2), world.lease(1)
    assert explained(world, older.id).position == 1
    explanation = explained(world, newer.id)
    assert explanation.position == 2
    assert "number 2 in the queue" in explanation.sentence
    claimed = next(item for item in explanation.obstacles if item.index == 0)
    assert (claimed.code, claimed.lease_id) == ("claimed", older.id)
    assert older.id in claimed.sentence


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"count": 3}, "Node h has 2 GPUs. There are 18 more nodes."),
        (
            {"gpu_model": "A100"},
            "the models are: Model a, Model b, Model c, Model d, Model e, Model f, Model g, Model h and",
        ),
    ],
)
def test_on_many_nodes_a_request_that_never_fits_names_the_first(what: dict[str, Any], said: str) -> None:
    world = World()
    for name in "abcdefghijklmnopqrstuvwxyz":
        world.node(name, gpus=[gpu(index, name, name=f"Model {name}") for index in range(2)])

    sentence = refused(world, **what).sentence

    assert said in sentence
    assert "Node z" not in sentence
    assert "Model z" not in sentence


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"selection": Selection.LISTED, "count": 2, "indices": (1, 9)}, "There is no GPU 9 on any node."),
        ({"selection": Selection.LISTED, "indices": (3,), "node": "b"}, "There is no GPU 3 on node b."),
        ({"selection": Selection.LISTED, "uuids": ("GPU-gone",)}, "There is no GPU GPU-gone on any node."),
        (
            {"selection": Selection.LISTED, "count": 2, "uuids": (uuid(0, "a"), uuid(0, "b"))},
            "They are on different nodes (a, b), and a lease uses one node.",
        ),
        ({"node": "elsewhere"}, "There is no node elsewhere with GPUs; there are: a, b."),
        ({"gpu_model": "A100"}, "No GPU has A100 in its name; the models are: NVIDIA H100."),
        ({"min_free_memory_bytes": 81 * GIB}, "The largest has 80.0 GiB."),
        ({"count": 5}, "No node has more than 4 such GPUs, and the request is for one node."),
        ({"count": 2, "among": (uuid(0), "GPU-gone")}, "Of the 2 GPUs that may serve it, 1 can."),
    ],
)
def test_never_says_what_there_is_not(what: dict[str, Any], said: str) -> None:
    world = World().node("a", gpus=4).node("b", gpus=2)
    explanation = refused(world, **what)
    assert explanation.verdict == "never"
    assert said in explanation.sentence
    assert explanation.sentence.endswith("Node a has 4 GPUs. Node b has 2 GPUs.")


def test_that_a_model_is_missing_is_said_of_the_node_that_was_asked_for() -> None:
    world = World().node("a", gpus=[gpu(0, name="NVIDIA A100")]).node("b", gpus=2)
    said = refused(world, node="b", gpu_model="A100").sentence
    assert "No GPU on node b has A100 in its name; the models there are: NVIDIA H100." in said


def test_a_grant_names_the_node_where_there_are_several() -> None:
    world = World().node("a", gpus=2)
    lease = world.lease(2)
    assert explained(world, lease.id).sentence.startswith("Granted: GPUs 0, 1.")
    world.node("b", gpus=2)
    assert explained(world, lease.id).sentence.startswith("Granted: GPUs 0, 1 of a.")


def test_a_gpu_that_is_out_of_use_is_not_now_and_one_that_went_is_never() -> None:
    world = World(policy=Policy(gone_after_s=2.0)).node(gpus=2)
    world.cordon(1)
    waiting = world.answers[world.ask(selection=Selection.LISTED, indices=(1,))]
    assert isinstance(waiting, Lease)
    assert explained(world, waiting.id).verdict == "not_now"
    world.node(gpus=[gpu(0), gpu(1, pids=(7,))])
    world.cordon(1, cordoned=False)
    assert explained(world, waiting.id).verdict == "not_now"
    world.node(gpus=[gpu(0)])
    assert explained(world, waiting.id).verdict == "not_now"
    world.pass_time(2.5)
    explanation = explained(world, waiting.id)
    assert explanation.verdict == "never"
    assert "There is no GPU 1 on any node." in explanation.sentence


def test_a_lease_that_has_gpus_or_has_ended_says_so() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    assert explained(world, lease.id).verdict == "granted"
    world.release(lease)
    assert explained(world, lease.id).sentence == "The lease has ended: released."


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (gpu(0, memory_used_bytes=75 * GIB), "GPU 0 of a has too little free memory."),
        (gpu(0, memory_used_bytes=None), "GPU 0 of a does not report how much of its memory is free."),
    ],
)
def test_too_little_memory_now_is_what_is_said_to_be_in_the_way(reading: GpuReading, words: str) -> None:
    explanation = refused(World().node(gpus=[reading]), min_free_memory_bytes=10 * GIB)
    assert only(explanation).sentence == words
    assert explanation.sentence == f"Not now: asked for 1 GPU with 10.0 GiB free. {words}"


def test_memory_that_no_gpu_tells_is_not_none() -> None:
    mute = gpu(0, memory_total_bytes=None, memory_used_bytes=None)
    explanation = refused(World().node(gpus=[mute]), min_free_memory_bytes=10 * GIB)
    assert explanation.obstacles[0].sentence == "GPU 0 of a does not report how much memory it has."
    assert "The memory of 1 is not known. Node a has 1 GPU." in explanation.sentence
    explanation = refused(World().node(gpus=[mute, gpu(1)]), min_free_memory_bytes=81 * GIB)
    assert "The largest has 80.0 GiB. The memory of 1 is not known." in explanation.sentence


@pytest.mark.parametrize("what", [{"time_s": 100.0}, {"token": "t", "budget": Budget(max_lease_s=100.0)}])
def test_a_holder_is_said_to_end_when_its_time_has_ended_and_no_renewal_helps(what: dict[str, Any]) -> None:
    world = World().node(gpus=1)
    world.lease(ttl_s=86400.0, **what)
    item = only(explained(world, world.lease(user="bob").id))
    ends_at = world.now.at + timedelta(seconds=100)
    assert item.until == ends_at
    assert f"until {ends_at:%Y-%m-%d %H:%M:%S} UTC at the latest." in item.sentence


def test_a_job_that_an_older_release_let_last_forever_is_no_error() -> None:
    world = World().node(gpus=1)
    job_id = world.submit(1, timeout_s=1e12)
    world.jobs["a"] = [JobReport(job_id=job_id, attempt=1, state=RunState.RUNNING, started_at=world.now.at)]
    world.report()
    assert "UTC at the latest" in refused(world).sentence


@pytest.mark.parametrize(("indices", "said"), [((7,), "GPU 7"), ((1, 3), "GPUs 1, 3")])
def test_one_named_gpu_is_not_told_as_several(indices: tuple[int, ...], said: str) -> None:
    demand = Demand(selection=Selection.LISTED, indices=indices)
    assert describe_demand(demand) == in_a_table(demand) == said


def test_of_very_many_gpus_those_are_listed_that_could_serve_the_request() -> None:
    world = World()
    for name in [chr(0x100 + number) for number in range(40)]:
        world.node(name)
    last = [chr(0x300), chr(0x301)]
    for name in last:
        world.node(name, gpus=[gpu(index, name, name="NVIDIA A100") for index in range(8)])
        world.lease(8, node=name)
    told = refused(world, 2, gpu_model="A100")
    assert [one.node for one in told.obstacles[-16:]] == [last[0]] * 8 + [last[1]] * 8
    assert {one.code for one in told.obstacles[:-16]} == {"other_model"}
    assert (len(told.obstacles), told.unlisted_gpus) == (256, 42 * 8 - 256)
    assert told.sentence.count("is held by") == 16
    assert refused(World().node(gpus=1), 2).unlisted_gpus == 0


def test_of_very_many_gpus_those_that_keep_a_gang_waiting_are_listed() -> None:
    world, names = World(), [chr(0x100 + number) for number in range(42)]
    for number, name in enumerate(names):
        world.addresses[name] = f"10.1.0.{number}"
        world.node(name)
    for name in names[-2:]:
        world.lease(8, node=name)
    told = refused(world, 8, nodes=41)
    assert {(one.node, one.code) for one in told.obstacles} == {(name, "leased") for name in names[-2:]}
    assert "is held by" in told.sentence
    assert "just become free" not in told.sentence


def test_a_refusal_costs_as_much_with_ten_thousand_gpus_as_with_a_thousand() -> None:
    few, many = (calls_of_a_refusal(nodes) for nodes in (125, 1250))
    assert many < 1.5 * few
    few, many = (calls_of_a_refusal(nodes, nodes=2) for nodes in (125, 1250))
    assert many < 3 * few  # it says of each node whether it is ready


def calls_of_a_refusal(number: int, **what: Any) -> int:
    """How many calls the second refusal takes: the first also finds out which GPUs could ever serve it."""
    world, calls = World(), 0
    for at in range(number):
        world.addresses[name := chr(0x100 + at)] = f"10.1.{at // 250}.{at % 250}"
        world.node(name)
        world.lease(8, node=name)
    refused(world, 1, **what)

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event.endswith("call")

    sys.setprofile(count)
    try:
        refused(world, 1, **what)
    finally:
        sys.setprofile(None)
    return calls
