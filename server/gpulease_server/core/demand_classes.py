"""The queue by what is asked for: requests that one look at the free GPUs answers for all; and the order of these.

Requests of one class ask for the same GPUs with the same priority, and the same limits apply to them. When the oldest
of them cannot be granted in a turn, neither can the others, so a walk through the queue looks at the oldest of each
class only, see `core.queue_walk`. A part of the ledger, which keeps it up to date.

`heads` has the oldest of each class in the order in which they are looked at (`core.order`): kept sorted from change to
change, and never sorted for a turn. A walk begins with a copy of it, since a sorted list is a heap.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import NamedTuple

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import Demand, Priority
from gpulease_server.core.limit_records import NO_USERS, ORDERED
from gpulease_server.core.records import LeaseRecord

Place = tuple[int, str]
"""Number and lease id of a request in the queue: its place by arrival."""
Group = tuple[int, int]
"""What comes before the arrival: the rank of a priority, and the step of a user's usage. The lowest go first."""
OrderedPlace = tuple[int, int, int, str]
"""A group and a place: where a request comes in a walk."""
ONE_GROUP: Group = (1, 0)
"""That of a request of normal priority while usage does not count."""
UsersApart = frozenset[str | None] | None
"""Users who have classes of their own; None for all."""
NOWHERE: Mapping[LimitKind, tuple[int, float]] = {}
RANKS = {Priority.INTERACTIVE: 0, Priority.NORMAL: 1, Priority.SCAVENGE: 2}


def rank_of(demand: Demand) -> int:
    """The rank of a request's priority; the lowest goes first. A word of another version counts as normal."""
    return RANKS.get(demand.priority, RANKS[Priority.NORMAL])


class ClassKey(NamedTuple):
    """What the requests of a class share."""

    demand: Demand
    user: str | None
    """None where nothing tells the users apart: no limit, and no usage."""
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

    def copy(self) -> Bypassed:
        """An independent copy."""
        return Bypassed(self.places.copy(), self.most_times, self.first_s)

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
    group: Group = ONE_GROUP
    places: list[Place] = field(default_factory=list)
    """In order of arrival."""
    head: OrderedPlace | None = None
    """Where it is in `DemandClasses.heads`."""
    bypassed: Bypassed = field(default_factory=Bypassed)
    """By `Ledger.bypasses`."""
    bypassed_within: dict[LimitKind, Bypassed] = field(default_factory=lambda: {kind: Bypassed() for kind in ORDERED})
    """By `Ledger.limit_bypasses`."""

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

    apart: UsersApart = NO_USERS
    """The users who have classes of their own, because there are limits for them; all where their usage counts."""
    timed_apart: bool = False
    """Whether all users have classes of their own for what they ask with a time: some may run ahead, others not."""
    classes: dict[ClassKey, DemandClass] = field(default_factory=dict)
    class_of: dict[str, DemandClass] = field(default_factory=dict)
    """By lease id."""
    heads: list[tuple[OrderedPlace, int, DemandClass]] = field(default_factory=list)
    """The oldest of each class, in order. The number is 0: what a walk adds to its copy has others."""
    of_user: dict[str | None, dict[DemandClass, None]] = field(default_factory=dict)
    """The classes of each user who has some."""
    of_demand: dict[Demand, dict[DemandClass, None]] = field(default_factory=dict)
    """The classes that ask for the same, of whichever user."""
    timed: dict[DemandClass, None] = field(default_factory=dict)
    """The classes that declare their time, as they came."""
    steps: dict[str | None, int] = field(default_factory=dict)
    """By user, the step of their usage, see `core.fair_share`; empty while usage does not count."""
    lowest_step: int = 0
    """Who has a lower step, or none, counts as on this one."""
    moved: dict[str | None, int] = field(default_factory=dict)
    """The users whom `set_steps` last put on other steps, and on which ones they were before."""
    pauses: list[tuple[float, str]] = field(default_factory=list)
    """A heap: when a pause ends, and the lease id. Those of former leases are passed over."""

    def put(
        self,
        record: LeaseRecord,
        array_id: str | None,
        times: tuple[int, float] | None = None,
        within: Mapping[LimitKind, tuple[int, float]] = NOWHERE,
    ) -> None:
        """Add a request, or move it to its class. `array_id`: the array that limits it; `times`: how many times it was
        bypassed, and since when; `within`: the same within limits."""
        lease, place = record.lease, (record.arrival, record.lease.id)
        told_apart = self.apart is None or lease.holder.token_id is not None or lease.holder.user in self.apart
        told_apart = told_apart or lease.demand.priority is Priority.INTERACTIVE
        told_apart = told_apart or (self.timed_apart and lease.demand.time_s is not None)
        key = ClassKey(lease.demand, lease.holder.user if told_apart else None, lease.holder.token_id, array_id)
        if lease.id in self.class_of:
            if self.class_of[lease.id].key == key:
                return
            self.remove(record)
        members = self.classes.get(key)
        if members is None:
            members = self.classes[key] = DemandClass(key, self.group_of(lease.demand, key.user))
            self.of_user.setdefault(key.user, {})[members] = None
            self.of_demand.setdefault(key.demand, {})[members] = None
            if key.demand.time_s is not None:
                self.timed[members] = None
        self.class_of[lease.id] = members
        bisect.insort(members.places, place)
        self._put_head(members)
        if times is not None:
            members.bypassed.put(place, *times)
        for kind, counts in within.items():
            members.bypassed_within[kind].put(place, *counts)

    def remove(self, record: LeaseRecord) -> None:
        """Let a request go, if it is there."""
        members = self.class_of.pop(record.lease.id, None)
        if members is None:
            return
        place = (record.arrival, record.lease.id)
        del members.places[bisect.bisect_left(members.places, place)]
        for bypassed in (members.bypassed, *members.bypassed_within.values()):
            if bypassed.places and place in bypassed.places[bisect.bisect_left(bypassed.places, place) :][:1]:
                bypassed.remove(place)
        self._put_head(members)
        if not members.places:
            key = members.key
            del self.classes[key], self.of_user[key.user][members], self.of_demand[key.demand][members]
            self.timed.pop(members, None)
            if not self.of_user[key.user]:
                del self.of_user[key.user]
            if not self.of_demand[key.demand]:
                del self.of_demand[key.demand]

    def _put_head(self, members: DemandClass) -> None:
        """Bring what `heads` has of a class up to date."""
        head = (*members.group, *members.places[0]) if members.places else None
        if head == members.head:
            return
        if members.head is not None:
            del self.heads[bisect.bisect_left(self.heads, (members.head,))]
        if head is not None:
            bisect.insort(self.heads, (head, 0, members))
        members.head = head

    def group_of(self, demand: Demand, user: str | None) -> Group:
        """The group of a request of this user."""
        return rank_of(demand), self.step_of(user)

    def step_of(self, user: str | None) -> int:
        """The step that the requests of this user are on."""
        return max(self.steps.get(user, self.lowest_step), self.lowest_step)

    def set_steps(self, steps: Iterable[tuple[str | None, int]], lowest: int, kept: Iterable[int] = ()) -> None:
        """Put users on other steps, and their requests where those belong. `kept`: the steps of the requests that keep
        their places. No user falls from behind one of these to where it is, nor from where it is to before it."""
        changed: dict[str | None, None] = {}
        self.moved = {}
        floors = sorted({*kept})
        for user, wanted in steps:
            before = self.step_of(user)
            at = bisect.bisect_right(floors, before)
            step = max(wanted, floors[at - 1] + (floors[at - 1] < before)) if at else wanted
            if self.steps.get(user) != step:
                self.steps[user] = step
                self.moved[user] = before
                changed[user] = None
        if lowest != self.lowest_step:
            self.lowest_step, changed = lowest, dict.fromkeys(self.of_user)
            self.steps = {user: step for user, step in self.steps.items() if step > lowest}
        for user in changed:
            for members in self.of_user.get(user, ()):
                members.group = self.group_of(members.key.demand, user)
                self._put_head(members)

    @property
    def is_one_group(self) -> bool:
        """True while priority and usage tell none apart."""
        return not self.heads or self.heads[0][0][:2] == self.heads[-1][0][:2]

    def count_before(self, place: OrderedPlace) -> int:
        """How many requests come before a place. Costs one look at each class that begins before it."""
        begun = self.heads[: bisect.bisect_left(self.heads, (place,))]
        return sum(
            len(members.places) if head[:2] < place[:2] else bisect.bisect_left(members.places, place[2:])
            for head, _, members in begun
        )

    def in_order(self) -> Iterator[str]:
        """The lease ids of all of them, in order."""
        heap = self.heads.copy()
        while heap:
            place, _, members = heap[0]
            yield place[3]
            following = members.after(place[2:])
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, ((*place[:2], *following), 0, members))

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

    def divide(
        self, queued: Iterable[LeaseRecord], apart: UsersApart, timed_apart: bool, put: Callable[[LeaseRecord], None]
    ) -> None:
        """Group the requests again, with these users told apart; `put` adds one of them."""
        self.apart, self.timed_apart = apart, timed_apart
        for part in (self.classes, self.class_of, self.of_user, self.of_demand, self.timed, self.heads):
            part.clear()
        for record in queued:
            put(record)

    def copy(self) -> DemandClasses:
        """An independent copy."""
        made = DemandClasses(
            self.apart,
            self.timed_apart,
            steps=self.steps.copy(),
            lowest_step=self.lowest_step,
            pauses=self.pauses.copy(),
        )
        for key, members in self.classes.items():
            within = {kind: one.copy() for kind, one in members.bypassed_within.items()}
            copied = DemandClass(
                key, members.group, members.places.copy(), members.head, members.bypassed.copy(), within
            )
            made.classes[key] = copied
            made.of_user.setdefault(key.user, {})[copied] = None
            made.of_demand.setdefault(key.demand, {})[copied] = None
            if members in self.timed:
                made.timed[copied] = None
            made.class_of.update(dict.fromkeys((lease_id for _, lease_id in copied.places), copied))
        made.heads = [(head, number, made.classes[members.key]) for head, number, members in self.heads]
        return made
