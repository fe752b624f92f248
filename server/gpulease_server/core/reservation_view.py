"""What is held for waiting requests at this moment, for readers: the walk of `settle`, without grants."""

from __future__ import annotations

from gpulease_server.core.backfill import BlockedRequests, Reservations
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.place import place
from gpulease_server.core.placement import Blocked, NeedsReading, Placed, find_candidates
from gpulease_server.core.policy import Policy
from gpulease_server.core.preempted_gpus import hold_preempted_gpus
from gpulease_server.core.queue_walk import QueueWalk
from gpulease_server.core.records import BudgetRecord, Instant, LeaseRecord
from gpulease_server.core.user_limits import usage_by_user
from gpulease_server.core.user_order import UserOrder

MAX_SHOWN_DEMANDS = 100
"""For how many different demands a list of GPUs shows what is held, oldest first."""


def reservations_before(
    ledger: Ledger, record: LeaseRecord, now: Instant, policy: Policy, budget: BudgetRecord | None = None
) -> Reservations:
    """What is kept at this moment for the requests older than this one, and for it; with what its user has.
    `budget`: that of the token of a request that is not made."""
    return _reservations(ledger, record, now, policy, budget)


def current_reservations(ledger: Ledger, now: Instant, policy: Policy) -> Reservations:
    """What is reserved now for all waiting requests.

    Costs one walk over the different demands in the queue while any free GPU is unreserved, and one over the GPUs for
    each of the first `MAX_SHOWN_DEMANDS` demands and for each with a reservation.
    """
    return _reservations(ledger, None, now, policy)


def _reservations(
    ledger: Ledger, last: LeaseRecord | None, now: Instant, policy: Policy, budget: BudgetRecord | None = None
) -> Reservations:
    """What `settle` reserves for the requests up to `last`, or for all if it is None."""
    users = usage_by_user(ledger, policy.limits, now)
    assert users.tokens is not None
    users.tokens.unmade = budget
    reservations = Reservations(ledger, now, policy, users)
    hold_preempted_gpus(reservations)
    blocked, order = BlockedRequests(reservations), UserOrder(reservations)
    max_demands = MAX_SHOWN_DEMANDS if last is None else None
    for record in QueueWalk(ledger, reservations, blocked, order, last=last, max_demands=max_demands):
        candidates = frozenset[str]()
        if order.keeps_out(record) or not (reservations.is_any_left or reservations.is_complete):
            if record is not last:
                order.add(record)
            continue
        if not blocked.has(record):
            if len(blocked) == max_demands:
                continue
            demand, most_gpus = record.lease.demand, users.gpus_left(record.lease)
            placed: Placed | NeedsReading | Blocked = Blocked(find_candidates(ledger, demand).uuids)
            if reservations.is_any_left:
                reserved, closed = reservations.by_uuid.keys(), users.closed_to(record.lease)
                placed = place(ledger, demand, reserved, now, policy, most_gpus=most_gpus, closed=closed)
            if not isinstance(placed, Blocked):
                if record is not last:
                    reservations.reserve(record, placed.gpus)
                    users.keep_all(record.lease, len(placed.gpus))
                continue
            candidates = placed.candidates
        blocked.add(record, candidates)
        if record is not last:
            order.add(record)
    return reservations
