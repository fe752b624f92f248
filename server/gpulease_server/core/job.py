"""A job's life: submitted with its lease, launched by a worker, reported, ended; and, where it may, tried again.

Every attempt has a lease of its own. When an attempt fails, its lease ends like any other and its GPUs drain. So an
unhealthy GPU is not taken again, and nothing of the first attempt is left when the second begins. The next attempt's
lease goes to the end of the queue, and takes part in it after a pause. After a preemption (`core.preemption`) the next
attempt keeps the place, and does not pause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from gpulease_protocol.errors import GpuleaseError, NotFound, OverQuota
from gpulease_protocol.model import Demand, EndReason, Job, JobAttempt, JobState, Lease, LeaseState, Liveness
from gpulease_protocol.node_protocol import JobReport
from gpulease_server.core import dependencies
from gpulease_server.core.budget_records import enter_budget
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.happenings import CancelRequested, JobSubmitted, SubmittedJob
from gpulease_server.core.lease import answer_repeated, enqueue
from gpulease_server.core.lease_end import end_lease
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.pending import PendingRequests
from gpulease_server.core.policy import Policy
from gpulease_server.core.preemption_records import with_consent
from gpulease_server.core.queue import admit_waiting
from gpulease_server.core.reclaim_rule import with_reclaim_rule
from gpulease_server.core.records import Change, JobRecord, LeaseRecord, NotBefore
from gpulease_server.core.shadow_time import JOB_GRACE_S
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import queue_is_full, timed_demand

ATTEMPT_SUFFIX = re.compile(r"r[0-9]+$")
"""Of the id of a lease of a later attempt; ids themselves are hexadecimal."""
MAX_HISTORY = 20
"""Earlier attempts of a job that are kept."""
STOPPED_BY_DAEMON = "cancelled: "
"""So the reason of a job begins that the daemon stops: for a budget, a reservation, or others that wait."""
STUCK_NODES_SHOWN = 4
"""For how many nodes a job's reason says which processes do not die."""


def on_job_submitted(turn: Turn, submitted: JobSubmitted) -> None:
    """Take a job and its lease in; `settle` gives the verdict on both.

    Of an array it gives the verdict on the first job, since all ask for the same. The others are recorded with that, as
    queued, in one commit: an array is there whole or not at all.
    """
    if answer_repeated(turn, submitted.cause, submitted.key):
        return
    demand = timed_demand(turn.ledger, submitted, turn.policy)
    if isinstance(demand, GpuleaseError):
        turn.answer(submitted.cause, demand)
        return
    submitted = _with_time(submitted, with_consent(with_reclaim_rule(demand, turn.policy)))
    enter_budget(turn, submitted.holder.token_id, submitted.budget)
    first, *others = submitted.jobs
    refused = submitted.after_refused
    refused = refused or dependencies.check(turn.ledger, submitted.after, submitted.after_live)
    refused = refused or too_many_at_once(turn.ledger, submitted, turn.pending, turn.policy)
    waits = any(turn.ledger.is_live(one.job) for one in submitted.after)
    refused = refused or (too_many_waiting(turn.ledger, submitted, turn.policy) if waits else None)
    if refused is not None:
        turn.answer(submitted.cause, refused)
        return
    first_number = turn.ledger.next_number
    lease, job_record = _queued_job(turn, submitted, first, first_number, waits=waits)
    changes: list[Change] = [job_record]
    for number, member in enumerate(others, first_number + 1):
        member_lease, job_record = _queued_job(turn, submitted, member, number, waits=waits)
        lease_record = LeaseRecord(
            lease=member_lease,
            number=number,
            cause=submitted.cause,
            renewed_at=turn.now.at,
            requested_at_s=turn.now.mono_s,
        )
        changes += [lease_record, job_record]
    enqueue(turn, lease, submitted.cause, queue=True, key=submitted.key, changes=tuple(changes))
    turn.ledger.next_number = max(turn.ledger.next_number, first_number + len(submitted.jobs))
    if waits and lease.id in turn.pending:
        # Not by `settle`: what it waits for could end in this turn before that, and no one would tell it.
        admit_waiting(turn, lease.id)


def _with_time(submitted: JobSubmitted, demand: Demand) -> JobSubmitted:
    """The submission with the time after which its nodes end its jobs."""
    if demand == submitted.demand:
        return submitted
    jobs = tuple(replace(one, spec=replace(one.spec, timeout_s=demand.time_s)) for one in submitted.jobs)
    return replace(submitted, demand=demand, jobs=jobs)


def too_many_at_once(
    ledger: Ledger, submitted: JobSubmitted, undecided: PendingRequests, policy: Policy
) -> OverQuota | None:
    """Why an array with too many jobs for the queue is refused; None for one that fits, and for a single job."""
    further, remedy = len(submitted.jobs) - 1, "Submit fewer jobs at once, or try again later."
    if further and (full := queue_is_full(ledger, submitted.holder, undecided, further, policy.limits)) is not None:
        return OverQuota(full, remedy=remedy)
    if further and ledger.waiting_count + further > policy.max_queued:
        detail = f"The queue has {ledger.waiting_count} requests already; the limit is {policy.max_queued}."
        return OverQuota(detail, remedy=remedy)
    return None


def too_many_waiting(ledger: Ledger, submitted: JobSubmitted, policy: Policy) -> OverQuota | None:
    """Why jobs that wait for other jobs are refused; None if their user may have so many."""
    user, most = submitted.holder.user, policy.max_waiting_for_jobs
    waiting = ledger.waiting_for_jobs_by_user[user]
    if waiting + len(submitted.jobs) <= most:
        return None
    detail = f"User {user} has {waiting} jobs that wait for other jobs already; the limit is {most}."
    return OverQuota(detail, remedy="Submit the rest when some of them have started.")


def _queued_job(
    turn: Turn, submitted: JobSubmitted, member: SubmittedJob, number: int, *, waits: bool
) -> tuple[Lease, JobRecord]:
    """A job in the queue, or one that waits for others, and its lease."""
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
        reason=dependencies.reason_to_wait(submitted.after) if waits else "waiting for its GPUs",
        lease_id=member.lease_id,
        user=submitted.holder.user,
        launcher=member.spec.launcher,
        command=member.spec.command,
        created_at=turn.now.at,
        array_id=submitted.array_id,
        array_index=member.index,
        array_at_most=submitted.array_at_most,
        after=submitted.after,
    )
    return lease, JobRecord(job=job, spec=member.spec, number=number, uid=submitted.uid, gid=submitted.gid)


def on_cancel_requested(turn: Turn, cancelled: CancelRequested) -> None:
    """Let a job end. One that still waits ends at once; cancelling one that has ended changes nothing."""
    record = turn.ledger.jobs.get(cancelled.job_id)
    if record is None:
        detail = f"There is no job {cancelled.job_id}."
        turn.answer(cancelled.cause, NotFound(detail, remedy="`GET /v1/jobs` lists those that are kept."))
        return
    cancel_job(turn, record, cancelled.grace_s, "cancelled")
    turn.answer(cancelled.cause, turn.ledger.jobs[cancelled.job_id].job)


def cancel_job(turn: Turn, record: JobRecord, grace_s: float, why: str) -> None:
    """Let a job end, unless it has ended."""
    if record.job.state is JobState.QUEUED:
        has_run = record.job.attempts > 0
        what = "its next attempt" if has_run else "it"
        finish_job(turn, record, JobState.CANCELLED, f"cancelled before {what} started")
    elif not record.job.state.final:
        is_news = record.cancelled_at is None and not _is_told_why_it_stops(record)
        record = replace(record, grace_s=grace_s, cancelled_at=record.cancelled_at or turn.now.at)
        reason = why if is_news else record.job.reason
        change_job(turn, record, JobState.STOPPING, reason=reason, preempt_at=None)


def _is_told_why_it_stops(record: JobRecord) -> bool:
    """True for a job that stops already, for what is worth more than who wanted it to. Not where it was to start again
    after that: it does not, once it is cancelled."""
    was_to_go_on = record.job.preempt_at is not None or record.grows_at is not None
    return record.job.state is JobState.STOPPING and (bool(record.stuck_on) or not was_to_go_on)


def why_cancelled(record: JobRecord, by_user: str = "cancelled") -> str:
    """The reason with which a job ends that was cancelled: why the daemon has stopped it, where no user has."""
    reason = record.job.reason or ""
    return reason if reason.startswith(STOPPED_BY_DAEMON) and not record.stuck_on else by_user


def mark_stuck(turn: Turn, record: JobRecord, node: str, report: JobReport) -> None:
    """Some of its processes on a node do not die. It stops for as long as they live, and its GPUs stay its own: it is
    not known what those processes still do with them. Its reason says what was last seen of them; `job.stuck` tells of
    a node once in an attempt, since what is seen changes as they end one by one."""
    kept = report.reason or f"processes that SIGKILL does not end: {', '.join(map(str, report.unkillable))}"
    told = node in record.stuck_on
    stuck_on = record.stuck_on if told else (*record.stuck_on, node)
    reason = _stuck_parts(record, stuck_on, node, kept) if record.job.members else kept
    reason = f"cancelled; {reason}" if record.cancelled_at else reason
    shown = (record.job.state, record.job.reason) == (JobState.STOPPING, reason)
    if told and shown:
        return
    change_job(turn, replace(record, stuck_on=stuck_on), JobState.STOPPING, reason=reason)
    if not told and not shown:  # an older release has told of what is shown already
        turn.emit("job.stuck", job_id=record.job.id, lease_id=record.job.lease_id, node=node, reason=reason)


def _stuck_parts(record: JobRecord, stuck_on: Sequence[str], node: str, kept: str) -> str:
    """What keeps a job on several nodes from ending, by node, whichever of them has reported last."""
    parts = [one for one in record.job.members if one.node in stuck_on and (one.node == node or not one.state.final)]
    said = [f"on node {one.node}: {kept if one.node == node else one.reason}" for one in parts[:STUCK_NODES_SHOWN]]
    more = [f"and on {len(parts) - len(said)} more nodes"] if len(parts) > len(said) else []
    return "; ".join(said + more)


def kept_history(history: tuple[JobAttempt, ...]) -> tuple[JobAttempt, ...]:
    """The earlier attempts that are kept. Those that `may_retry` counts stay the longest; beside them the newest one
    after which nodes changed, which tells what its lease had left of its time (`declared_ends.spec_of_attempt`)."""
    newest = max((at for at, one in enumerate(history) if one.regrouped), default=None)
    while len(history) > MAX_HISTORY + (newest is not None):
        kept = (at for at in range(len(history)) if at != newest)
        least = min(kept, key=lambda at: (not history[at].regrouped, history[at].node_left, at))
        history = history[:least] + history[least + 1 :]
        newest = newest if newest is None or least > newest else newest - 1
    return history


def may_retry(record: JobRecord, *, node_left: bool = False) -> bool:
    """True while a job that fails has an attempt left. One whose node has left may be tried again in any case, and such
    attempts do not count; but `MAX_HISTORY` times at most."""
    uncounted = sum(attempt.node_left for attempt in record.job.attempt_history)
    counted = record.job.attempts - uncounted - record.regroups - record.job.preempted
    return (node_left and uncounted < MAX_HISTORY) or counted <= record.spec.retries


def retry_job(
    turn: Turn,
    record: JobRecord,
    reason: str | None,
    lease_end: EndReason = EndReason.JOB_FINISHED,
    *,
    ended_at: datetime | None = None,
    node_left: bool = False,
) -> None:
    """End the attempt and queue the next, which starts after a pause. One that could not even start is not tried again:
    what it lacks, it will lack again. `node_left`: its node has left, so that it does not count."""
    job, (first, longest) = record.job, turn.policy.retry_pause_s
    pause_s = min(longest, first * 2 ** min(job.attempts - record.regroups - job.preempted - 1, 30))
    why = (reason or "no reason is known").rstrip(".")
    uncounted = sum(attempt.node_left for attempt in job.attempt_history)
    what = "does not count" if node_left else "failed"
    are_counted = not (node_left or uncounted or record.regroups or job.preempted)
    of_all = f"attempt {job.attempts}" + (f" of {record.spec.retries + 1}" if are_counted else "")
    said = f"{of_all} {what}: {why}; the next one joins the queue after a pause of {pause_s:g} s"
    attempt = ended_attempt(turn, record, reason, ended_at)
    _queue_next(turn, record, replace(attempt, node_left=node_left), said, lease_end, pause_s)
    turn.emit("job.retried", job_id=job.id, lease_id=turn.ledger.jobs[job.id].job.lease_id, reason=said)
    turn.emit("lease.queued", lease_id=turn.ledger.jobs[job.id].job.lease_id, job_id=job.id)


def queue_preempted(turn: Turn, record: JobRecord, *, ended_at: datetime | None = None) -> None:
    """End an attempt that was preempted, and queue the next at the place of this one. It does not count, and does not
    pause. What the program has ended with says nothing: it was told to save what it has."""
    job, attempt = record.job, ended_attempt(turn, record, record.job.reason, ended_at)
    said = f"attempt {job.attempts} was preempted; the next one is in the queue at the same place"
    again = replace(record, grace_s=JOB_GRACE_S, job=replace(job, preempted=job.preempted + 1, preempt_at=None))
    _queue_next(turn, again, replace(attempt, preempted=True), said, EndReason.PREEMPTED, None)
    turn.emit("lease.preempted", lease_id=job.lease_id, job_id=job.id, reason=job.reason)
    turn.emit("job.preempted", job_id=job.id, lease_id=turn.ledger.jobs[job.id].job.lease_id, reason=said)
    turn.emit("lease.queued", lease_id=turn.ledger.jobs[job.id].job.lease_id, job_id=job.id)


def ended_attempt(turn: Turn, record: JobRecord, reason: str | None, ended_at: datetime | None = None) -> JobAttempt:
    """The attempt as the history of its job has it."""
    job = record.job
    return JobAttempt(
        number=job.attempts,
        lease_id=job.lease_id,
        node=job.gpus[0].node if job.gpus else None,
        exit_code=job.exit_code,
        reason=reason,
        started_at=job.started_at,
        ended_at=ended_at or turn.now.at,
        log_directory=record.log_directory,
    )


def _queue_next(
    turn: Turn, record: JobRecord, attempt: JobAttempt, said: str, lease_end: EndReason, pause_s: float | None
) -> None:
    """End the lease of an attempt that has ended, and queue the next one: at the end, after a pause; at the same place
    where that is None."""
    job, old = record.job, turn.ledger.leases[record.job.lease_id]
    if old.lease.state is not LeaseState.ENDED:
        end_lease(turn, old, lease_end)
    lease = Lease(
        # Follows from the first, because the core makes no ids; without a separator, because a cgroup's name is
        # compared by whole words.
        id=f"{ATTEMPT_SUFFIX.sub('', job.lease_id)}r{job.attempts + 1}",
        state=LeaseState.QUEUED,
        holder=old.lease.holder,
        demand=old.lease.demand,
        ttl_s=0.0,
        liveness=Liveness.JOB,
        job_id=job.id,
        created_at=turn.now.at,
    )
    now, queued = turn.now, LeaseRecord(lease=lease, number=turn.ledger.next_number, cause=turn.cause)
    if pause_s is not None:
        turn.put(NotBefore(lease.id, now.mono_s + pause_s))
    else:
        queued = replace(queued, place=old.arrival)
    turn.put(replace(queued, renewed_at=now.at, requested_at_s=now.mono_s))
    again = replace(
        job,
        state=JobState.QUEUED,
        reason=said,
        lease_id=lease.id,
        gpus=(),
        exit_code=None,
        started_at=None,
        traceback=None,
        members=(),
        attempt_history=kept_history((*job.attempt_history, attempt)),
    )
    fresh = replace(record, job=again, log_directory=None, fenced=False, go_at=None, parts_stopped_at=None)
    turn.put(replace(fresh, grows_at=None, stuck_on=()))


def change_job(turn: Turn, record: JobRecord, state: JobState, **changes: Any) -> None:
    """Change a job's state and whatever else is given, with an event where the state is another one."""
    turn.put(replace(record, job=replace(record.job, state=state, **changes)))
    lease_id, reason = record.job.lease_id, changes.get("reason")
    if state is not record.job.state:
        turn.emit(f"job.{state.value}", job_id=record.job.id, lease_id=lease_id, reason=reason)


def finish_job(
    turn: Turn,
    record: JobRecord,
    state: JobState,
    reason: str | None,
    lease_end: EndReason = EndReason.JOB_FINISHED,
    **changes: Any,
) -> None:
    """End a job for good, and its lease. Jobs that wait for it join the queue, or are cancelled with it."""
    doomed = _end_job(turn, record, state, reason, lease_end, **changes)
    while doomed:
        # In a loop, because a chain may be longer than Python's stack.
        job_id, why = doomed.popitem()
        waiting = turn.ledger.jobs[job_id]
        if waiting.job.state is JobState.QUEUED:
            doomed |= _end_job(turn, waiting, JobState.CANCELLED, why)


def _end_job(
    turn: Turn,
    record: JobRecord,
    state: JobState,
    reason: str | None,
    lease_end: EndReason = EndReason.JOB_FINISHED,
    **changes: Any,
) -> dict[str, str]:
    """End one job. Its environment, which may hold secrets and 1 MiB, and its `notify` are kept no longer. Returns the
    ids of the jobs that cannot start any more, each with the reason."""
    ended_at, spec = changes.pop("ended_at", turn.now.at), replace(record.spec, environment={}, notify=None)
    changes |= {"state": state, "reason": reason, "ended_at": ended_at, "preempt_at": None}
    turn.put(replace(record, spec=spec, job=replace(record.job, **changes)))
    turn.emit("job.ended", job_id=record.job.id, lease_id=record.job.lease_id, reason=reason or state.value)
    lease = turn.ledger.leases[record.job.lease_id]
    if lease.lease.state is not LeaseState.ENDED:
        waited = lease.lease.state is LeaseState.QUEUED
        end_lease(turn, lease, EndReason.CANCELLED if waited else lease_end)
    return dependencies.release_dependents(turn, turn.ledger.jobs[record.job.id].job)
