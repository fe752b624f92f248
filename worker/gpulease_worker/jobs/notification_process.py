"""Forks the process that tells of a job's end: what it needs is imported there, and not kept by every supervisor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gpulease_worker.jobs.launch_plan import LaunchPlan
from gpulease_worker.jobs.pam_session import LoginLimits


def start_notification(
    directory: Path, plan: LaunchPlan, login: LoginLimits | None, log_error: Callable[[str], None], *, cancelled: bool
) -> None:
    """Have a process of its own tell of the end that is recorded in the job's directory. Nothing waits for it."""
    try:
        if os.fork() != 0:
            return
    except OSError as error:
        log_error(f"no one can be told of the end: {error}")
        return
    try:
        from gpulease_worker.jobs import notification  # noqa: PLC0415 - HTTP is not for every supervisor's memory

        notification.tell_of_end(directory, plan, login, cancelled=cancelled)
    except Exception as error:
        log_error(f"no one was told of the end: {error}")
    finally:
        os._exit(0)
