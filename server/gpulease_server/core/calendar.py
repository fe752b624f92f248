"""The calendar: GPUs that are reserved for a user or a group in a window of time.

The rule
--------
A GPU is *closed* to a request while a reservation of it is in the calendar that is not for its user, and begins before
the request could have ended. Nothing is granted that is closed, whether it is a lease, a job, a node more of an elastic
job, a process that is adopted, or a lease that a late renewal revives. So no lease of anyone else is in a window, and
before it a GPU is of use to those who declare a time that ends early enough.

What a request could last rests on what is enforced: its declared time, or what its token lets a lease last. To that
comes `END_MARGIN_S`. A request without either could last forever.

A reservation names its GPUs from the moment that it is made; those of a number of GPUs are chosen then. It is refused
where a lease is in the way, so none is ended for it but a job that has started too late (`core.late_jobs`). It leaves
the calendar with the first tick after its end, or when it is cancelled.

| what happens | what follows |
|---|---|
| a lease outlasts its time, as its node is silent, or a process stays on its GPU | who it is for waits for that |
| a GPU of it fails, or is taken out of use | no other takes its place |
| a user leaves the group that it is for | what they hold goes on; they get nothing more of it |
| the wall clock jumps | windows are where the clock says. What has ended by it stays ended |
| a job starts later than its grant assumed | it is ended before the window begins, see `core.late_jobs` |
| the daemon restarts | it is in the database; a lease gets no time beyond its own that reaches into a window |

With an empty calendar nothing is looked at. With others the cost is one look at a table for each request that is looked
at, see `Calendar.closed_to`; the walk through the queue tells those apart who have a reservation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from gpulease_protocol.durations import LONGEST_S
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.reservations import Reservation
from gpulease_server.core.limit_index import LimitIndex
from gpulease_server.core.limit_records import LimitKey

END_MARGIN_S = 420.0
"""A GPU may be free again so long after a declared time: a job starts later than its lease and has a grace, and what is
left in memory goes (`shadow_time.settling_s`: 310 s for one on several nodes, with more where `retained_memory_s` is
raised); or the daemon restarts and gives a lease up to five minutes more. A job that starts later still is ended, see
`core.late_jobs`."""
MAX_RESERVATIONS = 1000
"""In the calendar at a time."""
MAX_AHEAD = timedelta(days=366)
"""How far ahead a reservation may end."""
MAX_KNOWN = 10_000
"""How many answers are kept."""
NO_GPUS: frozenset[str] = frozenset()
UsersSet = frozenset[str | None]


@dataclass(frozen=True, slots=True)
class ReservationRemoved:
    """A reservation is in the calendar no longer: it has ended, or was cancelled."""

    id: str


CalendarChange = Reservation | ReservationRemoved


@dataclass(slots=True)
class Calendar:
    """The reservations that have not ended. A part of the ledger."""

    entries: dict[str, Reservation] = field(default_factory=dict)
    """By id, as they begin."""
    _begin: list[datetime] = field(default_factory=list, compare=False)
    """When they begin, in this order."""
    _users: frozenset[str | None] = field(default=frozenset(), compare=False)
    _groups: frozenset[str] = field(default=frozenset(), compare=False)
    """Whom they are for."""
    _closed: dict[tuple[int, str | None, str | None], frozenset[str]] = field(default_factory=dict, compare=False)
    """What `closed_to` has answered: by how many have begun, and whose they are."""
    _apart: tuple[object, frozenset[str | None]] | None = field(default=None, compare=False)
    """What `users_apart` has answered, and for what."""

    def put(self, change: CalendarChange) -> None:
        """Add or remove a reservation. Costs as much as there are."""
        kept = (entry for entry in self.entries.values() if entry.id != change.id)
        self._put_all([*kept, change] if isinstance(change, Reservation) else kept)

    def _put_all(self, entries: Iterable[Reservation]) -> None:
        in_order = sorted(entries, key=lambda entry: (entry.from_at, entry.id))
        self.entries = {entry.id: entry for entry in in_order}
        self._begin = [entry.from_at for entry in in_order]
        self._users = frozenset(entry.user for entry in in_order if entry.user is not None)
        self._groups = frozenset(entry.group for entry in in_order if entry.group is not None)
        self._closed, self._apart = {}, None

    def closed_to(self, user: str | None, group: str | None, until: datetime | None) -> frozenset[str]:
        """The UUIDs of the GPUs that are closed to a request of this user, who is in this group, that could last until
        this moment; None for one that could last forever."""
        if not self.entries:
            return NO_GPUS
        begun = len(self._begin) if until is None else bisect_left(self._begin, until)
        key = (begun, user if user in self._users else None, group if group in self._groups else None)
        if (known := self._closed.get(key)) is not None:
            return known
        if len(self._closed) >= MAX_KNOWN:
            self._closed.clear()
        entries = list(self.entries.values())[:begun]
        others = (entry for entry in entries if not is_for(entry, user, group))
        found = self._closed[key] = frozenset(device.uuid for entry in others for device in entry.gpus)
        return found

    def first_in_the_way(
        self, uuid: str, user: str | None, group: str | None, until: datetime | None
    ) -> Reservation | None:
        """The reservation that closes a GPU first; None if none does."""
        for entry in self.entries.values():
            if until is not None and entry.from_at >= until:
                return None
            if not is_for(entry, user, group) and any(device.uuid == uuid for device in entry.gpus):
                return entry
        return None

    def next_of_others(self, uuids: Set[str], user: str | None, group: str | None, now: datetime) -> Reservation | None:
        """The first one of these GPUs that is not for this user, and has not ended; None if there is none."""
        for entry in self.entries.values():
            is_of_others = entry.to_at > now and not is_for(entry, user, group)
            if is_of_others and any(device.uuid in uuids for device in entry.gpus):
                return entry
        return None

    def within(self, from_at: datetime, to_at: datetime) -> list[Reservation]:
        """Those whose windows share a moment with this one."""
        return [entry for entry in self.entries.values() if entry.from_at < to_at and from_at < entry.to_at]

    def users_apart(self, limited: UsersSet, index: LimitIndex) -> UsersSet:
        """These users, and those whom a reservation is for. The same object while they are the same: the queue is
        grouped again for another one."""
        keys = (LimitKey(LimitKind.GROUP, group) for group in sorted(self._groups))
        of_groups = tuple(index.records[key].members for key in keys if key in index.records)
        asked = (limited, of_groups)
        if self._apart is None or self._apart[0] != asked:
            self._apart = asked, limited.union(self._users, *of_groups)
        return self._apart[1]


class ForWhom(Protocol):
    """What says for whom it is: a reservation, or what asks for one."""

    @property
    def user(self) -> str | None:
        """The user, if it is for one."""

    @property
    def group(self) -> str | None:
        """The group, if it is for one."""


def is_for(entry: ForWhom, user: str | None, group: str | None) -> bool:
    """True where a reservation is for this user, or for the group of that user."""
    if entry.group is not None:
        return entry.group == group
    return entry.user == user and user is not None


def latest_end(now: datetime, longest_s: float | None, held_s: float) -> datetime | None:
    """By when the GPUs of a lease are free that may last for so long, and has for so long; None where that is open."""
    if longest_s is None:
        return None
    return now + timedelta(seconds=min(max(0.0, longest_s - held_s), LONGEST_S) + END_MARGIN_S)
