"""A past: ended leases, jobs with their leases and metrics, and events, so many and so old as a test says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, func, insert, select

from gpulease_protocol.model import Event, Job, JobSpec, JobState, Lease
from gpulease_server.core.records import JobRecord, LeaseRecord
from gpulease_server.store import rows, tables
from gpulease_server.store.ledger_store import Store
from gpulease_server.store.retention import PruneScan, RetentionLimits, delete_batch, prune_bounds
from tests.store.large_ledger import device, lease

NOW = datetime(2027, 1, 1, tzinfo=UTC)
FIRST = 1_000_000
"""Numbers, tokens and seqs of the past begin here, so that they are not those of a world beside it."""
CHUNK = 1000
MODEL = lease(1, (device(0),))


def ended_lease(number: int, at: datetime, job_id: str | None = None) -> LeaseRecord:
    """A lease that ended at that moment, a minute after its grant."""
    noun: Lease = replace(
        MODEL.lease,
        id=f"lease-{number:016x}",
        state="ended",
        end_reason="released",
        fencing_token=number,
        job_id=job_id,
        granted_at=at - timedelta(minutes=1),
        ended_at=at,
    )
    return replace(MODEL, lease=noun, number=number)


def job(number: int, at: datetime | None, array_id: str | None = None, state: JobState | None = None) -> JobRecord:
    """A job that succeeded at that moment, or runs. Its lease has the number after its own."""
    spec = JobSpec(command=("train.py",), gpus=1)
    noun = Job(
        id=f"job-{number:016x}",
        name="",
        state=state or (JobState.SUCCEEDED if at else JobState.RUNNING),
        lease_id=f"lease-{number + 1:016x}",
        launcher=spec.launcher,
        command=spec.command,
        attempts=1,
        array_id=array_id,
        array_index=None if array_id is None else number,
        created_at=NOW,
        ended_at=at,
    )
    return JobRecord(job=noun, spec=spec, number=number)


def event(seq: int, at: datetime) -> Event:
    return Event(seq=seq, at=at, kind="lease.granted", cause="request-1", lease_id="lease-1", gpus=(MODEL.lease.id,))


def put(store: Store, records: Iterable[LeaseRecord | JobRecord | Event]) -> None:
    """Write rows as they are, and what number, token and seq come next; a transaction has a bounded time."""
    for chunk in _chunks(records):
        by_table: dict[Any, list[dict[str, Any]]] = {}
        for record in chunk:
            table, row = rows.to_row(record)
            by_table.setdefault(table, []).append(row)
        for table, found in by_table.items():
            with store.writing() as connection:
                connection.execute(insert(table), found)
    with store.writing() as connection:
        _count_on(connection)


def _chunks(records: Iterable[Any]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for record in records:
        chunk.append(record)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    yield chunk


def _count_on(connection: Connection) -> None:
    counter = tables.counter
    used = {
        "token": (tables.lease.c.token,),
        "number": (tables.lease.c.number, tables.job.c.number),
        "seq": (tables.event.c.seq,),
    }
    for name, columns in used.items():
        highest = max(connection.execute(select(func.max(column))).scalar() or 0 for column in columns)
        connection.execute(counter.delete().where(counter.c.name == name))
        connection.execute(insert(counter).values(name=name, value=highest + 1))


def metrics(store: Store, lease_ids: Iterable[str]) -> None:
    """Metrics of these leases, 200 bytes each."""
    with store.writing() as connection:
        connection.execute(insert(tables.gpu_metrics), [{"id": one, "series": b"s" * 200} for one in lease_ids])


def prune(store: Store, keep: RetentionLimits, now: datetime | None = NOW, *, orphans: bool = False) -> dict[str, int]:
    """Everything that is due, at once; how many of each."""
    old = None if now is None else now - timedelta(seconds=keep.age_s)
    walk, removed = PruneScan(store.engine, prune_bounds(store.engine, keep, old), orphans=orphans), {}
    while batch := walk.next():
        delete_batch(store, batch)
        removed[batch.kind] = removed.get(batch.kind, 0) + batch.rows
    return removed


def count(store: Store) -> dict[str, int]:
    """Rows in each table that grows."""
    with store.engine.connect() as connection:
        grows = (tables.lease, tables.job, tables.gpu_metrics, tables.event)
        return {table.name: connection.execute(select(func.count()).select_from(table)).scalar_one() for table in grows}


def ids(store: Store, table: Any) -> set[str]:
    with store.engine.connect() as connection:
        return set(connection.scalars(select(table.c.id)))
