"""What is kept, and what is pruned: ended leases, jobs with all that is theirs, and the oldest events.

Something goes when it is older than `Keep.age_s`, or when there are more than so many that are newer. What belongs
together goes in one transaction: a job with the leases of all its attempts and their metrics. Events go from the oldest
end alone, so that the log stays a suffix of what happened; the row of `pruned` says up to where they are gone, and is
written with the deletion.

What never goes
---------------
- What is live: queued and active leases, jobs that are not final.
- What something live refers to: the leases of such a job; a job whose array is not over; a lease that drains, or whose
  token is still the last one of a GPU, since a late renewal might revive it.
- The newest `STAYS` ended leases, final jobs and events, however old: the ledger has them in memory.

All of that is final: an ended lease whose GPUs went to others never comes back, nor does a job or an array that is
over. So what is to go is looked for first, without a transaction, and removed afterwards, in one that only deletes.

Cost: to look takes a walk along an index as long as what is kept (1,000,000 events: some 30 ms), once a pass; to remove
a batch takes what some 500 rows take. SQLite uses the pages of what was deleted again, so its file does not grow beyond
the most that was ever kept; see docs/databases.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Engine, Select, Table, and_, delete, exists, func, or_, select, update

from ..core.ledger import ENDED_KEPT
from . import tables
from .store import LIVE_JOBS, LIVE_LEASES, Store

BATCH = 500
"""Leases, jobs or events in one transaction, at most."""
STAYS = ENDED_KEPT
"""Of each that many stay, however old."""
LAST = 2**63 - 1

Place = tuple[datetime, int]
"""The end of a lease or job, and its number: the order in which they go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How much is kept."""

    age_s: float = 90 * 24 * 3600.0
    """Leases and jobs for so long after their end, events for so long."""
    ended: int = 200_000
    """Ended leases, and final jobs, at most; at least `STAYS`."""
    events: int = 1_000_000
    """Events, at most; at least `STAYS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What is to go, as of one moment."""

    lease: Place | None
    """This and all that ended before it; None: nothing."""
    job: Place | None
    """The same for jobs."""
    event: int
    """Events up to this `seq` are too many."""
    newest: int
    """Events over this `seq` stay, however old."""
    old: datetime | None
    """What was before this is too old; None where the time is not known well enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one transaction removes."""

    kind: str
    """`job`, `lease`, `event` or `metrics`."""
    ids: tuple[str, ...] = ()
    seq: int = 0
    """Events up to this one."""
    rows: int = 0
    """How many leases, jobs, events or orphans that is."""


def bounds(engine: Engine, keep: Keep, old: datetime | None) -> Bounds:
    """What is to go now. Blocks. Raises SQLAlchemyError."""
    lease, job, seq = tables.lease, tables.job, tables.event.c.seq
    with engine.connect() as connection:

        def nth(table: Table, count: int) -> Place | None:
            """The newest that has so many newer ones beside it."""
            ended_at, number = table.c.ended_at, table.c.number
            query = select(ended_at, number).where(ended_at.is_not(None))
            found = connection.execute(query.order_by(ended_at.desc(), number.desc()).offset(count).limit(1)).first()
            return None if found is None else (found.ended_at, found.number)

        def newest(count: int) -> int:
            return connection.execute(select(seq).order_by(seq.desc()).offset(count).limit(1)).scalar() or 0

        leases, jobs = nth(lease, keep.ended), nth(job, keep.ended)
        aged = None if old is None else (old, 0)
        before_leases = None if leases is None else (leases[0], 0)  # too many leases of jobs: their jobs have to go
        return Bounds(
            lease=_earlier(nth(lease, STAYS), _later(leases, aged)),
            job=_earlier(nth(job, STAYS), _later(jobs, before_leases, aged)),
            event=newest(keep.events),
            newest=newest(STAYS),
            old=old,
        )


def _later(*places: Place | None) -> Place | None:
    return max((place for place in places if place is not None), default=None)


def _earlier(*places: Place | None) -> Place | None:
    return None if None in places else min(place for place in places if place is not None)


class Pass:
    """One walk from the oldest to the last that is to go. Only reads, and blocks; `remove` deletes.

    Args:
        engine: The database.
        bounds: What is to go.
        orphans: Whether to look for metrics of leases that are not there, which takes a walk along all metrics.
    """

    def __init__(self, engine: Engine, bounds: Bounds, *, orphans: bool = False) -> None:
        self._engine = engine
        self._bounds = bounds
        self._after: Place | None = None
        self._kinds: list[Callable[[], Batch | None]] = [self._jobs, self._leases, self._events]
        if orphans:
            self._kinds.append(self._orphans)

    def next(self) -> Batch | None:
        """What to remove next; None when nothing is left. Raises SQLAlchemyError."""
        while self._kinds:
            batch = self._kinds[0]()
            if batch is not None:
                return batch
            self._kinds.pop(0)
            self._after = None
        return None

    def _jobs(self) -> Batch | None:
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

    def _leases(self) -> Batch | None:
        """Those of no job; those of a job go with it."""
        lease, job = tables.lease, tables.job
        own = or_(lease.c.job_id.is_(None), ~exists().where(job.c.id == lease.c.job_id))
        return self._ended(lease, self._bounds.lease, _dispensable(lease), own)

    def _ended(self, table: Table, last: Place | None, *where: ColumnElement[bool]) -> Batch | None:
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
            found = connection.execute(query.order_by(ended_at, number).limit(BATCH)).all()
        if not found:
            return None
        self._after = (found[-1].ended_at, found[-1].number)
        return Batch(kind=table.name, ids=tuple(row.id for row in found), rows=len(found))

    def _events(self) -> Batch | None:
        """The oldest ones, up to the first that stays."""
        event, bounds = tables.event, self._bounds
        with self._engine.connect() as connection:
            oldest = connection.execute(select(event.c.seq, event.c.at).order_by(event.c.seq).limit(BATCH)).all()
        last, rows = 0, 0
        for row in oldest:
            too_old = bounds.old is not None and row.at < bounds.old
            if row.seq > bounds.newest or not (too_old or row.seq <= bounds.event):
                break
            last, rows = row.seq, rows + 1
        return Batch(kind="event", seq=last, rows=rows) if rows else None

    def _orphans(self) -> Batch | None:
        """Metrics that were written when their lease was gone already."""
        kept, lease = tables.job_metrics, tables.lease
        query = select(kept.c.lease_id).where(~exists().where(lease.c.id == kept.c.lease_id)).limit(BATCH)
        with self._engine.connect() as connection:
            found = tuple(connection.scalars(query))
        return Batch(kind="metrics", ids=found, rows=len(found)) if found else None


def _has_ended(lease: Table) -> ColumnElement[bool]:
    """Not as `state = 'ended'`: SQLite would take the index of that, and walk through all that has ended."""
    return lease.c.state.not_in(LIVE_LEASES)


def _dispensable(lease: Table) -> ColumnElement[bool]:
    """True for a lease that has ended, and will not be revived."""
    gpu = tables.gpu
    draining = select(gpu.c.lease_id).where(gpu.c.lease_id.is_not(None))
    return and_(
        _has_ended(lease),
        lease.c.id.not_in(draining),
        func.coalesce(lease.c.token, -1).not_in(select(gpu.c.token)),
    )


def remove(store: Store, batch: Batch) -> None:
    """Delete a batch, all or nothing. Blocks. Raises `StoreFailed` or `Superseded`."""
    lease, job, kept = tables.lease, tables.job, tables.job_metrics
    ended = _has_ended(lease)
    with store.writing() as connection:
        match batch.kind:
            case "job":
                theirs = select(lease.c.id).where(lease.c.job_id.in_(batch.ids))
                connection.execute(delete(kept).where(kept.c.lease_id.in_(theirs)))
                connection.execute(delete(lease).where(lease.c.job_id.in_(batch.ids), ended))
                connection.execute(delete(job).where(job.c.id.in_(batch.ids)))
            case "lease":
                connection.execute(delete(kept).where(kept.c.lease_id.in_(batch.ids)))
                connection.execute(delete(lease).where(lease.c.id.in_(batch.ids), ended))
            case "metrics":
                connection.execute(delete(kept).where(kept.c.lease_id.in_(batch.ids)))
            case _:
                connection.execute(delete(tables.event).where(tables.event.c.seq <= batch.seq))
                connection.execute(update(tables.pruned).values(seq=batch.seq))
