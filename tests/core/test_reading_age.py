"""How old a reading may be that a grant rests on, on nodes whose readings are quick, slow, and too slow."""

from __future__ import annotations

import pytest

from gpulease.errors import NotNow
from gpulease.model import GpuState, Lease, LeaseState
from gpulease_server.core.happenings import Ticked

from .build import World, gpu, uuid


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


def test_a_report_that_nobody_asked_for_and_repeats_old_processes_does_not_count() -> None:
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
    assert not granted(world, other), "GPU 1 was shown by a reading that nobody had asked for"


def test_whoever_waits_is_told_that_a_node_is_too_slow_to_grant_on() -> None:
    world = old_world()
    call = world.ask(queue=False)
    for _ in range(24):
        world.at_s += 0.25
        world.report(age_s=3.0, reading_limit_s=2.0, read_s=2.9)
        world.turn(Ticked(cause="t", since_last_s=0.25))
    refused = world.answers[call]
    assert isinstance(refused, NotNow)
    assert "a fresh reading of it is awaited; the last one took its node 2.9 s, too long to grant on" in refused.detail
    assert "at most 2 s count (worker --probe-deadline-s)" in refused.detail


def test_a_node_whose_readings_may_take_long_is_not_silent_meanwhile() -> None:
    world = World().node(gpus=1)
    world.report(reading_limit_s=10.0, hold_s=1.0)
    world.at_s += 10.5
    assert world.state() is GpuState.FREE
    world.at_s += 1.2
    assert world.state() is GpuState.UNKNOWN


def test_a_draining_gpu_that_alone_was_read_anew_is_freed_and_granted() -> None:
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


def test_a_report_that_was_overtaken_by_one_that_read_a_gpu_anew_decides_nothing() -> None:
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
