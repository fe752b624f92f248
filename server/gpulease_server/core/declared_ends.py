"""When leases end by what was declared, and whether a request can start on a node before the calendar closes it."""

from __future__ import annotations

from collections.abc import Sequence

from gpulease_protocol.model import JobSpec, JobState, Lease, LeaseState
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import GpuRecord, Instant, JobRecord, LeaseRecord
from gpulease_server.core.token_budgets import held_s
from gpulease_server.core.user_limits import UserUsage

LEAST_S = 1.0
"""For how long an attempt may run at least that begins as the time of its lease ends."""


def spec_of_attempt(record: JobRecord, lease: Lease) -> JobSpec:
    """What the nodes of a job run. Of `timeout_s`, which each attempt counts from its start, the next attempt under a
    lease has what the lease had left when that attempt began: the lease lasts no longer than any other."""
    spec, history = record.spec, record.job.attempt_history
    last = next((one for one in reversed(history) if one.regrouped and one.lease_id == lease.id), None)
    if spec.timeout_s is None or last is None or last.ended_at is None or lease.granted_at is None:
        return spec
    held_s = max(0.0, (last.ended_at - lease.granted_at).total_seconds())
    return replace(spec, timeout_s=max(LEAST_S, spec.timeout_s - held_s))


def declared_end_s(ledger: Ledger, record: LeaseRecord, now: Instant) -> float | None:
    """When an active lease ends by its declared time, or by that of its token's budget, on the monotonic clock; None
    where it has neither. The time of a job begins with the job, a little later than its lease."""
    lease, budget = record.lease, ledger.budgets.get(record.lease.holder.token_id or "")
    begun_s, found = now.mono_s - held_s(record, now), list[float]()
    if lease.id in ledger.ends_s:
        found.append(ledger.ends_s[lease.id])
    elif lease.demand.time_s is not None:
        found.append(begun_s + lease.demand.time_s)
    if budget is not None and budget.budget.max_lease_s is not None:
        found.append(begun_s + budget.budget.max_lease_s)
    return min(found, default=None)


def is_closed_before_free(
    users: UserUsage, ledger: Ledger, record: LeaseRecord, gpus: Sequence[GpuRecord], needed: int
) -> bool:
    """True where a request cannot start on these GPUs of a node before they are closed to it, unless holders give GPUs
    back before their declared times: at no moment are so many as it needs both free and not closed. Those that are free
    or draining count as free now, and so do those of a lease without an end, or that may end before it."""
    now = users.now
    if now is None or users.latest_end(record.lease) is None:
        return False  # what is closed to one without a time stays the same until a window ends
    free_s = [(free_at_s(ledger, gpu, now) - now.mono_s, gpu.device.uuid) for gpu in gpus]
    for wait_s in sorted({one for one, _ in free_s}):
        closed = users.closed_to(record.lease, -wait_s)
        if sum(free_in_s <= wait_s and uuid not in closed for free_in_s, uuid in free_s) >= needed:
            return False
    return True


def free_at_s(ledger: Ledger, gpu: GpuRecord, now: Instant) -> float:
    """Before this time a GPU is not free, unless its holder gives it back; now where that is not known, and where it is
    being given back: its lease ends for a request (`core.preemption`), or when it is idle (`core.reclaim`), or its job
    is being stopped."""
    record = ledger.leases.get(gpu.lease_id or "")
    if record is None or gpu.draining or record.lease.state is not LeaseState.ACTIVE:
        return now.mono_s
    if record.lease.demand.reclaim_idle_after_s is not None:
        return now.mono_s
    job = ledger.live_jobs.get(record.lease.job_id or "")
    if record.lease.id in ledger.preempting or (job is not None and job.job.state is JobState.STOPPING):
        return now.mono_s
    budget = ledger.budgets.get(record.lease.holder.token_id or "")
    if budget is not None and budget.budget.gpu_hours_per_day is not None:
        return now.mono_s
    end_s = declared_end_s(ledger, record, now)
    return now.mono_s if end_s is None else max(end_s, now.mono_s)
