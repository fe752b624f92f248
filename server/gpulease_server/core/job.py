"""A job's life: submitted with its lease, launched by a worker, reported, ended; and, where it may, tried again.

Every attempt has a lease of its own. The lease of an attempt that has failed ends like any other and its GPUs drain, so
that an ill GPU is not taken again and nothing of the first attempt is left when the second begins; the next attempt's
lease goes to the end of the queue, and takes part in it after a pause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gpulease.errors import NotFound, OverQuota
from gpulease.exchange import JobReport, RunState
from gpulease.model import EndReason, Job, JobState, Lease, LeaseState, Liveness

from .happenings import ArrayMember, JobCancelled, JobSubmitted
from .lease import answered_before, end, take_in
from .ledger import Change, JobRecord, LeaseRecord, NotBefore
from .quota import queue_is_full
from .turn import Turn


def on_submitted(turn: Turn, submitted: JobSubmitted) -> None:
    """Take a job and its lease in; `settle` gives the verdict on both.

    Of an array it gives the verdict on the first job, since all ask for the same. The others are recorded with that, as
    queued, in one commit: an array is there whole or not at all.
    """
    if answered_before(turn, submitted.cause, submitted.key):
        return
    waiting = len(turn.ledger.queue) + len(submitted.further)
    user, limits = submitted.holder.user, turn.policy.limits
    if queue_is_full(turn.ledger, user, turn.pending, len(submitted.further), limits) and submitted.further:
        detail = f"{turn.ledger.waiting[user]} requests of user {user} wait already, and at most {limits.queued} may."
        turn.answer(submitted.cause, OverQuota(detail, remedy="Submit fewer jobs at once, or ask again later."))
        return
    if submitted.further and waiting > turn.policy.max_queued:
        detail = f"{len(turn.ledger.queue)} requests wait already, and at most {turn.policy.max_queued} may."
        turn.answer(submitted.cause, OverQuota(detail, remedy="Submit fewer jobs at once, or ask again later."))
        return
    number = turn.ledger.next_number
    first = ArrayMember(
        job_id=submitted.job_id,
        lease_id=submitted.lease_id,
        index=submitted.array_index or 0,
        spec=submitted.spec,
    )
    lease, record = _waiting(turn, submitted, first, number)
    changes: list[Change] = [record]
    for member in submitted.further:
        number += 1
        further, job = _waiting(turn, submitted, member, number)
        waits = LeaseRecord(
            lease=further,
            number=number,
            cause=submitted.cause,
            renewed_at=turn.now.at,
            asked_at_s=turn.now.mono_s,
        )
        changes += [waits, job]
    take_in(turn, lease, submitted.cause, queue=True, key=submitted.key, changes=tuple(changes))
    turn.ledger.next_number = max(turn.ledger.next_number, number + 1)


def _waiting(turn: Turn, submitted: JobSubmitted, member: ArrayMember, number: int) -> tuple[Lease, JobRecord]:
    """A job that waits, and the lease that it waits for."""
    lease = Lease(
        id=member.lease_id,
        state=LeaseState.QUEUED,
        holder=submitted.holder,
        demand=submitted.demand,
        ttl_s=0.0,
        liveness=Liveness.JOB,
        job_id=member.job_id,
        created_at=turn.now.at,
    )
    job = Job(
        id=member.job_id,
        name=submitted.name,
        state=JobState.QUEUED,
        reason="waits for its GPUs",
        lease_id=member.lease_id,
        user=submitted.holder.user,
        launcher=member.spec.launcher,
        command=member.spec.command,
        created_at=turn.now.at,
        array_id=submitted.array_id,
        array_index=None if submitted.array_id is None else member.index,
        array_at_most=submitted.array_at_most,
    )
    return lease, JobRecord(job=job, spec=member.spec, number=number, uid=submitted.uid, gid=submitted.gid)


def on_cancelled(turn: Turn, cancelled: JobCancelled) -> None:
    """Let a job end. One that still waits ends at once; cancelling one that has ended changes nothing."""
    record = turn.ledger.jobs.get(cancelled.job_id)
    if record is None:
        detail = f"There is no job {cancelled.job_id}."
        turn.answer(cancelled.cause, NotFound(detail, remedy="gpulease jobs shows those there are."))
        return
    if record.job.state is JobState.QUEUED:
        _finish(turn, record, JobState.CANCELLED, "cancelled before it began")
    elif not record.job.state.final:
        first = record.cancelled_at is None
        record = replace(record, grace_s=cancelled.grace_s, cancelled_at=record.cancelled_at or turn.now.at)
        # What keeps one that stops already is worth more than who wanted it to.
        reason = "cancelled" if first and record.job.state is not JobState.STOPPING else record.job.reason
        _change(turn, record, JobState.STOPPING, reason=reason)
    turn.answer(cancelled.cause, turn.ledger.jobs[cancelled.job_id].job)


def on_job_reports(turn: Turn, node: str, reports: Iterable[JobReport]) -> None:
    """Take in what the worker says of every job it knows. A job it should run and has lost the record of is lost.

    Also by a worker's first report: were the job ordered again, it would run twice.
    """
    by_run = {(report.job_id, report.attempt): report for report in reports}
    for record in list(turn.ledger.live_jobs.values()):
        if record.job.gpus and record.job.gpus[0].node == node:
            report = by_run.get((record.job.id, record.job.attempts))
            if report is not None:
                _reported(turn, record, report)
            elif record.log_directory is not None or record.job.started_at is not None:
                _finish(turn, record, JobState.LOST, f"the worker of {node} no longer knows the job")
            elif record.cancelled_at is not None:
                _finish(turn, record, JobState.CANCELLED, "cancelled before it began")


def _reported(turn: Turn, record: JobRecord, report: JobReport) -> None:
    if report.log_directory is not None and report.log_directory != record.log_directory:
        record = replace(record, log_directory=report.log_directory)
        turn.put(record)
    if report.state is RunState.RUNNING and record.job.started_at is None:
        state = JobState.STOPPING if record.job.state is JobState.STOPPING else JobState.RUNNING
        _change(turn, record, state, started_at=report.started_at or turn.now.at)
        record = turn.ledger.jobs[record.job.id]
    if report.unkillable and report.state is not RunState.EXITED:
        _stuck(turn, record, report)
    elif report.state is RunState.EXITED:
        started = record.job.started_at or report.started_at
        changes: dict[str, Any] = {
            "exit_code": report.exit_code,
            "traceback": report.traceback,
            "started_at": started,
            "ended_at": report.ended_at or turn.now.at,
        }
        state, reason = _verdict(record, report)
        if state is JobState.FAILED and started is not None and record.job.attempts <= record.spec.retries:
            _try_again(turn, record, reason)
        else:
            _finish(turn, record, state, reason, **changes)


def _stuck(turn: Turn, record: JobRecord, report: JobReport) -> None:
    """Some of its processes do not die. It stops for as long as they live, and its GPUs stay its own: nobody can say
    what those processes still do with them."""
    kept = report.reason or f"processes that SIGKILL does not end: {', '.join(map(str, report.unkillable))}"
    reason = f"cancelled; {kept}" if record.cancelled_at else kept
    if (record.job.state, record.job.reason) == (JobState.STOPPING, reason):
        return
    _change(turn, record, JobState.STOPPING, reason=reason)
    turn.event("job.stuck", job_id=record.job.id, lease_id=record.job.lease_id, reason=reason)


def _verdict(record: JobRecord, report: JobReport) -> tuple[JobState, str | None]:
    """The final state and the reason. A command that ended well before it was stopped has succeeded."""
    if report.exit_code == 0 and not report.timed_out:
        return JobState.SUCCEEDED, None
    if report.timed_out:
        return JobState.TIMED_OUT, report.reason or "ran longer than its time limit"
    if record.cancelled_at is not None:
        return JobState.CANCELLED, "cancelled"
    return JobState.FAILED, report.reason or f"exit code {report.exit_code}"


def _try_again(turn: Turn, record: JobRecord, reason: str | None) -> None:
    """End the attempt and queue the next, which starts after a pause. One that could not even start is not tried again:
    what it lacks, it will lack again."""
    job, old = record.job, turn.ledger.leases[record.job.lease_id]
    if old.lease.state is not LeaseState.ENDED:
        end(turn, old, EndReason.JOB_FINISHED)
    first, longest = turn.policy.retry_pause_s
    pause_s = min(longest, first * 2 ** min(job.attempts - 1, 30))
    lease = Lease(
        # Follows from the first, because the core makes no ids; without a separator, because a cgroup's name is
        # compared by whole words.
        id=f"{job.lease_id.removesuffix(f'r{job.attempts}')}r{job.attempts + 1}",
        state=LeaseState.QUEUED,
        holder=old.lease.holder,
        demand=old.lease.demand,
        ttl_s=0.0,
        liveness=Liveness.JOB,
        job_id=job.id,
        created_at=turn.now.at,
    )
    turn.put(NotBefore(lease.id, turn.now.mono_s + pause_s))
    number, now = turn.ledger.next_number, turn.now
    turn.put(LeaseRecord(lease=lease, number=number, cause=turn.cause, renewed_at=now.at, asked_at_s=now.mono_s))
    said = (
        f"attempt {job.attempts} of {record.spec.retries + 1} failed: {(reason or 'no reason is known').rstrip('.')};"
        f" the next waits for its GPUs in {pause_s:g} s"
    )
    again = replace(
        job, state=JobState.QUEUED, reason=said, lease_id=lease.id, gpus=(), started_at=None, traceback=None
    )
    turn.put(replace(record, job=again, log_directory=None))
    turn.event("job.retried", job_id=job.id, lease_id=lease.id, reason=said)
    turn.event("lease.queued", lease_id=lease.id, job_id=job.id)


def _change(turn: Turn, record: JobRecord, state: JobState, **changes: Any) -> None:
    turn.put(replace(record, job=replace(record.job, state=state, **changes)))
    lease_id, reason = record.job.lease_id, changes.get("reason")
    if state is not record.job.state:
        turn.event(f"job.{state.value}", job_id=record.job.id, lease_id=lease_id, reason=reason)


def _finish(turn: Turn, record: JobRecord, state: JobState, reason: str | None, **changes: Any) -> None:
    ended_at = changes.pop("ended_at", turn.now.at)
    turn.put(replace(record, job=replace(record.job, state=state, reason=reason, ended_at=ended_at, **changes)))
    turn.event("job.ended", job_id=record.job.id, lease_id=record.job.lease_id, reason=reason or state.value)
    lease = turn.ledger.leases[record.job.lease_id]
    if lease.lease.state is not LeaseState.ENDED:
        waited = lease.lease.state is LeaseState.QUEUED
        end(turn, lease, EndReason.CANCELLED if waited else EndReason.JOB_FINISHED)
