"""Runs a worker: one per data directory, until it is told to end. Its jobs go on without it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from gpulease.addresses import let_through
from gpulease.log_lines import logging_to_stderr
from gpulease_worker import processes
from gpulease_worker.exchange import Exchange
from gpulease_worker.settings import WorkerSettings

LOCK_WAIT_S = 15.0
"""How long to wait for a predecessor to end; it may be ending just now."""
LOCK_LOOK_S = 0.1
PARENT = "GPULEASE_PARENT_PID"
"""Set by a parent that starts a worker with `with_parent`: the worker sees if it died before it could look."""

__all__ = ["WorkerSettings", "run"]


def run(settings: WorkerSettings) -> int:
    """Run a worker until SIGTERM or SIGINT. Returns 0, or 1 with a message on stderr when it cannot run here."""
    with logging_to_stderr("worker", settings.log_format, settings.log_level):
        return _run(settings)


def _run(settings: WorkerSettings) -> int:
    # Inherited as ignored it would have the kernel reap the supervisors, and their pids be used again unseen.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if settings.with_parent and not _bind_to_parent():
        return _refuse("The process that started this worker is gone.", "Start it again.")
    try:
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        let_through(settings.data_dir)
        lock = _lock(settings.data_dir / "worker.lock")
        if lock is None:
            return _refuse(
                f"Another worker runs on {settings.data_dir}.", "Stop it, or give this one a --data-dir of its own."
            )
        with suppress(asyncio.CancelledError):
            asyncio.run(_until_told(settings))
    except OSError as error:
        return _refuse(f"The data directory {settings.data_dir} cannot be used: {error}.", "Choose another --data-dir.")
    return 0


async def _until_told(settings: WorkerSettings) -> None:
    exchange = asyncio.create_task(Exchange(settings).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, exchange.cancel)
    await exchange


def _bind_to_parent() -> bool:
    """Have this process end with its parent. False when that is gone already."""
    expected = int(os.environ.get(PARENT) or os.getppid())
    processes.end_with_parent(signal.SIGTERM)
    return os.getppid() == expected


def _lock(path: Path) -> int | None:
    """The lock of a data directory, held until this process ends; None if another holds it all the while."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(descriptor)
                return None
            time.sleep(LOCK_LOOK_S)
        else:
            return descriptor


def _refuse(what: str, remedy: str) -> int:
    print(f"gpulease worker: {what} {remedy}", file=sys.stderr)
    return 1
