"""What an administrator takes out of use, and puts back."""

from __future__ import annotations

import pytest

from gpulease_protocol.errors import InUse, LeaseLost, NotFound
from gpulease_protocol.model import ComputeMode, Event, GpuReading, GpuState, Lease, LeaseState, NodeMode
from gpulease_protocol.node_protocol import JUST_STARTED, PAUSED
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.node import desired_state
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import gpu_view, node_view
from tests.core.build import World, gpu, uuid


def kinds(world: World) -> list[str]:
    return [change.kind for change in world.changes if isinstance(change, Event)]


def reason(world: World, index: int = 0) -> str | None:
    return gpu_view(world.ledger, world.ledger.gpus[uuid(index)], world.now, world.policy).reason


def why(world: World, lease_id: str) -> str:
    return explain(world.ledger, world.ledger.leases[lease_id], world.now, world.policy).sentence


def test_a_cordoned_gpu_is_granted_to_no_one_and_those_who_ask_wait() -> None:
    world = World().node(gpus=2)
    world.cordon(0)
    assert world.state(0) is GpuState.CORDONED
    assert [device.index for device in world.lease().gpus] == [1]
    waiting = world.lease()
    assert waiting.state is LeaseState.QUEUED
    assert why(world, waiting.id).startswith("Not now")
    assert "GPU 0 of a is cordoned by an administrator." in why(world, waiting.id)
    world.cordon(0, cordoned=False)
    world.answer_wanted()
    assert world.now_of(waiting).state is LeaseState.ACTIVE
    assert [kind for kind in kinds(world) if "cordon" in kind] == ["gpu.cordoned", "gpu.uncordoned"]


@pytest.mark.parametrize(
    ("reading", "state"),
    [
        (gpu(0, health="lost"), GpuState.UNHEALTHY),
        (gpu(0, compute_mode=ComputeMode.PROHIBITED), GpuState.PROHIBITED),
        (gpu(0, pids=(7,)), GpuState.CORDONED),
        (gpu(0), GpuState.CORDONED),
    ],
)
def test_cordoned_comes_before_foreign_and_after_what_is_broken(reading: GpuReading, state: GpuState) -> None:
    world = World().node(gpus=[reading])
    world.cordon(0)
    assert world.state(0) is state


def test_who_holds_a_gpu_keeps_it_when_it_is_cordoned_and_it_is_cordoned_once_it_is_clean() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    world.cordon(0)
    assert world.state() is GpuState.LEASED
    assert world.renew(lease).state is LeaseState.ACTIVE
    world.release(lease)
    assert world.state() is GpuState.DRAINING
    world.report()
    assert world.state() is GpuState.CORDONED


def test_cordoning_twice_is_cordoning_once_and_an_unknown_gpu_is_not_found() -> None:
    world = World().node(gpus=1)
    world.cordon(0)
    before = len(world.changes)
    assert world.cordon(0) is None
    assert len(world.changes) == before
    assert isinstance(world.cordon(9), NotFound)


def test_a_cordoned_gpu_that_its_node_shows_no_more_comes_back_cordoned() -> None:
    world = World().node(gpus=2)
    world.cordon(1)
    world.node(gpus=1)
    assert world.state(1) is GpuState.UNKNOWN
    world.node(gpus=2)
    assert world.state(1) is GpuState.CORDONED


def test_nothing_of_a_drained_node_is_granted_and_what_runs_there_goes_on() -> None:
    world = World().node("a", gpus=2).node("b", gpus=2)
    held = world.lease(1, node="a")
    world.set_mode(NodeMode.DRAINING)
    assert {device.node for device in world.lease(2).gpus} == {"b"}
    waiting = world.lease(1, node="a")
    assert waiting.state is LeaseState.QUEUED
    assert "GPU 1 of a is on node a, which is being drained by root." in why(world, waiting.id)
    assert world.state(0) is GpuState.LEASED
    assert world.now_of(held).state is LeaseState.ACTIVE
    assert not desired_state(world.ledger, "a", 1).paused
    world.set_mode(NodeMode.ACTIVE)
    world.answer_wanted()
    assert world.now_of(waiting).state is LeaseState.ACTIVE


def test_who_waits_reads_why_a_node_is_out_of_use_until_it_is_back() -> None:
    world = World().node(gpus=1)
    world.set_mode(NodeMode.DRAINING, reason="driver update till 15:00")
    assert [one.reason for one in world.changes if isinstance(one, Event)][
        -1
    ] == "by user root: driver update till 15:00"
    waiting = world.lease()
    assert "on node a, which is being drained by root: driver update till 15:00." in why(world, waiting.id)
    world.report()
    world.set_mode(NodeMode.PAUSED)  # the next step of the same work: its reason stays
    assert "on node a, which is paused by root: driver update till 15:00; its worker" in why(world, waiting.id)
    world.set_mode(NodeMode.PAUSED, reason="it takes till 16:00")
    assert "on node a, which is paused by root: it takes till 16:00; its worker" in why(world, waiting.id)
    world.set_mode(NodeMode.ACTIVE)
    node = world.ledger.nodes["a"]
    assert (node.mode_reason, node.mode_by) == (None, None)


def test_pausing_a_node_with_an_active_lease_is_refused_unless_it_is_forced() -> None:
    world = World().node(gpus=2)
    lease = world.lease()
    refusal = world.set_mode(NodeMode.PAUSED)
    assert isinstance(refusal, InUse)
    assert lease.id in refusal.detail
    assert world.ledger.nodes["a"].mode is NodeMode.ACTIVE
    assert world.set_mode(NodeMode.PAUSED, force=True) is None
    assert world.now_of(lease).state is LeaseState.ACTIVE
    assert world.state() is GpuState.UNKNOWN


def test_a_node_whose_gpus_only_drain_can_be_paused_and_they_drain_on_until_it_is_resumed() -> None:
    world = World().node(gpus=1)
    world.release(world.lease())
    assert world.set_mode(NodeMode.PAUSED) is None
    world.report(problem=PAUSED)
    world.set_mode(NodeMode.ACTIVE)
    assert world.state() is GpuState.UNKNOWN
    assert world.ledger.gpus[uuid(0)].draining
    world.report()
    assert world.state() is GpuState.FREE


def test_a_paused_node_is_unknown_at_once_whatever_its_worker_still_reports() -> None:
    world = World().node(gpus=1)
    world.set_mode(NodeMode.PAUSED)
    assert desired_state(world.ledger, "a", 1).paused
    assert world.state() is GpuState.UNKNOWN
    world.report()  # a worker that has not been told yet
    world.pass_time(1)
    assert world.state() is GpuState.UNKNOWN
    assert reason(world) == "On node a, which is paused by root; its worker has not closed NVML yet"
    world.report(problem=PAUSED)
    assert reason(world) == "On node a, which is paused by root"
    assert world.lease().state is LeaseState.QUEUED
    assert [kind for kind in kinds(world) if kind.startswith("node.")] == ["node.ready", "node.paused"]


def test_a_resumed_node_grants_only_on_what_it_read_after_the_pause() -> None:
    world = World().node(gpus=2)
    world.set_mode(NodeMode.PAUSED)
    world.report(problem=PAUSED)
    world.set_mode(NodeMode.ACTIVE)
    assert not desired_state(world.ledger, "a", 1).paused
    assert world.state() is GpuState.UNKNOWN
    waiting = world.answers[world.ask()]
    assert isinstance(waiting, Lease)
    assert waiting.state is LeaseState.QUEUED
    world.node(gpus=[gpu(1)])  # GPU 0 was taken out in the meantime
    assert [device.index for device in world.now_of(waiting).gpus] == [1]
    assert world.state(0) is GpuState.UNKNOWN
    node_events = [kind for kind in kinds(world) if kind.startswith("node.")]
    assert node_events == ["node.ready", "node.paused", "node.resumed", "node.ready"]


def test_a_pause_is_there_before_the_node_has_reported_again() -> None:
    """As after a restart of the daemon: the mode is stored, the last reading is not."""
    world = World().node(gpus=1)
    world.set_mode(NodeMode.PAUSED)
    world.lose_reports()
    node = node_view(world.ledger, world.ledger.nodes["a"], world.now, world.policy)
    assert (node.mode, node.reason) == (NodeMode.PAUSED, f"{PAUSED}; its worker has not closed NVML yet")
    world.report()
    assert world.ledger.nodes["a"].mode is NodeMode.PAUSED
    assert world.state() is GpuState.UNKNOWN


def test_an_unknown_node_is_not_found() -> None:
    assert isinstance(World().node(gpus=1).set_mode(NodeMode.DRAINING, "z"), NotFound)


@pytest.mark.parametrize(("problem", "event"), [(None, "node.ready"), ("no driver", "node.unknown")])
def test_that_a_worker_has_just_started_is_no_event_and_what_follows_is(problem: str | None, event: str) -> None:
    world = World().node(gpus=1, report=False)
    world.report(problem=JUST_STARTED)
    assert kinds(world) == []
    world.report(problem=problem)
    assert kinds(world) == [event]


def test_a_cordon_outlives_the_gpu_being_taken_out_while_it_drains() -> None:
    world = World(policy=Policy(gone_after_s=2.0)).node(gpus=2)
    lease = world.lease()
    world.cordon(0)
    world.release(lease)
    world.node(gpus=[gpu(1)])
    world.pass_time(2.5)
    world.node(gpus=2)
    assert world.state(0) is GpuState.CORDONED
    assert kinds(world)[-1] == "gpu.gone", "the log must say why it need not be seen clean any more"


@pytest.mark.parametrize("draining", [True, False])
def test_an_expired_lease_does_not_revive_on_a_node_that_was_paused_meanwhile(draining: bool) -> None:
    """The administrator was told that nothing is active there, and may be resetting the GPU."""
    world = World().node(gpus=2)
    lease = world.lease(ttl_s=1)
    if draining:
        world.nodes["a"][0] = gpu(0, pids=(7,), lease=lease.id)
    world.pass_time(2)
    assert world.state(0) is (GpuState.DRAINING if draining else GpuState.FREE)
    assert world.set_mode(NodeMode.PAUSED) is None, "no lease is active there"
    assert isinstance(world.renew(lease), LeaseLost)
    world.report(problem=PAUSED)
    assert isinstance(world.renew(lease), LeaseLost), "its worker has closed NVML by now"
    world.set_mode(NodeMode.ACTIVE)
    assert isinstance(world.renew(lease), Lease) is draining, "unknown is not free, but no other lease had what drains"


@pytest.mark.parametrize(
    ("shown", "revives"),
    [
        ({}, True),
        ({"health": "lost"}, False),
        ({"compute_mode": ComputeMode.PROHIBITED}, False),
    ],
)
def test_an_expired_lease_revives_on_a_gpu_that_drains_only_while_it_is_healthy(
    shown: dict[str, object], revives: bool
) -> None:
    world = World().node(gpus=1)
    lease = world.lease(ttl_s=1)
    world.nodes["a"] = [gpu(0, pids=(7,), lease=lease.id, **shown)]
    world.pass_time(2)
    assert isinstance(world.renew(lease), Lease) is revives


@pytest.mark.parametrize("out_of_use", ["cordon", "drain", "silence"])
def test_a_lease_whose_processes_still_run_revives_on_a_node_that_gets_no_new_ones(out_of_use: str) -> None:
    world = World().node(gpus=1)
    lease = world.lease(ttl_s=1)
    world.nodes["a"] = [gpu(0, pids=(7,), lease=lease.id)]
    world.pass_time(2)
    if out_of_use == "cordon":
        world.cordon(0)
    elif out_of_use == "drain":
        world.set_mode(NodeMode.DRAINING)
    else:
        world.pass_time(30, silent=("a",))
    assert isinstance(world.renew(lease), Lease)
    world.check()
