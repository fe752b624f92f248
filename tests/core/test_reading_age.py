"""How old a reading may be that a grant rests on, on nodes whose readings are quick, slow, and too slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulease_protocol.errors import NotNow
from gpulease_protocol.model import GpuState, Lease, LeaseState
from gpulease_server.core.gpu import is_recent
from gpulease_server.core.happenings import Ticked
from gpulease_server.core.node import MAX_READING_S
from tests.core.build import World, gpu, uuid


def granted(world: World, call: str) -> bool:
    answer = world.answers.get(call)
    return isinstance(answer, Lease) and answer.state is LeaseState.ACTIVE


def old_world(**what: int) -> World:
    """A node whose last reading is too old for a grant."""
    world = World().node(gpus=what.get("gpus", 1))
    world.at_s += 2
    return world


def test_a_reading_that_was_asked_for_counts_when_it_arrives_however_long_it_took_within_its_limit() -> None:
    world = old_world()
    call = world.ask(queue=False)
    assert "a" in world.wanted
    world.at_s += 1.6
    world.report(age_s=1.5, reading_limit_s=2.0, read_s=1.5)
    assert granted(world, call)
    assert not world.wanted


@pytest.mark.parametrize(
    ("change", "since_s", "counts"),
    [
        ({}, 8.4, True),
        ({}, 8.6, False),
        ({"answers_request": False}, 8.4, False),
        ({"reported_at_s": 9.9}, 8.4, False),
        ({"read_s": 0.9}, 8.4, False),
        ({"reading_limit_s": 0.9}, 8.4, False),
        ({"problem": "the driver hangs"}, 8.4, False),
        ({"observed_at_s": 8.0, "reread_at_s": {uuid(0): 8.5}}, 8.4, True),
        ({"observed_at_s": 8.0, "reread_at_s": {uuid(1): 8.5}}, 8.4, False),
    ],
)
def test_a_slow_reading_counts_only_as_the_answer_to_a_request_and_within_its_limit(
    change: dict[str, Any], since_s: float, counts: bool
) -> None:
    world = World().node(gpus=1)
    slow = replace(
        world.ledger.node_observations["a"],
        observed_at_s=8.5,
        reported_at_s=10.0,
        answers_request=True,
        read_s=1.5,
        reading_limit_s=2.0,
    )
    now = replace(world.now, mono_s=10.0)
    assert is_recent(replace(slow, **change), uuid(0), now, world.policy, since_s) is counts


@pytest.mark.parametrize(
    ("age_s", "read_s", "limit_s"),
    [(1.5, 1.5, 0.9), (2.6, 2.6, 2.0), (1.5, 0.9, 2.0), (0.6, None, 2.0)],
    ids=["an old worker's", "longer than the limit", "long under way", "of unknown length"],
)
def test_a_reading_that_took_too_long_does_not_count_and_another_is_asked_for(
    age_s: float, read_s: float | None, limit_s: float
) -> None:
    world = old_world()
    call = world.ask()
    world.at_s += age_s + 0.1
    world.report(age_s=age_s, read_s=read_s, reading_limit_s=limit_s)
    assert not granted(world, call)
    assert world.wanted["a"] == world.at_s
    world.report(reading_limit_s=limit_s)
    assert granted(world, call)


def test_a_reading_that_was_begun_before_the_request_does_not_count_for_it() -> None:
    world = old_world(gpus=2)
    first = world.ask(queue=False)
    world.at_s += 1
    second = world.ask(queue=False)
    world.at_s += 0.8
    world.report(age_s=1.5, read_s=1.5, reading_limit_s=2.0)
    assert (granted(world, first), granted(world, second)) == (True, False)
    world.at_s += 1.2
    world.report(age_s=1.1, read_s=1.1, reading_limit_s=2.0)
    assert granted(world, second)


def test_a_report_that_no_one_asked_for_and_repeats_old_processes_does_not_count() -> None:
    """Process lists are read every 5 s, and reports come every second."""
    world = World().node(gpus=1)
    first = world.lease()
    waiting = world.ask()
    world.at_s += 1.5
    world.release(first)
    world.report(age_s=1.4, read_s=1.4, reading_limit_s=2.0)
    assert not granted(world, waiting), "it was begun before the lease had ended"


def test_a_slow_reading_that_has_arrived_is_old_a_moment_later() -> None:
    world = old_world()
    call = world.ask()
    world.at_s += 1.6
    world.report(age_s=1.5, read_s=1.5, reading_limit_s=2.0)
    held = world.answers[call]
    assert isinstance(held, Lease)
    world.at_s += 0.1
    world.nodes["a"] = [gpu(0), gpu(1)]
    world.report(age_s=1.5, read_s=1.5, reading_limit_s=2.0)
    other = world.ask(queue=False)
    assert not granted(world, other), "GPU 1 was shown by a reading that no one had asked for"


def test_explain_says_that_a_node_is_too_slow_to_grant_on() -> None:
    world = old_world()
    call = world.ask(queue=False)
    for _ in range(24):
        world.at_s += 0.25
        world.report(age_s=3.0, reading_limit_s=2.0, read_s=2.9)
        world.turn(Ticked(cause="t", since_last_s=0.25))
    refused = world.answers[call]
    assert isinstance(refused, NotNow)
    assert "a recent reading is still awaited; the last one took its node 2.9 s" in refused.detail
    assert "more than the 2 s that count for a grant (worker --probe-deadline-s)" in refused.detail


def test_explain_says_that_readings_are_too_long_on_the_way() -> None:
    world = old_world()
    call = world.ask(queue=False)
    while call not in world.answers:
        world.at_s += 1.0
        world.report(age_s=0.9, reading_limit_s=2.0, read_s=0.1)
    refused = world.answers[call]
    assert isinstance(refused, NotNow)
    assert "the last one arrived 0.9 s old, of which its node read for 0.1 s" in refused.detail
    assert "0.5 s on the way (serve --max-observation-age-s)" in refused.detail


def test_a_node_whose_readings_may_take_long_is_not_silent_meanwhile() -> None:
    world = World().node(gpus=1)
    world.report(reading_limit_s=10.0, hold_s=1.0)
    world.at_s += 10.5
    assert world.state() is GpuState.FREE
    world.at_s += 1.2
    assert world.state() is GpuState.UNKNOWN


@pytest.mark.parametrize(("reported_s", "used_s"), [(1e9, MAX_READING_S), (-1.0, 0.0)])
def test_a_workers_reading_limit_is_clamped(reported_s: float, used_s: float) -> None:
    world = World().node(gpus=1)
    world.report(reading_limit_s=reported_s)
    assert world.ledger.node_observations["a"].reading_limit_s == used_s


def test_a_draining_gpu_that_alone_was_read_again_is_freed_and_granted() -> None:
    world = World().node(gpus=2)
    both = world.lease(2)
    waiting = world.ask()
    world.at_s += 1
    world.release(both)
    world.at_s += 0.1
    world.report(age_s=1.0, begun_s=0.05, reread=(1,))
    assert (world.state(0), world.state(1)) == (GpuState.DRAINING, GpuState.LEASED)
    lease = world.answers[waiting]
    assert isinstance(lease, Lease)
    assert [device.uuid for device in lease.gpus] == []
    assert [device.uuid for device in world.now_of(lease).gpus] == [uuid(1)]


def test_a_report_that_was_overtaken_by_one_that_read_a_gpu_again_decides_nothing() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    world.at_s += 1
    world.release(lease)
    world.nodes["a"] = [gpu(0, pids=(7,), lease=lease.id)]
    world.at_s += 0.3
    world.report(age_s=1.2, begun_s=0.1, reread=(0,))
    world.nodes["a"] = [gpu(0)]
    world.report(age_s=1.2, begun_s=0.2, reread=(0,))
    assert world.state() is GpuState.DRAINING, "it was begun before the one that showed a process"
