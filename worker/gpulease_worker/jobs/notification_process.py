"""Forks the process that tells of a job's end: what it needs is imported there, and not kept by every supervisor.

Such a process is outside the job's limits, so one user has at most MAX_AT_ONCE of them on a node: each holds the lock
of a file, which the kernel releases with it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from gpulease_worker.jobs.launch_plan import LaunchPlan
from gpulease_worker.jobs.pam_session import LoginLimits

MAX_AT_ONCE = 16
"""Processes that tell of the ends of one user's jobs; beyond that no one is told."""
LOCKS = "notify"
"""Directory of their locks, in the worker's data directory."""


def start_notification(
    directory: Path, plan: LaunchPlan, login: LoginLimits | None, log_error: Callable[[str], None]
) -> None:
    """Have a process of its own tell of the end that is recorded in the job's directory. Nothing waits for it."""
    try:
        if os.fork() != 0:
            return
    except OSError as error:
        log_error(f"no one can be told of the end: {error}")
        return
    try:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the lock of the directory, the session, and all else
        if _take_place(directory.parents[1] / LOCKS, plan.uid) is None:
            log_error(f"no one is told of the end: {MAX_AT_ONCE} notifications of its user are under way")
            return
        from gpulease_worker.jobs import notification  # noqa: PLC0415 - HTTP is not for every supervisor's memory

        notification.tell_of_end(directory, plan, login)
    except Exception as error:
        log_error(f"no one was told of the end: {error}")
    finally:
        os._exit(0)


def _take_place(locks: Path, uid: int) -> int | None:
    """A lock that this process holds until it ends; None if its user has as many as one may."""
    locks.mkdir(mode=0o700, exist_ok=True)
    for number in range(MAX_AT_ONCE):
        descriptor = os.open(locks / f"{uid}-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return descriptor
    return None
