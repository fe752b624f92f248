"""What a supervisor records of the end of its job, and writing that although the disk may be full for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gpulease_worker.jobs import failure_cause, job_records
from gpulease_worker.jobs.fence import Fence
from gpulease_worker.jobs.gang_part import GangPart
from gpulease_worker.jobs.launch_plan import LaunchPlan

STOPPED = "It was stopped on request."
"""Why a job has ended that its worker, or a SIGTERM of another, has told to stop."""
SIGTERM_TO_ALL_S = 0.2
"""How long a supervisor waits for SIGTERM after its job has ended badly: who sends it to all processes of a cgroup, as
`scancel` does, may reach the job a moment before its supervisor."""


def exit_code(status: int) -> int:
    """The shell's number for a wait status: the exit code, or 128 + N for signal N."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def of_launched(
    directory: Path,
    plan: LaunchPlan,
    status: int | None,
    fence: Fence,
    part: GangPart | None,
    *,
    stopped: bool,
    timed_out: bool,
) -> job_records.ExitRecord:
    """The record of a job that was launched, with the reason if there is one.

    Args:
        directory: The job's: a failure is looked for in its logs.
        plan: What was to run.
        status: The launcher's wait status; None if that was not observed.
        fence: The fence that its supervisor keeps.
        part: This node's part of a job on several nodes; None for a job on one.
        stopped: It was told to stop.
        timed_out: It was ended because of its time limit.
    """
    code = None if status is None else exit_code(status)
    end = job_records.ExitRecord(exit_code=code, timed_out=timed_out, ended_at=job_records.now())
    if timed_out:
        return replace(end, reason=f"It ran longer than its time limit of {plan.timeout_s:g} s.")
    if fence.was_reached and code != 0:
        return replace(end, reason=fence.reason, fence_reached=True)
    if stopped:
        return replace(end, reason=STOPPED, stopped=True, follows=part is not None)
    peer_end = None if part is None else part.peer_end
    if part is not None and part.is_stopped and peer_end is not None:
        return replace(end, reason=peer_end.sentence, follows=True)
    if code in (0, None):
        return end
    failure = failure_cause.first_failure(directory / job_records.LOGS, code)
    follows = part is not None and (peer_end is not None or failure.lost_peer)
    return replace(end, exit_code=failure.code, reason=failure.reason, traceback=failure.traceback, follows=follows)


def of_never_launched(reason: str, fence: Fence, part: GangPart | None, *, stopped: bool) -> job_records.ExitRecord:
    """The record of a job that was never launched."""
    follows = part is not None and (stopped or part.peer_end is not None)
    end = job_records.never_launched(reason, stopped=stopped)
    return replace(end, follows=follows, fence_reached=fence.was_reached and not stopped)


def write(
    directory: Path, end: job_records.ExitRecord, sleep: Callable[[float], object], log_error: Callable[[str], object]
) -> None:
    """Write the record of the end, unless its directory was removed. Raises OSError when that has failed for
    `job_records.DEADLINE_S`."""
    end = replace(end, reason=failure_cause.reportable(end.reason))
    give_up_s = time.monotonic() + job_records.DEADLINE_S
    while True:
        try:
            job_records.write(directory, job_records.EXIT, end)
        except OSError as error:
            log_error(f"the end could not be recorded: {error}")
            if job_records.is_removed(directory):
                return  # no one could read it there
            if time.monotonic() > give_up_s:
                raise
            sleep(job_records.RETRY_S)
        else:
            return
