"""Loads the ledger, writes turns, and reads records that are no longer in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    func,
    or_,
    select,
    update,
)

from gpulease_protocol.model import Event, JobState, LeaseState
from gpulease_server.core.footprint import records_bytes, shown_characters
from gpulease_server.core.gang_records import GangTimes
from gpulease_server.core.ledger import MAX_ENDED_BYTES, MAX_ENDED_IN_MEMORY, Ledger
from gpulease_server.core.order_records import GroupUsage, Overtakes, PlacesKept, RanAhead, UsageSteps
from gpulease_server.core.reclaim_records import ReclaimNotice
from gpulease_server.core.records import (
    BypassCounts,
    Change,
    Deadline,
    DependencyMet,
    JobRecord,
    LeaseRecord,
    NodeObservation,
    NotBefore,
)
from gpulease_server.store import rows, tables
from gpulease_server.store.database import connect
from gpulease_server.store.dialects import execute, pipeline, snapshot
from gpulease_server.store.event_pages import EventFilter, find_events
from gpulease_server.store.fencing import StoreFailed, Superseded, WriterFence
from gpulease_server.store.lease_conditions import has_gpu, on_node
from gpulease_server.store.statements import Statements, statement_text

__all__ = ["Store", "StoreFailed", "Superseded", "is_stored"]

Record = TypeVar("Record", LeaseRecord, JobRecord)

MAX_PAGE_CHARACTERS = 2**17
"""Of the texts of a page's records: a page of longer ones ends earlier. It has one record at least."""
COUNTERS = ("number", "token", "seq")
_NEXT_SEQ = (
    update(tables.counter)
    .where(
        tables.counter.c.name == bindparam("counter"),
        tables.counter.c.value == bindparam("before", type_=BigInteger()),
    )
    .values(value=bindparam("after", type_=BigInteger()))
)
"""Counts the events on, if the database has the last turn: see `Store.write`."""
RENEWAL = (tables.lease.c.renewed_at,)
END = (tables.lease.c.state, tables.lease.c.end_reason, tables.lease.c.ended_at)
"""What changes of an active lease, in nearly all changes."""
LIVE_LEASES = tuple(state.value for state in LeaseState if state is not LeaseState.ENDED)
LIVE_JOBS = tuple(state.value for state in JobState if not state.final)


READ_WHOLE: tuple[tuple[Table, Callable[[Row[Any]], Change]], ...] = (
    (tables.usage_limit, rows.limit_record),
    (tables.gpu_time, rows.gpu_time_record),
    (tables.node, rows.node_record),
    (tables.gpu, rows.gpu_record),
    (tables.token_budget, rows.budget_record),
    (tables.user_usage, rows.usage_record),
    (tables.reservation, rows.reservation),
    (tables.preemption, rows.preemption),
)
"""Tables of which all rows are in the ledger, in the order in which they are read; leases come after them."""
IN_MEMORY = {
    *(NodeObservation, Deadline, NotBefore, GangTimes, DependencyMet, BypassCounts),
    *(Overtakes, PlacesKept, RanAhead, GroupUsage, UsageSteps, ReclaimNotice),
}
"""Changes that are not stored."""


class Store:
    """The ledger's database. Its methods block; the runtime calls them outside the event loop.

    Reading is always possible. A writer takes over first (`fence.take_over`), or else at its first write.
    `on_superseded` is called when another writer has taken over.
    """

    def __init__(self, url: str, on_superseded: Callable[[], None] = lambda: None) -> None:
        self.engine = connect(url)
        self.statements = Statements(self.engine)
        self.fence = WriterFence(self.engine, on_superseded)
        self._counters: dict[str, int] = {}
        """The next number, token and seq in the database, as this store last read or committed them."""
        self._next_seq = statement_text(self.engine, _NEXT_SEQ)
        self._active: dict[str, LeaseRecord] = {}
        """The active leases that it has committed since then: of one that is only renewed or ended, only that is
        written."""

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def load(self) -> Ledger:
        """The ledger as last committed, without what exists only in memory (see the package docstring)."""
        self.fence.resolve_in_doubt()
        self._counters = {}
        self._active = {}
        ledger = Ledger()
        with snapshot(self.engine) as connection:
            for table, read in READ_WHOLE:
                for row in connection.execute(select(table)):
                    ledger.apply(read(row))
            for lease in self._live_and_newest(connection, tables.lease, LIVE_LEASES, rows.lease_record):
                ledger.apply(lease)
            for job in self._live_and_newest(connection, tables.job, LIVE_JOBS, rows.job_record):
                ledger.apply(job)
            for row in connection.execute(select(tables.idempotency_key).order_by(tables.idempotency_key.c.at)):
                ledger.apply(rows.key_record(row))
            for name, value in connection.execute(select(tables.counter.c.name, tables.counter.c.value)):
                self._counters[name] = value
                setattr(ledger, f"next_{name}", max(value, getattr(ledger, f"next_{name}")))
            last = connection.execute(select(func.max(tables.event.c.seq))).scalar() or 0
            ledger.next_seq = max(ledger.next_seq, last + 1)
        return ledger

    def _live_and_newest(self, connection: Connection, table: Table, live: Collection[str], read: Any) -> list[Any]:
        """All live records, the newest ended ones, and every lease that still drains; oldest first.

        The newest are found by key first: sorting whole rows takes four times as long. They are read until the ledger
        would not keep more, because 1,000 that are as large as is allowed take 1 GiB.
        """
        state, number = table.c.state, table.c.number
        going_on = connection.execute(select(table).where(state.in_(live)).order_by(number)).all()
        latest_first = (table.c.ended_at.desc(), number.desc())
        newest = select(number).where(state.not_in(live)).order_by(*latest_first).limit(MAX_ENDED_IN_MEMORY)
        newest_first = select(table).where(number.in_(newest)).order_by(*latest_first)
        past: list[Any] = []
        kept, room_bytes = {row.id for row in going_on}, MAX_ENDED_BYTES
        with connection.execute(newest_first.execution_options(yield_per=50)) as found:
            for row in found:
                record = read(row)
                room_bytes -= records_bytes([record])
                if room_bytes < 0:
                    break
                past.append(record)
                kept.add(row.id)
        late: list[Any] = []
        if table is tables.lease:
            draining = select(tables.gpu.c.lease_id).where(tables.gpu.c.draining)
            late = list(connection.execute(select(table).where(table.c.id.in_(draining))))
        return [*(read(row) for row in late if row.id not in kept), *past[::-1], *map(read, going_on)]

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that commits only while this store is the writer. Raises as `WriterFence.writing` does."""
        with self.fence.writing() as connection:
            yield connection

    def has_event(self, seq: int) -> bool:
        """True if the event with this number is there. Blocks."""
        with snapshot(self.engine) as connection:
            return connection.scalar(select(tables.event.c.seq).where(tables.event.c.seq == seq)) is not None

    def write(self, changes: Iterable[Change], ledger: Ledger) -> None:
        """Commit one turn, all or nothing, with fsync. Raises `StoreFailed`, `Superseded`, or DataError.

        The last turn must be in the database. It is not if an older copy has taken the place of its content, as after a
        failover of PostgreSQL to a replica that lagged behind: then `StoreFailed`, so that the ledger is loaded again
        and compared.
        """
        events, latest = _events_and_latest(changes)
        leases = {key: last for (_, key), last in latest.items() if isinstance(last, LeaseRecord)}
        renewed, ended = self._only_renewed(leases), self._only_ended(leases)
        removed: dict[Table, list[str]] = {}
        written: dict[Table, list[dict[str, Any]]] = {}
        for (table, key), last in latest.items():
            if not isinstance(last, rows.Record):
                removed.setdefault(table, []).append(key)
            elif table is not tables.lease or not (key in renewed or key in ended):
                written.setdefault(table, []).append(rows.to_row(last)[1])
        counters = {name: getattr(ledger, f"next_{name}") for name in COUNTERS}
        new = dict(counters.items() - self._counters.items())
        counted = "seq" in new and "seq" in self._counters
        followed = [{"counter": "seq", "before": self._counters["seq"], "after": new.pop("seq")}] if counted else []
        written[tables.counter] = [{"name": name, "value": value} for name, value in new.items()]
        with self.writing() as connection:
            with pipeline(connection):
                counting = execute(connection, self._next_seq, followed) if followed else None
                for table, keys in removed.items():
                    self.statements.delete(connection, table, keys)
                for table, changed in written.items():
                    self.statements.upsert(connection, table, changed)
                changed_leases = [
                    self.statements.update(connection, columns, values)
                    for columns, values in ((RENEWAL, renewed), (END, ended))
                ]
                self.statements.insert(connection, tables.event, events)
            if counting is not None and counting.rowcount != 1:
                raise StoreFailed("The database lacks what was written to it before.", remedy="Ask again.")
            if sum(one.rowcount for one in changed_leases if one is not None) != len(renewed) + len(ended):
                raise StoreFailed("A lease that was renewed or has ended is not in the database.", remedy="Ask again.")
        self._counters = counters
        self._active |= leases
        for key in [key for key, record in leases.items() if record.lease.state is not LeaseState.ACTIVE]:
            del self._active[key]

    def _only_renewed(self, leases: Mapping[str, LeaseRecord]) -> dict[str, Sequence[Any]]:
        """By id, the new values of the columns `RENEWAL` of those leases of which no other is to be written."""
        active = self._active
        return {
            key: (record.renewed_at,)
            for key, record in leases.items()
            if (before := active.get(key)) is not None and record.is_renewal_of(before)
        }

    def _only_ended(self, leases: Mapping[str, LeaseRecord]) -> dict[str, Sequence[Any]]:
        """The same of `END`."""
        active = self._active
        return {
            key: (record.lease.state, record.lease.end_reason, record.lease.ended_at)
            for key, record in leases.items()
            if (before := active.get(key)) is not None and record.is_end_of(before)
        }

    def leases(
        self,
        states: Collection[str],
        after: int | None,
        limit: int,
        *,
        id_prefix: str | None = None,
        user: str | None = None,
        label: str | None = None,
        node: str | None = None,
        job: str | None = None,
        gpu: str | None = None,
        from_at: datetime | None = None,
        to_at: datetime | None = None,
        known: Mapping[str, LeaseRecord] | None = None,
    ) -> tuple[list[LeaseRecord], int | None]:
        """Leases in these states (all when empty), newest first, and the number to continue after, None at the end.

        Only leases that arrived before number `after`; with an id that begins with `id_prefix`; of one user, label or
        job; with GPUs of one node, or one GPU; that held GPUs after `from_at` or before `to_at` (any where None). Those
        in `known` are taken from there instead of being read."""
        holder = tables.lease.c.holder
        given = {holder["user"]: user, holder["label"]: label}
        only = _given({part.as_string(): value for part, value in given.items()} | {tables.lease.c.job_id: job})
        if node is not None:
            only.append(on_node(node))
        if gpu is not None:
            only.append(has_gpu(gpu))
        if id_prefix is not None:
            only.append(_begins(tables.lease.c.id, id_prefix))
        if from_at is not None:
            only += [tables.lease.c.granted_at.is_not(None), _is_after(tables.lease.c.ended_at, from_at)]
        if to_at is not None:
            only.append(tables.lease.c.granted_at < to_at)
        return self._page(tables.lease, rows.lease_record, known or {}, states, after, limit, *only)

    def jobs(
        self,
        states: Collection[str],
        after: int | None,
        limit: int,
        *,
        array: str | None = None,
        user: str | None = None,
        id_prefix: str | None = None,
        name: str | None = None,
        known: Mapping[str, JobRecord] | None = None,
    ) -> tuple[list[JobRecord], int | None]:
        """As `leases`, for the jobs of one array, one user and one name (any when None). `id_prefix` may be that of an
        array. A job that lives may have an environment of 1 MiB in the database, so it should be known."""
        job = tables.job.c
        only = _given({job.array_id: array, job.user_name: user, job.name: name})
        if id_prefix is not None:
            only.append(_begins(job.array_id if id_prefix.startswith("array-") else job.id, id_prefix))
        return self._page(tables.job, rows.job_record, known or {}, states, after, limit, *only)

    def lease(self, lease_id: str) -> LeaseRecord | None:
        """One lease, however long ago it ended."""
        row = self._one(select(tables.lease).where(tables.lease.c.id == lease_id))
        return None if row is None else rows.lease_record(row)

    def job(self, job_id: str) -> JobRecord | None:
        """One job, however long ago it ended."""
        row = self._one(select(tables.job).where(tables.job.c.id == job_id))
        return None if row is None else rows.job_record(row)

    def history(self, after: int, limit: int) -> tuple[list[Event], int]:
        """Events with a `seq` over `after`, oldest first, and the `seq` up to which events are pruned."""
        found = find_events(self.engine, EventFilter(), limit, after=after)
        return found.events, found.pruned_seq

    def _page(
        self,
        table: Table,
        read: Callable[[Row[Any]], Record],
        known: Mapping[str, Record],
        states: Collection[str],
        after: int | None,
        limit: int,
        *where: ColumnElement[bool],
    ) -> tuple[list[Record], int | None]:
        newest_first = table.c.number.desc()
        query = select(table.c.id, table.c.state).where(*where).order_by(newest_first).limit(limit)
        if states:
            query = query.where(table.c.state.in_(states))
        if after is not None:
            query = query.where(table.c.number < after)
        page: list[Record] = []
        with snapshot(self.engine) as connection:
            found = {key: _known_in(known, key, state) for key, state in connection.execute(query)}
            unknown = [key for key, record in found.items() if record is None]
            rest = select(table).where(table.c.id.in_(unknown)).order_by(newest_first)
            with connection.execute(rest.execution_options(yield_per=20)) as others:
                left = MAX_PAGE_CHARACTERS
                for record in (record or read(next(others)) for record in found.values()):
                    page.append(record)
                    left -= shown_characters(record)
                    if left < 0:
                        break
        return page, page[-1].number if page and (left < 0 or len(page) == limit) else None

    def _one(self, query: Select[Any]) -> Row[Any] | None:
        with self.engine.connect() as connection:
            return connection.execute(query).one_or_none()


def _events_and_latest(changes: Iterable[Change]) -> tuple[list[dict[str, Any]], dict[tuple[Table, str], rows.Stored]]:
    """The rows of the events among these changes, and by table and key the last of the others that is stored."""
    events: list[dict[str, Any]] = []
    latest: dict[tuple[Table, str], rows.Stored] = {}
    for change in changes:
        if isinstance(change, Event):
            events.append(rows.to_row(change)[1])
        elif isinstance(change, rows.Stored):
            latest[rows.place(change)] = change
    return events, latest


def is_stored(change: Change) -> bool:
    """False for changes that exist only in memory: a turn with only those needs no commit."""
    return change.__class__ not in IN_MEMORY


def _known_in(known: Mapping[str, Record], key: str, state: str) -> Record | None:
    """A record as readers know it, unless its state is already committed that they are to see next."""
    record = known.get(key)
    if record is None:
        return None
    noun = record.lease if isinstance(record, LeaseRecord) else record.job
    return record if noun.state == state else None


def _begins(column: ColumnElement[str], prefix: str) -> ColumnElement[bool]:
    """That an id begins with `prefix`, which ends in a hexadecimal digit: a range of the column's index.

    The range ends before another letter or digit, because locales of PostgreSQL sort punctuation in many ways.
    """
    last = "0123456789abcdefg".index(prefix[-1])
    return and_(column >= prefix, column < prefix[:-1] + "0123456789abcdefg"[last + 1])


def _is_after(column: ColumnElement[Any], moment: datetime) -> ColumnElement[bool]:
    """That a time is after this one, or has not come yet."""
    return or_(column.is_(None), column > moment)


def _given(values: Mapping[ColumnElement[str], str | None]) -> list[ColumnElement[bool]]:
    """The conditions of a query: each of these columns equals its value, unless that is None."""
    return [column == value for column, value in values.items() if value is not None]
