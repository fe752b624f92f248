"""Retention: which ended leases, jobs and events are pruned.

A record is pruned when it is older than `RetentionLimits.age_s`, or when too many newer ones exist. Records that belong
together are deleted in one transaction: a job with the leases of all its attempts and their metrics. Events are deleted
from the oldest end only, so that the log has no gaps; the row of `pruned` has the last deleted `seq`, and is written
with the deletion.

Of the history of GPUs, each resolution is kept for its own time, the coarsest for `age_s`.

Never pruned
------------
- Live records: queued and active leases, jobs that are not final.
- Records that live ones refer to: the leases of such a job; jobs of an array with unfinished jobs; a lease that drains,
  or holds the last token of a GPU, since a late renewal might revive it.
- The newest `ALWAYS_KEPT` ended leases, final jobs and events, however old: the ledger has them in memory.

None of that can be undone: an ended lease whose GPUs were granted again never comes back, nor does a finished job or
array. So a batch is selected without a transaction, and deleted afterwards in one that only deletes.

Cost: selecting scans an index of everything that is kept (1,000,000 events: some 30 ms), once a pass; deleting a batch
costs about 500 rows. SQLite reuses the pages of deleted rows, so its file does not grow beyond its largest content; see
docs/databases.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Engine, Select, Table, and_, delete, exists, func, or_, select, update

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.core.ledger import MAX_ENDED_IN_MEMORY
from gpulease_server.store import tables
from gpulease_server.store.gpu_metrics_table import RESOLUTIONS
from gpulease_server.store.ledger_store import LIVE_JOBS, LIVE_LEASES, Store

MAX_BATCH = 500
"""Leases, jobs or events in one transaction, at most."""
ALWAYS_KEPT = MAX_ENDED_IN_MEMORY
"""The newest records of each kind that are kept, however old."""
LAST = 2**63 - 1

EndPosition = tuple[datetime, int]
"""End and number of a lease or job: the order in which they are pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionLimits:
    """How much is kept, and for how long."""

    age_s: float = 90 * 24 * 3600.0
    """Leases and jobs for this long after their end, events for this long."""
    ended: int = 200_000
    """Ended leases, and final jobs, at most; at least `ALWAYS_KEPT`."""
    events: int = 1_000_000
    """Events, at most; at least `ALWAYS_KEPT`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneBounds:
    """What is to be pruned, as of one moment."""

    lease: EndPosition | None
    """This lease and all that ended before it; None for no lease."""
    job: EndPosition | None
    """The same for jobs."""
    event: int
    """Events up to this `seq` are too many."""
    newest: int
    """Events over this `seq` are kept, however old."""
    old: datetime | None
    """Records before this time are too old; None while ages do not count."""
    blocks: tuple[tuple[int, float, float], ...] = ()
    """Of the history of GPUs: length of a bucket, and blocks that begin before this and after that time are pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneBatch:
    """What one transaction deletes."""

    kind: str
    """`job`, `lease`, `event`, `metrics` or `block`."""
    ids: tuple[str, ...] = ()
    seq: int = 0
    """Events up to this one."""
    ended_at: datetime | None = None
    """The latest end of these jobs or leases."""
    rows: int = 0
    """Number of leases, jobs, events or orphans."""


def prune_bounds(engine: Engine, keep: RetentionLimits, old: datetime | None) -> PruneBounds:
    """What is to be pruned now. Blocks. Raises SQLAlchemyError."""
    lease, job, seq = tables.lease, tables.job, tables.event.c.seq
    with engine.connect() as connection:

        def nth(table: Table, count: int) -> EndPosition | None:
            """The newest ended record that has at least `count` newer ones."""
            ended_at, number = table.c.ended_at, table.c.number
            query = select(ended_at, number).where(ended_at.is_not(None))
            found = connection.execute(query.order_by(ended_at.desc(), number.desc()).offset(count).limit(1)).first()
            return None if found is None else (found.ended_at, found.number)

        def newest(count: int) -> int:
            return connection.execute(select(seq).order_by(seq.desc()).offset(count).limit(1)).scalar() or 0

        leases, jobs = nth(lease, keep.ended), nth(job, keep.ended)
        aged = None if old is None else (old, 0)
        before_leases = None if leases is None else (leases[0], 0)  # leases of jobs are pruned with their jobs
        return PruneBounds(
            lease=_earlier(nth(lease, ALWAYS_KEPT), _later(leases, aged)),
            job=_earlier(nth(job, ALWAYS_KEPT), _later(jobs, before_leases, aged)),
            event=newest(keep.events),
            newest=newest(ALWAYS_KEPT),
            old=old,
            blocks=() if old is None else tuple(_block_bounds(old.timestamp(), keep.age_s)),
        )


def _block_bounds(old_s: float, age_s: float) -> Iterator[tuple[int, float, float]]:
    """For each resolution; blocks of the future are of a time at which the wall clock was wrong."""
    now_s = old_s + age_s
    for one in RESOLUTIONS:
        yield one.width_s, now_s - (one.keep_s or age_s) - one.block_s, now_s + 24 * 3600.0


def _later(*places: EndPosition | None) -> EndPosition | None:
    return max((place for place in places if place is not None), default=None)


def _earlier(*places: EndPosition | None) -> EndPosition | None:
    return None if None in places else min(place for place in places if place is not None)


class PruneScan:
    """Selects batches to prune, from the oldest on. Only reads, and blocks; `delete_batch` deletes.

    Args:
        engine: The database.
        bounds: What is to be pruned.
        orphans: Whether to search for metrics without a lease, which scans all metrics.
    """

    def __init__(self, engine: Engine, bounds: PruneBounds, *, orphans: bool = False) -> None:
        self._engine = engine
        self._bounds = bounds
        self._after: EndPosition | None = None
        self._kinds: list[Callable[[], PruneBatch | None]] = [
            self._jobs,
            self._leases,
            self._events,
            self._blocks,
        ]
        if orphans:
            self._kinds.append(self._orphans)

    def next(self) -> PruneBatch | None:
        """The next batch; None when nothing is left. Raises SQLAlchemyError."""
        while self._kinds:
            batch = self._kinds[0]()
            if batch is not None:
                return batch
            self._kinds.pop(0)
            self._after = None
        return None

    def _jobs(self) -> PruneBatch | None:
        job, lease = tables.job, tables.lease
        unfinished = select(job.c.array_id).where(job.c.state.in_(LIVE_JOBS), job.c.array_id.is_not(None))
        needed = exists().where(lease.c.job_id == job.c.id, ~_dispensable(lease))
        return self._ended(
            job,
            self._bounds.job,
            job.c.state.not_in(LIVE_JOBS),
            or_(job.c.array_id.is_(None), job.c.array_id.not_in(unfinished)),
            ~needed,
        )

    def _leases(self) -> PruneBatch | None:
        """Leases without a job; those of a job are deleted with it."""
        lease, job = tables.lease, tables.job
        own = or_(lease.c.job_id.is_(None), ~exists().where(job.c.id == lease.c.job_id))
        return self._ended(lease, self._bounds.lease, _dispensable(lease), own)

    def _ended(self, table: Table, last: EndPosition | None, *where: ColumnElement[bool]) -> PruneBatch | None:
        if last is None:
            return None
        ended_at, number = table.c.ended_at, table.c.number
        query: Select[Any] = select(table.c.id, ended_at, number).where(
            ended_at <= last[0], or_(ended_at < last[0], number <= last[1]), *where
        )
        if self._after is not None:
            at, of = self._after
            query = query.where(and_(ended_at >= at, or_(ended_at > at, number > of)))
        with self._engine.connect() as connection:
            found = connection.execute(query.order_by(ended_at, number).limit(MAX_BATCH)).all()
        if not found:
            return None
        self._after = (found[-1].ended_at, found[-1].number)
        return PruneBatch(kind=table.name, ids=tuple(row.id for row in found), ended_at=self._after[0], rows=len(found))

    def _events(self) -> PruneBatch | None:
        """The oldest events, up to the first that is kept."""
        event, bounds = tables.event, self._bounds
        with self._engine.connect() as connection:
            oldest = connection.execute(select(event.c.seq, event.c.at).order_by(event.c.seq).limit(MAX_BATCH)).all()
        last, rows = 0, 0
        for row in oldest:
            too_old = bounds.old is not None and row.at < bounds.old
            if row.seq > bounds.newest or not (too_old or row.seq <= bounds.event):
                break
            last, rows = row.seq, rows + 1
        return PruneBatch(kind="event", seq=last, rows=rows) if rows else None

    def _blocks(self) -> PruneBatch | None:
        """Blocks of the history of GPUs."""
        kept = tables.gpu_metrics
        with self._engine.connect() as connection:
            for width_s, before_s, after_s in self._bounds.blocks:
                wrong = or_(kept.c.start_s < before_s, kept.c.start_s > after_s)
                query = select(kept.c.id).where(kept.c.width_s == width_s, wrong).limit(MAX_BATCH)
                found = tuple(connection.scalars(query))
                if found:
                    return PruneBatch(kind="block", ids=found, rows=len(found))
        return None

    def _orphans(self) -> PruneBatch | None:
        """Metrics that were written after their lease was pruned."""
        kept, lease = tables.gpu_metrics, tables.lease
        query = (
            select(kept.c.id)
            .where(kept.c.gpu_uuid.is_(None), ~exists().where(lease.c.id == kept.c.id))
            .limit(MAX_BATCH)
        )
        with self._engine.connect() as connection:
            found = tuple(connection.scalars(query))
        return PruneBatch(kind="metrics", ids=found, rows=len(found)) if found else None


def _has_ended(lease: Table) -> ColumnElement[bool]:
    """Not written as `state = 'ended'`: SQLite would use that index, and scan every ended lease."""
    return lease.c.state.not_in(LIVE_LEASES)


def _dispensable(lease: Table) -> ColumnElement[bool]:
    """True for an ended lease that cannot be revived."""
    gpu = tables.gpu
    draining = select(gpu.c.lease_id).where(gpu.c.lease_id.is_not(None))
    return and_(
        _has_ended(lease),
        lease.c.id.not_in(draining),
        func.coalesce(lease.c.token, -1).not_in(select(gpu.c.token)),
    )


def delete_batch(store: Store, batch: PruneBatch) -> None:
    """Delete a batch, all or nothing. Blocks. Raises `StoreFailed` or `Superseded`."""
    lease, job, kept = tables.lease, tables.job, tables.gpu_metrics
    ended = _has_ended(lease)
    with store.writing() as connection:
        match batch.kind:
            case "job":
                theirs = select(lease.c.id).where(lease.c.job_id.in_(batch.ids))
                connection.execute(delete(kept).where(kept.c.id.in_(theirs)))
                connection.execute(delete(lease).where(lease.c.job_id.in_(batch.ids), ended))
                connection.execute(delete(job).where(job.c.id.in_(batch.ids)))
            case "lease":
                connection.execute(delete(kept).where(kept.c.id.in_(batch.ids)))
                connection.execute(delete(lease).where(lease.c.id.in_(batch.ids), ended))
            case "metrics" | "block":
                connection.execute(delete(kept).where(kept.c.id.in_(batch.ids)))
            case _:
                connection.execute(delete(tables.event).where(tables.event.c.seq <= batch.seq))
                connection.execute(update(tables.pruned).values(seq=batch.seq))
        if batch.ended_at is not None:
            until = tables.pruned.c.leases_ended_at
            is_later = or_(until.is_(None), until < batch.ended_at)
            connection.execute(update(tables.pruned).where(is_later).values(leases_ended_at=batch.ended_at))
