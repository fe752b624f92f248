"""Arrays: how many jobs of one run, and whether another may begin.

A job whose array is at its limit takes no part in the queue, as one that pauses before a retry does not: it claims no
GPU, and holds nobody back.
"""

from __future__ import annotations

from collections import Counter

from gpulease.model import Job, JobState

from .ledger import Instant, LeaseRecord, Ledger


def under_way(ledger: Ledger) -> Counter[str]:
    """How many jobs of each array have GPUs. One walk over the jobs that have not ended."""
    jobs = (record.job for record in ledger.live_jobs.values())
    return Counter(job.array_id for job in jobs if job.array_id is not None and job.state is not JobState.QUEUED)


def at_limit(ledger: Ledger, record: LeaseRecord, running: Counter[str]) -> Job | None:
    """The job of a queued lease whose array runs as many jobs as it may; None where nothing of the kind is in its
    way."""
    known = ledger.jobs.get(record.lease.job_id or "")
    if known is None or known.job.array_id is None or known.job.array_at_most is None:
        return None
    return known.job if running[known.job.array_id] >= known.job.array_at_most else None


def takes_part(ledger: Ledger, record: LeaseRecord, now: Instant, running: Counter[str]) -> bool:
    """True when a queued lease may begin: it does not pause before a retry, and its array is below its limit."""
    pauses = ledger.not_before.get(record.lease.id, now.mono_s) > now.mono_s
    return not pauses and at_limit(ledger, record, running) is None


def array_of(ledger: Ledger, record: LeaseRecord) -> str | None:
    """The array of a lease's job."""
    known = ledger.jobs.get(record.lease.job_id or "")
    return None if known is None else known.job.array_id
