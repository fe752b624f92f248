"""The queue by what is asked for: requests that one look at the free GPUs answers for all.

Requests of one class ask for the same GPUs, and the same limits apply to them. When the oldest of them cannot be
granted in a turn, neither can the others, so a walk through the queue looks at the oldest of each class only, see
`core.queue_walk`. A part of the ledger, which keeps it up to date.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpulease_protocol.model import Demand
from gpulease_server.core.records import LeaseRecord

Place = tuple[int, str]
"""Number and lease id of a request in the queue."""


class ClassKey(NamedTuple):
    """What the requests of a class share."""

    demand: Demand
    user: str | None
    """None where no limit tells the users apart."""
    token_id: str | None
    array_id: str | None
    """None without an array that limits how many of its jobs run at once."""


@dataclass(slots=True)
class Bypassed:
    """The members of a class that were bypassed, and bounds for all of them."""

    places: list[Place] = field(default_factory=list)
    """In order of arrival."""
    most_times: int = 0
    """None of them was bypassed more often."""
    first_s: float = float("inf")
    """None of them was bypassed sooner, on the monotonic clock."""

    def put(self, place: Place, times: int, since_s: float) -> None:
        """Take up a member, or one that was bypassed again."""
        at = bisect.bisect_left(self.places, place)
        if at == len(self.places) or self.places[at] != place:
            self.places.insert(at, place)
        self.most_times, self.first_s = max(self.most_times, times), min(self.first_s, since_s)

    def remove(self, place: Place) -> None:
        """Let a member go."""
        at = bisect.bisect_left(self.places, place)
        del self.places[at]
        if not self.places:
            self.most_times, self.first_s = 0, float("inf")


@dataclass(slots=True, eq=False)
class DemandClass:
    """Requests that ask for the same."""

    key: ClassKey
    places: list[Place] = field(default_factory=list)
    """In order of arrival."""
    bypassed: Bypassed = field(default_factory=Bypassed)
    """By `Ledger.bypasses`."""
    bypassed_by_user: Bypassed = field(default_factory=Bypassed)
    """By `Ledger.user_bypasses`."""

    def after(self, place: Place) -> Place | None:
        """The next member behind a place in the queue."""
        at = bisect.bisect_right(self.places, place)
        return self.places[at] if at < len(self.places) else None

    def between(self, first: Place, last: Place) -> list[Place]:
        """The members from one place to another, both included."""
        return self.places[bisect.bisect_left(self.places, first) : bisect.bisect_right(self.places, last)]


@dataclass(slots=True)
class DemandClasses:
    """The requests in the queue that do not pause, by class; and when the pauses of the others end."""

    by_user: bool = False
    """True where each user has classes of their own, because there are limits for users."""
    classes: dict[ClassKey, DemandClass] = field(default_factory=dict)
    class_of: dict[str, DemandClass] = field(default_factory=dict)
    """By lease id."""
    pauses: list[tuple[float, str]] = field(default_factory=list)
    """A heap: when a pause ends, and the lease id. Those of former leases are passed over."""

    def put(
        self,
        record: LeaseRecord,
        array_id: str | None,
        times: tuple[int, float] | None = None,
        times_by_user: tuple[int, float] | None = None,
    ) -> None:
        """Add a request, or move it to its class. `array_id`: the array that limits it; `times`: how many times it was
        bypassed, and since when."""
        lease, place = record.lease, (record.number, record.lease.id)
        user = lease.holder.user if self.by_user or lease.holder.token_id is not None else None
        key = ClassKey(lease.demand, user, lease.holder.token_id, array_id)
        if lease.id in self.class_of:
            if self.class_of[lease.id].key == key:
                return
            self.remove(record)
        members = self.classes.get(key)
        if members is None:
            members = self.classes[key] = DemandClass(key)
        self.class_of[lease.id] = members
        bisect.insort(members.places, place)
        if times is not None:
            members.bypassed.put(place, *times)
        if times_by_user is not None:
            members.bypassed_by_user.put(place, *times_by_user)

    def remove(self, record: LeaseRecord) -> None:
        """Let a request go, if it is there."""
        members = self.class_of.pop(record.lease.id, None)
        if members is None:
            return
        place = (record.number, record.lease.id)
        del members.places[bisect.bisect_left(members.places, place)]
        for bypassed in (members.bypassed, members.bypassed_by_user):
            if place in bypassed.places[bisect.bisect_left(bypassed.places, place) :][:1]:
                bypassed.remove(place)
        if not members.places:
            del self.classes[members.key]

    def pause(self, lease_id: str, until_s: float) -> None:
        """Note when the pause of a request ends."""
        heapq.heappush(self.pauses, (until_s, lease_id))

    def pauses_over(self, now_s: float) -> list[str]:
        """The ids of those whose pauses have ended, until they are let go. Costs nothing while there are none."""
        if not self.pauses or self.pauses[0][0] > now_s:
            return []
        return list(dict.fromkeys(lease_id for until_s, lease_id in self.pauses if until_s <= now_s))

    def let_pauses_go(self, paused: Mapping[str, float]) -> None:
        """Let the pauses go that have ended, or are those of former leases. `paused`: all others, and when they end."""
        while self.pauses and self.pauses[0][1] not in paused:
            heapq.heappop(self.pauses)

    def divide(self, queued: Iterable[LeaseRecord], by_user: bool, put: Callable[[LeaseRecord], None]) -> None:
        """Group the requests again, with users told apart or not; `put` adds one of them."""
        self.by_user = by_user
        self.classes.clear()
        self.class_of.clear()
        for record in queued:
            put(record)

    def copy(self) -> DemandClasses:
        """An independent copy."""
        made = DemandClasses(self.by_user, pauses=self.pauses.copy())
        for key, members in self.classes.items():
            bypassed = (
                Bypassed(one.places.copy(), one.most_times, one.first_s)
                for one in (members.bypassed, members.bypassed_by_user)
            )
            made.classes[key] = copied = DemandClass(key, members.places.copy(), *bypassed)
            made.class_of.update(dict.fromkeys((lease_id for _, lease_id in copied.places), copied))
        return made
