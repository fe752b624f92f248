"""When a waiting request gets its GPUs, as the daemon expects; else what is in the way without an end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from gpulease_protocol.model import Gpu, GpuState, Job, JobState, Lease, LeaseState, Selection, TopologyMode
from gpulease_protocol.status_table import describe_holder, format_age, format_duration, job_label


def expected_starts(
    gpus: Sequence[Gpu], leases: Sequence[Lease], jobs: Sequence[Job], queue: Sequence[Lease], now: datetime
) -> dict[str, str]:
    """By lease, for people: `in about 40m`, `in 40m to 3h 20m`, or who holds a GPU that it needs without a limit.

    Of the last nothing is said to requests for certain GPUs, and where there are several nodes, because their GPUs do
    not come free for one another. Nor where enough GPUs are free: then something else keeps a request waiting, as a
    limit or a reservation; `explain` knows.
    """
    holding = {lease.id: lease for lease in leases if lease.state is LeaseState.ACTIVE}
    job_of = {job.lease_id: job for job in jobs}
    endless = _longest_without_limit(gpus, holding, job_of) if len({gpu.node for gpu in gpus}) == 1 else None
    running = Counter(job.array_id for job in jobs if job.state is not JobState.QUEUED)
    free = Counter(gpu.reserved_for for gpu in gpus if gpu.state is GpuState.FREE)
    found: dict[str, str] = {}
    for lease in queue:
        demand, job = lease.demand, job_of.get(lease.id)
        any_will_do = demand.selection is Selection.COUNT and not demand.gpu_model and not demand.min_free_memory_bytes
        if start := expected_start(lease, now):
            found[lease.id] = start
        elif lease.position is None:
            found[lease.id] = "after other jobs"
        elif job is not None and job.array_at_most and running[job.array_id] >= job.array_at_most:
            found[lease.id] = f"its array runs {job.array_at_most} at once"
        elif free[None] + free[lease.id] >= demand.count:  # the others are held for other requests
            continue
        elif endless and any_will_do and demand.topology is not TopologyMode.REQUIRED:
            found[lease.id] = _without_limit(endless, job_of.get(endless.id), now)
    return found


def expected_start(lease: Lease, now: datetime) -> str:
    """In what time the daemon expects a request to start: about then by declared times, a range by history; empty
    where it does not know."""
    if lease.expected_at is not None:
        return f"in about {_coarse(_seconds_until(lease.expected_at, now))}"
    if lease.expected_from is None or lease.expected_until is None:
        return ""
    from_s, until_s = _seconds_until(lease.expected_from, now), _seconds_until(lease.expected_until, now)
    latest = format_duration(until_s)
    return f"in {_coarse(from_s)} to {latest}" if from_s >= 1 else f"within {latest}"


def _coarse(seconds: float) -> str:
    """A length of time without its seconds: `42s`, `40m`, `1h 59m`."""
    return format_age(seconds) if seconds < 3600 else format_duration(seconds)


def _seconds_until(at: datetime, now: datetime) -> float:
    return max(0.0, (at - now).total_seconds())


def _longest_without_limit(gpus: Sequence[Gpu], holding: dict[str, Lease], job_of: dict[str, Job]) -> Lease | None:
    """Of the leases without a known end: the one that has held GPUs for the longest time."""
    held = (holding[gpu.lease_id] for gpu in gpus if gpu.lease_id in holding)
    endless = [
        lease
        for lease in held
        if (lease.ends_at is None if lease.id not in job_of else job_of[lease.id].timeout_s is None)
        and lease.preempt_at is None
    ]
    return min(endless, key=lambda lease: lease.granted_at or lease.created_at, default=None)


def _without_limit(lease: Lease, job: Job | None, now: datetime) -> str:
    held_s = (now - (lease.granted_at or lease.created_at)).total_seconds()
    return f"unknown: {describe_holder(lease.holder, job_label(job))} for {format_age(held_s)}, no end declared"
