"""Which queued requests may be granted now: not those that pause before a retry, or that their array stops. Who is
stopped by a limit of a user, group or token is told by `core.user_order`. And which of them one look answers for.

A request that is not eligible reserves no GPU and delays no other.
"""

from __future__ import annotations

from gpulease_protocol.model import Demand, Job
from gpulease_server.core.demand_classes import DemandClasses
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.placement import min_gpus
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant, LeaseRecord
from gpulease_server.core.user_limits import UserUsage


def array_at_limit(ledger: Ledger, record: LeaseRecord) -> Job | None:
    """The job of a queued lease that waits for the limit of its array; None if the limit does not delay it."""
    known = ledger.jobs.get(record.lease.job_id or "")
    if known is None or known.job.array_id is None or known.job.array_at_most is None:
        return None
    running = ledger.job_index.running_in_array[known.job.array_id]
    return known.job if running >= known.job.array_at_most else None


def is_eligible(ledger: Ledger, record: LeaseRecord, now: Instant) -> bool:
    """True when a queued lease may begin: it does not pause before a retry, and its array is below its limit."""
    pauses = ledger.not_before.get(record.lease.id, now.mono_s) > now.mono_s
    return not pauses and array_at_limit(ledger, record) is None


def divided_queue(ledger: Ledger, users: UserUsage, policy: Policy) -> DemandClasses:
    """The queue by what is asked for, with classes of their own for those who have a limit, or a reservation, by now;
    for everyone where usage counts. To be asked for before the classes are looked at: what sets users apart may have
    changed since."""
    apart = None if policy.fair_share else ledger.calendar.users_apart(users.limited_users, users.index)
    return ledger.classes_by_user(apart, timed_apart=policy.easy_backfill)


def min_gpus_of(ledger: Ledger, users: UserUsage, demand: Demand) -> int:
    """The fewest GPUs that a grant of this demand has; looked up once for each demand."""
    if demand not in users.min_gpus:
        users.min_gpus[demand] = min_gpus(ledger, demand)
    return users.min_gpus[demand]
