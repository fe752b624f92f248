"""Indexes of the ledger that a turn relies on. `World.check` counts them again after each step of test_promises.py."""

from __future__ import annotations

from dataclasses import replace

from gpulease_protocol.model import Demand, Holder, LeaseState
from gpulease_protocol.node_protocol import JobReport, OwnerState, RunState
from gpulease_server.core import fleet
from gpulease_server.core.happenings import LeaseRequested, ReleaseRequested, Ticked
from gpulease_server.core.node import desired_state
from gpulease_server.core.placement import find_candidates
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Deadline
from gpulease_server.runtime.outage import copy_ledger
from tests.core.build import World, gpu, uuid
from tests.core.test_arrays import array_of_jobs


def orders(world: World) -> list[str]:
    return [order.job_id for order in desired_state(world.ledger, "a", 1).jobs]


def test_a_node_is_told_of_its_jobs_in_the_same_order_while_they_are_the_same() -> None:
    world = World().node(gpus=2)
    first, second = world.submit(), world.submit()
    before = orders(world)
    world.jobs["a"] = [JobReport(job_id=first, state=RunState.RUNNING, log_directory="/j")]
    world.report()
    assert orders(world) == before == [first, second]


def test_a_gpu_that_got_another_index_while_it_was_held_comes_back_in_its_new_place() -> None:
    world = World().node(gpus=3)
    lease = world.lease(1)
    assert [device.uuid for device in lease.gpus] == [uuid(0)]
    world.nodes["a"][0] = replace(world.nodes["a"][0], index=9)
    world.report()
    world.release(lease)
    world.report()
    assert world.ledger.fleet.free["a"] == (uuid(1), uuid(2), uuid(0))
    assert [device.index for device in world.lease(2).gpus] == [1, 2]


def test_the_jobs_of_an_array_come_before_what_was_asked_for_after_it_in_the_same_turn() -> None:
    world = World().node(gpus=2)
    newer = LeaseRequested(
        cause="newer", lease_id="newer", demand=Demand(count=1), holder=Holder(), ttl_s=60.0, queue=True
    )
    world.turn(array_of_jobs(3), newer)
    world.answer_wanted()
    states = {lease_id: record.lease.state for lease_id, record in world.ledger.leases.items()}
    assert states == {
        "array-lease-0": LeaseState.ACTIVE,
        "array-lease-1": LeaseState.ACTIVE,
        "array-lease-2": LeaseState.QUEUED,
        "newer": LeaseState.QUEUED,
    }


def test_a_lease_that_is_spared_at_its_deadline_is_looked_at_in_each_tick_and_keeps_the_deadline() -> None:
    world = World(policy=Policy(node_lost_after_s=0)).node()
    world.owners[7] = OwnerState.ALIVE
    lease = world.lease(owner=7)
    world.report()
    deadline_s = world.ledger.deadlines[lease.id]
    world.pass_time(lease.ttl_s * 2, silent=("a",))
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.changes.clear()
    for _ in range(3):
        world.at_s += 1.0
        world.turn(Ticked(cause="tick", since_last_s=1.0))
    assert not [change for change in world.changes if isinstance(change, Deadline)]
    assert world.ledger.deadlines[lease.id] == deadline_s
    assert [lease_id for _, lease_id in world.ledger.due.heap].count(lease.id) >= 1


def test_a_request_that_is_taken_back_before_its_verdict_gets_none() -> None:
    world = World().node(gpus=1)
    world.at_s += 1.0  # so that the verdict waits for a reading
    call = world.ask()
    (lease_id,) = world.pending
    world.turn(ReleaseRequested(cause="taken back", lease_id=lease_id, fencing_token=None))
    world.node(gpus=[gpu(0, pids=(5,))])
    assert world.ledger.leases[lease_id].lease.state is LeaseState.ENDED
    assert call not in world.answers
    assert lease_id not in world.ledger.deadlines


def test_what_could_serve_a_demand_is_kept_for_so_many_gpus_only() -> None:
    world = World().node(gpus=8)
    most = fleet.MAX_KNOWN_UUIDS // 9
    for number in range(most + 10):
        find_candidates(world.ledger, Demand(count=1, min_free_memory_bytes=number + 1))
    known = world.ledger.fleet.candidates
    assert len(known) == most
    assert Demand(count=1, min_free_memory_bytes=most + 10) in known
    assert Demand(count=1, min_free_memory_bytes=1) not in known
    world.node(gpus=9)
    assert not known, "there is a GPU more"


def test_a_copy_of_a_ledger_changes_by_itself() -> None:
    world = World().node(gpus=2)
    lease = world.lease()
    copy = copy_ledger(world.ledger)
    before = repr(copy)
    world.release(lease)
    world.report()
    world.lease()
    world.submit()
    assert repr(copy) == before
