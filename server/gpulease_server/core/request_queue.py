"""The queue of the ledger: which requests wait, and what is known of them while they do."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import field

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import Lease, LeaseState
from gpulease_server.core.demand_classes import DemandClasses, OrderedPlace, Place, UsersApart, rank_of
from gpulease_server.core.limit_index import LimitChange, LimitIndex, add
from gpulease_server.core.limit_records import ORDERED, LimitRecord, LimitRemoved
from gpulease_server.core.order_records import (
    GroupUsage,
    OrderChange,
    Overtakes,
    PlacesKept,
    RanAhead,
    UsageRecord,
    UsageRemoved,
    UsageSteps,
)
from gpulease_server.core.preemption_records import Preemption, PreemptionChange, PreemptionRemoved
from gpulease_server.core.records import BypassCounts, JobRecord, LeaseRecord, NotBefore

BypassesWithin = dict[LimitKind, dict[str, tuple[int, float]]]


@dataclass
class RequestQueue:
    """The requests that wait: those that are in the queue, and those of jobs that wait for other jobs."""

    leases: dict[str, LeaseRecord] = field(default_factory=dict)
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    queue: list[tuple[int, str]] = field(default_factory=list)
    """(place by arrival, lease id) of queued leases, in that order; without those of jobs that wait for other jobs."""
    waiting_for_jobs: dict[str, None] = field(default_factory=dict)
    """Ids of queued leases of jobs that wait for other jobs, see `core.dependencies`."""
    waiting_for_jobs_by_user: Counter[str | None] = field(default_factory=Counter)
    """By user, how many of them there are."""
    unmet: dict[str, dict[str, None]] = field(default_factory=dict)
    """By id of a job that waits for others: the jobs and arrays of its `after` that have not ended."""
    dependents: dict[tuple[str, str], dict[str, None]] = field(default_factory=dict)
    """By id of a job or array and what is asked of its end: the jobs that wait for it."""
    limits: LimitIndex = field(default_factory=LimitIndex)
    """Limits, and what users, groups and tokens have, and have waiting."""
    queued_bytes: dict[str, int] = field(default_factory=dict)
    """By id of a lease or job that waits: the memory that it keeps."""
    queued_bytes_by_user: Counter[str | None] = field(default_factory=Counter)
    """By user, the sum of it."""
    not_before: dict[str, float] = field(default_factory=dict)
    """By lease id: when a queued lease begins to take part in the queue."""
    paused: dict[tuple[int, str | None], list[Place]] = field(default_factory=dict)
    """By the rank of a priority and the user: the places in the queue of those requests, in order of arrival."""
    bypasses: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By id of a queued lease: how many times a newer request has passed it, and when the first one did."""
    limit_bypasses: BypassesWithin = field(default_factory=lambda: {kind: {} for kind in ORDERED})
    """The same for newer requests of the same user or group that used up its limit, see `core.user_order`."""
    overtakes: int = 0
    """How many requests were granted by priority or usage since one was last chosen to go first."""
    go_first: dict[str, int] = field(default_factory=dict)
    """By id, the queued leases that go before all others, because they have waited longest; and how many grants they
    have missed because of their limits. See `core.order`."""
    places_kept: dict[str, int] = field(default_factory=dict)
    """By id, the queued leases that keep their places because GPUs are held for them, each on this step; see
    `core.order`."""
    ran_ahead: dict[str, RanAhead] = field(default_factory=dict)
    """By id, the leases that were granted before older requests without delaying them, until their GPUs are clean."""
    preemptions: dict[str, Preemption] = field(default_factory=dict)
    """By lease id of the request for which others end, see `core.preemption`."""
    preempting: dict[str, str] = field(default_factory=dict)
    """By lease id of what ends: that of the request for which it does."""
    usage: dict[str, UsageRecord] = field(default_factory=dict)
    """By user, what they have used lately, see `core.fair_share`."""
    group_usage: dict[str, GroupUsage] = field(default_factory=dict)
    """By group, what its members have used, where it is known; see `core.group_usage`."""
    usage_recounted: bool = False
    """True once `usage` is counted on the clock of this process."""
    steps_counted_at_s: float | None = None
    """When all users who wait were last put on the steps of their usages, on the monotonic clock."""
    bypasses_recounted: bool = False
    """True once `bypasses` also has what happened before this process."""
    demand_classes: DemandClasses = field(default_factory=DemandClasses, compare=False)
    """The queue by what is asked for."""

    def _put_bypass_counts(self, counts: BypassCounts) -> None:
        bypasses = self.bypasses if counts.within is None else self.limit_bypasses[counts.within]
        for lease_id, times in counts.times:
            before, since_s = bypasses.get(lease_id, (0, counts.at_s))
            bypasses[lease_id] = (before + times, since_s)
            members = self.demand_classes.class_of.get(lease_id)
            if members is not None:
                bypassed = members.bypassed if counts.within is None else members.bypassed_within[counts.within]
                bypassed.put((self.leases[lease_id].arrival, lease_id), before + times, since_s)

    def _put_order_change(self, change: OrderChange) -> None:
        match change:
            case RanAhead():
                self.ran_ahead[change.lease_id] = change
            case Overtakes():
                self.overtakes = change.times
                self.go_first |= dict.fromkeys(change.go_first, 0)
                self.go_first |= {lease_id: self.go_first[lease_id] + 1 for lease_id in change.missed}
            case PlacesKept():
                self.places_kept |= dict(change.kept)
                for lease_id in change.let_go:
                    self.places_kept.pop(lease_id, None)
            case Preemption() | PreemptionRemoved():
                self._put_preemption(change)
            case UsageRemoved() | GroupUsage() | UsageSteps():
                self._put_usage(change)

    def _put_usage(self, change: UsageRemoved | GroupUsage | UsageSteps) -> None:
        match change:
            case UsageRemoved():
                self.usage.pop(change.user, None)
            case GroupUsage():
                self.group_usage[change.group] = change
            case UsageSteps():
                self.classes_by_user(None)
                self.demand_classes.set_steps(change.steps, change.lowest, self.places_kept.values())
                if change.counted_at_s is not None:
                    self.steps_counted_at_s = change.counted_at_s

    def _put_limit_change(self, change: LimitChange) -> None:
        self.limits.put(change)
        if isinstance(change, (LimitRecord, LimitRemoved)) and change.key.kind is LimitKind.GROUP:
            self.group_usage.pop(change.key.name or "", None)  # its members may be others

    def _put_preemption(self, change: PreemptionChange) -> None:
        before = self.preemptions.pop(change.lease_id, None)
        for lease_id in () if before is None else before.victims:
            self.preempting.pop(lease_id, None)
        if isinstance(change, Preemption):
            self.preemptions[change.lease_id] = change
            self.preempting |= dict.fromkeys(change.victims, change.lease_id)

    def _put_pause(self, pause: NotBefore) -> None:
        if pause.at_s is None:
            self.not_before.pop(pause.lease_id, None)
            self.demand_classes.let_pauses_go(self.not_before)
        else:
            self.not_before[pause.lease_id] = pause.at_s
            self.demand_classes.pause(pause.lease_id, pause.at_s)
        if (record := self.leases.get(pause.lease_id)) is not None:
            self._classify(record)

    def _place_in_queue(self, record: LeaseRecord) -> None:
        place = (record.arrival, record.lease.id)
        at = bisect.bisect_left(self.queue, place)
        is_there = at < len(self.queue) and self.queue[at] == place
        belongs = self.place_of(record) is not None
        if belongs and not is_there:
            self.queue.insert(at, place)
        elif is_there and not belongs:
            del self.queue[at]
        self._classify(record)

    def _classify(self, record: LeaseRecord) -> None:
        """Put a lease into its class, or take it out."""
        lease, place = record.lease, self.place_of(record)
        pauses = place is not None and lease.id in self.not_before
        if pauses or self.paused:
            self._put_paused(record, pauses=pauses)
        if place is None or pauses:
            self.demand_classes.remove(record)
            return
        job = self.jobs.get(lease.job_id or "")
        array_id = job.job.array_id if job is not None and job.job.array_at_most is not None else None
        within = {kind: found[lease.id] for kind, found in self.limit_bypasses.items() if lease.id in found}
        self.demand_classes.put(record, array_id, self.bypasses.get(lease.id), within)

    def _put_paused(self, record: LeaseRecord, *, pauses: bool) -> None:
        key, place = (rank_of(record.lease.demand), record.lease.holder.user), (record.arrival, record.lease.id)
        places = self.paused.setdefault(key, [])
        at = bisect.bisect_left(places, place)
        is_there = at < len(places) and places[at] == place
        if pauses and not is_there:
            places.insert(at, place)
        elif is_there and not pauses:
            del places[at]
        if not places:
            del self.paused[key]

    def classes_by_user(self, apart: UsersApart, *, timed_apart: bool | None = None) -> DemandClasses:
        """The queue by what is asked for; and by user for these users, or all. `timed_apart`: and for all requests with
        a time; None for as before."""
        classes = self.demand_classes
        if classes.apart is not apart or timed_apart not in (None, classes.timed_apart):
            classes.divide(
                self.queued(), apart, classes.timed_apart if timed_apart is None else timed_apart, self._classify
            )
        return classes

    def _waits_no_more(self, lease: Lease) -> None:
        self.go_first.pop(lease.id, None)
        self.places_kept.pop(lease.id, None)
        self.not_before.pop(lease.id, None)
        for bypasses in (self.bypasses, *self.limit_bypasses.values()):
            bypasses.pop(lease.id, None)
        self.limits.count_queued(lease.holder, -1)
        self._count_bytes(lease.id, lease.holder.user, 0)

    def _count_bytes(self, waiting_id: str, user: str | None, size_bytes: int) -> None:
        """Note how much memory a waiting lease or job keeps; 0 when it no longer waits."""
        add(self.queued_bytes_by_user, user, size_bytes - self.queued_bytes.pop(waiting_id, 0))
        if size_bytes:
            self.queued_bytes[waiting_id] = size_bytes

    @property
    def waiting_count(self) -> int:
        """How many requests wait, including those of jobs that wait for other jobs."""
        return len(self.queue) + len(self.waiting_for_jobs)

    def place_of(self, record: LeaseRecord) -> tuple[int, str] | None:
        """What `queue` has of a lease; None for one that does not belong there."""
        if record.lease.state is not LeaseState.QUEUED or record.lease.id in self.waiting_for_jobs:
            return None
        return record.arrival, record.lease.id

    def ordered_place(self, record: LeaseRecord) -> OrderedPlace:
        """Where a walk comes to a request, whether it is in the queue or not."""
        lease, classes = record.lease, self.demand_classes
        group = (-1, 0) if lease.id in self.go_first else classes.group_of(lease.demand, lease.holder.user)
        if group[0] >= 0 and lease.id in self.places_kept:
            group = (group[0], self.places_kept[lease.id])
        return (*group, record.arrival, lease.id)

    @property
    def alone(self) -> dict[str, None]:
        """Ids of the requests that a walk comes to elsewhere than to others of their class."""
        return dict.fromkeys([*self.go_first, *self.places_kept])

    @property
    def is_by_arrival(self) -> bool:
        """True while the order is that of arrival."""
        return not self.places_kept and self.demand_classes.is_one_group

    def position_by_arrival(self, record: LeaseRecord) -> int | None:
        """Place in the queue by arrival, 1 is the first; None for one that is not in it. See `core.order.position`."""
        return None if (place := self.place_of(record)) is None else bisect.bisect_left(self.queue, place) + 1

    def queued(self) -> Iterator[LeaseRecord]:
        """Queued leases in order of arrival."""
        return (self.leases[lease_id] for _, lease_id in self.queue)
