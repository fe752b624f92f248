"""Jobs that started so late that they would be in a window of someone else: they are ended before it begins.

The time of a job counts from its start. `core.calendar` assumes that this is at most `JOB_START_S` after the grant, and
`gang_start_s` more on several nodes. A host that restarts, or has no worker for a while, takes the order later.
Such a job is the only one that is ended for a reservation: one that has held its GPUs for longer than its time and that
delay. It is stopped as if cancelled, so early that what it leaves in memory can go too, and is not tried again.

A job that started in time has been stopped by its node at that moment. One without a time is never ended: it is in a
window only if the clock has jumped, or its user has left the group that the reservation is for.
"""

from __future__ import annotations

from datetime import timedelta

from gpulease_protocol.model import LeaseState
from gpulease_protocol.reservations import Reservation
from gpulease_server.core.calendar import is_for
from gpulease_server.core.explain.reserved_gpus import describe_reservation
from gpulease_server.core.job import STOPPED_BY_DAEMON, cancel_job
from gpulease_server.core.records import GpuRecord, JobRecord, LeaseRecord
from gpulease_server.core.shadow_time import END_S, JOB_GRACE_S, JOB_START_S
from gpulease_server.core.token_budgets import TokenBudgets, held_s
from gpulease_server.core.turn import Turn


def end_late_jobs(turn: Turn) -> None:
    """End those in the way of a window that begins soon. Costs one look at each GPU of it, and nothing where there is
    none."""
    if not turn.ledger.calendar.entries:
        return
    soon = turn.now.at + timedelta(seconds=JOB_GRACE_S + END_S + 2 * turn.policy.retained_memory_s)
    for entry in turn.ledger.calendar.in_order():
        if entry.from_at > soon:
            return
        for device in entry.gpus:
            gpu = turn.ledger.gpus.get(device.uuid)
            if gpu is not None and gpu.lease_id is not None and not gpu.draining:
                _end_if_late(turn, entry, gpu, turn.ledger.leases[gpu.lease_id])


def _end_if_late(turn: Turn, entry: Reservation, gpu: GpuRecord, record: LeaseRecord) -> None:
    lease, user = record.lease, record.lease.holder.user
    job = turn.ledger.live_jobs.get(lease.job_id or "")
    if job is None or lease.state is not LeaseState.ACTIVE or not _is_late(turn, record) or _ends_already(job):
        return
    if is_for(entry, user, turn.ledger.limits.group_of.get(user)):
        return
    where = f"GPU {gpu.device.index} of {gpu.device.node} is {describe_reservation(entry)}"
    why = f"it started too late to end by itself before that: {where}"
    turn.emit("job.ended_for_reservation", job_id=job.job.id, lease_id=lease.id, reason=why)
    cancel_job(turn, job, min(job.grace_s, JOB_GRACE_S), STOPPED_BY_DAEMON + why)


def _is_late(turn: Turn, record: LeaseRecord) -> bool:
    """True for a job that would have been stopped by its node, had it started in time."""
    longest_s = TokenBudgets(turn.ledger, turn.now).longest_s(record.lease)
    if longest_s is None:
        return False
    start_s = JOB_START_S + (turn.policy.gang_start_s if record.lease.demand.nodes > 1 else 0.0)
    return held_s(record, turn.now) > longest_s + start_s


def _ends_already(job: JobRecord) -> bool:
    return job.cancelled_at is not None and job.grace_s <= JOB_GRACE_S
