"""A walk through the queue, in the order of `core.order`, that costs what it finds: one look at each class of requests,
not at each request.

The requests of a class (`core.demand_classes`) ask for the same. Within a walk GPUs are only taken, so when one of a
class is blocked all behind it are; and where a limit keeps one out, it keeps out all behind it. The walk *skips* these.
It still comes to those that something sets apart:

- New requests, each of which gets a verdict.
- Those that were bypassed as often or as long as they may be: GPUs, or GPUs of their user's limit, are reserved for
  them. Once nothing is left to reserve for a class, they are skipped as well.
- Where all that is free is reserved, some more, of which one may declare its time: it may have some of what is held
  (`core.easy_backfill`), and those before it must be known.

A grant may put its user on a higher step (`core.fair_share`), and all members of the user's group
(`core.group_usage`). What they still wait for then moves back, also within the walk.

A class is looked at again behind the request at which that changed which its members share: what their user, group
and token have, and how many jobs of their array run.

Where usage counts, and for requests with a time where these may run ahead, each user has classes of their own, of which
many ask for the same. When one of these is blocked the others are too where usage alone tells them apart: those with
nothing set apart are *dropped* from the walk at once.

Skipped and dropped requests count for a grant behind them, which bypasses them. They are *listed* only then, and only
where they could use what is granted. A request whose pause has just ended is in no class, and looked at by itself.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from enum import StrEnum, auto

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Priority, Selection
from gpulease_server.core.backfill import BlockedRequests, Reservations, Undelayed, nodes_to_reserve
from gpulease_server.core.demand_classes import Bypassed, DemandClass, OrderedPlace, Place, UsersApart
from gpulease_server.core.easy_backfill import MAX_AHEAD
from gpulease_server.core.eligibility import array_at_limit, divided_queue, is_eligible
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import NO_USERS, LimitKey, token_key
from gpulease_server.core.pending import PendingRequest
from gpulease_server.core.records import GpuRecord, LeaseRecord
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import LimitedDemand
from gpulease_server.core.user_order import UserOrder

Limiter = LimitKey | tuple[str, str | None]
"""What limits a class, beside others, by what changes within a walk: user, group, token, or `array` and its id."""

SKIPPED_AT_ONCE = 16
"""So many requests that are skipped cost as much as one that is looked at."""
MOST_KEPT = 16
"""A walk drops classes that ask for the same if there are no more than so many times as many others."""


class Why(StrEnum):
    """Why the members of a class are skipped."""

    BLOCKED = auto()
    """No GPUs for them are left."""
    KEPT_OUT = auto()
    """A limit of their user, group or token, or the budget of their token."""
    LEFT_OUT = auto()
    """They take no part: their array is at its limit, or enough demands were looked at."""


@dataclass(slots=True)
class Skipped:
    """A class with members that are skipped."""

    members: DemandClass
    why: Why
    first: Place
    """The first member that is skipped, and not yet listed."""
    limited: LimitedDemand
    """What they ask for."""


@dataclass(slots=True)
class QueueWalk:
    """Iterate over it for the requests that must be looked at, in order."""

    ledger: Ledger
    reservations: Reservations
    blocked: BlockedRequests
    order: UserOrder
    new: Mapping[str, object] = field(default_factory=dict)
    """By lease id, the requests without a verdict. When no GPU is left the walk soon comes to these alone."""
    last: LeaseRecord | None = None
    """Where the walk ends, for a reader. It then goes on without a GPU where users have a limit of GPUs."""
    max_demands: int | None = None
    """When so many different demands are blocked, others are left out."""
    _at: OrderedPlace = (-2, 0, 0, "")
    _steps: dict[str | None, int] = field(default_factory=dict)
    """The step of the user of the request at hand, before anything is granted there; and those of others of the user's
    group whom the grant of it has moved."""
    _end: OrderedPlace | None = None
    """The place of `last`."""
    _first: frozenset[str] = frozenset()
    """The requests that go before all others, or keep their places."""
    _only_new: bool = False
    _looked: float = 0
    """How many requests it has come to since no GPU is left; those that are skipped count less."""
    _heap: list[tuple[OrderedPlace, int, DemandClass | None]] = field(default_factory=list)
    """The next request of each class, or one without a class; the numbers make all entries different."""
    _entries: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _passed: dict[DemandClass, Place] = field(default_factory=dict)
    """By class, the last member that the walk has come to."""
    _skipped: dict[DemandClass, Skipped] = field(default_factory=dict)
    _by_demand: dict[LimitedDemand, dict[DemandClass, None]] = field(default_factory=dict)
    """The classes that are skipped because they are blocked."""
    _dropped: dict[LimitedDemand, list[DemandClass]] = field(default_factory=dict)
    """Those that were dropped with them. They are skipped once they are to be listed."""
    _by_limiter: dict[Limiter, dict[DemandClass, None]] = field(default_factory=dict)
    """The classes that are skipped, and may have to be looked at again."""
    _new_of_class: dict[DemandClass, list[Place]] = field(default_factory=dict)
    _were_new: frozenset[str] = frozenset()
    """Ids of those that were new when the first class was skipped. They are not skipped."""

    def __iter__(self) -> Iterator[LeaseRecord]:  # noqa: C901 - one case for each kind of entry
        self._begin()
        classes = self.ledger.demand_classes
        while self._heap:
            if not self._only_new and self._is_over():
                self._keep_new()
                continue
            place, _, members = heapq.heappop(self._heap)
            if members is not None and members.group != place[:2]:
                self._push_next(members)  # its user was granted something meanwhile
                continue
            if members is not None and place[3] in self._first:
                self._passed[members] = max(self._passed.get(members, (0, "")), place[2:])
                self._push_next(members)
                continue
            if place <= self._at:
                continue
            if self._end is not None and place > self._end:
                return
            self._at, record = place, self.ledger.leases[place[3]]
            user = record.lease.holder.user
            self._steps = {user: classes.group_of(record.lease.demand, user)[1]}
            was_any_left = self.reservations.is_any_left
            if members is not None:
                self._passed[members] = place[2:]
            before = self._limit_state(record) if self._by_limiter else None
            must_look = self._must_look_at(record, members)
            if not was_any_left:
                self._looked += 1 if must_look else 1 / SKIPPED_AT_ONCE
            if must_look:
                request = self.new.get(record.lease.id)
                yield record
                self._push_added(request)
            if members is not None:
                self._push_next(members)
            if before is not None and before != self._limit_state(record):
                self._look_again(record)

    def count_bypass(
        self, turn: Turn, granted: LeaseRecord, gpus: tuple[GpuRecord, ...], place: OrderedPlace, undelayed: Undelayed
    ) -> None:
        """Count a bypass for the older requests that could use the GPUs of a grant, or what it takes of a limit.
        `place`: where the walk came to the granted one; `undelayed`: whom it does not delay."""
        user = granted.lease.holder.user
        self._steps = self._moved_others | self._steps
        for demand in [one for one in self.blocked.could_use(gpus) if one not in undelayed.demands]:
            for members in self._by_demand.get(demand, ()):
                self._list(self._skipped[members])
            for members in self._dropped.pop(demand, ()):
                skipped = self._skipped[members] = Skipped(members, Why.BLOCKED, (0, ""), demand)
                self._by_demand.setdefault(demand, {})[members] = None
                self._list(skipped)
        is_before = self.is_before(user, place)
        self.blocked.count_bypass(turn, gpus, is_before, undelayed)
        for one in self.reservations.users.ordered(user) if self._by_limiter else ():
            for members in self._by_limiter.get(one.key, ()):
                if (alike := self._skipped.get(members)) is not None:  # else another limit had it looked at again
                    self._list(alike)
        self.order.count_bypass(turn, granted, gpus, is_before)
        if self.reservations.policy.fair_share:
            self._stay_passed(place)

    def _stay_passed(self, place: OrderedPlace) -> None:
        """Where users are on other steps now, the walk has still come so far with what they ask for."""
        for user, step in self._steps.items():
            for members in self.ledger.demand_classes.of_user.get(user, ()):
                if (group := (members.group[0], step)) == place[:2]:
                    self._passed[members] = max(self._passed.get(members, (0, "")), place[2:])
                elif group < place[:2] and self.reservations.policy.group_shares:
                    self._passed[members] = members.places[-1]

    @property
    def _moved_others(self) -> dict[str | None, int]:
        """Whom the last grant has moved with its user, and the steps on which they were."""
        return self.ledger.demand_classes.moved if self.reservations.policy.group_shares else {}

    def is_before(self, user: str | None, place: OrderedPlace) -> Callable[[LeaseRecord], bool] | None:
        """What tells whether a request still comes before one of this user that was granted at this place. The grant
        may have put its user and their group on other steps, which changes nothing between their requests. None if the
        order did not change within the walk."""
        if not self.reservations.policy.fair_share:
            return None

        moved = self._moved_others

        def is_before(record: LeaseRecord) -> bool:
            own, other = self.ledger.ordered_place(record), record.lease.holder.user
            if record.lease.id in self._first:
                return own < place
            if other == user:
                return (own[0], *own[2:]) < (place[0], *place[2:])
            return (own[0], moved.get(other, own[1]), *own[2:]) < place

        return is_before

    @property
    def _users_apart(self) -> UsersApart:
        """Who has a limit, or a reservation; None for all."""
        users = self.reservations.users
        return self.ledger.calendar.users_apart(users.limited_users, users.index)

    def _begin(self) -> None:
        classes = divided_queue(self.ledger, self.reservations.users, self.reservations.policy)
        if self.last is not None:
            self._end = self.ledger.ordered_place(self.last)
        if self._is_over():
            self._keep_new()
            return
        self._heap = [*classes.heads]
        alone = [one for one in classes.pauses_over(self.reservations.now.mono_s) if one not in classes.class_of]
        self._first = frozenset(self.ledger.alone)
        for lease_id in dict.fromkeys([*alone, *self.ledger.alone]):
            record = self.ledger.leases.get(lease_id)
            if record is not None and self.ledger.place_of(record) is not None:
                heapq.heappush(self._heap, (self.ledger.ordered_place(record), next(self._entries), None))

    def _is_over(self) -> bool:
        """True when only new requests have anything to expect."""
        reservations = self.reservations
        if reservations.is_any_left:
            return False
        timed = self.last is not None or bool(self.ledger.demand_classes.timed)
        is_any_held = bool(reservations.held_for and reservations.by_uuid)
        may_run_ahead = reservations.policy.easy_backfill and timed and is_any_held
        if reservations.is_complete and may_run_ahead and self.max_demands is None:
            reservations.is_complete = self._looked < MAX_AHEAD
        else:
            reservations.is_complete = False
        goes_on = self.last is not None and reservations.users.has_limits
        return not reservations.is_complete and not goes_on

    def _keep_new(self) -> None:
        """Go on with the new requests alone."""
        self._only_new = True
        records = (self.ledger.leases[lease_id] for lease_id in self.new if lease_id in self.ledger.leases)
        waiting = (record for record in records if self.ledger.place_of(record) is not None)
        places = map(self.ledger.ordered_place, waiting)
        self._heap = [(place, next(self._entries), None) for place in places if place > self._at]
        heapq.heapify(self._heap)

    def _must_look_at(self, record: LeaseRecord, members: DemandClass | None) -> bool:
        """True for a request that must be looked at. Others are skipped, with all that are like them."""
        if members is None or record.lease.id in self.new:
            return is_eligible(self.ledger, record, self.reservations.now)
        skipped = self._skipped.get(members)
        if skipped is None:
            why = self._why_skipped(record, members)
            if why is None:
                return True
            skipped = self._skip(record, members, why)
            if why is Why.BLOCKED and self._depends_on_user_alone(members):
                self._drop_alike(skipped)
            if self._next_apart(skipped, (record.arrival, "")) != self._at[2:]:
                return False
        if skipped.why is Why.BLOCKED:
            self.reservations.reserve_if_due(record)
        if record is not self.last:
            self.order.claim_if_due(record)
        return False

    def _why_skipped(self, record: LeaseRecord, members: DemandClass) -> Why | None:
        """Why neither a request that is not new nor those behind it in its class can be granted; None if they can be,
        or if that is not known."""
        reservations = self.reservations
        if members.key.array_id is not None and array_at_limit(self.ledger, record) is not None:
            return Why.LEFT_OUT
        if self.order.keeps_out(record) or not (reservations.is_any_left or reservations.is_complete):
            return Why.KEPT_OUT
        if record.lease.demand.selection is Selection.ALL and reservations.users.may_limit(record.lease):
            return None  # each may be limited to other nodes
        if self.blocked.has(record):
            return Why.BLOCKED
        return Why.LEFT_OUT if len(self.blocked) == self.max_demands else None

    def _skip(self, record: LeaseRecord, members: DemandClass, why: Why) -> Skipped:
        if not self._skipped and not self._were_new:
            self._find_new()
        limited = self.reservations.users.demand_within(record.lease)
        skipped = self._skipped[members] = Skipped(members, why, self._at[2:], limited)
        if why is Why.BLOCKED:
            self._by_demand.setdefault(limited, {})[members] = None
        for limiter in self._limiters(record):
            self._by_limiter.setdefault(limiter, {})[members] = None
        return skipped

    def _depends_on_user_alone(self, members: DemandClass) -> bool:
        """True for a class of which nothing but the usage of its user sets others apart that ask for the same."""
        policy, apart, key = self.reservations.policy, self._users_apart, members.key
        if policy.easy_backfill and key.demand.time_s is not None:
            return False  # some may run ahead, others not
        if not policy.fair_share or nodes_to_reserve(0, 0.0, policy) or key.demand.priority is Priority.INTERACTIVE:
            return False
        is_apart = apart is None or key.user in apart
        return (key.token_id, key.array_id) == (None, None) and not is_apart

    def _drop_alike(self, blocked: Skipped) -> None:
        """Drop the classes that ask for the same as a blocked one, if they are many of those that the walk has yet to
        come to. Not those with a new request, or one that was bypassed."""
        alike = self.ledger.demand_classes.of_demand[blocked.members.key.demand]
        if len(alike) * MOST_KEPT < len(self._heap):
            return
        known = self._skipped.keys() | self._passed.keys() | self._new_of_class.keys()
        limited = self._users_apart or NO_USERS  # not all: then none would be dropped
        dropped = {
            members: None
            for members in alike
            if not members.bypassed.places
            and members not in known
            and members.key.token_id is None
            and members.key.array_id is None
            and members.key.user not in limited
        }
        if dropped:
            self._heap = [entry for entry in self._heap if entry[2] not in dropped]
            heapq.heapify(self._heap)
            self._dropped.setdefault(blocked.limited, []).extend(dropped)

    def _find_new(self) -> None:
        """Find the new requests of each class. Not needed before the first class is skipped."""
        self._were_new, class_of = frozenset(self.new), self.ledger.demand_classes.class_of
        for lease_id in self._were_new:
            if (members := class_of.get(lease_id)) is not None:
                self._new_of_class.setdefault(members, []).append((self.ledger.leases[lease_id].arrival, lease_id))
        for places in self._new_of_class.values():
            places.sort()

    def _push_added(self, request: object) -> None:
        """Come to those that joined the queue with the verdict on a request, as the other jobs of an array do."""
        if isinstance(request, PendingRequest) and not self._only_new:
            added = (change.lease.id for change in request.changes if isinstance(change, LeaseRecord))
            class_of = self.ledger.demand_classes.class_of
            for members in {class_of[lease_id]: None for lease_id in added if lease_id in class_of}:
                self._push_next(members)

    def _push_next(self, members: DemandClass) -> None:
        """Come to the next request of a class that must be looked at, or that has something reserved."""
        if self._only_new or members.group < self._at[:2]:
            return
        at = self._passed.get(members, (0, ""))
        if members.group == self._at[:2]:
            at = max(at, self._at[2:])
        skipped = self._skipped.get(members)
        place = members.after(at) if skipped is None else self._next_apart(skipped, at)
        if place is not None:
            self._push(members, place)

    def _push(self, members: DemandClass, place: Place) -> None:
        heapq.heappush(self._heap, ((*members.group, *place), next(self._entries), members))

    def _next_apart(self, skipped: Skipped, place: Place) -> Place | None:
        """The next member behind a place that is not skipped with the others."""
        members, users, ledger = skipped.members, self.reservations.users, self.ledger
        new = self._new_of_class.get(members, [])
        at = bisect_right(new, place)
        found: list[Place | None] = [new[at] if at < len(new) else None]
        is_any_due = nodes_to_reserve(0, 0.0, self.reservations.policy) > 0
        may_be_due = is_any_due or members.bypassed.places
        if skipped.why is Why.BLOCKED and may_be_due and self.reservations.may_reserve(skipped.limited):
            due = members.after(place) if is_any_due else self._next_due(members.bypassed, ledger.bypasses, place)
            found.append(due)
        for one in users.ordered(members.key.user) if skipped.why is not Why.LEFT_OUT else ():
            kind, bypassed = one.key.kind, members.bypassed_within[one.key.kind]
            if is_any_due and self.order.may_claim(one, members.key):
                found.append(members.after(place))
            elif bypassed.places and self.order.may_keep(one, members.key):
                found.append(self._next_due(bypassed, ledger.limit_bypasses[kind], place))
        return min((one for one in found if one is not None), default=None)

    def _next_due(self, bypassed: Bypassed, counts: Mapping[str, tuple[int, float]], place: Place) -> Place | None:
        """The next member behind a place that was bypassed as often or as long as it may be."""
        now_s, policy = self.reservations.now.mono_s, self.reservations.policy
        if not nodes_to_reserve(bypassed.most_times, now_s - min(bypassed.first_s, now_s), policy):
            return None
        for one in bypassed.places[bisect_right(bypassed.places, place) :]:
            times, since_s = counts[one[1]]
            if nodes_to_reserve(times, now_s - since_s, policy):
                return one
        return None

    def _look_again(self, record: LeaseRecord) -> None:
        """Look again at the classes of a request's user, token and array: their limits leave something else now."""
        for limiter in self._limiters(record):
            for members in self._by_limiter.pop(limiter, ()):
                skipped = self._skipped.pop(members, None)
                if skipped is not None:
                    self._list(skipped)
                    self._by_demand.get(skipped.limited, {}).pop(members, None)
                    self._push_next(members)

    def _list(self, skipped: Skipped) -> None:
        """List the skipped members up to the request at hand with the others that wait."""
        members, group = skipped.members, skipped.members.group
        group = (group[0], self._steps.get(members.key.user, group[1]))  # where they were before the grant
        if group > self._at[:2] or not members.places:
            return
        at = self._at[2:] if group == self._at[:2] else members.places[-1]
        ids = [lease_id for _, lease_id in members.between(skipped.first, at) if lease_id not in self._were_new]
        skipped.first = (at[0] + 1, "")
        records = [self.ledger.leases[lease_id] for lease_id in ids if lease_id not in self._first]
        if skipped.why is Why.BLOCKED:
            self.blocked.extend(skipped.limited, records)
        if skipped.why is not Why.LEFT_OUT:
            self.order.extend(records)

    def _limiters(self, record: LeaseRecord) -> list[Limiter]:
        holder = record.lease.holder
        found: list[Limiter] = [one.key for one in self.reservations.users.applied(record.lease)]
        if (token := token_key(holder)) is not None and token not in found:
            found.append(token)
        job = self.ledger.jobs.get(record.lease.job_id or "")
        if job is not None and job.job.array_at_most is not None:
            found.append(("array", job.job.array_id))
        return found

    def _limit_state(self, record: LeaseRecord) -> tuple[object, ...]:
        """What limits of its user, token and array make of a request at this moment."""
        holder, users, ledger = record.lease.holder, self.reservations.users, self.ledger
        state: list[object] = []
        for key, _ in users.applied(record.lease):
            state += users.index.leases.get(key), users.index.gpus.get(key), users.first_interactive.get(key)
            if (kept := users.kept.get(key)) is not None:
                state += sum(kept.values()), len(kept)
        token_id, tokens = holder.token_id or "", users.tokens
        of_token = () if tokens is None else (tokens.first.get(token_id), tokens.kept_of(token_id))
        job = ledger.jobs.get(record.lease.job_id or "")
        running = ledger.job_index.running_in_array[job.job.array_id] if job is not None and job.job.array_id else 0
        return *state, *of_token, running
