"""What is decided when leases are to end so that a request can start, see `core.preemption`."""

from __future__ import annotations

from dataclasses import field
from datetime import datetime

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Demand, Job, Priority
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.policy import Policy

MAX_PREEMPTED = 2
"""So often a job is preempted; then it goes first, and keeps what it gets."""


def is_preemptible(demand: Demand) -> bool:
    """True for what was asked for with the consent to end for others."""
    # `scavenge` is the consent also where an older version has recorded it, without the other word.
    return demand.preemptible or demand.priority is Priority.SCAVENGE


def with_consent(demand: Demand) -> Demand:
    """A demand that says of itself whether it may end for others, also by its priority: what holds is in the record."""
    is_said = demand.preemptible or not is_preemptible(demand)
    return demand if is_said else replace(demand, preemptible=True)


def was_preempted(job: Job) -> bool:
    """True if the last attempt of the job was preempted: the next one is, or was, in the queue at its place."""
    return bool(job.attempt_history) and job.attempt_history[-1].preempted


def goes_first(job: Job) -> bool:
    """True for the attempt that follows when a job was preempted as often as it may be; not for its retries."""
    return job.preempted >= MAX_PREEMPTED and was_preempted(job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """The leases that end so that one request can start. Kept until the request leaves the queue."""

    lease_id: str
    """The request."""
    victims: tuple[str, ...]
    """Ids of the leases that end for it; without those that keep their GPUs after all."""
    gpus: tuple[str, ...]
    """UUIDs of the GPUs on which it is to start, held for it; none once leases have kept theirs after all."""
    noticed_at: datetime
    """When the holders were told."""
    preempt_at: datetime
    """When leases without a job end; those of jobs have ended by then, or earlier."""
    end_s: float = field(default=float("inf"), compare=False)
    """The same on the monotonic clock; after a restart `runtime.outage` sets it."""

    def held_until_s(self, policy: Policy) -> float:
        """Until when the GPUs are held, if they do not come: a declared end may be later than `preempt_at` by twice the
        notice, and memory may be retained."""
        return self.end_s + 2 * policy.preempt_notice_s + 2 * policy.retained_memory_s + 60.0


@dataclass(frozen=True, slots=True)
class PreemptionRemoved:
    """The request that others were to end for has left the queue."""

    lease_id: str


PreemptionChange = Preemption | PreemptionRemoved
