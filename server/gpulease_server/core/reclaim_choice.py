"""Which idle leases to take GPUs from, so that requests that wait can start: no more than these need.

A request is *helped* where the GPUs that come by themselves do not suffice for it, and those of idle leases beside them
do. GPUs come by themselves that are free, drain, or are of a job that is being stopped. What its limits keep out, what
pauses, and what waits for others' GPUs too is not helped: an end would be for nothing.

Each GPU counts for one request, in the queue's order: what one takes is not there for the next, and the next may have
what is left of a lease that ends for one before it. The same holds for the limits of a user or group, and for that of
an array of jobs.

| a GPU of an idle lease does not count | because |
|---|---|
| on which someone else's process is, too | it would drain until that has ended |
| for a request behind one that also waits for others, and that free GPUs are held for by now | it would be held for \
that one (`core.backfill`) |
| that is cordoned, reserved, on a drained node, or lent to a lease that ran ahead | it would go to others, or no one |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from itertools import islice

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Job, JobState
from gpulease_server.core.backfill import Reservations, nodes_to_reserve
from gpulease_server.core.eligibility import is_eligible, min_gpus_of
from gpulease_server.core.gpu import conflicting_processes
from gpulease_server.core.idle import IdleTime
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order import in_order
from gpulease_server.core.placement import (
    candidates,
    find_candidates,
    gpus_needed,
    gpus_to_have,
    has_enough,
    lacks_memory,
)
from gpulease_server.core.preempted_gpus import preemptions_under_way
from gpulease_server.core.records import GpuRecord, LeaseRecord
from gpulease_server.core.reservation_view import current_reservations
from gpulease_server.core.shadow_time import END_S, JOB_GRACE_S
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import LimitedDemand

MAX_REQUESTS = 100
"""Requests that are looked at, the first in the queue."""
MAX_DEMANDS = 20
"""How many of these have a look at the GPUs; of those that ask for the same and are not helped the first one."""
MAX_LEASES = 64
"""Idle leases that are looked at."""


def leases_to_reclaim(turn: Turn, idle: Mapping[str, IdleTime]) -> dict[str, str]:
    """By id of an idle lease, the request that its GPUs would help. Those that were told come first, then those that
    have been idle longest.

    Costs a walk through the queue, and for `MAX_DEMANDS` of its requests a look at the GPUs of the nodes that could
    serve each.
    """
    ledger, notices = turn.ledger, turn.ledger.reclaims.notices
    pool = sorted(idle, key=lambda one: (one not in notices, idle[one].since_s, one))[:MAX_LEASES]
    choice = Choice(current_reservations(ledger, turn.now, turn.policy), pool)
    unhelped, looks = set[LimitedDemand](), 0
    for record in _waiting(turn, choice.reservations):
        limited = _demand_by_then(turn, choice.reservations, record)
        if len(choice.chosen) == len(pool) or looks >= MAX_DEMANDS:
            break
        if choice.is_array_full(record):
            continue
        if limited in unhelped or choice.of_pool.keys().isdisjoint(find_candidates(ledger, limited.demand).uuids):
            continue
        looks += 1
        if not choice.add(record, limited):
            unhelped.add(limited)  # others that ask for the same see the same GPUs
    return choice.chosen


def _demand_by_then(turn: Turn, reservations: Reservations, record: LeaseRecord) -> LimitedDemand:
    """What a request asks for, and what the calendar closes to it by the time when a job that ends now is gone."""
    closed = reservations.users.closed_to(record.lease, -(JOB_GRACE_S + END_S + 2 * turn.policy.retained_memory_s))
    return reservations.users.demand_within(record.lease)._replace(closed=closed)


def _waiting(turn: Turn, reservations: Reservations) -> Iterator[LeaseRecord]:
    """The first requests of the queue that wait for nothing but GPUs. One without a verdict yet does not wait; for one
    that has had others end, their GPUs are held."""
    ledger, users = turn.ledger, reservations.users
    preempting = {record.lease.id for _, record in preemptions_under_way(ledger, turn.now, turn.policy)}
    for record in islice(in_order(ledger), MAX_REQUESTS):
        if record.lease.id in turn.pending or record.lease.id in preempting:
            continue
        if not is_eligible(ledger, record, turn.now):
            continue
        if users.limit_reached(record.lease, min_gpus_of(ledger, users, record.lease.demand)) is None:
            yield record


@dataclass(slots=True)
class Choice:
    """The leases that are to end, and for which requests. Filled in the order of the queue."""

    reservations: Reservations
    pool: list[str]
    """Ids of the idle leases, the first choice first."""
    of_pool: dict[str, str] = field(default_factory=dict)
    """The lease of each of their GPUs, by UUID."""
    chosen: dict[str, str] = field(default_factory=dict)
    """By lease id, the request that it ends for."""
    taken: set[str] = field(default_factory=set)
    """GPUs that the requests get which are helped."""
    held: set[str] = field(default_factory=set)
    """GPUs of idle leases that would be held for requests which are not helped."""
    starting: Counter[str] = field(default_factory=Counter)
    """By array, the jobs that are helped, or have what they need."""

    def __post_init__(self) -> None:
        leases = [self.reservations.ledger.leases[lease_id].lease for lease_id in self.pool]
        self.of_pool = {device.uuid: lease.id for lease in leases for device in lease.gpus}

    def add(self, record: LeaseRecord, limited: LimitedDemand) -> bool:
        """Choose the leases for a request, as few as it needs; True where it is helped."""
        coming = self._coming(record, limited)
        nodes = {self.reservations.ledger.gpus[uuid].device.node for uuid in coming}

        def gpus_once(ended: Collection[str]) -> list[GpuRecord] | None:
            """GPUs that suffice for it once these leases have ended; None where there are none."""
            from_leases = {"", *ended}
            return gpus_to_have(
                self.reservations.ledger,
                limited.demand,
                self.reservations.now,
                limited.most_gpus,
                lambda gpus: [gpu for gpu in gpus if coming.get(gpu.device.uuid) in from_leases],
                only=nodes,
            )

        if (gpus := gpus_once(())) is not None:
            self._note_start(record, gpus)
            return False
        if gpus_once(self.pool) is None:
            self.held |= self._held_once_free(record, limited)
            return False
        left, more = [lease_id for lease_id in self.pool if lease_id not in self.chosen], list[str]()
        while (gpus := gpus_once([*self.chosen, *more])) is None:
            more.append(left[len(more)])
        for lease_id in reversed(more[:-1]):
            fewer = [one for one in more if one != lease_id]
            if (of_fewer := gpus_once([*self.chosen, *fewer])) is not None:
                more, gpus = fewer, of_fewer
        self.chosen |= dict.fromkeys(more, record.lease.id)
        self.taken.update(gpu.device.uuid for gpu in gpus)
        self._note_start(record, gpus)
        return True

    def is_array_full(self, record: LeaseRecord) -> bool:
        """True where jobs of its array before it take up what the limit of that leaves."""
        ledger, job = self.reservations.ledger, self._job(record)
        if job is None or job.array_id is None or job.array_at_most is None:
            return False
        return ledger.job_index.running_in_array[job.array_id] + self.starting[job.array_id] >= job.array_at_most

    def _note_start(self, record: LeaseRecord, gpus: Collection[GpuRecord]) -> None:
        """Count a request that is to start for its limits."""
        self.reservations.users.keep_all(record.lease, len(gpus))
        job = self._job(record)
        if job is not None and job.array_id is not None:
            self.starting[job.array_id] += 1

    def _job(self, record: LeaseRecord) -> Job | None:
        known = self.reservations.ledger.live_jobs.get(record.lease.job_id or "")
        return None if known is None else known.job

    def _coming(self, record: LeaseRecord, limited: LimitedDemand) -> dict[str, str]:
        """The GPUs that a request may have, by UUID: the idle lease that would have to end, or nothing where a GPU
        comes by itself."""
        found, reservations, lease_id = dict[str, str](), self.reservations, record.lease.id
        gpus = reservations.ledger.gpus
        for uuid in find_candidates(reservations.ledger, limited.demand).uuids:
            if (of_lease := self._comes_from(gpus[uuid])) is None:
                continue  # as nearly always
            if uuid in limited.closed or uuid in self.taken or uuid in self.held:
                continue
            if reservations.by_uuid.get(uuid, reservations.lent.get(uuid, lease_id)) != lease_id:
                continue
            if self._can_use(limited, gpus[uuid]):
                found[uuid] = of_lease
        return found

    def _comes_from(self, gpu: GpuRecord) -> str | None:
        """The idle lease that would have to end, or an empty text; None for a GPU that does not come."""
        ledger = self.reservations.ledger
        if gpu.lease_id is None or gpu.draining:
            return ""
        if gpu.device.uuid in self.of_pool:
            return None if conflicting_processes(ledger, gpu) else self.of_pool[gpu.device.uuid]
        return "" if is_being_stopped(ledger, gpu.lease_id) else None

    def _can_use(self, limited: LimitedDemand, gpu: GpuRecord) -> bool:
        """True for a GPU that is free for a request, or will be once its lease has ended."""
        reservations = self.reservations
        if gpu.lease_id is None:
            return reservations.is_free(gpu) and not lacks_memory(reservations.ledger, limited.demand, gpu)
        return reservations.will_be_free(limited.demand, gpu)

    def _held_once_free(self, record: LeaseRecord, limited: LimitedDemand) -> set[str]:
        """GPUs of idle leases that would be held for a request which waits for others' GPUs too: those that it could
        use, once it was bypassed as often or as long as it may be. On nodes that lack more than those where as much is
        held for it as may be, nothing would."""
        reservations, demand, lease_id = self.reservations, limited.demand, record.lease.id
        ledger, now_s = reservations.ledger, reservations.now.mono_s
        times, since_s = ledger.bypasses.get(lease_id, (0, now_s))
        most = nodes_to_reserve(times, now_s - since_s, reservations.policy)
        lacking, found = dict[str, int](), dict[str, tuple[int, set[str]]]()
        for node, gpus in candidates(ledger, demand, limited.most_gpus).items() if most else ():
            able = [gpu for gpu in gpus if gpu.device.uuid not in limited.closed and self._can_use(limited, gpu)]
            needed = gpus_needed(demand, gpus)
            if not has_enough(ledger, demand, node, able, needed):
                continue
            own = {gpu.device.uuid for gpu in able if reservations.by_uuid.get(gpu.device.uuid) == lease_id}
            idle = {gpu.device.uuid for gpu in able if gpu.device.uuid in self.of_pool}
            found[node] = needed - len(own) - len(idle), idle
            if own:
                lacking[node] = needed - len(own)
        if len(found) < demand.nodes:
            return set()  # nothing is held for a gang that could not start
        enough = demand.nodes == 1 and len(lacking) >= most
        worst = max(lacking.values(), default=0)
        return {uuid for lacks, idle in found.values() if not enough or lacks <= worst for uuid in idle}


def is_being_stopped(ledger: Ledger, lease_id: str) -> bool:
    """True for the lease of a job that has been told to end, and does so soon: its GPUs come by themselves."""
    record = ledger.leases.get(lease_id)
    job = None if record is None else ledger.live_jobs.get(record.lease.job_id or "")
    if job is None or job.job.state is not JobState.STOPPING or job.job.lease_id != lease_id:
        return False
    return not job.stuck_on and job.grace_s <= JOB_GRACE_S
