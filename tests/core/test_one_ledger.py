"""A GPU is in one ledger, and a port is given out by one daemon: what the core makes of a worker's claims."""

from __future__ import annotations

from gpulease_protocol.model import Device, EndReason, GpuState, Lease, LeaseState
from gpulease_protocol.node_protocol import LEASE_PORTS, ClaimedGpu
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.grant import can_revive
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import gpu_view, lease_problems
from gpulease_server.core.turn import Turn
from tests.core.build import World, gpu, uuid

WHY = "it is in the ledger of another gpulease daemon, whose worker is pid 4242, user ada"


def claimed(*indices: int, node: str = "a") -> tuple[ClaimedGpu, ...]:
    """GPUs that a node's worker could not claim."""
    fields = Device.__dataclass_fields__
    devices = (Device(**{name: getattr(gpu(index, node), name) for name in fields}) for index in indices)
    return tuple(ClaimedGpu(device=device, reason=WHY) for device in devices)


def without(world: World, *indices: int, node: str = "a", gpus: int = 2) -> None:
    """The node's worker reports: another one has these GPUs."""
    world.nodes[node] = [gpu(index, node) for index in range(gpus) if index not in indices]
    world.claimed[node] = claimed(*indices, node=node)
    world.report(node)


def test_a_gpu_of_another_daemon_is_known_and_never_granted() -> None:
    world = World()
    without(world, 0)
    assert (world.state(0), world.state(1)) == (GpuState.UNKNOWN, GpuState.FREE)
    assert gpu_view(world.ledger, world.ledger.gpus[uuid(0)], world.now, world.policy).reason == f"Unknown: {WHY}"
    assert [device.uuid for device in world.lease().gpus] == [uuid(1)]


def test_who_waits_for_it_is_told_not_now_and_who_has_it() -> None:
    world = World()
    without(world, 0)
    waiting = world.lease(2)
    assert waiting.state is LeaseState.QUEUED, "not never: the other daemon may end"
    told = explain(world.ledger, world.ledger.leases[waiting.id], world.now, world.policy)
    assert f"GPU 0 of a is unknown: {WHY}" in str(told)
    world.node(gpus=2, report=False)
    world.claimed.clear()
    world.report()
    world.answer_wanted()
    assert world.now_of(waiting).state is LeaseState.ACTIVE


def test_a_lease_on_a_gpu_that_another_daemon_took_stays_and_says_so() -> None:
    """Its worker was away, and another daemon's worker was started in that time."""
    world = World().node(gpus=2)
    lease = world.lease(2, ttl_s=10)
    without(world, 0)
    assert world.now_of(lease).state is LeaseState.ACTIVE
    assert lease_problems(world.ledger, world.now_of(lease), world.now, world.policy) == (
        f"GPU 0 of a is unknown: {WHY}.",
    )
    world.release(lease)
    world.pass_time(1)
    assert (world.ledger.gpus[uuid(0)].draining, world.state(1)) == (True, GpuState.FREE)


def test_it_drains_for_as_long_as_another_daemon_has_it() -> None:
    """It was not taken out of its host, so it is not forgotten, and comes back only when it is seen clean."""
    world = World(policy=Policy(gone_after_s=5)).node(gpus=1)
    lease = world.lease()
    without(world, 0, gpus=1)
    world.release(lease)
    world.pass_time(20)
    assert world.ledger.gpus[uuid(0)].draining
    world.claimed.clear()
    world.node(gpus=[gpu(0, pids=(7,), lease=lease.id)])
    assert world.state(0) is GpuState.DRAINING
    world.node(gpus=1)
    assert world.state(0) is GpuState.FREE


def test_a_late_renewal_does_not_revive_a_lease_on_it() -> None:
    world = World().node(gpus=1)
    lease = world.lease(ttl_s=2)
    without(world, 0, gpus=1)
    world.pass_time(3)
    assert world.now_of(lease).end_reason is EndReason.EXPIRED
    turn = Turn(world.ledger, world.now, world.policy, {}, {})
    assert not can_revive(turn, world.now_of(lease))


def test_of_two_workers_on_one_host_the_one_with_the_claim_shows_the_gpu() -> None:
    """Both report to this daemon, as two nodes, and the one without the claim reports first."""
    world = World(host="h")
    world.nodes["b"], world.claimed["b"] = [], claimed(0)
    world.report("b")
    assert world.ledger.gpus[uuid(0)].device.node == "b"
    world.node("a", gpus=1)
    assert world.ledger.gpus[uuid(0)].device.node == "a"
    world.report("b")
    assert world.ledger.gpus[uuid(0)].device.node == "a"
    assert world.lease().gpus[0].node == "a"


def test_a_gpu_that_another_daemon_has_goes_with_its_node() -> None:
    world = World(policy=Policy(gone_after_s=2))
    without(world, 0)
    world.claimed.clear()
    world.report()
    world.pass_time(4)
    assert set(world.ledger.gpus) == {uuid(1)}


def ports(leases: list[Lease]) -> list[int]:
    return [int(lease.env["MASTER_PORT"]) for lease in leases]


def test_ports_come_from_what_the_worker_has_reserved() -> None:
    """Two daemons of one host do not know of each other's leases; their workers have reserved different ports."""
    given = []
    for start in (21000, 21016):
        world = World(ports_reserved=tuple(range(start, start + 16))).node(gpus=16)
        given += ports([world.lease() for _ in range(16)])
    assert sorted(given) == list(range(21000, 21032))


def test_leases_that_one_turn_grants_have_ports_of_their_own() -> None:
    world = World(ports_reserved=(21000, 21001, 21002)).node(gpus=4)
    held = world.lease()
    world.at_s += 1  # the reading is too old by now
    calls = [world.ask() for _ in range(3)]
    assert not world.answers.keys() & set(calls)
    world.answer_wanted()
    others = [answer for call in calls if isinstance(answer := world.answers[call], Lease)]
    assert len(set(ports([held, *others]))) == 4
    assert {21000, 21001, 21002} < set(ports([held, *others]))


def test_a_reserved_port_on_which_something_listens_is_passed_over() -> None:
    world = World(ports_reserved=(21000, 21001, 21002), ports_in_use=(21000, 21002)).node(gpus=1)
    assert ports([world.lease()]) == [21001]


def test_where_too_few_ports_are_reserved_any_other_is_given_out() -> None:
    world = World(ports_reserved=(21000, 80), ports_in_use=(21001,)).node(gpus=3)
    first, *others = ports([world.lease() for _ in range(3)])
    assert first == 21000
    assert set(others) <= set(LEASE_PORTS) - {21000, 21001}
