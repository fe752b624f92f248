"""Every job that this worker has a record of, brought in line with what the daemon orders.

What is true is on disk, in each job's directory (`records`). This module turns orders into directories, supervisors and
stop records; `watch` knows who has a job. It never starts a job twice: a directory is made by a rename that succeeds
once, and of the supervisors that are started for a directory only the one with its lock launches, once.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from gpulease.exchange import JobOrder, JobReport, RunState, run_name
from gpulease.model import Launcher
from gpulease_worker import accounts, launch, launcher_argv, records
from gpulease_worker.job import Job
from gpulease_worker.removal import Removal
from gpulease_worker.watch import Watch

GONE_GRACE_S = 2.0
"""Grace for a job that runs and that the daemon does not ask for."""
KEEP_JOBS = 1000
"""Directories of forgotten jobs that are kept for their logs; the oldest go first."""
THINNED = 20
"""Of those that are too many, so many go at a time: after `--keep-jobs` was lowered it may be a million."""
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

log = logging.getLogger(__name__)


class Jobs:
    """The jobs of one data directory.

    Args:
        data_dir: Absolute; jobs lie in `jobs/` of it.
        url: The daemon, for the jobs' environment.
        changed: Called when a job has changed by itself, from the event loop.
        log_bytes: How much of each log file of a job stays on disk.
        keep: How many directories of forgotten jobs stay there.
    """

    def __init__(
        self,
        data_dir: Path,
        url: str,
        changed: Callable[[], None],
        log_bytes: int = launch.LOG_BYTES,
        keep: int = KEEP_JOBS,
    ) -> None:
        self._root = data_dir / "jobs"
        self._url = url
        self._log_bytes = log_bytes
        self._keep = keep
        self._watch = Watch(changed)
        self._removal = Removal()
        self._jobs: dict[str, Job] = {}
        self._refused: dict[str, JobReport] = {}
        self._forgotten: dict[str, None] = {}
        """Names of forgotten jobs that have a directory, in the order in which they were forgotten."""

    def recover(self) -> None:
        """Find the jobs of an earlier worker again. Raises OSError when the data directory cannot be used."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        marks = []
        for mark in self._root.glob(f"*/{records.FORGOTTEN}"):
            with suppress(FileNotFoundError):
                marks.append((mark.stat().st_mtime_ns, mark.parent.name))
        self._forgotten = dict.fromkeys(name for _, name in sorted(marks))
        for directory in sorted(self._root.iterdir()):
            if directory.name.startswith("."):
                self._removal.put(directory)  # made by a worker that ended before it could rename it, or not yet gone
            elif JOB_ID.fullmatch(directory.name) and _holds_job(directory):
                self._load(directory)

    def reports(self) -> tuple[JobReport, ...]:
        """What the daemon is told: every job that it has not yet stopped asking for."""
        return (*(job.report() for job in self._jobs.values()), *self._refused.values())

    def reconcile(self, orders: Sequence[JobOrder]) -> bool:
        """Start what is ordered, stop what is to stop or no longer ordered. True when a report is different now."""
        before = self.reports()
        for job in self._jobs.values():
            job.read_stuck()
        ordered = {_run(order) for order in orders}
        for order in orders:
            try:
                self._follow(order)
            except (OSError, ValueError) as error:
                self._refuse(order, f"The worker cannot run it: {error}.")
        for run in [run for run in self._refused if run not in ordered]:
            del self._refused[run]
        for job in [job for run, job in self._jobs.items() if run not in ordered]:
            self._drop(job)
        self._thin_out()
        return self.reports() != before

    def close(self) -> None:
        """Stop watching. The jobs go on."""
        self._watch.close()
        for job in self._jobs.values():
            self._watch.leave(job)

    def _follow(self, order: JobOrder) -> None:
        if _run(order) in self._refused:
            return
        job = self._jobs.get(_run(order)) or self._known(order) or self._prepare(order)
        if job.lease_id is None:
            job.lease_id = order.lease_id
        if job.adrift and self._watch.claim(job):
            if order.stop:
                self._watch.record_end(job, "It was stopped before it started.")
            else:
                self._watch.start(job)
        if order.stop:
            self._stop(job, order.grace_s)

    def _known(self, order: JobOrder) -> Job | None:
        """The job from a directory that is there already: forgotten once, and asked for again."""
        if not JOB_ID.fullmatch(order.job_id):
            raise ValueError(f"its id {order.job_id!r} is not a plain name")
        directory = self._root / _run(order)
        self._forgotten.pop(directory.name, None)
        if not directory.is_dir():
            return None
        (directory / records.FORGOTTEN).unlink(missing_ok=True)
        if not _holds_job(directory):
            raise ValueError(f"{directory} is in the way: it has no {records.ORDER}; remove it")
        self._load(directory)
        return self._jobs.get(_run(order))

    def _prepare(self, order: JobOrder) -> Job:
        """Make the job's directory, whole or not at all. A job that cannot start has its end in it at once."""
        directory = self._root / _run(order)
        logs, work = directory / records.LOGS, directory / records.WORK
        own = accounts.own_uid()
        refusal = accounts.refusal(order.uid, own)
        account = None if order.uid in (None, own) else accounts.account(order.uid, order.gid)
        plan = launch.plan(
            order,
            own=os.environ,
            url=self._url,
            python=sys.executable,
            work=work,
            logs=logs,
            account=account,
            log_bytes=self._log_bytes,
        )
        job = Job(directory=directory, lease_id=order.lease_id)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=self._root))
        try:
            self._furnish(made, records.Task(order=order, plan=plan))
            made.rename(directory)
            records.sync(self._root)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            raise
        self._jobs[_run(order)] = job
        if refusal is not None and self._watch.claim(job):
            self._watch.record_end(job, refusal)
        return job

    def _furnish(self, made: Path, task: records.Task) -> None:
        """Fill a new directory. What the job's user must write is his; the directory itself stays the worker's, so that
        nothing in it can be exchanged."""
        logs, work = made / records.LOGS, made / records.WORK
        logs.mkdir(mode=0o700)
        work.mkdir(mode=0o700)
        (logs / "launcher.log").touch()
        launcher = task.order.spec.launcher
        if launcher in launcher_argv.ALONE:
            # One process is launched, and whatever it prints is in the launcher's log.
            os.link(logs / "launcher.log", logs / "rank-0.log")
        if launcher is Launcher.ACCELERATE:
            (made / launcher_argv.ACCELERATE_CONFIG).write_text(launcher_argv.accelerate_config(task.order))
            (made / launcher_argv.ACCELERATE_CONFIG).chmod(0o644)
        records.reserve(made, records.EXIT)
        records.write(made, records.ORDER, task)
        account = task.plan.account
        if account is not None:
            for path in (logs / "launcher.log", logs, work):
                os.chown(path, account.uid, account.gid)
            made.chmod(0o711)
            self._root.chmod(0o711)

    def _load(self, directory: Path) -> None:
        """Take up a job that has a directory. It is the worker's from now on, also while its records cannot be read."""
        job = self._jobs[directory.name] = Job(directory=directory)
        if self._watch.claim(job):
            job.let_go()  # started when it is ordered

    def _stop(self, job: Job, grace_s: float) -> None:
        """Pass an order to stop on to the supervisor; again only when the grace has become shorter."""
        if job.exit is not None or job.cleaning or (job.stop is not None and job.stop.grace_s <= grace_s):
            return
        stop = records.Stop(grace_s=grace_s)
        try:
            records.write(job.directory, records.STOP, stop)
            job.stop = stop
        except OSError as error:
            job.say(f"the order to stop is not on disk: {error}")
        # Told without the record it stops with its default grace; the record is tried again at the next order.
        if job.watched is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(job.watched, signal.SIGTERM)

    def _drop(self, job: Job) -> None:
        """End a job that the daemon does not ask for; forget it once it has ended. Its logs stay."""
        if job.adrift and self._watch.claim(job):
            self._watch.record_end(job, "The daemon no longer asks for it.")
        if job.exit is None:
            self._stop(job, GONE_GRACE_S)
            return
        self._watch.write_end(job)
        if job.lock is not None:
            return  # its end is not on disk, and without that it might yet be launched
        del self._jobs[job.name]
        try:
            (job.directory / records.FORGOTTEN).touch()
            self._forgotten[job.directory.name] = None
        except FileNotFoundError:
            pass  # someone has removed it
        except OSError as error:
            # Only the mark is missing: the next worker reports the job once more, and forgets it then.
            job.say(f"it cannot be marked as forgotten: {error}")

    def _thin_out(self) -> None:
        """Remove the directories of jobs that were forgotten longest ago, where there are too many."""
        for name in list(islice(self._forgotten, min(THINNED, max(0, len(self._forgotten) - self._keep)))):
            del self._forgotten[name]
            directory, gone = self._root / name, self._root / f".gone-{name}"
            try:
                if name not in self._jobs and (directory / records.FORGOTTEN).exists():
                    directory.rename(gone)
                    self._removal.put(gone)
            except OSError as error:
                log.warning("%s stays, because it cannot be removed: %s", directory, error)

    def _refuse(self, order: JobOrder, reason: str) -> None:
        log.error("job %s: %s", order.job_id, reason)
        if _run(order) in self._jobs:
            return  # it has a report of its own, and the order comes again
        self._refused[_run(order)] = JobReport(
            job_id=order.job_id, attempt=order.attempt, state=RunState.EXITED, ended_at=records.now(), reason=reason
        )


def _run(order: JobOrder) -> str:
    """The attempt that an order is for: the key of everything here, and the name of its directory."""
    return run_name(order.job_id, order.attempt)


def _holds_job(directory: Path) -> bool:
    """True if it is the directory of a job that is not forgotten, also when that cannot be told."""
    try:
        return (directory / records.ORDER).exists() and not (directory / records.FORGOTTEN).exists()
    except OSError:
        return True
