"""What the workers report of jobs: of a job on one node all of it, of one on several nodes the part on theirs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from gpulease_protocol.model import EndReason, JobState
from gpulease_protocol.node_protocol import JobReport, RunState, final_state
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gang_run import on_part_reported
from gpulease_server.core.job import (
    change_job,
    finish_job,
    mark_stuck,
    may_retry,
    queue_preempted,
    retry_job,
    why_cancelled,
)
from gpulease_server.core.records import JobRecord
from gpulease_server.core.turn import Turn


def on_job_reports(turn: Turn, node: str, reports: Iterable[JobReport]) -> None:
    """Take in what the worker says of every job it knows. A job it should run and has lost the record of is lost.

    Also by a worker's first report: were the job ordered again, it would run twice.
    """
    by_run = {(report.job_id, report.attempt): report for report in reports}
    for record in [turn.ledger.jobs[job_id] for job_id in turn.ledger.job_index.of_node.get(node, ())]:
        report = by_run.get((record.job.id, record.job.attempts))
        if record.job.members:
            on_part_reported(turn, record, node, report)
        elif report is not None:
            _apply_job_report(turn, record, node, report)
        elif record.log_directory is not None or record.job.started_at is not None:
            finish_job(turn, record, JobState.LOST, f"the worker of {node} has lost its record of the job")
        elif record.cancelled_at is not None:
            finish_job(turn, record, JobState.CANCELLED, why_cancelled(record, "cancelled before it started"))


def _timed(turn: Turn, record: JobRecord, report: JobReport) -> JobReport:
    """A report with now in place of each time that cannot be: before the grant, before the start, or ahead. The clock
    of its node is wrong; by it a job would have run for years, or have ended long ago."""

    def possible(at: datetime | None, since: datetime | None) -> datetime | None:
        return at if at is None or (since or at) <= at <= turn.now.at else turn.now.at

    granted_at = turn.ledger.leases[record.job.lease_id].lease.granted_at
    started_at = possible(report.started_at, granted_at)
    ended_at = possible(report.ended_at, record.job.started_at or started_at or granted_at)
    return replace(report, started_at=started_at, ended_at=ended_at)


def _apply_job_report(turn: Turn, record: JobRecord, node: str, report: JobReport) -> None:
    report = _timed(turn, record, report)
    if report.log_directory is not None and report.log_directory != record.log_directory:
        record = replace(record, log_directory=report.log_directory)
        turn.put(record)
    if not record.fenced and report.fence_s is not None and report.fence_s == record.spec.fence_s:
        record = replace(record, fenced=True)
        turn.put(record)
    if report.state is RunState.RUNNING and record.job.started_at is None:
        state = JobState.STOPPING if record.job.state is JobState.STOPPING else JobState.RUNNING
        change_job(turn, record, state, started_at=report.started_at or turn.now.at)
        record = turn.ledger.jobs[record.job.id]
    if report.unkillable and report.state is not RunState.EXITED:
        mark_stuck(turn, record, node, report)
    elif report.state is RunState.EXITED:
        started = record.job.started_at or report.started_at
        changes: dict[str, Any] = {
            "exit_code": report.exit_code,
            "traceback": report.traceback,
            "started_at": started,
            "ended_at": report.ended_at or turn.now.at,
        }
        state, reason = final_state(report, cancelled=record.cancelled_at is not None)
        if state is JobState.CANCELLED:
            reason = why_cancelled(record)
        is_done = state is JobState.TIMED_OUT or (report.exit_code == 0 and report.reason is None)
        if record.job.preempt_at is not None and record.cancelled_at is None and not is_done:
            told = replace(record, job=replace(record.job, started_at=started, exit_code=report.exit_code))
            queue_preempted(turn, told, ended_at=changes["ended_at"])
            return
        left = report.node_left
        if left and state is JobState.FAILED:
            reason = f"its node {record.job.gpus[0].node} left"
        is_retried = started is not None or left or report.fence_reached
        if state is JobState.FAILED and is_retried and may_retry(record, node_left=left):
            failed = replace(record, job=replace(record.job, started_at=started, exit_code=report.exit_code))
            end = EndReason.NODE_LOST if left else EndReason.JOB_FINISHED
            retry_job(turn, failed, reason, end, ended_at=changes["ended_at"], node_left=left)
        else:
            finish_job(turn, record, state, reason, **changes)
