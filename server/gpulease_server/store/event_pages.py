"""Pages of the event history: by number, time, subject and user, forwards or backwards.

A page looks through `MAX_EXAMINED` events at most, so that a rare subject in a long history costs no more than another.
It may therefore be short or empty and still have a next one. Times do not increase with numbers, because the clock may
have been set back: a period begins at the lowest number in it, and each event that is looked at is compared with it.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ColumnElement, Engine, Text, cast, exists, func, or_, select

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Event
from gpulease_server.store import rows
from gpulease_server.store.dialects import snapshot
from gpulease_server.store.tables import event, lease, pruned

MAX_EXAMINED = 100_000
"""Events that one page looks through for those that are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events are meant; None or empty: any."""

    from_at: datetime | None = None
    to_at: datetime | None = None
    """The events before this."""
    kinds: tuple[str, ...] = ()
    """`lease.granted`, or `lease` for all kinds of events of leases."""
    user: str | None = None
    """Those of leases and jobs of this user."""
    gpu: str | None = None
    node: str | None = None
    lease: str | None = None
    job: str | None = None
    hidden_kinds: tuple[str, ...] = ()
    """Prefixes of kinds that are left out."""

    @property
    def is_sparse(self) -> bool:
        """Whether many events may have to be looked at for one that is meant, and no index finds it."""
        return bool(self.kinds or self.user or self.gpu or self.node or self.job or self.times())

    def conditions(self) -> list[ColumnElement[bool]]:
        """What an event must meet, in SQL."""
        found: list[ColumnElement[bool]] = []
        if self.kinds:
            found.append(or_(*(_is_of_kind(kind) for kind in self.kinds)))
        if self.user is not None:
            of_user = lease.c.holder["user"].as_string() == self.user
            found.append(exists().where(lease.c.id == event.c.lease_id, of_user))
        if self.gpu is not None:
            found.append(cast(event.c.gpus, Text).contains(f'"{self.gpu}"', autoescape=True))
        given = {event.c.node: self.node, event.c.lease_id: self.lease, event.c.job_id: self.job}
        found += [column == value for column, value in given.items() if value is not None]
        found += [event.c.kind.not_like(f"{prefix}%") for prefix in self.hidden_kinds]
        return found + self.times()

    def times(self) -> list[ColumnElement[bool]]:
        """The part of the conditions that is about time."""
        since = [] if self.from_at is None else [event.c.at >= self.from_at]
        return since + ([] if self.to_at is None else [event.c.at < self.to_at])


@dataclass(frozen=True, slots=True)
class FoundEvents:
    """A page."""

    events: list[Event]
    next_seq: int | None
    """Where the next page begins: pass as `after`, or as `before` when the newest come first. None at the end."""
    pruned_seq: int
    """Events up to this one are no longer kept."""
    last_seq: int
    """The newest event, of whatever kind; 0 while there is none."""


def find_events(
    engine: Engine,
    wanted: EventFilter,
    limit: int,
    *,
    after: int = 0,
    before: int | None = None,
    newest_first: bool = False,
) -> FoundEvents:
    """Up to `limit` events with `after` < `seq` < `before`. Blocks.

    All is read in one snapshot: otherwise events pruned between two queries would be missed silently.
    """
    with snapshot(engine) as connection:
        pruned_seq = connection.execute(select(pruned.c.seq)).scalar() or 0
        lowest, last_seq = connection.execute(select(func.min(event.c.seq), func.max(event.c.seq))).one()
        last_seq = last_seq or 0
        first = max(min(after, last_seq) + 1, lowest or 0)
        last = last_seq if before is None else min(before - 1, last_seq)
        if wanted.times() and after == 0 and before is None:
            # Where the first page begins. Not the bare columns: PostgreSQL would walk through their index.
            bounds = select(func.min(event.c.seq + 0), func.max(event.c.seq + 0)).where(*wanted.times())
            earliest, latest = connection.execute(bounds).one()
            first, last = (first, 0) if earliest is None else (max(first, earliest), min(last, latest))
        begin, end = first, last
        if wanted.is_sparse and last - first >= MAX_EXAMINED:
            begin, end = (last - MAX_EXAMINED + 1, last) if newest_first else (first, first + MAX_EXAMINED - 1)
        order = event.c.seq.desc() if newest_first else event.c.seq
        query = select(event).where(event.c.seq.between(begin, end), *wanted.conditions()).order_by(order).limit(limit)
        found = [rows.event(row) for row in connection.execute(query)]
        next_seq = None
        if len(found) == limit:
            next_seq = found[-1].seq
        elif (begin, end) != (first, last):
            rest = event.c.seq < begin if newest_first else event.c.seq > end
            if connection.execute(select(exists().where(rest, *wanted.times()))).scalar():
                next_seq = begin if newest_first else end
    return FoundEvents(found, next_seq, pruned_seq, last_seq)


def _is_of_kind(kind: str) -> ColumnElement[bool]:
    return or_(event.c.kind == kind, event.c.kind.startswith(f"{kind}.", autoescape=True))
