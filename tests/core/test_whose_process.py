"""Whose a process on a GPU is, and who is told what about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulease_protocol.model import ComputeMode, GpuReading, GpuState, Process, ProcessType
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.gpu_observation import BASELINE_READINGS, FOREIGN_AFTER_S
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import gpu_view, lease_view
from tests.core.build import GIB, World, gpu, uuid

GRAPHICS = ProcessType.GRAPHICS


def with_processes(*processes: Process, **what: object) -> GpuReading:
    return gpu(0, processes=processes, **what)


def told(world: World, *kinds: str) -> list[tuple[str, str | None]]:
    """The events of these kinds so far: kind and reason."""
    found = [change for change in world.changes if hasattr(change, "kind")]
    return [(event.kind, event.reason) for event in found if event.kind in kinds]


def problems(world: World, lease) -> tuple[str, ...]:
    return lease_view(world.ledger, world.ledger.leases[lease.id], world.now, world.policy).problems


def reason(world: World) -> str:
    return gpu_view(world.ledger, world.ledger.gpus[uuid(0)], world.now, world.policy).reason or ""


def test_a_gpu_with_a_foreign_process_is_not_granted_and_frees_itself_when_the_process_goes() -> None:
    world = World().node(gpus=[with_processes(Process(pid=7, user="bob", command="python sd.py"))])
    assert world.state() is GpuState.FOREIGN
    assert reason(world) == "In use without a lease by pid 7 of bob (python sd.py)"
    waiting = world.lease()
    assert world.position(waiting) == 1
    world.node(gpus=1)
    assert [gpu.uuid for gpu in world.now_of(waiting).gpus] == [uuid(0)]


@pytest.mark.parametrize(
    ("process", "state"),
    [
        (Process(pid=7, type=GRAPHICS, memory_bytes=GIB // 4, command="firefox"), GpuState.FREE),
        (Process(pid=7, type=GRAPHICS, memory_bytes=None, command="firefox"), GpuState.FREE),
        (Process(pid=7, type=GRAPHICS, memory_bytes=6 * GIB, command="game"), GpuState.FOREIGN),
        (Process(pid=7, type=GRAPHICS, memory_bytes=6 * GIB, command="/usr/lib/xorg/Xorg vt2"), GpuState.FREE),
        (Process(pid=7, memory_bytes=GIB // 4, command="/usr/bin/gnome-shell"), GpuState.FREE),
        (Process(pid=7, memory_bytes=6 * GIB, command="/usr/bin/gnome-shell"), GpuState.FOREIGN),
        (Process(pid=7, memory_bytes=GIB // 4, command="python Xorg"), GpuState.FOREIGN),
        (Process(pid=7, memory_bytes=GIB // 4, command="/usr/libexec/gnome-remote-desktop-daemon"), GpuState.FREE),
        (Process(pid=7, memory_bytes=GIB // 4, command="/usr/bin/sunshine"), GpuState.FREE),
        (Process(pid=7, memory_bytes=6 * GIB, command="/usr/bin/sunshine"), GpuState.FOREIGN),
        (Process(pid=7, memory_bytes=1, command=None), GpuState.FOREIGN),
    ],
)
def test_a_desktop_does_not_make_a_gpu_foreign_but_a_game_does(process: Process, state: GpuState) -> None:
    world = World().node(gpus=[with_processes(process)])
    assert world.state() is state


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"memory_used_bytes": GIB},
        {"memory_used_bytes": None},
        {"processes": (Process(pid=7, user="bob"),)},
        {"hidden_use": True},
        {"health": "ecc_error"},
        {"health": "ecc_error", "memory_used_bytes": GIB},
    ],
)
def test_a_change_of_a_gpu_that_was_free_for_long_is_seen_at_once(change: dict[str, Any]) -> None:
    short, long = World().node(gpus=1), World().node(gpus=1)
    for _ in range(2 * BASELINE_READINGS):
        long.node(gpus=1)
    for world in (short, long):
        world.node(gpus=[gpu(0, **change)])
        world.at_s += FOREIGN_AFTER_S
        world.node(gpus=[gpu(0, **change)])
    seen, expected = (world.ledger.node_observations["a"].gpus[uuid(0)] for world in (long, short))
    for name in ("unhealthy", "foreign", "memory_awaited"):
        assert getattr(seen, name) == getattr(expected, name), name
    assert seen.free_bytes[-1:] == expected.free_bytes[-1:]


SERVER = "/usr/bin/nvidia-cuda-mps-server"


@pytest.mark.parametrize(
    ("processes", "state"),
    [
        ((Process(pid=7, memory_bytes=GIB // 32, command=SERVER),), GpuState.FREE),
        ((Process(pid=7, memory_bytes=None, command=f"{SERVER} --x"),), GpuState.FREE),
        ((Process(pid=7, memory_bytes=GIB, command=SERVER),), GpuState.FOREIGN),
        ((Process(pid=7, memory_bytes=GIB // 32, command=f"python {SERVER}"),), GpuState.FOREIGN),
        (
            (
                Process(pid=7, memory_bytes=GIB // 32, command=SERVER),
                Process(pid=8, type=ProcessType.MPS, memory_bytes=GIB // 32, command="python infer.py"),
            ),
            GpuState.FOREIGN,
        ),
        ((Process(pid=8, type=ProcessType.MPS, memory_bytes=GIB // 32, command=SERVER),), GpuState.FOREIGN),
    ],
    ids=["idle", "its memory is not known", "with memory of clients", "a script", "with a client", "a client"],
)
def test_an_mps_server_without_clients_keeps_a_gpu_from_no_one(processes: tuple[Process, ...], state: GpuState) -> None:
    assert World().node(gpus=[with_processes(*processes)]).state() is state


def test_an_mps_server_that_a_lease_has_brought_does_not_keep_its_gpu_but_one_that_is_the_leases_own_does() -> None:
    server = Process(pid=7, memory_bytes=GIB // 32, command=SERVER)
    for left, state in ((server, GpuState.FREE), (replace(server, lease_id="lease-2"), GpuState.DRAINING)):
        world = World().node(gpus=1)
        lease = world.lease()
        assert lease.id == "lease-2"
        world.node(gpus=[with_processes(left, memory_used_bytes=GIB // 32, opened_by=(left,))])
        world.release(lease)
        world.report()
        assert world.state() is state


def test_the_names_and_the_memory_of_a_desktop_are_the_administrators_to_set() -> None:
    policy = Policy(desktop_names=frozenset({"my-shell"}), desktop_memory_bytes=8 * GIB)
    for command, kind, state in [
        ("my-shell --replace", ProcessType.COMPUTE, GpuState.FREE),
        ("gnome-shell", ProcessType.COMPUTE, GpuState.FOREIGN),
        ("game", GRAPHICS, GpuState.FREE),
    ]:
        process = Process(pid=7, type=kind, memory_bytes=6 * GIB, command=command)
        assert World(policy=policy).node(gpus=[with_processes(process)]).state() is state


def test_use_outside_any_lease_is_recorded_once_it_lasts_and_so_is_its_end() -> None:
    theirs, used = Process(pid=7, user="bob", command="sd.py"), ("gpu.foreign", "gpu.foreign_over")
    world = World().node(gpus=[with_processes(theirs)])
    for _ in range(3):
        world.pass_time(FOREIGN_AFTER_S - 5)
        world.node(gpus=1)
        world.node(gpus=[with_processes(theirs)])
    assert told(world, *used) == [], "each was short"
    world.pass_time(FOREIGN_AFTER_S + 1)
    for _ in range(2):
        world.node(gpus=[with_processes(theirs)])
    assert told(world, *used) == [("gpu.foreign", "used by pid 7 of bob (sd.py), outside any lease")]
    for _ in range(2):
        world.node(gpus=1)
    assert told(world, *used)[1:] == [("gpu.foreign_over", None)]


def test_of_many_processes_on_a_gpu_the_first_are_named_and_the_others_are_counted() -> None:
    """Anyone may have hundreds there, and others at each reading: an event of each would have been kilobytes long."""
    many = [Process(pid=pid, user="eve", command="x" * 300) for pid in range(10, 210)]
    words = ", ".join(f"pid {pid} of eve ({60 * 'x'})" for pid in range(10, 14)) + " and 196 more"
    world = World().node(gpus=1)
    lease = world.lease()
    for _ in range(2):
        world.node(gpus=[with_processes(*many)])
    assert told(world, "gpu.conflict") == [("gpu.conflict", f"used by {words}, outside its lease")]
    assert problems(world, lease) == (f"GPU 0 of a is also used by {words}, outside this lease.",)
    world.release(lease)
    world.pass_time(world.policy.leftover_after_s)
    world.node(gpus=[with_processes(*many)])
    assert told(world, "gpu.leftover") == [("gpu.leftover", f"left behind: {words}")]


def test_a_conflict_and_its_end_are_recorded_once_each_and_its_holder_sees_it() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    mine, theirs = Process(pid=5, lease_id=lease.id), Process(pid=7, user="bob", command="sd.py")
    for _ in range(3):
        world.node(gpus=[with_processes(mine, theirs)])
    words = "pid 7 of bob (sd.py)"
    assert told(world, "gpu.conflict") == [("gpu.conflict", f"used by {words}, outside its lease")]
    view = gpu_view(world.ledger, world.ledger.gpus[uuid(0)], world.now, world.policy)
    assert view.activity == "conflict"
    assert view.reason == f"Held by {lease.id} (user ann), and also used by {words}, outside that lease"
    assert problems(world, lease) == (f"GPU 0 of a is also used by {words}, outside this lease.",)

    world.node(gpus=[with_processes(mine, theirs, Process(pid=8))])
    assert len(told(world, "gpu.conflict")) == 2, "another process is another conflict"
    for _ in range(2):
        world.node(gpus=[with_processes(mine)])
    assert told(world, "gpu.conflict_over") == [("gpu.conflict_over", None)]
    assert problems(world, lease) == ()


def test_a_reading_begun_before_the_grant_does_not_judge_the_holders_processes() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    world.node(gpus=[with_processes(Process(pid=5))])
    assert not told(world, "gpu.conflict")
    world.node(gpus=[with_processes(Process(pid=5, lease_id=lease.id))])
    world.report()
    assert not told(world, "gpu.conflict")


def test_a_desktop_on_a_leased_gpu_is_no_conflict() -> None:
    world = World().node(gpus=[with_processes(Process(pid=7, type=GRAPHICS, command="Xorg"))])
    lease = world.lease()
    for _ in range(3):
        world.report()
    view = gpu_view(world.ledger, world.ledger.gpus[uuid(0)], world.now, world.policy)
    assert (view.activity, problems(world, lease)) == ("starting", ())


def test_ill_health_is_told_once_and_the_holder_sees_it_until_it_is_over() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    for _ in range(3):
        world.node(gpus=[gpu(0, health="xid:79")])
    assert told(world, "gpu.unhealthy", "gpu.recovered") == [("gpu.unhealthy", "xid:79")]
    assert problems(world, lease) == ("GPU 0 of a is unhealthy: xid:79.",)
    world.report(problem="the probe hangs")
    assert problems(world, lease) == ("GPU 0 of a is unknown: the probe hangs.",)
    world.node(gpus=[gpu(0, health="xid:79")])
    world.node(gpus=1)
    assert told(world, "gpu.unhealthy", "gpu.recovered") == [("gpu.unhealthy", "xid:79"), ("gpu.recovered", None)]
    assert problems(world, lease) == ()


@pytest.mark.parametrize("health", ["lost", "reset_required", "xid:79", "processes_unknown"])
def test_an_unhealthy_gpu_is_granted_again_once_it_has_recovered(health: str) -> None:
    world = World().node(gpus=[gpu(0, health=health)])
    assert world.state() is GpuState.UNHEALTHY
    waiting = world.lease()
    assert not waiting.gpus
    world.node(gpus=1)
    assert world.now_of(waiting).gpus


def test_a_lease_that_waits_or_has_ended_has_no_problems() -> None:
    world = World().node(gpus=1)
    lease, waiting = world.lease(), world.lease()
    world.node(gpus=[gpu(0, health="lost")])
    assert problems(world, waiting) == ()
    world.release(lease)
    assert problems(world, lease) == ()


def test_what_exclusive_process_means_is_said_to_those_who_hold_or_wait() -> None:
    world = World().node(gpus=[gpu(0, compute_mode=ComputeMode.EXCLUSIVE_PROCESS), gpu(1)])
    lease, waiting = world.lease(2), world.lease(1)
    words = "GPU 0 of a is in compute mode EXCLUSIVE_PROCESS: one process on each at a time"
    for asked in (lease, waiting):
        sentence = explain(world.ledger, world.ledger.leases[asked.id], world.now, world.policy).sentence
        assert words in sentence
    world.node(gpus=2)
    assert words not in explain(world.ledger, world.ledger.leases[lease.id], world.now, world.policy).sentence


def test_who_holds_several_gpus_is_told_of_one_that_should_not_reach_the_others() -> None:
    world = World().node(gpus=3)
    alone, several = world.lease(), world.lease(count=2)
    warned = {"warnings": ("row_remap_pending", "drain_p2p", "a word to come")}
    world.node(gpus=[gpu(0, **warned), gpu(1, **warned), gpu(2, warnings=("fabric_not_ready",))])
    assert problems(world, alone) == ()
    assert problems(world, several) == (
        "GPU 1 of a is best used alone: the driver advises against exchanging data between it and other GPUs.",
        "GPU 2 of a is best used alone: it is not on the host's NVLink fabric, and reaches the others over PCIe, "
        "if at all.",
    )


def test_of_a_silent_node_a_holder_is_told_once_and_not_for_each_gpu() -> None:
    """Every holder would otherwise read a line for each of its GPUs after each restart of the daemon."""
    world = World().node(gpus=4)
    lease = world.lease(3)
    world.pass_time(5, silent=("a",))
    assert problems(world, lease) == ("GPUs 0-2 of a are unknown: node a has been silent for over 3 s.",)
