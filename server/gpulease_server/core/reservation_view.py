"""What is held for waiting requests at this moment, for readers: the walk of `settle`, without grants."""

from __future__ import annotations

from gpulease_server.core.backfill import Reservations
from gpulease_server.core.eligibility import is_eligible, is_over_user_limit
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.placement import Blocked, place
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import BudgetRecord, Instant, LeaseRecord
from gpulease_server.core.user_limits import LimitedDemand, usage_by_user
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

    Costs one walk over the queue while any free GPU is unreserved, and one over the GPUs for each of the first
    `MAX_SHOWN_DEMANDS` demands and for each with a reservation.
    """
    return _reservations(ledger, None, now, policy)


def _reservations(  # noqa: C901 - one case for each outcome
    ledger: Ledger, last: LeaseRecord | None, now: Instant, policy: Policy, budget: BudgetRecord | None = None
) -> Reservations:
    """What `settle` reserves for the requests up to `last`, or for all if it is None."""
    users = usage_by_user(ledger, policy.limits, now)
    assert users.tokens is not None
    users.tokens.unmade = budget
    reservations = Reservations(ledger, now, policy, users)
    user_order, blocked_demands = UserOrder(reservations), set[LimitedDemand]()
    for record in ledger.queued():
        is_last = record is last
        if last is not None and record.number > last.number:
            break
        # With no free GPU left, only users' limits can still be kept for requests before it.
        if not reservations.is_any_left and (last is None or not users.limits.gpus):
            break
        if not is_eligible(ledger, record, now):
            continue
        if is_over_user_limit(ledger, users, record) or not reservations.is_any_left:
            if not is_last:
                user_order.add(record)
            continue
        demand = users.demand_within(record.lease)
        if demand not in blocked_demands:
            if last is None and len(blocked_demands) == MAX_SHOWN_DEMANDS:
                continue
            placed = place(
                ledger,
                record.lease.demand,
                reservations.by_uuid.keys(),
                now,
                policy,
                most_gpus=users.gpus_left(record.lease),
            )
            if not isinstance(placed, Blocked):
                if not is_last:
                    reservations.reserve(record, placed.gpus)
                    users.keep(record.lease, len(placed.gpus))
                continue
            blocked_demands.add(demand)
        if not is_last:
            user_order.add(record)
        reservations.reserve_if_due(record)
    return reservations
