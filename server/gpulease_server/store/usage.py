"""Reads which leases held GPUs in a period, for `GET /v1/usage`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

from sqlalchemy import Engine, func, or_, select

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.store.dialects import snapshot
from gpulease_server.store.held_gpus import HeldGpus, held_gpus, node_changes
from gpulease_server.store.tables import lease


@dataclass(frozen=True, slots=True)
class HeldTime:
    """One lease that held GPUs in a period."""

    lease_id: str
    user: str | None
    label: str | None
    agent: str | None
    session: str | None
    node: str | None
    """The node of its first GPU."""
    gpus: int
    """How many it had last."""
    granted_at: datetime
    ended_at: datetime | None
    on_nodes: tuple[HeldGpus, ...] = ()
    """What it held on each of its nodes, for one on several; empty: `gpus` of `node` from its grant to its end."""

    def gpu_seconds(self, begin: datetime, end: datetime, node: str | None = None) -> float:
        """GPU time held in this time, on one node or on all."""
        if not self.on_nodes:
            until = min(self.ended_at or end, end)
            return self.gpus * max(0.0, (until - max(self.granted_at, begin)).total_seconds())
        parts = (part for part in self.on_nodes if node in (None, part.node))
        return sum(part.seconds_between(begin, end) * len(part.uuids) for part in parts)

    def uuids_on(self, node: str) -> frozenset[str] | None:
        """The GPUs that it had on a node; None for all that it had."""
        if not self.on_nodes:
            return None
        return frozenset(uuid for part in self.on_nodes if part.node == node for uuid in part.uuids)


def held_times(engine: Engine, from_at: datetime, to_at: datetime, user: str | None = None) -> Iterator[HeldTime]:
    """The leases (of one user, or of all) that held GPUs in the period, newest first. Blocks.

    The database picks the few values out of the JSON columns, which takes a tenth of the time of decoding them here.
    Retention bounds how many there are.
    """
    holder = lease.c.holder["user"].as_string()
    within = [lease.c.granted_at < to_at, or_(lease.c.ended_at.is_(None), lease.c.ended_at > from_at)]
    if user is not None:
        within.append(holder == user)
    query = (
        select(
            lease.c.id,
            holder,
            lease.c.holder["label"].as_string(),
            lease.c.holder["agent"].as_string(),
            lease.c.holder["session"].as_string(),
            lease.c.gpus[0]["node"].as_string(),
            func.json_array_length(lease.c.gpus),
            lease.c.granted_at,
            lease.c.ended_at,
            lease.c.members,
        )
        .where(*within)
        .order_by(lease.c.number.desc())
    )
    with snapshot(engine) as connection:
        changes = node_changes(connection, *within)
        for *values, members in connection.execute(query.execution_options(yield_per=500)):
            found = HeldTime(*values)
            if members:
                last = {one["node"]: [gpu["uuid"] for gpu in one["gpus"]] for one in members}
                held = held_gpus(last, found.granted_at, found.ended_at, changes.get(found.lease_id, ()))
                found = replace(found, on_nodes=tuple(held))
            yield found
