"""A GPU that a process without a lease has just left is free when its memory is back, and not before."""

from __future__ import annotations

import pytest

from gpulease_protocol.errors import NotNow
from gpulease_protocol.model import GpuState, LeaseState
from gpulease_server.core.presentation import gpu_view
from tests.core.build import GIB, World, gpu, uuid

IDLE = GIB // 2


def show(world: World, used: int | None = IDLE, pids: tuple[int, ...] = ()) -> GpuState:
    """A second later, a reading."""
    world.at_s += 1.0
    world.nodes["a"] = [gpu(0, pids=pids, memory_used_bytes=used)]
    world.report()
    return world.state()


def left(*, learnt: bool = True) -> World:
    """A process of 40 GiB was on the GPU and is no longer listed; most of its memory is still in use."""
    world = World().node(gpus=[gpu(0, memory_used_bytes=IDLE, pids=() if learnt else (7,))])
    show(world, 40 * GIB, (7,))
    show(world, 30 * GIB)
    return world


@pytest.mark.parametrize("learnt", [True, False])
def test_it_is_foreign_until_its_memory_is_back(learnt: bool) -> None:
    world = left(learnt=learnt)
    assert world.state() is GpuState.FOREIGN
    assert isinstance(world.answers[world.ask(queue=False)], NotNow | None)
    reason = gpu_view(world.ledger, world.ledger.gpus[uuid(0)], world.now, world.policy).reason
    assert reason == "Being left by a process without a lease: no process is left, but 30.0 GiB of memory is in use"
    assert show(world, 10 * GIB) is GpuState.FOREIGN
    assert show(world, IDLE if learnt else 0) is GpuState.FREE


def test_who_waits_for_it_gets_it_then() -> None:
    world = left()
    waiting = world.lease()
    assert waiting.state is LeaseState.QUEUED
    show(world)
    assert world.now_of(waiting).state is LeaseState.ACTIVE
    assert world.ledger.gpus[uuid(0)].baseline_bytes == IDLE, "the memory of the process that left was not learnt"


def test_memory_that_the_driver_keeps_delays_it_by_a_bounded_time_and_is_its_baseline_then() -> None:
    world = left()
    for _ in range(29):
        assert show(world, 30 * GIB) is GpuState.FOREIGN
    assert show(world, 30 * GIB) is GpuState.FREE
    lease = world.lease()
    assert world.ledger.gpus[uuid(0)].baseline_bytes == 30 * GIB
    world.release(lease)
    world.report()
    assert world.state() is GpuState.FREE


def test_memory_that_goes_on_falling_is_waited_for_without_a_bound() -> None:
    world = left()
    for step in range(1, 100):
        assert show(world, 30 * GIB - step * GIB // 8) is GpuState.FOREIGN


def test_another_process_begins_it_again() -> None:
    world = left()
    for _ in range(29):
        show(world, 30 * GIB)
    show(world, 31 * GIB, (8,))
    assert show(world, 30 * GIB) is GpuState.FOREIGN
    assert show(world) is GpuState.FREE


def test_memory_that_the_driver_does_not_tell_for_a_moment_is_not_back_and_where_it_never_tells_there_is_none() -> None:
    world = left()
    assert show(world, None) is GpuState.FOREIGN
    assert show(world) is GpuState.FREE
    silent = World().node(gpus=[gpu(0, memory_used_bytes=None)])
    show(silent, None, (7,))
    assert show(silent, None) is GpuState.FREE


def test_a_node_that_is_silent_meanwhile_does_not_make_it_free() -> None:
    world = left()
    world.pass_time(60, silent=("a",))
    world.report(problem="the driver hangs")
    assert world.state() is GpuState.UNKNOWN
    assert show(world, 20 * GIB) is GpuState.FOREIGN
