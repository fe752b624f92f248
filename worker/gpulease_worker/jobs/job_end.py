"""What a supervisor records of the end of its job."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from gpulease_worker.jobs import failure_cause, job_records

STOPPED = "It was stopped on request."
"""Why a job has ended that its worker, or a SIGTERM of another, has told to stop."""


def exit_code(status: int) -> int:
    """The shell's number for a wait status: the exit code, or 128 + N for signal N."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def end_record(logs: Path, code: int | None, *, timed_out: bool, why: str | None) -> job_records.ExitRecord:
    """The record of the end, with the reason if there is one.

    Args:
        logs: Where a failure is looked for.
        code: Exit code of the launcher; None if that was not observed.
        timed_out: It was ended because of its time limit.
        why: Why its supervisor has ended it; None if it has ended by itself.
    """
    end = job_records.ExitRecord(
        exit_code=code, timed_out=timed_out, stopped=why == STOPPED, ended_at=job_records.now(), reason=why
    )
    if why is not None or code in (0, None):
        return end
    failure = failure_cause.first_failure(logs, code)
    return replace(end, exit_code=failure.code, reason=failure.reason, traceback=failure.traceback)
