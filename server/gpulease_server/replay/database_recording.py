"""Reads the recorded requests of an installation from its database, in one snapshot, and writes nothing.

Of each lease only a few values are read: the database picks them out of its JSON columns. What is pruned is not there;
retention keeps 90 days and 200,000 ended leases by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Text, and_, cast, func, or_, select
from sqlalchemy.exc import SQLAlchemyError

from gpulease_protocol.codec import from_json
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Demand, Holder, Priority, TopologyMode
from gpulease_server.core.limit_index import LimitIndex
from gpulease_server.core.limit_records import LimitRecord
from gpulease_server.replay.recorded_requests import (
    MAX_REQUESTS,
    RecordedRequest,
    Recording,
    ReplayedNode,
)
from gpulease_server.store import rows, tables
from gpulease_server.store.database import DatabaseUnusable, connect, unusable_error
from gpulease_server.store.dialects import snapshot
from gpulease_server.store.integrity_check import revisions

PAGE = 1000
_NO_TIME_S = float("inf")


@dataclass(slots=True)
class _Names:
    """How requests depend on each other: by job, and by array."""

    array_of: dict[str, str] = field(default_factory=dict)
    at_most: dict[str, int] = field(default_factory=dict)
    """By array."""
    after: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By job: jobs and arrays that it waited for."""
    ended_at: dict[str, datetime] = field(default_factory=dict)
    """By job and by array: when the last of its leases that were read had ended."""
    last_lease: dict[str, str] = field(default_factory=dict)
    """By job: the lease of its last attempt so far."""


def read_database(url: str, since: datetime, until: datetime) -> Recording:
    """The requests made from `since` to `until` that were granted, and those that held GPUs at `since`; on the nodes
    that there are now. Blocks.

    A lease that is still active counts up to `until`. Raises `DatabaseUnusable`, and `InvalidRequest` where there is
    nothing to replay, or too much.
    """
    found, newest = revisions(url)
    if found != newest:
        detail = f"The database has schema {found or 'none'}, and this version of gpulease works with {newest}."
        raise DatabaseUnusable(detail, remedy="Run the version that the daemon runs, or gpulease db upgrade.")
    engine = connect(url)
    try:
        with snapshot(engine) as connection:
            nodes, limits = _nodes(connection), _limits(connection)
            period = _Period(since, until, _begin(connection, since, until))
            requests, left_out = _requests(connection, _job_names(connection), period)
            requests = without_given_times(requests, limits)
    except (OSError, SQLAlchemyError) as error:
        raise unusable_error(url, error) from error
    finally:
        engine.dispose()
    if not any(one.counted for one in requests):
        remedy = "Take a longer period with --since; ended leases are kept for `keep_days`."
        raise InvalidRequest(f"No request was made and granted since {since:%Y-%m-%d %H:%M} UTC.", remedy=remedy)
    return Recording(requests=requests, nodes=nodes, limits=limits, begin_at=period.begin_at, left_out=left_out)


@dataclass(frozen=True, slots=True)
class _Period:
    since: datetime
    until: datetime
    begin_at: datetime
    """When the oldest request was made that held GPUs at `since`; `since` if there is none."""


def _of_period(since: datetime, until: datetime) -> ColumnElement[bool]:
    ended_at = tables.lease.c.ended_at
    return and_(tables.lease.c.created_at < until, or_(ended_at.is_(None), ended_at > since))


def _begin(connection: Connection, since: datetime, until: datetime) -> datetime:
    lease = tables.lease
    granted = select(func.min(lease.c.created_at)).where(_of_period(since, until), lease.c.granted_at < until)
    return min(connection.execute(granted).scalar() or since, since)


def _nodes(connection: Connection) -> tuple[ReplayedNode, ...]:
    hosts = {name: host for name, host in connection.execute(select(tables.node.c.name, tables.node.c.host))}
    gpus: dict[str, list[Any]] = {}
    for row in connection.execute(select(tables.gpu).order_by(tables.gpu.c.uuid)):
        device = rows.gpu_record(row).device
        gpus.setdefault(device.node, []).append(device)
    return tuple(
        ReplayedNode(name, hosts.get(name, name), tuple(sorted(some, key=lambda device: device.index)))
        for name, some in sorted(gpus.items())
    )


def _limits(connection: Connection) -> tuple[LimitRecord, ...]:
    table = tables.usage_limit
    return tuple(map(rows.limit_record, connection.execute(select(table).order_by(table.c.id))))


def _job_names(connection: Connection) -> _Names:
    names, job = _Names(), tables.job
    query = select(job.c.id, job.c.array_id, job.c.array_at_most, job.c.after).where(
        or_(job.c.array_id.is_not(None), job.c.after.is_not(None))
    )
    with connection.execute(query.execution_options(yield_per=PAGE)) as jobs:
        for job_id, array_id, at_most, after in jobs:
            if array_id is not None:
                names.array_of[job_id] = array_id
                if at_most is not None:
                    names.at_most[array_id] = at_most
            if after:
                names.after[job_id] = tuple(one["job"] for one in after)
    return names


def _requests(connection: Connection, names: _Names, period: _Period) -> tuple[list[RecordedRequest], int]:
    """The requests in order of arrival, and how many were left out."""
    lease, since, until = tables.lease, period.since, period.until
    query = (
        select(
            *(lease.c.id, lease.c.holder["user"].as_string(), lease.c.holder["token_id"].as_string()),
            *(cast(lease.c.demand, Text), lease.c.job_id),
            *(lease.c.created_at, lease.c.granted_at, lease.c.ended_at),
        )
        .where(_of_period(since, until))
        .order_by(lease.c.number)
    )
    found, left_out = list[RecordedRequest](), 0
    with connection.execute(query.execution_options(yield_per=PAGE)) as leases:
        for lease_id, user, token_id, demand, job_id, created_at, granted_at, ended_at in leases:
            if granted_at is None or granted_at >= until:
                left_out += created_at >= since
                continue
            if len(found) == MAX_REQUESTS:
                detail = f"More than {MAX_REQUESTS} requests were granted since {since:%Y-%m-%d}."
                raise InvalidRequest(detail, remedy="Take a shorter period with --since and --until.")
            asked, held_s = _demand(demand), (min(ended_at or until, until) - granted_at).total_seconds()
            request = RecordedRequest(
                id=lease_id,
                asked_at_s=(created_at - period.begin_at).total_seconds(),
                duration_s=max(0.0, held_s if asked.time_s is None else min(held_s, asked.time_s)),
                demand=asked,
                user=user,
                token_id=token_id,
                waited_s=max(0.0, (granted_at - created_at).total_seconds()),
                counted=created_at >= since,
            )
            found.append(request if job_id is None else _of_job(request, job_id, names, created_at, granted_at))
            if job_id is not None:
                names.last_lease[job_id] = lease_id
                for name in found[-1].part_of:
                    names.ended_at[name] = max(ended_at or until, names.ended_at.get(name, since))
    return found, left_out


def _of_job(
    request: RecordedRequest, job_id: str, names: _Names, created_at: datetime, granted_at: datetime
) -> RecordedRequest:
    """The request of a job: what it is a part of, and what it waited for before it could be granted."""
    array_id = names.array_of.get(job_id)
    part_of = (job_id,) if array_id is None else (job_id, array_id)
    before = names.last_lease.get(job_id)
    if before is not None:  # a further attempt; its pause of seconds is left out
        return replace(request, part_of=part_of, after=(before,), asked_at_s=0.0)
    after = names.after.get(job_id, ())
    could_at = max([created_at, *(names.ended_at[name] for name in after if name in names.ended_at)])
    at_most = names.at_most.get(array_id or "")
    return replace(
        request,
        part_of=part_of,
        after=after,
        array_id=None if at_most is None else array_id,
        array_at_most=at_most or 0,
        waited_s=None if at_most is not None else max(0.0, (granted_at - could_at).total_seconds()),
    )


@lru_cache(maxsize=10_000)
def _demand(text: str) -> Demand:
    """A recorded demand; nothing is known of how GPUs were connected, so that nothing is required of that."""
    demand: Demand = from_json(Demand, msgspec.json.decode(text))
    required = demand.topology is TopologyMode.REQUIRED
    return replace(demand, topology=TopologyMode.PREFERRED) if required else demand


def without_given_times(requests: Iterable[RecordedRequest], limits: Iterable[LimitRecord]) -> list[RecordedRequest]:
    """The requests without the times that the daemon gave those that declared none: the longest that the user, the
    group or the token may have. In the replay they get what the limits say there. An interactive request has no time
    of its own either: the longest that the policy allows is recorded with it."""
    index = LimitIndex()
    for record in limits:
        index.put(record)
    found = []
    for one in requests:
        keys = index.keys_of(Holder(user=one.user, token_id=one.token_id))
        longest_s = min((index.limits_set(key).max_lease_s or _NO_TIME_S for key in keys), default=_NO_TIME_S)
        is_given = one.demand.priority is Priority.INTERACTIVE or one.demand.time_s == longest_s
        found.append(replace(one, demand=replace(one.demand, time_s=None)) if is_given else one)
    return found


def recorded_waits(requests: Iterable[RecordedRequest]) -> list[float]:
    """How long the counted requests waited as recorded, where that is known, the shortest first."""
    return sorted(one.waited_s for one in requests if one.counted and one.waited_s is not None)
