"""Determines which process has a job: its supervisor, watched by pidfd; this worker, after a dead supervisor; or none.

The lock of a job's directory decides. A supervisor holds it from before it launches until it ends. So while it is held
the job is taken, whatever `start.json` says. Only its holder may record an end: the worker takes it before it records
one. While another has it, the worker searches until it finds the supervisor. This makes it safe to start a supervisor
twice: a worker may die right after it has started one, and the next worker starts another. That one finds the lock
taken and ends, and its end is not the job's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.host import process_tree
from gpulease_protocol.host.logging import fields
from gpulease_protocol.host.process_id import ProcessId
from gpulease_worker.jobs import cgroup, job_records, unkillable_processes
from gpulease_worker.jobs.local_job import LocalJob
from gpulease_worker.jobs.supervisor_start import SupervisorStarter
from gpulease_worker.processes import lease_claims

log = logging.getLogger(__name__)

START_POLL_S = (0.5, 2.0)
"""First and longest pause between two reads of the record of a starting job. Its supervisor gives news of it, too, but
one of an older version does not."""
SEARCH_S = (0.02, 1.0)
"""First and longest pause between two searches for the supervisor of a job whose lock is taken."""
UNREADABLE_S = 60.0
"""How long to retry unreadable records before a job without a supervisor is given up."""
ORPHANS_DEADLINE_S = 5.0
"""How long to kill the processes of a job without a supervisor before the survivors are recorded as unkillable."""
UNKILLABLE_ROUND_S = 1.0
"""Pause between two further attempts to kill those."""


class SupervisorWatcher:
    """Finds, starts and watches the supervisors of jobs, from the event loop.

    Args:
        changed: Called when a job has changed by itself.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._cleaning: set[asyncio.Task[None]] = set()
        self._closing = threading.Event()
        self._starter = SupervisorStarter()

    def close(self) -> None:
        """Stop cleaning up. The next worker finds what is left to clean up."""
        self._closing.set()
        self._starter.close()
        for task in self._cleaning:
            task.cancel()

    def forget(self, job: LocalJob) -> None:
        """Stop watching a job, which continues."""
        self._unwatch(job)
        if job.searching is not None:
            job.searching.cancel()
            job.searching = None
        job.release_lock()

    def claim(self, job: LocalJob) -> bool:
        """Find out which process has an unclaimed job. True if it never started: its lock is then held for the caller.

        Otherwise it has ended, its supervisor is watched or searched for, or its processes are being killed.
        """
        never_started = job.searching is None and self._find(job)
        if not never_started and job.is_unclaimed and job.searching is None:
            job.searching = asyncio.get_running_loop().create_task(self._search(job))
        return never_started

    def start(self, job: LocalJob) -> None:
        """Start a supervisor. Raises OSError."""
        job.release_lock()
        started = self._starter.start(job.directory)
        self._watch_pidfd(job, started.pidfd)
        line = fields(event="job.launched", job_id=job.name, lease_id=job.lease_id, supervisor=started.pid)
        log.info("job.launched", extra=line)

    def signal(self, job: LocalJob, number: signal.Signals) -> None:
        """Send a signal to the supervisor of a job, if one is known, and have it go on if it is stopped: a job of the
        worker's own user can stop it."""
        if job.pidfd is not None:
            with suppress(ProcessLookupError):
                for one in (number, signal.SIGCONT):
                    signal.pidfd_send_signal(job.pidfd, one)

    def record_end(self, job: LocalJob, reason: str, *, stopped: bool = False) -> None:
        """Record the end of a job while its lock is held, and release the lock once that is on disk."""
        job.exit = job_records.never_launched(reason, stopped=stopped)
        self.write_end(job)

    def write_end(self, job: LocalJob) -> None:
        """Write the end of a job to disk, unless it is there. Until then the lock keeps supervisors from launching."""
        if job.lock is None:
            return
        try:
            job_records.write(job.directory, job_records.EXIT, job.exit)
        except FileNotFoundError:
            job.release_lock()  # someone has removed the directory: nothing can be launched from it
        except OSError as error:
            job.log_error(f"its end could not be recorded: {error}")
        else:
            job.release_lock()

    def _find(self, job: LocalJob) -> bool:
        try:
            never_started = self._examine(job)
        except (OSError, ValueError) as error:
            job.release_lock()
            self._retry_or_give_up(job, error)
            return False
        job.unreadable_since_s = None
        return never_started

    def _examine(self, job: LocalJob) -> bool:
        with suppress(ValueError):  # it is read again before it is needed
            job.read_lease()
        job.read()
        if job.exit is None and not self._watch_supervisor(job):
            job.lock = job_records.lock(job.directory)
            if job.lock is None:
                return False
            job.read()  # again: more may have been written until the lock was free
            if job.exit is None and job.start is None:
                return True
            if job.exit is None:
                self._clean(job, "The job's supervisor died")
                return False
            job.release_lock()
        return False

    def _retry_or_give_up(self, job: LocalJob, error: Exception) -> None:
        """Give a job with unreadable records up, but only when that has lasted long and no supervisor is alive; and at
        once where its directory was removed."""
        if job_records.is_removed(job.directory):
            self._clean(job, f"The job's directory {job.directory} was removed, and with it the record of its end")
            return
        job.log_error(f"its state is unknown: {error}")
        now = time.monotonic()
        if job.unreadable_since_s is None:
            job.unreadable_since_s = now
        if now - job.unreadable_since_s < UNREADABLE_S:
            return
        try:
            job.lock = job_records.lock(job.directory)
            if job.lock is None:
                return
        except FileNotFoundError:
            pass  # a directory that was removed has no lock
        except OSError:
            if job.start is None or job.start.supervised():
                return  # otherwise no other supervisor launches it
        self._clean(job, f"The job's records cannot be used ({error}) and it has no supervisor")

    async def _search(self, job: LocalJob) -> None:
        """Search until it is known which process has the job, or that it never started."""
        pause_s = SEARCH_S[0]
        while job.is_unclaimed:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, SEARCH_S[1])
            if self._find(job):
                job.release_lock()
                break
        job.searching = None
        self._changed()

    def _watch_supervisor(self, job: LocalJob) -> bool:
        pidfd = job.start.supervisor.pidfd() if job.start and job.start.supervised() else None
        if pidfd is None:
            return False
        self._watch_pidfd(job, pidfd)
        if job.stop is not None:  # it was written before the supervisor was found
            self.signal(job, signal.SIGTERM)
        return True

    def _watch_pidfd(self, job: LocalJob, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(pidfd, self._ended, job)
        except OSError:
            os.close(pidfd)
            raise
        job.pidfd = pidfd
        job.awaiting_rank = loop.create_task(self._await_rank(job))

    def _unwatch(self, job: LocalJob) -> None:
        if job.awaiting_rank is not None:
            job.awaiting_rank.cancel()
            job.awaiting_rank = None
        if job.pidfd is not None:
            asyncio.get_running_loop().remove_reader(job.pidfd)
            os.close(job.pidfd)
            job.pidfd = None

    def take_news(self, job: LocalJob) -> None:
        """Read the records of a running job that its supervisor may have written."""
        if job.pidfd is None:
            return
        before = job.report()
        with suppress(ValueError):  # it is read again
            job.start = job_records.read(job.directory, job_records.START, job_records.StartRecord)
        job.read_unkillable()
        if job.report() != before:
            self._changed()

    async def _await_rank(self, job: LocalJob) -> None:
        """Wait until the first rank has started. Ends with the supervisor at the latest, which `_ended` handles."""
        pause_s = START_POLL_S[0]
        while job.pidfd is not None and (job.start is None or job.start.rank_at is None):
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.2, START_POLL_S[1])
            self.take_news(job)

    def _ended(self, job: LocalJob) -> None:
        """A supervisor has ended: read its record of the end, find the job's other supervisor, or clean up."""
        _reap(job)
        self._unwatch(job)
        if self.claim(job):
            self.record_end(job, "The job's supervisor ended before it launched anything; see supervisor.log.")
        if job.exit is not None:
            log.info("job.exited", extra=fields(event="job.exited", job_id=job.name, exit_code=job.exit.exit_code))
        self._changed()

    def _clean(self, job: LocalJob, what: str) -> None:
        """Kill the processes of a job without a supervisor, then record the end."""
        job.cleaning = True
        task = asyncio.get_running_loop().create_task(self._clean_up(job, what))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _clean_up(self, job: LocalJob, what: str) -> None:
        with suppress(ValueError):
            job.read_lease()
        if job.lease_id is None:
            self.record_end(job, f"{what}. Its lease is unknown, so its processes could not be found.")
        else:
            await self._kill(job, job.lease_id)
            self.record_end(job, f"{what}; its processes were killed.")
        job.cleaning = False
        self._changed()

    async def _kill(self, job: LocalJob, lease_id: str) -> None:
        """Kill until no process of the job is alive, however long that takes; record the survivors meanwhile.

        What survives SIGKILL is there again in the next round. If all that is left is new each time, something outside
        the job keeps starting what claims to be the job's: that does not keep the job from ending.
        """
        survivors: set[ProcessId] = set()
        group = cgroup.Cgroup(Path(job.start.cgroup)) if job.start and job.start.cgroup else None
        deadline_s = ORPHANS_DEADLINE_S
        while True:
            try:
                left = await asyncio.to_thread(_kill_all, lease_id, job, group, deadline_s, self._closing)
                if not left:
                    return
                if survivors and survivors.isdisjoint(left):
                    pids = ", ".join(str(process.pid) for process in left)
                    job.log_error(f"processes outside the job keep naming its lease, and are left: {pids}")
                    return
                survivors = left
                self._record_unkillable(job, unkillable_processes.unkillable_record(left))
            except (OSError, RuntimeError) as error:  # no descriptor for /proc, no thread: unknown does not mean none
                job.log_error(f"its processes cannot be listed: {error}")
            deadline_s = 2 * process_tree.ROUND_S  # briefly, so that a few such jobs do not occupy every thread
            await asyncio.sleep(UNKILLABLE_ROUND_S)

    def _record_unkillable(self, job: LocalJob, record: job_records.UnkillableRecord) -> None:
        if record == job.unkillable:
            return
        job.log_error(record.reason)
        job.unkillable = record
        try:
            job_records.write(job.directory, job_records.UNKILLABLE, record)
        except OSError as error:
            job.log_error(f"the record of unkillable processes could not be written: {error}")
        self._changed()


def _kill_all(
    lease_id: str, job: LocalJob, group: cgroup.Cgroup | None, deadline_s: float, closing: threading.Event
) -> set[ProcessId]:
    """SIGKILL everything in the job's cgroup and everything of its user with its marker. Returns the survivors."""
    if group is not None and group.path.exists():
        group.kill()
    left = lease_claims.kill_claimants(lease_id, job.uid, deadline_s, closing, job.part)
    if group is not None and group.path.exists() and not left and not group.remove():
        left |= group.members()
    return left


def _reap(job: LocalJob) -> None:
    """Reap a supervisor that has ended, where this worker is its parent: it started it, or is the init process."""
    if job.pidfd is not None:
        with suppress(OSError):
            os.waitid(os.P_PIDFD, job.pidfd, os.WEXITED | os.WNOHANG)
