"""Reads what happened in a period, for `GET /v1/timeline`: leases, events of the state of GPUs, drains, the queue.

Every query is bounded and walks an index: leases that live by state, those that have ended by their end, events of
states by an index of their own, drains by time. Each says where it gave up, as a time before which things may be
missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, Text, and_, cast, or_, select

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.store.dialects import is_later_by
from gpulease_server.store.held_gpus import SHRUNK, NodeChange, node_changes
from gpulease_server.store.lease_conditions import has_gpu, is_elastic, on_node
from gpulease_server.store.tables import STATE_EVENTS, event, lease, pruned

MAX_STATE_EVENTS = 10_000
"""Events of states that are read, the newest."""
MAX_DRAINS = 20_000
"""GPUs that were found clean in the period, the newest."""
MAX_WAITED = 50_000
"""Leases of which the length of the queue is made, those that ended last."""
MAX_NAMED_GPUS = 100_000
"""GPUs that the leases of one page name, about: a page of larger leases ends earlier."""
DRAIN_MARGIN = timedelta(hours=1)
"""A drain that began in the period is followed for so long after it."""
LIVE = ("queued", "active")


class KeptDevice(msgspec.Struct, gc=False):
    """A GPU in the row of a lease."""

    uuid: str
    node: str
    index: int | None = None
    name: str | None = None


_DEVICES = msgspec.json.Decoder(list[KeptDevice])


@dataclass(frozen=True, slots=True)
class KeptLease:
    """A lease that held GPUs in the period."""

    id: str
    number: int
    granted_at: datetime
    ended_at: datetime | None
    end_reason: str | None
    job_id: str | None
    user: str | None
    label: str
    gpus: list[KeptDevice]
    """Those that it had last."""
    changes: list[NodeChange]
    """How the nodes of an elastic one changed."""


@dataclass(frozen=True, slots=True)
class StateEvent:
    """An event of the state of GPUs."""

    at: datetime
    kind: str
    cause: str
    node: str | None
    gpus: tuple[str, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class Drain:
    """GPUs of one node that were found clean after a lease, or after they left it."""

    lease_id: str
    node: str
    gpus: tuple[str, ...]
    from_at: datetime | None
    to_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a timeline is about; None: any."""

    from_at: datetime
    to_at: datetime
    gpu: str | None = None
    node: str | None = None
    user: str | None = None

    def holders(self) -> list[ColumnElement[bool]]:
        """The condition on who asked for a lease."""
        return [] if self.user is None else [lease.c.holder["user"].as_string() == self.user]


def leases(
    connection: Connection, scope: Scope, limit: int, after: tuple[datetime, int] | None
) -> tuple[list[KeptLease], tuple[datetime, int] | None]:
    """A page of the leases that held GPUs in the period, and where the next one begins. `after`: the end and the
    number of the last one of the page before."""
    where = [lease.c.granted_at < scope.to_at, *scope.holders()]
    if scope.gpu is not None:
        where.append(or_(has_gpu(scope.gpu), is_elastic()))
    if scope.node is not None:
        where.append(or_(on_node(scope.node), is_elastic()))
    columns = (
        *(lease.c.id, lease.c.number, lease.c.granted_at, lease.c.ended_at, lease.c.end_reason, lease.c.job_id),
        *(lease.c.holder["user"].as_string(), lease.c.holder["label"].as_string(), cast(lease.c.gpus, Text)),
        is_elastic(),
    )
    found: list[Any] = []
    if after is None:
        live = select(*columns).where(lease.c.state.in_(LIVE), *where).order_by(lease.c.number.desc())
        found += connection.execute(live)
    ended = select(*columns).where(lease.c.ended_at > scope.from_at, *where)
    if after is not None:
        at, number = after
        ended = ended.where(lease.c.ended_at <= at, or_(lease.c.ended_at < at, lease.c.number < number))
    ended = ended.order_by(lease.c.ended_at.desc(), lease.c.number.desc()).limit(limit)
    count, named, last = 0, 0, None
    with connection.execute(ended.execution_options(yield_per=100)) as rows:
        for row in rows:
            found.append(row)
            count, named = count + 1, named + row[8].count('"uuid"')
            if count == limit or named >= MAX_NAMED_GPUS:
                last = (row.ended_at, row.number)
                break
    elastic = [row.id for row in found if row[9]]
    changes = node_changes(connection, lease.c.id.in_(elastic)) if elastic else {}
    page = [
        KeptLease(*values, label or "", _DEVICES.decode(gpus), changes.get(values[0], []))  # type: ignore[call-arg]
        for *values, label, gpus, _ in found
    ]
    return page, last


def state_events(connection: Connection) -> tuple[list[StateEvent], datetime | None]:
    """The newest events of the state of GPUs, oldest first; and since when, if there were more."""
    query = (
        select(event.c.at, event.c.kind, event.c.cause, event.c.node, event.c.gpus, event.c.reason)
        .where(STATE_EVENTS)
        .order_by(event.c.seq.desc())
        .limit(MAX_STATE_EVENTS)
    )
    found = [StateEvent(*row[:4], tuple(row[4]), row[5]) for row in connection.execute(query)]
    return found[::-1], found[-1].at if len(found) == MAX_STATE_EVENTS else None


def drains(connection: Connection, scope: Scope, at_least: timedelta) -> tuple[list[Drain], datetime | None]:
    """Drains that took this long and ended in the period or soon after; and since when, if there were more."""
    slow = is_later_by(connection, event.c.at, lease.c.ended_at, at_least.total_seconds())
    unusual = or_(lease.c.ended_at.is_(None), lease.c.ended_at > event.c.at, slow)
    clean = (
        select(event.c.at, event.c.lease_id, event.c.node, event.c.gpus, lease.c.ended_at)
        .outerjoin(lease, lease.c.id == event.c.lease_id)
        .where(
            event.c.kind == "gpu.clean", event.c.at >= scope.from_at, event.c.at < scope.to_at + DRAIN_MARGIN, unusual
        )
        .order_by(event.c.at.desc(), event.c.seq.desc())
        .limit(MAX_DRAINS)
    )
    rows = connection.execute(clean).all()
    left = {row.lease_id for row in rows if row.ended_at is None or row.ended_at > row.at}
    changes = node_changes(connection, lease.c.id.in_(left)) if left else {}
    found = []
    for row in rows:
        from_at = row.ended_at
        if row.lease_id in left:  # it had left its lease before
            shrunk = [one.at for one in changes.get(row.lease_id, ()) if one.kind == SHRUNK and one.node == row.node]
            from_at = max((moment for moment in shrunk if moment <= row.at), default=None)
        if from_at is None or row.at - from_at >= at_least:
            found.append(Drain(row.lease_id or "", row.node or "", tuple(row.gpus), from_at, row.at))
    return found, rows[-1].at if len(rows) == MAX_DRAINS else None


def waits(connection: Connection, scope: Scope) -> tuple[list[tuple[datetime, datetime | None]], datetime | None]:
    """When requests began to wait in or before the period, and until when; and since when, if there were more. One that
    was granted at once did not wait."""
    columns = select(lease.c.created_at, lease.c.granted_at, lease.c.ended_at)
    waited = or_(lease.c.granted_at.is_(None), lease.c.granted_at > lease.c.created_at)
    where = [lease.c.created_at < scope.to_at, waited, *scope.holders()]
    ended = columns.where(and_(lease.c.ended_at > scope.from_at, *where)).order_by(lease.c.ended_at.desc())
    found: list[tuple[datetime, datetime | None]] = []
    count, last = 0, None
    for created_at, granted_at, ended_at in connection.execute(ended.limit(MAX_WAITED)):
        found.append((created_at, granted_at or ended_at))
        count, last = count + 1, ended_at
    for created_at, granted_at, _ in connection.execute(columns.where(lease.c.state.in_(LIVE), *where)):
        found.append((created_at, granted_at))
    return found, last if count == MAX_WAITED else None


def kept_since(connection: Connection) -> Iterator[datetime]:
    """When the oldest event was; and since when leases are kept, if any were pruned."""
    leases_ended_at = connection.execute(select(pruned.c.leases_ended_at)).scalar()
    oldest: Select[Any] = select(event.c.at).order_by(event.c.seq).limit(1)
    yield from (at for at in (leases_ended_at, connection.execute(oldest).scalar()) if at is not None)
