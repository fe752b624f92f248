"""Idle GPUs are taken back while someone waits for them: of leases that agreed to it, and of interactive ones where the
administrator says so. Never by an average, and never without notice. See docs/design/0016.

    a lease with a rule --idle for long, and needed--> noticed --the moment comes, still idle and needed--> ended
                ^                                         |
                +---work, keep, unknown readings, no one waits (withdrawn)
"""

from __future__ import annotations

from collections.abc import Iterable

from gpulease_protocol.model import EndReason, JobState, Lease
from gpulease_server.core.declared_ends import declared_end_s
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.idle import IdleTime, idle_time
from gpulease_server.core.job import STOPPED_BY_DAEMON, cancel_job
from gpulease_server.core.kept_leases import kept_now
from gpulease_server.core.lease_end import end_lease
from gpulease_server.core.reclaim_choice import leases_to_reclaim
from gpulease_server.core.reclaim_records import ReclaimNotice
from gpulease_server.core.reclaim_rule import withdraw_notice
from gpulease_server.core.records import LeaseRecord
from gpulease_server.core.shadow_time import JOB_GRACE_S, JOB_START_S
from gpulease_server.core.timestamps import wall_clock
from gpulease_server.core.token_budgets import last_moment_s
from gpulease_server.core.turn import Turn
from gpulease_server.core.wording import duration

CHECK_S = 5.0
"""Time between two looks at who waits for idle GPUs, which cost a walk through the queue."""


def reclaim_idle(turn: Turn, since_last_s: float, stalled_s: float) -> None:
    """Withdraw notices that no longer hold; every `CHECK_S` also give notices, and end leases of which the moment has
    come. `since_last_s`: since the last tick. While the daemon did not run no one could object."""
    index = turn.ledger.reclaims
    if not index.leases:
        return
    for told in list(index.notices.values()) if stalled_s > 0 else ():
        turn.put(replace(told, at_s=(told.at_s or 0.0) + stalled_s))
    is_due = turn.now.mono_s // CHECK_S != (turn.now.mono_s - since_last_s) // CHECK_S
    idle = _idle_leases(turn, list(index.leases if is_due else index.notices))
    if not is_due or not idle:
        return
    needed = leases_to_reclaim(turn, idle) if turn.ledger.queue else {}
    early = {
        for_id for lease_id, for_id in needed.items() if not _has_come(index.notices.get(lease_id), idle[lease_id])
    }
    for lease_id, one in idle.items():
        notice = index.notices.get(lease_id)
        if lease_id not in needed:
            if notice is not None:
                withdraw_notice(turn, lease_id, "no one waits any more whom they would help")
        elif notice is None:
            _give_notice(turn, turn.ledger.leases[lease_id], one, needed[lease_id])
        elif needed[lease_id] not in early:  # of another lease that must end for the same request it has not come
            _end(turn, turn.ledger.leases[lease_id], one, needed[lease_id])


def _has_come(notice: ReclaimNotice | None, idle: IdleTime) -> bool:
    """True where a reading of each GPU of a lease was begun after the moment that its holder was told."""
    return notice is not None and idle.until_s >= (notice.at_s or 0.0)


def _idle_leases(turn: Turn, ids: Iterable[str]) -> dict[str, IdleTime]:
    """Leases that GPUs may be taken back from, by id; the notices of all others are withdrawn."""
    idle: dict[str, IdleTime] = {}
    for lease_id in ids:
        found = _why_not(turn, turn.ledger.leases[lease_id])
        if isinstance(found, IdleTime):
            idle[lease_id] = found
        elif lease_id in turn.ledger.reclaims.notices:
            withdraw_notice(turn, lease_id, found)
    return idle


def _why_not(turn: Turn, record: LeaseRecord) -> IdleTime | str:
    """For how long a lease has been idle, if its GPUs may be taken back; else why they may not."""
    lease, after_s = record.lease, record.lease.demand.reclaim_idle_after_s
    if kept_now(record, turn.now) is not None:
        return "they are kept on purpose"
    if lease.id in turn.ledger.preempting:
        return "it ends for another request"
    if lease.job_id is not None:
        job = turn.ledger.live_jobs.get(lease.job_id)
        if job is None or job.cancelled_at is not None or job.job.state is JobState.STOPPING:
            return "its job ends"
    found = idle_time(turn.ledger, lease, turn.now, turn.policy)
    if found is None:
        return "one of them has worked, or it is not known whether one has"
    return found if after_s is not None and found.lasted_s >= after_s else "one of them has worked"


def _give_notice(turn: Turn, record: LeaseRecord, idle: IdleTime, for_id: str) -> None:
    lease, at_s = record.lease, _moment_s(turn, record.lease)
    if _ends_before(turn, record, at_s):
        return
    turn.put(ReclaimNotice(lease.id, at_s, for_id))
    at = wall_clock(turn.now, at_s)
    _emit(
        turn,
        lease,
        "lease.reclaim_notice",
        f"at {at:%Y-%m-%d %H:%M:%S} UTC, for {for_id}: {_rests_on(turn, lease, idle)}",
    )


def _moment_s(turn: Turn, lease: Lease) -> float:
    """When GPUs are taken back of which the holder is told now. A holder that no longer reaches the daemon does not
    hear of it, and may trust the lease until the end that the last renewal promised: not before that, within a bound.
    A holder that renews does."""
    now_s, policy = turn.now.mono_s, turn.policy
    promised_s = turn.ledger.deadlines.get(lease.id, now_s) - now_s
    return now_s + max(policy.reclaim_notice_s, min(promised_s, policy.reclaim_notice_most_s))


def _ends_before(turn: Turn, record: LeaseRecord, at_s: float) -> bool:
    """True for a lease that ends by itself before that moment."""
    last_s = last_moment_s(turn.ledger, record, turn.now)
    if last_s is not None and last_s <= at_s:
        return True
    job, end_s = turn.ledger.live_jobs.get(record.lease.job_id or ""), declared_end_s(turn.ledger, record, turn.now)
    if job is None or job.job.started_at is None or end_s is None:
        return False
    # A job that has run for so much longer started late: it is not known here when it ends.
    late_s = JOB_START_S + (turn.policy.gang_start_s if record.lease.demand.nodes > 1 else 0.0)
    return turn.now.mono_s - late_s <= end_s <= at_s


def _end(turn: Turn, record: LeaseRecord, idle: IdleTime, for_id: str) -> None:
    """End a lease as its holder would, and a job as a user would cancel it."""
    lease, job = record.lease, turn.ledger.live_jobs.get(record.lease.job_id or "")
    _emit(turn, lease, "lease.reclaimed", f"for {for_id}: {_rests_on(turn, lease, idle)}")
    turn.put(ReclaimNotice(lease.id, None))
    if job is None:
        end_lease(turn, record, EndReason.RECLAIMED_IDLE)
    else:
        why = f"{STOPPED_BY_DAEMON}its GPUs did nothing for {duration(idle.lasted_s)}, and {for_id} waits for them"
        cancel_job(turn, job, min(job.grace_s, JOB_GRACE_S), why)


def _rests_on(turn: Turn, lease: Lease, idle: IdleTime) -> str:
    """Which readings show that it is idle."""
    since, until = (wall_clock(turn.now, at_s) for at_s in (idle.since_s, idle.until_s))
    count = f"{idle.readings} readings or more of each of its GPUs ({len(lease.gpus)})"
    return f"{count} showed no work from {since:%Y-%m-%d %H:%M:%S} to {until:%Y-%m-%d %H:%M:%S} UTC"


def _emit(turn: Turn, lease: Lease, kind: str, reason: str) -> None:
    turn.emit(
        kind,
        lease_id=lease.id,
        job_id=lease.job_id,
        node=lease.gpus[0].node,
        gpus=tuple(device.uuid for device in lease.gpus),
        fencing_token=lease.fencing_token,
        reason=reason,
    )
