"""Who has a job: its supervisor, which is watched by pidfd; this worker, which cleans up after a dead one; or nobody.

The lock of a job's directory decides. A supervisor holds it from before it launches until it ends, so as long as it is
held the job is somebody's, whatever `start.json` says or does not yet say; and only who holds it may record an end. The
worker therefore takes it before it records one, and when it cannot have it, looks again until it finds the supervisor.
This is what makes it safe to start a supervisor twice: a worker may die right after it started one, and the next starts
another; the second finds the lock taken and ends, and its end is not the job's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpulease.log_lines import fields
from gpulease_worker import cgroup, processes, records, stuck
from gpulease_worker.job import Job

log = logging.getLogger(__name__)

START_LOOK_S = (0.02, 0.5)
"""First and longest pause between two looks at the record of a starting job: a plain command is up some tens of
milliseconds after the supervisor, a rank of torchrun some seconds."""
SEEK_S = (0.02, 1.0)
"""First and longest pause between two looks for the supervisor of a job that somebody has."""
DOUBT_S = 60.0
"""How long records that cannot be read are tried again before a job without a supervisor is given up."""
ORPHANS_DEADLINE_S = 5.0
"""How long the processes of a job without supervisor are killed for before those that live on are noted."""
STUCK_LOOK_S = 1.0
"""Pause between two more attempts on those."""


class Watch:
    """Finds, starts and watches the supervisors of jobs, from the event loop.

    Args:
        changed: Called when a job has changed by itself.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._cleaning: set[asyncio.Task[None]] = set()
        self._closing = threading.Event()

    def close(self) -> None:
        """Stop cleaning up. What is not clean yet is found again by the next worker."""
        self._closing.set()
        for task in self._cleaning:
            task.cancel()

    def leave(self, job: Job) -> None:
        """Stop watching a job, which goes on."""
        self._unwatch(job)
        if job.seeking is not None:
            job.seeking.cancel()
            job.seeking = None
        job.let_go()

    def claim(self, job: Job) -> bool:
        """Find out who has a job that is adrift. True when it never started: its lock is then held for the caller.

        Else it has ended, or it is watched, sought, or cleaned up after.
        """
        never_started = job.seeking is None and self._find(job)
        if not never_started and job.adrift and job.seeking is None:
            job.seeking = asyncio.get_running_loop().create_task(self._seek(job))
        return never_started

    def start(self, job: Job) -> None:
        """Start a supervisor: in a session of its own, and with no pipe to this worker. Raises OSError."""
        job.let_go()
        # -P, here as wherever a process of the worker is started: what lies in the directory in which somebody once
        # started it is not to be imported.
        inherited = {
            name: value for name, value in os.environ.items() if name not in (processes.MARKER, "GPULEASE_TOKEN")
        }
        output = str(job.directory / "supervisor.log")
        child = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "gpulease_worker.supervisor", str(job.directory)],
            inherited,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            # A SIGTERM that comes before the supervisor listens waits for it.
            setsigmask={signal.SIGTERM},
        )
        try:
            # Not reaped yet, so the pid is the child's own.
            self._watch_pidfd(job, os.pidfd_open(child))
        except OSError:
            # Nobody would see its end. It has hardly begun; should it have launched already, the next look cleans up.
            os.kill(child, signal.SIGKILL)
            _reap(child)
            raise
        job.child = child
        line = fields(event="job.launched", job_id=job.name, lease_id=job.lease_id, supervisor=child)
        log.info("job.launched", extra=line)

    def record_end(self, job: Job, reason: str) -> None:
        """End a job whose lock is held, and let go of it once that is on disk."""
        job.exit = records.Exit(exit_code=None, reason=reason, ended_at=records.now())
        self.write_end(job)

    def write_end(self, job: Job) -> None:
        """Put the end of a job on disk, unless it is there. Until it is, the lock keeps supervisors off."""
        if job.lock is None:
            return
        try:
            records.write(job.directory, records.EXIT, job.exit)
        except FileNotFoundError:
            job.let_go()  # someone has removed the directory: nothing can be launched from it
        except OSError as error:
            job.say(f"its end is not on disk: {error}")
        else:
            job.let_go()

    def _find(self, job: Job) -> bool:
        try:
            return self._look(job)
        except (OSError, ValueError) as error:
            job.let_go()
            self._doubt(job, error)
            return False

    def _look(self, job: Job) -> bool:
        with suppress(ValueError):  # asked for again before it is needed
            job.read_lease()
        job.read()
        job.doubtful_since_s = None
        if job.exit is None and not self._watch_supervisor(job):
            job.lock = records.lock(job.directory)
            if job.lock is None:
                return False
            job.read()  # what was written until the lock was free
            if job.exit is None and job.start is None:
                return True
            if job.exit is None:
                self._clean(job, "The job's supervisor died")
                return False
            job.let_go()
        return False

    def _doubt(self, job: Job, error: Exception) -> None:
        """The records cannot be read. Give the job up only when that has lasted long and no supervisor lives."""
        job.say(f"it is not known how it stands: {error}")
        now = time.monotonic()
        if job.doubtful_since_s is None:
            job.doubtful_since_s = now
        if now - job.doubtful_since_s < DOUBT_S:
            return
        try:
            job.lock = records.lock(job.directory)
            if job.lock is None:
                return
        except FileNotFoundError:
            pass  # nobody can hold the lock of a directory that was removed
        except OSError:
            return
        self._clean(job, f"The job's records cannot be read ({error}) and it has no supervisor")

    async def _seek(self, job: Job) -> None:
        """Until it is known who has the job, or that it never started."""
        pause_s = SEEK_S[0]
        while job.adrift:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, SEEK_S[1])
            if self._find(job):
                job.let_go()
                break
        job.seeking = None
        self._changed()

    def _watch_supervisor(self, job: Job) -> bool:
        pidfd = job.start.supervisor.pidfd() if job.start and job.start.supervised() else None
        if pidfd is None:
            return False
        self._watch_pidfd(job, pidfd)
        if job.stop is not None:  # it was written before there was anybody to be told
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        return True

    def _watch_pidfd(self, job: Job, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(pidfd, self._ended, job)
        except OSError:
            os.close(pidfd)
            raise
        job.watched = pidfd
        job.starting = loop.create_task(self._look_for_start(job))

    def _unwatch(self, job: Job) -> None:
        if job.starting is not None:
            job.starting.cancel()
            job.starting = None
        if job.watched is not None:
            asyncio.get_running_loop().remove_reader(job.watched)
            os.close(job.watched)
            job.watched = None

    async def _look_for_start(self, job: Job) -> None:
        """Until the first rank is up. Ends with the supervisor at the latest, which `_ended` sees."""
        pause_s = START_LOOK_S[0]
        while job.watched is not None and (job.start is None or job.start.rank_at is None):
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.2, START_LOOK_S[1])
            with suppress(ValueError):
                job.start = records.read(job.directory, records.START, records.Start)
        self._changed()

    def _ended(self, job: Job) -> None:
        """A supervisor is gone: take its record of the end, find the one that the job has, or clean up."""
        self._unwatch(job)
        if job.child is not None:
            _reap(job.child)  # its pidfd is readable, so it has ended
            job.child = None
        if self.claim(job):
            self.record_end(job, "The job's supervisor ended before it launched anything; see supervisor.log.")
        if job.exit is not None:
            log.info("job.exited", extra=fields(event="job.exited", job_id=job.name, exit_code=job.exit.exit_code))
        self._changed()

    def _clean(self, job: Job, what: str) -> None:
        """Kill the processes of a job without supervisor, then record the end."""
        job.cleaning = True
        task = asyncio.get_running_loop().create_task(self._clean_up(job, what))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _clean_up(self, job: Job, what: str) -> None:
        with suppress(ValueError):
            job.read_lease()
        if job.lease_id is None:
            self.record_end(job, f"{what}. Its lease is not known, so its processes could not be looked for.")
        else:
            await self._kill(job, job.lease_id)
            self.record_end(job, f"{what}; its processes were killed.")
        job.cleaning = False
        self._changed()

    async def _kill(self, job: Job, lease_id: str) -> None:
        """Until nothing of the job lives, however long that takes; what does not die is noted meanwhile."""
        group = cgroup.Cgroup(Path(job.start.cgroup)) if job.start and job.start.cgroup else None
        deadline_s = ORPHANS_DEADLINE_S
        while True:
            try:
                left = await asyncio.to_thread(_kill_all, lease_id, group, deadline_s, self._closing)
                if not left:
                    return
                self._note(job, stuck.note(left))
            except OSError as error:  # no file descriptor for /proc: unknown is not none
                job.say(f"its processes cannot be looked for: {error}")
            deadline_s = 2 * processes.KILL_ROUND_S  # briefly, so that a few such jobs do not occupy every thread
            await asyncio.sleep(STUCK_LOOK_S)

    def _note(self, job: Job, noted: records.Stuck) -> None:
        if noted == job.stuck:
            return
        job.say(noted.reason)
        job.stuck = noted
        try:
            records.write(job.directory, records.STUCK, noted)
        except OSError as error:
            job.say(f"what does not die is not on disk: {error}")
        self._changed()


def _kill_all(
    lease_id: str, group: cgroup.Cgroup | None, deadline_s: float, closing: threading.Event
) -> set[processes.Identity]:
    """End everything in the job's cgroup, and everything with its marker. Returns what would not die."""
    if group is not None and group.path.exists():
        group.kill()
    left = processes.kill_marked(lease_id, deadline_s, closing)
    if group is not None and group.path.exists() and not left and not group.remove():
        left |= group.members()
    return left


def _reap(child: int) -> None:
    with suppress(ChildProcessError):  # reaped already, where SIGCHLD is ignored
        os.waitpid(child, 0)
