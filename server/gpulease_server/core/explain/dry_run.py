"""What would become of a request that is not made: for `dry_run`. Reads the ledger, and changes nothing."""

from __future__ import annotations

from collections.abc import Collection

from gpulease_protocol.budgets import Budget
from gpulease_protocol.errors import OverQuota
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.model import Lease
from gpulease_server.core.easy_backfill import EasyBackfill
from gpulease_server.core.explain.connections import describe_connections
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.explain.never_fits import is_never
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.pending import PendingRequests
from gpulease_server.core.place import place
from gpulease_server.core.placement import Blocked, NeedsReading, Placed, min_gpus
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant, LeaseRecord
from gpulease_server.core.reservation_view import reservations_before
from gpulease_server.core.token_budgets import new_budget
from gpulease_server.core.user_limits import never_within_limits, queue_is_full
from gpulease_server.core.wording import describe_places

PROMISE = "Nothing is reserved: another request may be first."


def dry_run(
    ledger: Ledger,
    lease: Lease,
    now: Instant,
    policy: Policy,
    *,
    further_jobs: int = 0,
    queue: bool = True,
    budget: Budget | None = None,
) -> Explanation | OverQuota:
    """Whether a request fits at this moment: `fits_now`, `not_now` or `never`; or why it would be refused.

    It rests on the last reading of each node, which for a real request may have to be made again. `further_jobs`: how
    many more an array has, which are asked for together with this one.
    """
    record = LeaseRecord(lease=lease, number=ledger.next_number, cause="")
    demand = lease.demand
    if is_never(ledger, demand):
        return explain(ledger, record, now, policy, stays_queued=False)
    token_id = lease.holder.token_id
    unmade = None if token_id is None or budget is None else new_budget(token_id, budget, now)
    reservations = reservations_before(ledger, record, now, policy, unmade)
    users = reservations.users
    never = never_within_limits(users, lease, min_gpus(ledger, demand))
    if never is not None:
        return never
    if users.limit_reached(lease, min_gpus(ledger, demand)) is None:
        gpus_left, closed = users.gpus_left(lease), users.closed_to(lease)

        def find(reserved: Collection[str]) -> Placed | NeedsReading | Blocked:
            return place(ledger, demand, reserved, now, policy, most_gpus=gpus_left, closed=closed)

        placed = find(reservations.by_uuid.keys())
        if isinstance(placed, Blocked):
            placed = EasyBackfill(reservations).place(record, find) or placed
        if not isinstance(placed, Blocked):
            if further_jobs and (full := _queue_is_full(ledger, lease, policy, further_jobs)) is not None:
                return full
            first = f"the first of {further_jobs + 1} jobs would get " if further_jobs else ""
            named = describe_places(gpu.device for gpu in placed.gpus)
            connected = describe_connections(ledger, demand, (gpu.device for gpu in placed.gpus))
            return Explanation(verdict="fits_now", sentence=f"Fits now: {first}{named}.{connected} {PROMISE}")
    if queue and (full := _queue_is_full(ledger, lease, policy, further_jobs + 1)) is not None:
        return full
    return explain(ledger, record, now, policy, reservations=reservations, stays_queued=queue)


def _queue_is_full(ledger: Ledger, lease: Lease, policy: Policy, further: int) -> OverQuota | None:
    if (full := queue_is_full(ledger, lease.holder, PendingRequests(), further, policy.limits)) is not None:
        return OverQuota(full, remedy="Try again when some of them are granted, or cancel some.")
    if ledger.waiting_count + further > policy.max_queued:
        detail = f"The queue has {ledger.waiting_count} requests; the limit is {policy.max_queued}."
        return OverQuota(detail, remedy="Try again later.")
    return None
