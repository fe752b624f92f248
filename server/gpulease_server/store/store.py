"""Load the ledger, write a turn, and read what is no longer in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, delete, func, insert, select

from gpulease.model import Event, JobState, LeaseState

from ..core.ledger import (
    ENDED_KEPT,
    Change,
    Deadline,
    GpuGone,
    GpuRecord,
    JobRecord,
    KeyForgotten,
    KeyRecord,
    LeaseRecord,
    Ledger,
    NodeGone,
    NodeRecord,
    NotBefore,
    Passed,
    Sighting,
)
from . import rows, tables
from .database import connect
from .dialects import snapshot, upsert
from .term import StoreFailed, Superseded, Term

__all__ = ["Store", "StoreFailed", "Superseded", "is_stored"]

COUNTERS = ("number", "token", "seq")
LIVE_LEASES = tuple(state.value for state in LeaseState if state is not LeaseState.ENDED)
LIVE_JOBS = tuple(state.value for state in JobState if not state.final)


class Store:
    """The ledger's database. Its methods block; the runtime calls them outside the event loop.

    Who reads only may do so at any time. Who writes takes over first; a store that did not, at its first write.
    `on_superseded` is called when another writer has taken over.
    """

    def __init__(self, url: str, on_superseded: Callable[[], None] = lambda: None) -> None:
        self.engine = connect(url)
        self.term = Term(self.engine, on_superseded)

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def load(self) -> Ledger:
        """The ledger as it was last committed, without what only lives in memory (see the package)."""
        self.term.settle()
        ledger = Ledger()
        with snapshot(self.engine) as connection:
            for row in connection.execute(select(tables.node)):
                ledger.apply(rows.node_record(row))
            for row in connection.execute(select(tables.gpu)):
                ledger.apply(rows.gpu_record(row))
            for lease in self._recent(connection, tables.lease, LIVE_LEASES, rows.lease_record):
                ledger.apply(lease)
            for job in self._recent(connection, tables.job, LIVE_JOBS, rows.job_record):
                ledger.apply(job)
            for row in connection.execute(select(tables.idempotency_key).order_by(tables.idempotency_key.c.at)):
                ledger.apply(rows.key_record(row))
            for name, value in connection.execute(select(tables.counter.c.name, tables.counter.c.value)):
                setattr(ledger, f"next_{name}", max(value, getattr(ledger, f"next_{name}")))
            last = connection.execute(select(func.max(tables.event.c.seq))).scalar() or 0
            ledger.next_seq = max(ledger.next_seq, last + 1)
        return ledger

    def _recent(self, connection: Connection, table: Table, live: Collection[str], read: Any) -> list[Any]:
        """Everything live and the newest of what has ended, oldest first; and any lease that still drains.

        The newest are found by their keys first: sorting whole rows takes four times as long.
        """
        state, number = table.c.state, table.c.number
        going_on = connection.execute(select(table).where(state.in_(live)).order_by(number)).all()
        latest_first = (table.c.ended_at.desc(), number.desc())
        newest = select(number).where(state.not_in(live)).order_by(*latest_first).limit(ENDED_KEPT)
        past = connection.execute(select(table).where(number.in_(newest)).order_by(*latest_first)).all()[::-1]
        if table is tables.lease:
            draining = select(tables.gpu.c.lease_id).where(tables.gpu.c.draining)
            kept = {row.id for row in [*past, *going_on]}
            late = connection.execute(select(table).where(table.c.id.in_(draining))).all()
            past = [*(row for row in late if row.id not in kept), *past]
        return [read(row) for row in [*past, *going_on]]

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that commits only while this store is the writer; see `Term.writing` for what it raises."""
        with self.term.writing() as connection:
            yield connection

    def write(self, changes: Iterable[Change], ledger: Ledger) -> None:
        """Commit one turn, all or nothing, with fsync. Raises `StoreFailed`, `Superseded`, or DataError."""
        latest: dict[tuple[Table, str], dict[str, Any] | None] = {}
        events: list[dict[str, Any]] = []
        for change in changes:
            match change:
                case Event():
                    events.append(rows.to_row(change)[1])
                case GpuGone(key):
                    latest[tables.gpu, key] = None
                case NodeGone(key):
                    latest[tables.node, key] = None
                case KeyForgotten(key):
                    latest[tables.idempotency_key, key] = None
                case LeaseRecord() | JobRecord() | GpuRecord() | NodeRecord() | KeyRecord():
                    table, row = rows.to_row(change)
                    latest[table, row[_key(table)]] = row
        for name in COUNTERS:
            latest[tables.counter, name] = {"name": name, "value": getattr(ledger, f"next_{name}")}
        with self.writing() as connection:
            _write(connection, latest)
            if events:
                connection.execute(insert(tables.event), events)

    def leases(self, states: Collection[str], after: int | None, limit: int) -> list[LeaseRecord]:
        """Leases in these states (all when empty), newest first, those that arrived before number `after`."""
        return [rows.lease_record(row) for row in self._page(tables.lease, states, after, limit)]

    def jobs(
        self,
        states: Collection[str],
        after: int | None,
        limit: int,
        *,
        array: str | None = None,
        user: str | None = None,
    ) -> list[JobRecord]:
        """Jobs in these states (all when empty), of one array and of one user (any when None), newest first, those that
        arrived before number `after`."""
        given = {tables.job.c.array_id: array, tables.job.c.user_name: user}
        only = [column == value for column, value in given.items() if value is not None]
        return [rows.job_record(row) for row in self._page(tables.job, states, after, limit, *only)]

    def lease(self, lease_id: str) -> LeaseRecord | None:
        """One lease, however long ago it ended."""
        row = self._one(select(tables.lease).where(tables.lease.c.id == lease_id))
        return None if row is None else rows.lease_record(row)

    def job(self, job_id: str) -> JobRecord | None:
        """One job, however long ago it ended."""
        row = self._one(select(tables.job).where(tables.job.c.id == job_id))
        return None if row is None else rows.job_record(row)

    def events(self, after: int, limit: int) -> list[Event]:
        """Events with a `seq` over `after`, oldest first."""
        return self.history(after, limit)[0]

    def history(self, after: int, limit: int, without: str | None = None) -> tuple[list[Event], int]:
        """Events with a `seq` over `after`, oldest first, and the `seq` up to which events are pruned. `without`: how
        the kinds begin that are left out.

        Both of one moment: else what is pruned between the two readings would be missed in silence.
        """
        query = select(tables.event).where(tables.event.c.seq > after).order_by(tables.event.c.seq).limit(limit)
        if without is not None:
            query = query.where(tables.event.c.kind.not_like(f"{without}%"))
        with snapshot(self.engine) as connection:
            found = [rows.event_noun(row) for row in connection.execute(query)]
            return found, connection.execute(select(tables.pruned.c.seq)).scalar() or 0

    def last_seq(self) -> int:
        """`seq` of the newest event; 0 while there is none."""
        with self.engine.connect() as connection:
            return connection.execute(select(func.max(tables.event.c.seq))).scalar() or 0

    def _page(
        self, table: Table, states: Collection[str], after: int | None, limit: int, *where: ColumnElement[bool]
    ) -> list[Row[Any]]:
        query = select(table).where(*where).order_by(table.c.number.desc()).limit(limit)
        if states:
            query = query.where(table.c.state.in_(states))
        if after is not None:
            query = query.where(table.c.number < after)
        with self.engine.connect() as connection:
            return list(connection.execute(query))

    def _one(self, query: Select[Any]) -> Row[Any] | None:
        with self.engine.connect() as connection:
            return connection.execute(query).one_or_none()


def is_stored(change: Change) -> bool:
    """False for what only lives in memory: a turn of only such changes needs no commit."""
    return not isinstance(change, (Sighting, Deadline, NotBefore, Passed))


def _key(table: Table) -> str:
    return str(next(iter(table.primary_key)).name)


def _write(connection: Connection, latest: dict[tuple[Table, str], dict[str, Any] | None]) -> None:
    """Each row as it is at the end of the turn, or gone."""
    kept: dict[Table, list[dict[str, Any]]] = {}
    for (table, key), row in latest.items():
        if row is None:
            connection.execute(delete(table).where(table.c[_key(table)] == key))
        else:
            kept.setdefault(table, []).append(row)
    for table, table_rows in kept.items():
        connection.execute(upsert(connection, table, _key(table)), table_rows)
