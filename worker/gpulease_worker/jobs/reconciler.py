"""Reconciles every job that this worker has a record of with the daemon's orders.

Each job's directory is authoritative (`job_records`). This module turns orders into directories, supervisors and stop
records; `supervisor_watch` knows which process has a job. No job is started twice: a directory is made by a rename that
succeeds once, and of several supervisors of a directory only the holder of its lock launches, once.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from gpulease_protocol.model import Launcher
from gpulease_protocol.node_protocol import JobOrder, JobReport, RunState, attempt_name, parse_attempt_name
from gpulease_worker.desired_state import UnreadableOrder
from gpulease_worker.jobs import job_records, launch_plan, launcher_argv, user_accounts
from gpulease_worker.jobs.directory_removal import DirectoryRemover
from gpulease_worker.jobs.job_settings import JobSettings
from gpulease_worker.jobs.launch_plan import LaunchPlan
from gpulease_worker.jobs.local_job import LocalJob
from gpulease_worker.jobs.record_wakeup import NewsListener
from gpulease_worker.jobs.supervisor_watch import SupervisorWatcher
from gpulease_worker.processes import network_interface

GONE_GRACE_S = 2.0
"""Grace period of a running job that the daemon does not order."""
KEEP_JOBS = 1000
"""Directories of forgotten jobs that are kept for their logs; the oldest are removed first."""
REMOVED_AT_ONCE = 20
"""How many are removed at a time: after `--keep-jobs` was lowered there may be a million too many."""
FILLED_AT_ONCE = 16
"""How many directories of new jobs are filled side by side."""
LEAVES = "Its node leaves."
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

log = logging.getLogger(__name__)


class JobsOfAnotherNode(Exception):
    """A job runs here that was ordered for a node of another name, as after a change of the host's name."""

    def __init__(self, job: str, node: str) -> None:
        super().__init__(f"job {job} of node {node} runs there, and under another name its worker would end it")
        self.node = node


class JobReconciler:
    """Keeps the jobs of one data directory as the daemon orders them.

    Args:
        data_dir: Absolute; the jobs are in its `jobs/`.
        url: The daemon, for the jobs' environment.
        changed: Called from the event loop when a job has changed by itself.
        settings: What the worker's settings say about jobs; the defaults where None.
        keep: How many directories of forgotten jobs are kept.
        ca_file: Certificates to trust for https to the daemon, for the jobs' environment; the system's where None.
        may_leave: Whether the worker can leave with its node: a job that ends because of that is reported so.
    """

    def __init__(
        self,
        data_dir: Path,
        url: str,
        changed: Callable[[], None],
        settings: JobSettings | None = None,
        keep: int = KEEP_JOBS,
        ca_file: str | None = None,
        *,
        may_leave: bool = False,
    ) -> None:
        self._root = data_dir / "jobs"
        self._news: NewsListener | None = None
        self._url = url
        self._ca_file = ca_file
        self._settings = settings
        self._keep = keep
        self._may_leave = may_leave
        self._leaves = False
        self._database_id: str | None = None
        """The daemon's database, as in its last answer."""
        self._supervisors = SupervisorWatcher(changed)
        self._remover = DirectoryRemover()
        self._jobs: dict[str, LocalJob] = {}
        self._refused: dict[str, JobReport] = {}
        self._forgotten: dict[str, None] = {}
        """Names of forgotten jobs that have a directory, in the order in which they were forgotten."""

    def recover(self) -> None:
        """Load the jobs of an earlier worker. Raises OSError when the data directory cannot be used, and
        JobsOfAnotherNode where the daemon, which orders nothing of another node's here, would have them ended."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._news = NewsListener(self._root.parent, self._take_news)
        except OSError as error:
            log.warning("supervisors cannot give news of their jobs, which are seen to start later: %s", error)
        marks = []
        for mark in self._root.glob(f"*/{job_records.FORGOTTEN}"):
            with suppress(FileNotFoundError):
                marks.append((mark.stat().st_mtime_ns, mark.parent.name))
        self._forgotten = dict.fromkeys(name for _, name in sorted(marks))
        for directory in sorted(self._root.iterdir()):
            if directory.name.startswith("."):
                self._remover.put(directory)  # unfinished by a worker that ended, or not removed yet
            elif JOB_ID.fullmatch(directory.name) and _holds_job(directory):
                self._load(directory)
        node = None if self._settings is None else self._settings.node
        for job in self._jobs.values():
            if job.pidfd is not None and None not in (node, job.node) and job.node != node:
                self.close()
                raise JobsOfAnotherNode(job.name, str(job.node))

    def reports(self) -> tuple[JobReport, ...]:
        """A report of every job that the daemon still orders."""
        return (*map(self._report, self._jobs.values()), *self._refused.values())

    def _report(self, job: LocalJob) -> JobReport:
        report = job.report()
        return replace(report, node_left=True) if self._may_leave and job.ended_by_node else report

    def leave(self, grace_s: float) -> None:
        """End all jobs, with this grace period, and start none from now on: the node leaves."""
        self._leaves = True
        for job in self._jobs.values():
            self._end_with_node(job, grace_s)

    def _end_with_node(self, job: LocalJob, grace_s: float) -> None:
        if job.is_unclaimed and self._supervisors.claim(job):
            self._supervisors.record_end(job, LEAVES, stopped=True)
        told = job.stop or job_records.StopRecord(grace_s=grace_s, node_left=True)
        self._stop(job, replace(told, grace_s=grace_s))

    @property
    def have_ended(self) -> bool:
        """True when no job runs, and the end of each is on disk."""
        return all(job.exit is not None and job.lock is None for job in self._jobs.values())

    def reconcile(self, orders: Sequence[JobOrder], database_id: str | None = None) -> bool:
        """Start the ordered jobs; stop those ordered to stop and those not ordered, but for those of another database
        than `database_id`. True if a report has changed."""
        self._database_id = database_id
        before = self.reports()
        for job in self._jobs.values():
            job.read_unkillable()
            self._supervisors.signal(job, signal.SIGCONT)  # no job evades its time limit by stopping its supervisor
        ordered = {_attempt(order) for order in orders}
        self._prepare(orders)
        for order in orders:
            try:
                self._follow(order)
            except (OSError, ValueError) as error:
                self._refuse(order, f"The worker cannot run it: {error}.")
        for name in [name for name in self._refused if name not in ordered]:
            del self._refused[name]
        for job in [job for name, job in self._jobs.items() if name not in ordered]:
            self._drop(job)
        self._remove_oldest()
        return self.reports() != before

    def close(self) -> None:
        """Stop watching. The jobs go on."""
        if self._news is not None:
            self._news.close()
            self._news = None
        self._supervisors.close()
        for job in self._jobs.values():
            self._supervisors.forget(job)

    def _take_news(self, name: str) -> None:
        if (job := self._jobs.get(name)) is not None:
            self._supervisors.take_news(job)

    def _follow(self, order: JobOrder) -> None:
        job = self._jobs.get(_attempt(order))
        if job is None:
            return  # it is refused
        if job.lease_id is None:
            job.lease_id = order.lease_id
        job.note_origin(order.gpus, self._database_id)
        if job.is_unclaimed and self._supervisors.claim(job):
            if order.stop:
                self._supervisors.record_end(job, "It was stopped before it started.")
            elif self._leaves:
                self._supervisors.record_end(job, LEAVES, stopped=True)
            elif self._earlier_attempt_runs(order):
                job.release_lock()
                return  # until its end, which changes a report, and so has this called again
            else:
                self._supervisors.start(job)
        if order.stop:
            self._stop(job, job_records.StopRecord(grace_s=order.grace_s, again=order.again, failure=order.failure))
        elif order.gang is not None and order.go:
            self._let_go(job)

    def kept_gpus(self) -> dict[str, str]:
        """By UUID, why a GPU must not be leased: a job runs on it that another database ordered."""
        return {uuid: job.kept for job in self._jobs.values() if job.kept and job.exit is None for uuid in job.gpus}

    def _earlier_attempt_runs(self, order: JobOrder) -> bool:
        """True while something of another attempt of this job may be left here, under the same lease. What it left is
        known by that, so that its end would end this one."""
        attempts = ((parse_attempt_name(name), job) for name, job in self._jobs.items())
        return any(job.exit is None for (of, number), job in attempts if of == order.job_id and number < order.attempt)

    def _reload(self, order: JobOrder) -> bool:
        """Load the job of an existing directory: it was forgotten, and is ordered again. False if there is none."""
        if not JOB_ID.fullmatch(order.job_id):
            raise ValueError(f"its id {order.job_id!r} is not a plain name")
        directory = self._root / _attempt(order)
        self._forgotten.pop(directory.name, None)
        if not directory.is_dir():
            return False
        (directory / job_records.FORGOTTEN).unlink(missing_ok=True)
        if not _holds_job(directory):
            raise ValueError(f"{directory} is in the way: it has no {job_records.ORDER}; remove it")
        self._load(directory)
        return True

    def _prepare(self, orders: Sequence[JobOrder]) -> None:
        """Make the directories of the jobs that are new. What each needs on disk is synced side by side, and the names
        of all of them together."""
        new = []
        for order in orders:
            if _attempt(order) in self._jobs or _attempt(order) in self._refused:
                continue
            try:
                if not self._reload(order):
                    new.append((order, self._plan(order)))
            except (OSError, ValueError) as error:
                self._refuse(order, f"The worker cannot run it: {error}.")
        if self._leaves:
            for order, _ in new:
                self._refuse(order, LEAVES, node_left=True)
        elif new:
            self._make_new(new)

    def _make_new(self, new: Sequence[tuple[JobOrder, LaunchPlan]]) -> None:
        made = self._make_all(new)
        try:
            job_records.sync(self._root)
        except OSError as error:
            for order, _ in new:
                self._refuse(order, f"The worker cannot run it: {error}.")
            return
        for order, plan, failure in made:
            if failure is None:
                self._add(order, plan)
            else:
                self._refuse(order, f"The worker cannot run it: {failure}.")

    def _make_all(
        self, new: Sequence[tuple[JobOrder, LaunchPlan]]
    ) -> list[tuple[JobOrder, LaunchPlan, Exception | None]]:
        """Make the directories of new jobs, and say of each whether that failed. Where the host has no threads left,
        this does only some of them, and the next call does the others."""
        others, made = [], []
        try:
            with ThreadPoolExecutor(FILLED_AT_ONCE) as pool:
                for order, plan in new[1:]:
                    others.append((order, plan, pool.submit(self._try_to_make, order, plan)))
                made.append((*new[0], self._try_to_make(*new[0])))
        except RuntimeError as error:
            log.warning("jobs are made one by one: %s", error)
        if not made:
            made.append((*new[0], self._try_to_make(*new[0])))
        return made + [(order, plan, future.result()) for order, plan, future in others]

    def _try_to_make(self, order: JobOrder, plan: LaunchPlan) -> Exception | None:
        try:
            self._make(order, plan)
        except Exception as error:
            return error
        return None

    def _plan(self, order: JobOrder) -> LaunchPlan:
        """How a new job is run. Raises ValueError."""
        if isinstance(order, UnreadableOrder):
            raise ValueError(order.problem)
        directory, own = self._root / _attempt(order), user_accounts.own_uid()
        plan = launch_plan.plan_launch(
            order,
            own=os.environ,
            url=self._url,
            python=sys.executable,
            work=directory / job_records.WORK,
            logs=directory / job_records.LOGS,
            account=None if order.uid in (None, own) else user_accounts.account_of(order.uid, order.gid),
            settings=self._settings,
            ca_file=self._ca_file,
            interface=None if order.gang is None else network_interface.towards(order.gang.leader),
        )
        return replace(plan, database_id=self._database_id)

    def _make(self, order: JobOrder, plan: LaunchPlan) -> None:
        """Make a job's directory, complete or not at all. Raises OSError. It may run beside others in a thread."""
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=self._root))
        try:
            self._fill(made, order, plan)
            made.rename(self._root / _attempt(order))
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def _add(self, order: JobOrder, plan: LaunchPlan) -> None:
        """Take a new job in. If it cannot start, record its end at once."""
        job = LocalJob(directory=self._root / _attempt(order))
        job.take(plan)
        self._jobs[_attempt(order)] = job
        refusal = user_accounts.reason_to_refuse(order.uid, user_accounts.own_uid())
        if refusal is not None and self._supervisors.claim(job):
            self._supervisors.record_end(job, refusal)

    def _fill(self, made: Path, order: JobOrder, plan: LaunchPlan) -> None:
        """Fill a new directory. The job's user owns what the job writes; the worker owns the directory itself, so that
        nothing in it can be replaced."""
        logs, work = made / job_records.LOGS, made / job_records.WORK
        logs.mkdir(mode=0o700)
        work.mkdir(mode=0o700)
        (logs / "launcher.log").touch()
        if not plan.starts_ranks:
            # The launched process is the first rank of its node, so both names belong to one log.
            os.link(logs / "launcher.log", logs / f"rank-{launcher_argv.first_rank(order)}.log")
        if plan.notify is not None:
            (logs / job_records.NOTIFY_LOG).touch()
        if order.spec.launcher is Launcher.ACCELERATE:
            (made / launcher_argv.ACCELERATE_CONFIG).write_text(launcher_argv.accelerate_config(order))
            (made / launcher_argv.ACCELERATE_CONFIG).chmod(0o644)
        if order.spec.launcher is Launcher.DEEPSPEED and order.gang is not None:
            (made / launcher_argv.HOST_FILE).write_text(launcher_argv.host_file(order, order.gang))
            (made / launcher_argv.HOST_FILE).chmod(0o644)
        job_records.reserve(made, job_records.EXIT)
        job_records.write(made, job_records.ORDER, plan)
        account = plan.account
        if account is not None and user_accounts.own_uid() == 0:  # any other worker refuses the job, see `_add`
            for path in (*logs.iterdir(), logs, work):
                os.chown(path, account.uid, account.gid)
            made.chmod(0o711)
            self._root.chmod(0o711)

    def _load(self, directory: Path) -> None:
        """Load a job from its directory. The worker is responsible for it, even while its records are unreadable."""
        job = self._jobs[directory.name] = LocalJob(directory=directory)
        if self._supervisors.claim(job):
            job.release_lock()  # started when it is ordered

    def _stop(self, job: LocalJob, stop: job_records.StopRecord) -> None:
        """Pass an order to stop to the supervisor; once more only when the grace period has become shorter, or the job
        does not start again after all, or is cancelled after it had failed."""
        if job.exit is not None or job.cleaning:
            return
        told = job.stop
        if told is not None and told.grace_s <= stop.grace_s:
            if (stop.again or not told.again) and (stop.failure is None) == (told.failure is None):
                return
            stop = replace(stop, grace_s=told.grace_s)
        try:
            job_records.write(job.directory, job_records.STOP, stop)
            job.stop = stop
        except OSError as error:
            job.log_error(f"the order to stop is not on disk: {error}")
        # Without the record it stops with its default grace period; the next order tries the record again.
        self._supervisors.signal(job, signal.SIGTERM)

    def _let_go(self, job: LocalJob) -> None:
        """Tell the supervisor of a job on several nodes that all of them are prepared. Raises OSError."""
        if not job.may_go:
            (job.directory / job_records.GO).touch()
            job.may_go = True
            if job.start is not None and job.start.prepared_at is not None:
                # It catches the signal by now. Without it, it finds the file a moment later.
                self._supervisors.signal(job, signal.SIGUSR1)

    def _drop(self, job: LocalJob) -> None:
        """Stop a job that the daemon does not order; forget it once it has ended. Its logs stay.

        One that runs and was ordered from another database goes on: with an empty one, or a backup of yesterday, the
        daemon has not decided that it ends.
        """
        if job.is_unclaimed and self._supervisors.claim(job):
            self._supervisors.record_end(job, "The daemon no longer orders it.")
        if job.exit is None and job.stop is None and job.is_of_another(self._database_id):
            job.keep_on()
            return
        if job.exit is None:
            if job.stop is None:
                log.warning("job %s runs here, and its daemon does not know of that: it is ended", job.name)
            self._stop(job, job_records.StopRecord(grace_s=GONE_GRACE_S))
            return
        self._supervisors.write_end(job)
        if job.lock is not None:
            return  # its end is not on disk, and without it the job might still be launched
        del self._jobs[job.name]
        try:
            (job.directory / job_records.FORGOTTEN).touch()
            self._forgotten[job.directory.name] = None
        except FileNotFoundError:
            pass  # someone has removed it
        except OSError as error:
            # Only the mark is missing: the next worker reports the job once more, and then forgets it.
            job.log_error(f"it cannot be marked as forgotten: {error}")

    def _remove_oldest(self) -> None:
        """Remove the directories of the jobs that were forgotten first, beyond the number to keep."""
        for name in list(islice(self._forgotten, min(REMOVED_AT_ONCE, max(0, len(self._forgotten) - self._keep)))):
            del self._forgotten[name]
            directory, gone = self._root / name, self._root / f".gone-{name}"
            try:
                if name not in self._jobs and (directory / job_records.FORGOTTEN).exists():
                    directory.rename(gone)
                    self._remover.put(gone)
            except OSError as error:
                log.warning("%s cannot be removed and stays: %s", directory, error)

    def _refuse(self, order: JobOrder, reason: str, *, node_left: bool = False) -> None:
        if (job := self._jobs.get(_attempt(order))) is not None:
            job.log_error(reason)  # it has its own report, and the order is repeated
            return
        log.log(logging.INFO if node_left else logging.ERROR, "job %s: %s", order.job_id, reason)
        self._refused[_attempt(order)] = JobReport(
            job_id=order.job_id,
            attempt=order.attempt,
            state=RunState.EXITED,
            ended_at=job_records.now(),
            reason=reason,
            node_left=node_left,
        )


def _attempt(order: JobOrder) -> str:
    """Name of the attempt that is ordered, by which it is stored here; also the name of its directory."""
    return attempt_name(order.job_id, order.attempt)


def _holds_job(directory: Path) -> bool:
    """True if it is the directory of a job that is not forgotten, and while that is unreadable."""
    try:
        return (directory / job_records.ORDER).exists() and not (directory / job_records.FORGOTTEN).exists()
    except OSError:
        return True
