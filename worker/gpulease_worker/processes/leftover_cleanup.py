"""Ends the processes that an ended lease has left running, after a grace period, where the worker may.

The processes of a job belong to the daemon, and the job's supervisor ends them before the lease ends. This catches the
rest: the worker lost the job's record, or a process of the job was started without the supervisor noticing. Processes
of a user's own lease are ended only with `kill_leftovers`, and only those on the GPU.

A process is ended only if it carries the lease's marker itself and its user is the lease's, and the signal goes through
a pidfd to exactly the process whose user and marker were read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Sequence

from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import GpuReading, LeaseState
from gpulease_worker.processes import lease_claims, procfs
from gpulease_worker.processes.lease_cache import CachedLease

KILL_AFTER_S = 2.0
"""Time between SIGTERM and SIGKILL."""

log = logging.getLogger(__name__)


class LeftoverCleanup:
    """Ends the leftovers of a node's draining leases.

    Args:
        users_too: Also end what a lease without a job has left on its GPUs.
        grace_s: How long a lease's processes have to end by themselves, from when its end was first seen.
    """

    def __init__(self, users_too: bool, grace_s: float) -> None:
        self._users_too = users_too
        self._grace_s = grace_s
        self._ended_at_s: dict[str, float] = {}
        self._first_signal_s: dict[ProcessId, float] = {}
        self._cleanup: asyncio.Task[None] | None = None

    def clean_up(self, leases: Sequence[CachedLease], gpus: Sequence[GpuReading]) -> None:
        """End the leftovers that are due, in the background, by the leases and the last reading of their GPUs."""
        now_s = time.monotonic()
        draining = {lease.id: lease for lease in leases if lease.state is LeaseState.ENDED}
        self._ended_at_s = {lease_id: self._ended_at_s.get(lease_id, now_s) for lease_id in draining}
        due = {
            lease_id: None if lease.job_id is not None else _on_gpus(lease, gpus)
            for lease_id, lease in draining.items()
            if (lease.job_id is not None or self._users_too) and now_s - self._ended_at_s[lease_id] >= self._grace_s
        }
        if not due:
            self._first_signal_s.clear()
        elif self._cleanup is None or self._cleanup.done():
            uids = lease_claims.uids_of(draining[lease_id] for lease_id in due)
            self._cleanup = asyncio.create_task(asyncio.to_thread(self._end, due, uids))

    async def close(self) -> None:
        """Wait for a cleanup in progress, which is short."""
        if self._cleanup is not None:
            await asyncio.wait({self._cleanup})

    def _end(self, due: dict[str, set[int] | None], uids: lease_claims.Uids) -> None:
        """Signal every process that claims one of these leases; of a lease with a set of pids, only those."""
        signalled, self._first_signal_s = self._first_signal_s, {}
        for process, lease_id in lease_claims.claimants(uids).items():
            only = due[lease_id]
            if process.pid in (os.getpid(), os.getppid()) or (only is not None and process.pid not in only):
                continue
            first_s = self._first_signal_s[process] = signalled.get(process, time.monotonic())
            kill = time.monotonic() - first_s >= KILL_AFTER_S
            if process in signalled and not kill:
                continue
            number = signal.SIGKILL if kill else signal.SIGTERM
            command = procfs.command_of(process.pid)
            if _signal(process, lease_id, uids, number):
                log.warning("pid %d (%s), left by lease %s, was sent %s", process.pid, command, lease_id, number.name)


def _on_gpus(lease: CachedLease, gpus: Sequence[GpuReading]) -> set[int]:
    mine = [gpu for gpu in gpus if gpu.uuid in lease.gpus]
    return {process.pid for gpu in mine for process in (*gpu.processes, *(gpu.opened_by or ()))}


def _signal(process: ProcessId, lease_id: str, uids: lease_claims.Uids, number: signal.Signals) -> bool:
    """Send a signal to exactly this process, if its claim of the lease counts. False if it was not sent."""
    descriptor = process.pidfd()
    if descriptor is None:
        return False
    try:
        # With the pidfd open, user and marker read now are those of this process, or the process has ended.
        if lease_claims.claim_of(process.pid, uids) != lease_id:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)
    return True
