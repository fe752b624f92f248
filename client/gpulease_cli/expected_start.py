"""When a waiting request gets its GPUs, as far as that follows from declared time limits. Pure.

An estimate: limits per user and newer requests that pass are known to the daemon alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta

from gpulease_protocol.model import Gpu, GpuState, Job, JobState, Lease, LeaseState, Selection, TopologyMode
from gpulease_protocol.status_table import describe_holder, format_age, job_label


def expected_starts(
    gpus: Sequence[Gpu], leases: Sequence[Lease], jobs: Sequence[Job], queue: Sequence[Lease], now: datetime
) -> dict[str, str]:
    """By lease, for people: `in 40m or less`, or who holds a GPU that it needs without a limit.

    Each request is counted with all before it. Nothing is said of requests for certain GPUs, and where there are
    several nodes, because their GPUs do not come free for one another.
    """
    holding = {lease.id: lease for lease in leases if lease.state is LeaseState.ACTIVE}
    job_of = {job.lease_id: job for job in jobs}
    ends = sorted(filter(None, (_free_at(gpu, holding, job_of, now) for gpu in gpus)))
    running = Counter(job.array_id for job in jobs if job.state is not JobState.QUEUED)
    found: dict[str, str] = {}
    needed = 0
    for lease in queue:
        demand, job = lease.demand, job_of.get(lease.id)
        if lease.position is None:
            found[lease.id] = "after other jobs"
            continue
        if job is not None and job.array_at_most and running[job.array_id] >= job.array_at_most:
            found[lease.id] = f"its array runs {job.array_at_most} at once"
            continue
        any_will_do = demand.selection is Selection.COUNT and not demand.gpu_model and not demand.min_free_memory_bytes
        any_will_do = any_will_do and demand.topology is not TopologyMode.REQUIRED
        if not any_will_do or len({gpu.node for gpu in gpus}) != 1:
            break
        needed += demand.count
        if needed <= len(ends):
            wait_s = (ends[needed - 1] - now).total_seconds()
            if wait_s > 0:
                found[lease.id] = f"in {format_age(wait_s)} or less"
        elif endless := _longest_without_limit(gpus, holding, job_of):
            found[lease.id] = _without_limit(endless, job_of.get(endless.id), now)
    return found


def _free_at(gpu: Gpu, holding: dict[str, Lease], job_of: dict[str, Job], now: datetime) -> datetime | None:
    """When a GPU is free at the latest; None where that is not known."""
    if gpu.state is GpuState.FREE:
        return now
    job, lease = job_of.get(gpu.lease_id or ""), holding.get(gpu.lease_id or "")
    if job is None and gpu.state is GpuState.LEASED and lease is not None and lease.ends_at is not None:
        return max(now, lease.ends_at)
    if gpu.state is not GpuState.LEASED or job is None or job.timeout_s is None or job.started_at is None:
        return None
    return max(now, job.started_at + timedelta(seconds=job.timeout_s))


def _longest_without_limit(gpus: Sequence[Gpu], holding: dict[str, Lease], job_of: dict[str, Job]) -> Lease | None:
    """The lease that has held GPUs for the longest time, of those without a time limit."""
    held = (holding[gpu.lease_id] for gpu in gpus if gpu.lease_id in holding)
    endless = [
        lease
        for lease in held
        if (lease.ends_at is None if lease.id not in job_of else job_of[lease.id].timeout_s is None)
    ]
    return min(endless, key=lambda lease: lease.granted_at or lease.created_at, default=None)


def _without_limit(lease: Lease, job: Job | None, now: datetime) -> str:
    held_s = (now - (lease.granted_at or lease.created_at)).total_seconds()
    return f"{describe_holder(lease.holder, job_label(job))} for {format_age(held_s)}, no limit"
