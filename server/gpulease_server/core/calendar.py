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
at, see `Calendar.closed_to`, and one at each free GPU for what is asked for; the walk through the queue tells those
apart who have a reservation. A change costs a look at its GPUs, and at the reservations of each.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence, Set
from dataclasses import field
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Protocol, TypeVar

from gpulease_protocol.durations import LONGEST_S
from gpulease_protocol.lazy_dataclass import dataclass
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
MAX_KNOWN_GPUS = 1_000_000
"""How many UUIDs the answers may have that are kept. About 64 MB."""
NO_GPUS: frozenset[str] = frozenset()
UsersSet = frozenset[str | None]
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class ReservationRemoved:
    """A reservation is in the calendar no longer: it has ended, or was cancelled."""

    id: str


CalendarChange = Reservation | ReservationRemoved


@dataclass(slots=True)
class Calendar:
    """The reservations that have not ended. A part of the ledger."""

    entries: dict[str, Reservation] = field(default_factory=dict)
    """By id."""
    _in_order: list[Reservation] = field(default_factory=list, compare=False)
    """As they begin."""
    _of_gpu: dict[str, list[Reservation]] = field(default_factory=dict, compare=False)
    """By UUID, as they begin."""
    _for_whom: dict[tuple[str | None, str | None], list[Reservation]] = field(default_factory=dict, compare=False)
    """By user and group, one of which is None; as they begin."""
    _closed: dict[tuple[int, str | None, str | None], frozenset[str]] = field(default_factory=dict, compare=False)
    """What `closed_to` has answered: by how many have begun, and whose they are."""
    _known_gpus: int = field(default=0, compare=False)
    """How many UUIDs these answers have."""
    _apart: tuple[object, frozenset[str | None]] | None = field(default=None, compare=False)
    """What `users_apart` has answered, and for what."""

    def put(self, change: CalendarChange) -> None:
        """Add or remove a reservation. Costs a look at each of its GPUs, however many reservations there are."""
        if (before := self.entries.pop(change.id, None)) is not None:
            self._remove(before)
        if isinstance(change, Reservation):
            self.entries[change.id] = change
            bisect.insort(self._in_order, change, key=_place)
            bisect.insort(self._for_whom.setdefault((change.user, change.group), []), change, key=_place)
            for device in change.gpus:
                bisect.insort(self._of_gpu.setdefault(device.uuid, []), change, key=_place)
        self._closed, self._known_gpus, self._apart = {}, 0, None

    def _remove(self, entry: Reservation) -> None:
        del self._in_order[bisect.bisect_left(self._in_order, _place(entry), key=_place)]
        _remove_from(self._for_whom, (entry.user, entry.group), entry)
        for device in entry.gpus:
            _remove_from(self._of_gpu, device.uuid, entry)

    def in_order(self) -> Sequence[Reservation]:
        """All of them, as they begin. Not to be kept: it changes with the calendar."""
        return self._in_order

    def of_gpu(self, uuid: str) -> Sequence[Reservation]:
        """Those of a GPU, as they begin. Not to be kept either."""
        return self._of_gpu.get(uuid, ())

    def closed_to(self, user: str | None, group: str | None, until: datetime | None) -> frozenset[str]:
        """The UUIDs of the GPUs that are closed to a request of this user, who is in this group, that could last until
        this moment; None for one that could last forever."""
        if not self.entries:
            return NO_GPUS
        begun = len(self._in_order)
        if until is not None:
            begun = bisect.bisect_left(self._in_order, until, key=attrgetter("from_at"))
        own_keys = [key for key in ((user, None), (None, group)) if key in self._for_whom]
        own = [entry for key in own_keys for entry in self._for_whom[key] if until is None or entry.from_at < until]
        key = (begun, user, group) if own else (begun, None, None)
        if (known := self._closed.get(key)) is not None:
            return known
        if own:
            found = self.closed_to(None, None, until).difference(
                device.uuid
                for entry in own
                for device in entry.gpus
                if self.first_in_the_way(device.uuid, user, group, until) is None
            )
        else:
            found = frozenset(device.uuid for entry in self._in_order[:begun] for device in entry.gpus)
        self._known_gpus += len(found) + 1
        if self._known_gpus > MAX_KNOWN_GPUS:
            self._closed, self._known_gpus = {}, len(found) + 1
        self._closed[key] = found
        return found

    def first_in_the_way(
        self, uuid: str, user: str | None, group: str | None, until: datetime | None
    ) -> Reservation | None:
        """The reservation that closes a GPU first; None if none does."""
        for entry in self.of_gpu(uuid):
            if until is not None and entry.from_at >= until:
                return None
            if not is_for(entry, user, group):
                return entry
        return None

    def next_of_others(self, uuids: Set[str], user: str | None, group: str | None, now: datetime) -> Reservation | None:
        """The first one of these GPUs that is not for this user, and has not ended; None if there is none."""
        of_each = (
            next((entry for entry in self.of_gpu(uuid) if entry.to_at > now and not is_for(entry, user, group)), None)
            for uuid in uuids
        )
        return min((entry for entry in of_each if entry is not None), key=_place, default=None)

    def within(self, uuid: str, from_at: datetime, to_at: datetime) -> Reservation | None:
        """The first one of a GPU whose window shares a moment with this one; None if none does."""
        of_gpu = self.of_gpu(uuid)
        return next((entry for entry in of_gpu if entry.from_at < to_at and from_at < entry.to_at), None)

    def users_apart(self, limited: UsersSet | None, index: LimitIndex) -> UsersSet | None:
        """These users, and those whom a reservation is for; None for all. The same object while they are the same: the
        queue is grouped again for another one."""
        if limited is None or not self.entries:
            return limited
        groups = sorted(group for _, group in self._for_whom if group is not None)
        keys = (LimitKey(LimitKind.GROUP, group) for group in groups)
        of_groups = tuple(index.records[key].members for key in keys if key in index.records)
        asked = (limited, of_groups)
        if self._apart is None or self._apart[0] != asked:
            users = (user for user, _ in self._for_whom if user is not None)
            self._apart = asked, limited.union(users, *of_groups)
        return self._apart[1]


def _place(entry: Reservation) -> tuple[datetime, str]:
    """Its place among others: as it begins."""
    return entry.from_at, entry.id


def _remove_from(index: dict[Key, list[Reservation]], key: Key, entry: Reservation) -> None:
    entries = index[key]
    del entries[bisect.bisect_left(entries, _place(entry), key=_place)]
    if not entries:
        del index[key]


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
