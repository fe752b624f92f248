"""Jobs that run on several nodes: their parts are prepared together, start together and end together.

    granted -> each part: starting -> prepared                               (`PartState`, as its node reports it)
    all prepared -> `go` to all (`JobRecord.go_at`) -> each part: starting -> running -> exited
    the first part that fails, is lost, or is not prepared in time -> all others are stopped (`parts_stopped_at`)
    all parts exited or lost -> the job ends, or is tried again with another lease, port and start

What must always hold
---------------------
- No part is launched before all are prepared, and each at most once for an attempt (the worker sees to that).
- The job has succeeded only if all parts have exited with 0.
- Exit code, reason and traceback are those of the part that failed first. Which that was is not known by any clock:
  where one rank dies, those that it exchanged data with fail within the same tenth of a second, on nodes whose clocks
  differ. So a part says of itself whether it only followed another (`JobReport.follows`); of those that did not, the
  first that the daemon hears of counts. While only followers have failed, the others get ORIGIN_S to say what happened.
- The next attempt starts when no process of this one is left: a part has exited, or it has ended by itself, because its
  supervisor has lost those of the others (`gpulease_worker.jobs.gang_link`), FENCE_S after all others have ended. While
  none has, no part on a silent node is known to have ended: the supervisors may be connected all the same. Nor does one
  learn anything from a part that has ended well.

What each failure does
----------------------
| what fails | what is decided |
|---|---|
| a node is not prepared within `gang_start_s`, or is silent for SILENT_S | it is named, all are stopped, and tried \
again if a retry is left |
| a node cannot reach the leader | the same, REACH_S after the leader was prepared |
| the leased port is taken, the directory is missing | that part has exited: the same at once |
| a rank, a launcher or a supervisor is killed | that part exits: all others are stopped |
| a host dies, or its link to the others is cut | the supervisors see it and end their parts, there as well; its part \
is `lost` FENCE_S after the others have ended, unless it reports its end |
| only the daemon cannot reach a node, or a worker is away | nothing: the parts go on |
| the daemon is away | parts that have started go on, and end with the first that fails; others wait for `go` |
| the daemon restarts | prepared parts report again; the times begin again |
| a node is forgotten, or silent for longer than the job's fence (`core.node_loss`) | its part is `lost`: all others \
are stopped |
| a node is silent for too long | all others are stopped; its part is `lost` FENCE_S after they have ended |
| all nodes are silent for too long | the job is lost, and not tried again |
| a node leaves | its part ends, and all others; the attempt does not count as a retry |
| a part of an elastic job is lost | the next attempt begins under the same lease, see `core.elastic_jobs` |
| a user cancels | all parts are stopped, with the grace period of the user |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpulease_protocol.model import EndReason, Job, JobMember, JobState, PartState
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_server.core.elastic_jobs import go_on, is_late
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gang_records import GangTimes
from gpulease_server.core.gpu import is_unheard
from gpulease_server.core.job import (
    change_job,
    finish_job,
    mark_stuck,
    may_retry,
    queue_preempted,
    retry_job,
    why_cancelled,
)
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import JobRecord
from gpulease_server.core.turn import Turn

REACH_S = 10.0
"""How long a node may fail to reach a leader that is prepared: its first attempts may come too early."""
SILENT_S = 15.0
"""How long a node may be silent while the others wait for it to be prepared: a worker may be restarted meanwhile."""
ORIGIN_S = 3.0
"""How long the part that failed first may take to say so after one that only followed."""
GRACE_S = 5.0
"""Between SIGTERM and SIGKILL for parts that are stopped because of another."""
FENCE_S = 26.0
"""A part whose node is silent has ended by itself so long after the last of the others: the leader's supervisor has
lost those of the others within 9 s, and has ended its part within 5 s; then that of another silent node has learned of
it, has waited for 3 s, and has ended its own within 5 s. The rest is for searching processes."""

STATES = {
    RunState.STARTING: PartState.STARTING,
    RunState.PREPARED: PartState.PREPARED,
    RunState.RUNNING: PartState.RUNNING,
    RunState.EXITED: PartState.EXITED,
}


def must_stop(record: JobRecord) -> bool:
    """True when every part of a job is to end."""
    told_to_stop = record.cancelled_at, record.parts_stopped_at, record.job.preempt_at
    return told_to_stop != (None, None, None)


def stop_grace_s(record: JobRecord) -> float:
    """Seconds between SIGTERM and SIGKILL for the parts of a job: few where one of them has failed."""
    has_failed = record.cancelled_at is None and record.grows_at is None and record.parts_stopped_at is not None
    return GRACE_S if has_failed else record.grace_s


def failure_of(record: JobRecord) -> str | None:
    """Why an attempt has failed, once its parts end because of that, and of nothing else; None before."""
    is_told = record.cancelled_at, record.grows_at, record.job.preempt_at
    return _sentence(record.job) if record.parts_stopped_at is not None and is_told == (None, None, None) else None


def takes_part(ledger: Ledger, node: str) -> bool:
    """False for a node with a worker that would take its part of a job for the whole of it."""
    observation = ledger.node_observations.get(node)
    return observation is None or observation.takes_gangs


def on_part_reported(turn: Turn, record: JobRecord, node: str, report: JobReport | None) -> None:
    """Take in what a node's worker says of its part; None where it does not know the job."""
    before = next(one for one in record.job.members if one.node == node)
    if before.state is PartState.EXITED:
        return
    after = _unknown(record, before) if report is None else _reported(before, report)
    if report is not None and report.fence_s is not None and report.fence_s == record.spec.fence_s:
        after = replace(after, fenced=True)
    if report is not None and report.unkillable and report.state is not RunState.EXITED:
        mark_stuck(turn, record, node, report)
        record = turn.ledger.jobs[record.job.id]
    _advance(turn, _put(turn, record, before, after, None if report is None else report.traceback))


def lose_part(turn: Turn, record: JobRecord, node: str, reason: str, *, is_off: bool, node_left: bool = False) -> None:
    """End the part on a node that is gone for good. `is_off`: no process of it is left; `node_left`: its node has said
    that it goes. Else it has failed, and ends with the others."""
    before = next(one for one in record.job.members if one.node == node)
    others = [one for one in record.job.members if one is not before]
    if before.state.final:
        return
    if is_off:
        after = replace(before, state=PartState.LOST, reason=f"{reason}.", node_left=node_left)
    elif _tell([one for one in others if one.state.final or not _is_unheard(turn, one)]):
        after = before if before.failure is not None else _failed(record, replace(before, reason=f"{reason}."))
    else:
        finish_job(turn, record, JobState.LOST, f"{reason}; how the job ended is not known", EndReason.NODE_LOST)
        return
    _advance(turn, _put(turn, record, before, after))


def watch_gangs(turn: Turn, stalled_s: float) -> None:
    """End what is due: starts that take too long, and parts on nodes that are silent."""
    for job_id in list(turn.ledger.job_index.gangs):
        known, record = turn.ledger.job_index.gang_times.get(job_id), turn.ledger.jobs[job_id]
        times = (known or GangTimes(job_id, turn.now.mono_s)).later_by(stalled_s)
        if times != known:
            turn.put(times)
        if all(one.state.final for one in record.job.members):
            _advance(turn, record)
        elif must_stop(record):
            _end_silent_parts(turn, record)
        elif any(one.failure is not None for one in record.job.members):
            if times.failed_s is None:
                turn.put(replace(times, failed_s=turn.now.mono_s))
            elif turn.now.mono_s - times.failed_s >= ORIGIN_S:
                _stop_parts(turn, record)
        elif record.go_at is None:
            _check_start(turn, record)


def _reported(before: JobMember, report: JobReport) -> JobMember:
    """A part as its node reports it. A later report never takes back how far it was."""
    state = STATES.get(report.state, before.state)
    if state is PartState.EXITED or before.failure is None:
        before = replace(before, log_directory=report.log_directory or before.log_directory)
    if state is not PartState.EXITED:
        state = before.state if before.state in (PartState.RUNNING, PartState.LOST) else state
        return before if before.failure is not None else replace(before, state=state, reason=report.reason)
    ended = replace(before, state=state, exit_code=report.exit_code, timed_out=report.timed_out)
    ended = replace(ended, fence_reached=report.fence_reached)
    if report.node_left and before.failure is None:
        return replace(ended, reason=f"Its node {before.node} left.", node_left=True)
    return ended if before.failure is not None else replace(ended, reason=report.reason, follows=report.follows)


def _unknown(record: JobRecord, before: JobMember) -> JobMember:
    """A part that its node's worker does not know."""
    if before.log_directory is not None and not before.state.final:
        reason = f"The worker of node {before.node} has lost its record of the job."
        return replace(before, state=PartState.LOST, reason=before.reason if before.failure else reason)
    if before.state is PartState.STARTING and must_stop(record):
        return replace(before, state=PartState.EXITED, follows=True, reason=before.reason)
    return before


def _has_failed(part: JobMember) -> bool:
    ended_badly = part.state is PartState.EXITED and (part.exit_code != 0 or part.timed_out)
    return ended_badly or part.state is PartState.LOST


def _is_unheard(turn: Turn, part: JobMember) -> bool:
    return is_unheard(turn.ledger, part.node, turn.now, turn.policy)


def _tell(parts: Sequence[JobMember]) -> bool:
    """True when the ends of these parts end those on all other nodes; some may not be stopped yet. One that has ended
    well is not missed; and without the leader the others are not connected."""
    missed = [one for one in parts if one.state is not PartState.EXITED or one.exit_code != 0 or one.follows]
    return bool(missed) and all(one in missed for one in parts if one.rank == 0)


def _put(turn: Turn, record: JobRecord, before: JobMember, after: JobMember, traceback: str | None = None) -> JobRecord:
    """Record what has changed of a part, and that it has failed."""
    if after.failure is None and _has_failed(after):
        after = _failed(record, after)
    if after == before:
        return record
    members = tuple(after if one.rank == after.rank else one for one in record.job.members)
    changes: dict[str, Any] = {"members": members}
    if after.failure is not None and _origin(members) is after:
        changes |= {"exit_code": after.exit_code, "traceback": traceback}
    logs = after.log_directory if after.rank == 0 else record.log_directory
    turn.put(replace(record, log_directory=logs, job=replace(record.job, **changes)))
    if after.state.final and not before.state.final and must_stop(record):
        _note_stop(turn, record)
    return turn.ledger.jobs[record.job.id]


def _failed(record: JobRecord, part: JobMember) -> JobMember:
    """A part as one that has failed, after all those that have already."""
    return replace(part, failure=1 + sum(one.failure is not None for one in record.job.members))


def _note_stop(turn: Turn, record: JobRecord) -> None:
    """Note that all parts were ordered to end, or that one has since then."""
    times = turn.ledger.job_index.gang_times.get(record.job.id) or GangTimes(record.job.id, turn.now.mono_s)
    turn.put(replace(times, stop_s=turn.now.mono_s))


def _advance(turn: Turn, record: JobRecord) -> None:
    """Decide what follows from the states of all parts."""
    parts = record.job.members
    failed = [one for one in parts if one.failure is not None]
    if all(one.state.final for one in parts):
        _finish(turn, record)
    elif must_stop(record):
        return
    elif any(not one.follows for one in failed):
        _stop_parts(turn, record)
    elif not failed and record.go_at is None and all(one.state is not PartState.STARTING for one in parts):
        turn.put(replace(record, go_at=turn.now.at))
    elif not failed and record.job.started_at is None and all(_has_started(one) for one in parts):
        change_job(turn, record, JobState.RUNNING, started_at=turn.now.at)


def _has_started(part: JobMember) -> bool:
    return part.state in (PartState.RUNNING, PartState.EXITED)


def _check_start(turn: Turn, record: JobRecord) -> None:
    """Give the start up when a node takes too long, or cannot reach the leader."""
    job, now_s = record.job, turn.now.mono_s
    times = turn.ledger.job_index.gang_times[job.id]
    for one in job.members:
        if not takes_part(turn.ledger, one.node):
            why = f"The gpulease on node {one.node} is too old for jobs on several nodes; upgrade it there."
            _give_up(turn, record, one, why)
            return
    waiting = [one for one in job.members if one.state is PartState.STARTING]
    is_led = job.members[0] not in waiting
    if is_led and times.led_s is None:
        times = replace(times, led_s=now_s)
        turn.put(times)
    cut_off = next((one for one in waiting if one.reason is not None), None) if is_led else None
    since_s, most_s = now_s - times.since_s, turn.policy.gang_start_s
    silent = next((one for one in waiting if _is_unheard(turn, one)), None)
    late = since_s >= most_s
    if cut_off is not None and (late or now_s - (times.led_s or now_s) >= REACH_S):
        _give_up(turn, record, cut_off, cut_off.reason)
    elif silent is not None and since_s >= min(SILENT_S, most_s):
        _give_up(turn, record, silent, f"Node {silent.node} did not answer for {min(SILENT_S, most_s):g} s.")
    elif late and waiting:
        _give_up(turn, record, waiting[0], f"Node {waiting[0].node} was not prepared within {most_s:g} s.")


def _give_up(turn: Turn, record: JobRecord, culprit: JobMember, reason: str | None) -> None:
    """Stop all parts because of one that is not prepared. It has failed, and is still to end."""
    _stop_parts(turn, _put(turn, record, culprit, replace(culprit, reason=reason, failure=1)))


def _stop_parts(turn: Turn, record: JobRecord) -> None:
    """Have every part end."""
    turn.put(replace(record, parts_stopped_at=turn.now.at))
    reason = f"{_sentence(record.job)} The other nodes are being stopped."
    change_job(turn, turn.ledger.jobs[record.job.id], JobState.STOPPING, reason=reason)
    _note_stop(turn, record)


def _end_silent_parts(turn: Turn, record: JobRecord) -> None:
    """Count parts on silent nodes as ended once they must have ended by themselves."""
    times = turn.ledger.job_index.gang_times[record.job.id]
    if times.stop_s is None:
        _note_stop(turn, record)
        return
    left = [one for one in record.job.members if not one.state.final]
    ended_s = FENCE_S - GRACE_S + max(GRACE_S, stop_grace_s(record))
    if turn.now.mono_s - times.stop_s < ended_s or not _tell([one for one in record.job.members if one not in left]):
        return
    if not all(_is_unheard(turn, one) for one in left):
        return
    for one in left:
        reason = one.reason if one.failure is not None else f"Node {one.node} is silent."
        record = _put(turn, record, one, replace(one, state=PartState.LOST, reason=reason))
    _advance(turn, record)


def _origin(parts: Sequence[JobMember]) -> JobMember | None:
    """The part that failed first; None where none has failed."""
    failed = [one for one in parts if one.failure is not None]
    return min(failed, key=lambda one: (one.follows, one.failure), default=None)


def _sentence(job: Job) -> str:
    """Why the first part has failed, with its node. A part that is lost says nothing itself, so what another one has
    seen of it comes with that."""
    origin = _origin(job.members)
    if origin is None:
        return "It was stopped."
    first = min(job.members, key=lambda one: one.failure or len(job.members) + 1)
    seen = f" {_with_node(first)}" if origin.state is PartState.LOST and first.rank != origin.rank else ""
    return f"{_with_node(origin)}{seen}"


def _with_node(part: JobMember) -> str:
    """Why a part has failed, with its node."""
    reason = part.reason or f"exit code {part.exit_code}."
    is_named = re.search(rf"\bnode {re.escape(part.node)}(?![\w.-])", reason, re.IGNORECASE) is not None
    return reason if is_named else f"On node {part.node}: {reason}"


def _finish(turn: Turn, record: JobRecord) -> None:
    """End an attempt after all of its parts have ended."""
    job, origin = record.job, _origin(record.job.members)
    is_told = record.grows_at is not None or job.preempt_at is not None or record.cancelled_at is not None
    is_done = not is_told or all(one.reason is None for one in job.members)
    if origin is None and is_done:
        started = job.started_at or turn.now.at
        finish_job(turn, record, JobState.SUCCEEDED, None, exit_code=0, started_at=started)
        return
    reason, is_lost = _sentence(job), origin is not None and origin.state is PartState.LOST
    lease_end = EndReason.NODE_LOST if is_lost else EndReason.JOB_FINISHED
    timed_out = origin is not None and origin.timed_out
    stopped_to_grow = record.grows_at is not None and (origin is None or origin.follows)
    node_left = stopped_to_grow or (origin is not None and origin.node_left)
    if record.cancelled_at is not None and not timed_out:
        finish_job(turn, record, JobState.CANCELLED, why_cancelled(record), lease_end)
    elif timed_out:
        finish_job(turn, record, JobState.TIMED_OUT, reason, lease_end)
    elif job.preempt_at is not None:
        queue_preempted(turn, record)
    elif _awaits_reports(turn, record) or go_on(turn, record, origin, reason):
        return
    elif may_retry(record, node_left=node_left):
        retry_job(turn, record, reason, lease_end, node_left=node_left)
    else:
        finish_job(turn, record, JobState.LOST if is_lost else JobState.FAILED, reason, lease_end)


def _awaits_reports(turn: Turn, record: JobRecord) -> bool:
    """True for an elastic job while it is not known yet on how many nodes it can go on: one of them has yet to report
    since the daemon started, or its reports are late. Up to SILENT_S after the last part has ended, and for no node
    that has been silent for longer. `watch_gangs` looks again."""
    if record.spec.max_nodes is None:
        return False
    ledger, job_id = turn.ledger, record.job.id
    times = ledger.job_index.gang_times.get(job_id)
    if times is None or times.stop_s is None:
        _note_stop(turn, record)
    elif turn.now.mono_s - times.stop_s >= SILENT_S:
        return False
    members = ledger.leases[record.job.lease_id].lease.members
    recent = [one for one in members if ledger.silent_s.get(one.node, 0.0) < SILENT_S]
    return any(one.node in ledger.unreported or is_late(turn, record, one) for one in recent)
