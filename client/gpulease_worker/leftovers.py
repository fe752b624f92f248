"""Ends what an ended lease has left running, after a grace, where that is the worker's to do.

A job's processes are the daemon's own, and their supervisor has ended them before the lease ends; here is caught what
it could not: the worker lost the job's record, or something of the job was started behind its back. What a user's own
process has left is his, and is ended only if the administrator wants that, and only what is on the GPU.

A process is ended only when it carries the lease's marker itself, and a signal goes to exactly the process whose marker
was read: by pidfd.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence

from gpulease.model import GpuReading, LeaseState
from gpulease_worker import processes
from gpulease_worker.holders import SeenLease

KILL_AFTER_S = 2.0
"""Between SIGTERM and SIGKILL."""

log = logging.getLogger(__name__)


class Leftovers:
    """Follows the draining leases of a node.

    Args:
        users_too: End what a lease without a job has left on its GPUs as well.
        grace_s: How long a lease's processes have, from the first sight of its end, to end by themselves.
    """

    def __init__(self, users_too: bool, grace_s: float) -> None:
        self._users_too = users_too
        self._grace_s = grace_s
        self._since_s: dict[str, float] = {}
        self._told_at_s: dict[processes.Identity, float] = {}
        self._looking: asyncio.Task[None] | None = None

    def look(self, leases: Sequence[SeenLease], gpus: Sequence[GpuReading]) -> None:
        """Take in the leases and the last reading of their GPUs; end what is due, in the background."""
        now_s = time.monotonic()
        draining = {lease.id: lease for lease in leases if lease.state is LeaseState.ENDED}
        self._since_s = {lease_id: self._since_s.get(lease_id, now_s) for lease_id in draining}
        due = {
            lease_id: None if lease.job_id is not None else _on_gpus(lease, gpus)
            for lease_id, lease in draining.items()
            if (lease.job_id is not None or self._users_too) and now_s - self._since_s[lease_id] >= self._grace_s
        }
        if not due:
            self._told_at_s.clear()
        elif self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(asyncio.to_thread(self._end, due))

    async def close(self) -> None:
        """Wait for the look under way, which is short."""
        if self._looking is not None:
            await asyncio.wait({self._looking})

    def _end(self, due: Mapping[str, set[int] | None]) -> None:
        """Signal every marked process of these leases; of a lease with a set, only what is in it."""
        told, self._told_at_s = self._told_at_s, {}
        for process, lease_id in processes.marked(due).items():
            only = due[lease_id]
            if process.pid in (os.getpid(), os.getppid()) or (only is not None and process.pid not in only):
                continue
            first_s = self._told_at_s[process] = told.get(process, time.monotonic())
            hard = time.monotonic() - first_s >= KILL_AFTER_S
            if process in told and not hard:
                continue
            number = signal.SIGKILL if hard else signal.SIGTERM
            command = processes.command_of(process.pid)
            if _signal(process, lease_id, number):
                log.warning("pid %d (%s), left by lease %s, was sent %s", process.pid, command, lease_id, number.name)


def _on_gpus(lease: SeenLease, gpus: Sequence[GpuReading]) -> set[int]:
    mine = [gpu for gpu in gpus if gpu.uuid in lease.gpus]
    return {process.pid for gpu in mine for process in (*gpu.processes, *(gpu.opened_by or ()))}


def _signal(process: processes.Identity, lease_id: str, number: signal.Signals) -> bool:
    """Send a signal to exactly this process, if it carries the lease's marker. False if it is gone or may not be."""
    descriptor = process.pidfd()
    if descriptor is None:
        return False
    try:
        # The pidfd pins the process, so that the marker read now is its own, or it is gone and the signal goes nowhere.
        if processes.marker(process.pid) != lease_id:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)
    return True
