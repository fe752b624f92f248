"""Runs a worker, one per data directory, until SIGTERM or SIGINT. Its jobs continue without it, unless it leaves."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.host import garbage, process_tree
from gpulease_protocol.host.addresses import prepare_data_directory
from gpulease_protocol.host.logging import logging_to_stderr
from gpulease_worker.jobs import cgroup, resource_limits
from gpulease_worker.jobs.reconciler import JobsOfAnotherNode
from gpulease_worker.loop import WorkerLoop
from gpulease_worker.settings import WorkerSettings

LOCK_WAIT_S = 15.0
"""How long to wait for the previous worker to end."""
LOCK_RETRY_S = 0.1
REMEDIES = {
    (errno.ENOSPC, errno.EDQUOT): "Free space there.",
    (errno.EMFILE, errno.ENFILE): "Raise the limit of open files (ulimit -n, LimitNOFILE=).",
    (errno.ENOMEM, errno.EAGAIN): "Free memory or processes, and start it again.",
}
"""What to do about an error of the host, by its number."""
PARENT_VARIABLE = "GPULEASE_PARENT_PID"
"""Set by a parent that starts a worker with `with_parent`, so that the worker notices if it has died already."""

log = logging.getLogger(__name__)

__all__ = ["WorkerSettings", "run"]


def run(settings: WorkerSettings) -> int:
    """Run a worker until SIGTERM or SIGINT. Returns 0, or 1 with a message on stderr when it cannot run here."""
    with logging_to_stderr("worker", settings.log_format, settings.log_level):
        return _run(settings)


def _run(settings: WorkerSettings) -> int:
    # If it was inherited as ignored, the kernel would reap the supervisors, and their pids could be reused unnoticed.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource_limits.raise_open_files()
    if settings.with_parent and not _bind_to_parent():
        return _refuse("The process that started this worker has ended.", "Start it again.")
    try:
        lock = _open_directory(settings.data_dir)
        if lock is None:
            remedy = "Stop it; for another daemon, give this one its own --data-dir."
            return _refuse(f"Another worker uses {settings.data_dir}.", remedy)
        for problem in cgroup.prepare(settings.of_jobs.cgroup_limits):
            log.log(logging.WARNING if os.geteuid() == 0 else logging.INFO, "%s", problem)
        with suppress(asyncio.CancelledError):
            asyncio.run(_run_until_signal(settings))
    except UnusableDirectory as unusable:
        return _refuse(f"The data directory {settings.data_dir} cannot be used: {unusable}.", unusable.remedy)
    except OSError as error:
        log.debug("the worker ends", exc_info=error)
        return _refuse(f"This host does not let the worker run: {error}.", _remedy(error) or "Start it again.")
    return 0


async def _run_until_signal(settings: WorkerSettings) -> None:
    worker = WorkerLoop(settings)
    try:
        worker.recover()
    except OSError as error:
        raise UnusableDirectory(error) from error
    except JobsOfAnotherNode as error:
        raise UnusableDirectory(error, f"Give it --node {error.node}, or wait until its jobs have ended.") from error
    garbage.started()
    loop = asyncio.create_task(worker.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, loop.cancel)
    stop = worker.leave if settings.leaves_within_s > 0 else loop.cancel
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    await loop


class UnusableDirectory(Exception):
    """The data directory cannot be used. The message says why."""

    def __init__(self, error: Exception, remedy: str | None = None) -> None:
        super().__init__(str(error))
        self.remedy = remedy or _remedy(error) or "Choose another --data-dir."
        """What to do."""


def _open_directory(data_dir: Path) -> int | None:
    """Make a data directory and take its lock, as `_lock`. Raises UnusableDirectory."""
    try:
        prepare_data_directory(data_dir)
        return _lock(data_dir / "worker.lock")
    except OSError as error:
        raise UnusableDirectory(error) from error


def _remedy(error: Exception) -> str | None:
    number = getattr(error, "errno", None)
    return next((remedy for numbers, remedy in REMEDIES.items() if number in numbers), None)


def _bind_to_parent() -> bool:
    """Have this process end with its parent. False when the parent has ended already."""
    expected = int(os.environ.get(PARENT_VARIABLE) or os.getppid())
    process_tree.signal_on_parent_death(signal.SIGTERM)
    return os.getppid() == expected


def _lock(path: Path) -> int | None:
    """Take the lock of a data directory until this process ends; None if another process keeps it for LOCK_WAIT_S."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(descriptor)
                return None
            time.sleep(LOCK_RETRY_S)
        else:
            return descriptor


def _refuse(what: str, remedy: str) -> int:
    print(f"gpulease worker: {what} {remedy}", file=sys.stderr)
    return 1
