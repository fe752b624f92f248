"""Which idle leases to take GPUs from, so that requests that wait can start: no more than these need.

A request is *helped* where the GPUs that are free or drain do not suffice for it, and those of idle leases beside them
do. What its limits keep out, what pauses, and what waits for others' GPUs too is not helped: an end would be for
nothing. Each idle lease counts for one request, the first in the queue's order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from gpulease_server.core.backfill import Reservations
from gpulease_server.core.eligibility import is_eligible, min_gpus_of
from gpulease_server.core.idle import IdleTime
from gpulease_server.core.order import in_order
from gpulease_server.core.placement import can_have, find_candidates, lacks_memory
from gpulease_server.core.records import GpuRecord, LeaseRecord
from gpulease_server.core.reservation_view import current_reservations
from gpulease_server.core.shadow_time import END_S, JOB_GRACE_S
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import LimitedDemand

MAX_REQUESTS = 100
"""Requests that are looked at, the first in the queue."""
MAX_DEMANDS = 20
"""Different demands of these that are looked at."""
MAX_LEASES = 64
"""Idle leases that are looked at."""


def leases_to_reclaim(turn: Turn, idle: Mapping[str, IdleTime]) -> dict[str, str]:
    """By id of an idle lease, the request that its GPUs would help. Those that were told come first, then those that
    have been idle longest.

    Costs a walk through the queue, and a look at the GPUs of the nodes that could serve each of `MAX_DEMANDS` demands.
    """
    ledger, notices = turn.ledger, turn.ledger.reclaims.notices
    pool = sorted(idle, key=lambda one: (one not in notices, idle[one].since_s, one))[:MAX_LEASES]
    of_pool = {device.uuid for lease_id in pool for device in ledger.leases[lease_id].lease.gpus}
    reservations = current_reservations(ledger, turn.now, turn.policy)
    hopeless, chosen = set[LimitedDemand](), dict[str, str]()
    for record in _waiting(turn, reservations):
        left = [lease_id for lease_id in pool if lease_id not in chosen]
        limited = _demand_by_then(turn, reservations, record)
        if not left or len(hopeless) >= MAX_DEMANDS:
            break
        if limited in hopeless:
            continue
        if of_pool.isdisjoint(find_candidates(ledger, limited.demand).uuids):
            hopeless.add(limited)
            continue
        if _is_served(reservations, record, limited, ()) or not _is_served(reservations, record, limited, left):
            hopeless.add(limited)  # others that ask for the same see the same GPUs
            continue
        for lease_id in reversed(left.copy()):
            fewer = [one for one in left if one != lease_id]
            if _is_served(reservations, record, limited, fewer):
                left = fewer
        chosen |= dict.fromkeys(left, record.lease.id)
    return chosen


def _demand_by_then(turn: Turn, reservations: Reservations, record: LeaseRecord) -> LimitedDemand:
    """What a request asks for, and what the calendar closes to it by the time when a job that ends now is gone."""
    closed = reservations.users.closed_to(record.lease, -(JOB_GRACE_S + END_S + 2 * turn.policy.retained_memory_s))
    return reservations.users.demand_within(record.lease)._replace(closed=closed)


def _waiting(turn: Turn, reservations: Reservations) -> Iterator[LeaseRecord]:
    """The first requests of the queue that wait for nothing but GPUs. One without a verdict yet does not wait."""
    ledger, users = turn.ledger, reservations.users
    for record in islice(in_order(ledger), MAX_REQUESTS):
        if record.lease.id in turn.pending or not is_eligible(ledger, record, turn.now):
            continue
        if users.limit_reached(record.lease, min_gpus_of(ledger, users, record.lease.demand)) is None:
            yield record


def _is_served(reservations: Reservations, record: LeaseRecord, limited: LimitedDemand, ended: Collection[str]) -> bool:
    """True where GPUs suffice for a request that are free, drain, or would be given back by these leases."""
    ledger, demand, lease_id = reservations.ledger, limited.demand, record.lease.id

    def comes(gpu: GpuRecord) -> bool:
        uuid = gpu.device.uuid
        if gpu.lease_id is not None and not gpu.draining and gpu.lease_id not in ended:
            return False
        if uuid in limited.closed or reservations.by_uuid.get(uuid, lease_id) != lease_id:
            return False
        if gpu.lease_id is None:
            return reservations.is_free(gpu) and not lacks_memory(ledger, demand, gpu)
        return reservations.will_be_free(demand, gpu)

    most_gpus = reservations.users.gpus_left(record.lease)
    return can_have(ledger, demand, reservations.now, most_gpus, lambda gpus: [gpu for gpu in gpus if comes(gpu)])
