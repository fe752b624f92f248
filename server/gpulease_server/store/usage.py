"""Reads which leases held GPUs in a period, for `GET /v1/usage`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, func, or_, select

from gpulease_server.store.tables import lease


@dataclass(frozen=True, slots=True)
class HeldTime:
    """One lease that held GPUs in a period."""

    lease_id: str
    is_job: bool
    user: str | None
    label: str | None
    agent: str | None
    session: str | None
    node: str | None
    gpus: int
    granted_at: datetime
    ended_at: datetime | None
    members: list[dict[str, Any]] | None
    """Those of a gang."""
    uuids: frozenset[str] | None = None
    """The GPUs that are meant; None for all of the lease."""

    def by_node(self) -> Iterator[HeldTime]:
        """The lease on each of its nodes."""
        if not self.members:
            yield self
        for member in self.members or ():
            uuids = frozenset(gpu["uuid"] for gpu in member["gpus"])
            yield replace(self, node=member["node"], gpus=len(uuids), uuids=uuids)


def held_times(engine: Engine, from_at: datetime, to_at: datetime, user: str | None = None) -> Iterator[HeldTime]:
    """The leases (of one user, or of all) that held GPUs in the period, newest first. Blocks.

    The database picks the few values out of the JSON columns, which takes a tenth of the time of decoding them here.
    Retention bounds how many there are.
    """
    holder = lease.c.holder["user"].as_string()
    query = (
        select(
            lease.c.id,
            lease.c.job_id.is_not(None),
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
        .where(lease.c.granted_at < to_at, or_(lease.c.ended_at.is_(None), lease.c.ended_at > from_at))
        .order_by(lease.c.number.desc())
    )
    if user is not None:
        query = query.where(holder == user)
    with engine.connect() as connection:
        for row in connection.execute(query.execution_options(yield_per=500)):
            yield HeldTime(*row)
