"""Which GPUs a lease held when. All of its GPUs all of the time, but for an elastic lease, whose nodes come and go.

The row of a lease has the GPUs that it had last. What an elastic one had before follows from that and from its events
`lease.grown` and `lease.shrunk`, backwards in time. So where the oldest of these are pruned, the rest is still right: a
node that joined or left before them counts as there, or not there, since the grant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, Engine, select

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.store.lease_conditions import is_elastic
from gpulease_server.store.tables import event, lease

GROWN, SHRUNK = "lease.grown", "lease.shrunk"


@dataclass(frozen=True, slots=True)
class HeldGpus:
    """GPUs of one node that a lease held together."""

    node: str
    uuids: tuple[str, ...]
    from_at: datetime
    to_at: datetime | None
    """None: it still holds them."""

    def seconds_between(self, begin: datetime, end: datetime) -> float:
        """For how long in this time. None of it where the clock was set back in between."""
        return max(0.0, (min(self.to_at or end, end) - max(self.from_at, begin)).total_seconds())


@dataclass(frozen=True, slots=True)
class NodeChange:
    """GPUs of a node joined an elastic lease, or left it."""

    kind: str
    at: datetime
    node: str
    uuids: tuple[str, ...]


def node_changes(connection: Connection, *which: ColumnElement[bool]) -> dict[str, list[NodeChange]]:
    """By lease, how the nodes of these elastic leases changed, oldest first. `which`: conditions on the lease."""
    query = (
        select(event.c.lease_id, event.c.kind, event.c.at, event.c.node, event.c.gpus)
        .join(lease, lease.c.id == event.c.lease_id)
        .where(is_elastic(), event.c.kind.in_((GROWN, SHRUNK)), *which)
        .order_by(event.c.seq)
    )
    found: dict[str, list[NodeChange]] = {}
    for lease_id, kind, at, node, uuids in connection.execute(query):
        found.setdefault(lease_id, []).append(NodeChange(kind, at, node or "", tuple(uuids)))
    return found


def changes_of(engine: Engine, lease_ids: Iterable[str]) -> dict[str, list[NodeChange]]:
    """By lease, how the nodes of those of these leases changed that are elastic, oldest first. Blocks."""
    with engine.connect() as connection:
        return node_changes(connection, lease.c.id.in_(list(lease_ids)))


def held_gpus(
    last: Mapping[str, Sequence[str]],
    granted_at: datetime,
    ended_at: datetime | None,
    changes: Iterable[NodeChange] = (),
) -> list[HeldGpus]:
    """What a lease held, by node. `last`: the UUIDs that it had last, by node; `changes`: oldest first."""
    held: dict[str, tuple[tuple[str, ...], datetime | None]] = {
        node: (tuple(uuids), ended_at) for node, uuids in last.items()
    }
    found = []
    for change in reversed(list(changes)):
        if change.kind == SHRUNK:
            held.setdefault(change.node, (change.uuids, change.at))
        elif change.node in held:
            uuids, to_at = held.pop(change.node)
            found.append(HeldGpus(change.node, uuids, change.at, to_at))
    found += [HeldGpus(node, uuids, granted_at, to_at) for node, (uuids, to_at) in held.items()]
    return found[::-1]
