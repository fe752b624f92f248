"""Which GPUs an elastic lease held when, from the row and the events that the core has made of it."""

from __future__ import annotations

from datetime import datetime

from gpulease_protocol.model import Event
from gpulease_server.store.held_gpus import GROWN, SHRUNK, HeldGpus, NodeChange, held_gpus
from tests.core.build import World
from tests.core.test_elastic_growth import joined, with_room
from tests.core.test_gang_jobs import job_of


def held_by_record(world: World, lease_id: str) -> set[str]:
    return {gpu.device.uuid for gpu in world.ledger.gpus.values() if gpu.lease_id == lease_id and not gpu.draining}


def held_by_history(world: World, lease_id: str) -> list[HeldGpus]:
    lease = world.ledger.leases[lease_id].lease
    events = [one for one in world.changes if isinstance(one, Event) and one.lease_id == lease_id]
    changes = [NodeChange(one.kind, one.at, one.node or "", one.gpus) for one in events if one.kind in (GROWN, SHRUNK)]
    last = {member.node: [gpu.uuid for gpu in member.gpus] for member in lease.members}
    assert lease.granted_at is not None
    return held_gpus(last, lease.granted_at, lease.ended_at, changes)


def test_the_history_is_what_the_ledger_said_at_each_moment() -> None:
    world, job_id = with_room()
    world.node("d", gpus=4)
    lease_id = job_of(world, job_id).lease_id
    samples: list[tuple[datetime, set[str]]] = []
    for _ in range(4):
        samples.append((world.now.at, held_by_record(world, lease_id)))
        joined(world, job_id)  # a node joins, fails and is given back
        samples.append((world.now.at, held_by_record(world, lease_id)))
        world.pass_time(20)
    while len(samples[-1][1]) == 4:
        world.pass_time(1)
        samples.append((world.now.at, held_by_record(world, lease_id)))

    held = held_by_history(world, lease_id)
    assert len(held) >= 6, "two nodes from the beginning, and each that has joined"
    for at, uuids in samples:
        told = [
            uuid for one in held if one.from_at <= at and (one.to_at is None or at < one.to_at) for uuid in one.uuids
        ]
        assert sorted(told) == sorted(uuids), at
