"""The worker's view of one job on this node. Its directory is authoritative (`job_records`); this is a copy."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.node_protocol import JobReport, RunState, parse_attempt_name
from gpulease_worker.jobs import job_records
from gpulease_worker.jobs.failure_cause import reportable
from gpulease_worker.jobs.launch_plan import LaunchPlan
from gpulease_worker.processes import lease_claims

LOGGED_ERRORS = 4
"""How many errors of a job are remembered, so that they are not logged again and again."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LocalJob:
    """A job with a directory on this node."""

    directory: Path
    """Its directory; named after the attempt (`attempt_name`)."""
    lease_id: str | None = None
    """The marker of its processes; None while its order is unreadable."""
    uid: int = lease_claims.NO_USER
    """The user of its processes; NO_USER while its order is unreadable."""
    part: int | None = None
    """Rank of this node in a job on several nodes; None for a job on one, and while its order is unreadable."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its GPUs here; none while its order is unreadable, or of an older release."""
    database_id: str | None = None
    """The daemon's database from which it was last ordered; None while that is not known."""
    node: str | None = None
    """The node that it was ordered for; None while its order is unreadable, or of an older release."""
    kept: str | None = None
    """Why it goes on although its daemon does not order it; None as long as it does."""
    start: job_records.StartRecord | None = None
    exit: job_records.ExitRecord | None = None
    unkillable: job_records.UnkillableRecord | None = None
    """Processes of it that survive SIGKILL, as last recorded."""
    pidfd: int | None = None
    """Pidfd of the supervisor; None while no living one is known."""
    awaiting_rank: asyncio.Task[None] | None = None
    """Waits for the first rank to start."""
    searching: asyncio.Task[None] | None = None
    """Searches for the process that has the job, while it is unknown."""
    cleaning: bool = False
    """True while the processes of a dead supervisor are killed."""
    lock: int | None = None
    """The lock of its directory, while this worker records the end; until that is on disk, no one can launch it."""
    stop: job_records.StopRecord | None = None
    """The last order to stop that is on disk."""
    may_go: bool = False
    """True once it is on disk that all nodes of the job are prepared."""
    unreadable_since_s: float | None = None
    """Since when its records are unreadable, by the monotonic clock; None while they are readable."""
    logged_errors: tuple[str, ...] = ()
    """The errors that were logged last, `LOGGED_ERRORS` at most: none of them is logged again."""

    @property
    def name(self) -> str:
        """Its id and, from the second attempt on, the attempt's number."""
        return self.directory.name

    @property
    def is_unclaimed(self) -> bool:
        """True while no process is known to have it: it was not started yet, or its supervisor is yet to be found."""
        return self.exit is None and self.pidfd is None and not self.cleaning

    @property
    def ended_by_node(self) -> bool:
        """True when it ended although it was not asked to: its node leaves, or the scheduler that carries its worker
        has sent SIGTERM to all processes."""
        return self.exit is not None and self.exit.stopped and (self.stop is None or self.stop.node_left)

    def read(self) -> None:
        """Load its records. Raises ValueError that names an unreadable one."""
        self.stop = job_records.read(self.directory, job_records.STOP, job_records.StopRecord)
        self.start = job_records.read(self.directory, job_records.START, job_records.StartRecord)
        self.exit = job_records.read(self.directory, job_records.EXIT, job_records.ExitRecord)
        self.read_unkillable()

    def read_unkillable(self) -> None:
        """Load which of its processes survive SIGKILL, while it has not ended."""
        if self.exit is None:
            with suppress(ValueError):  # it is read again
                self.unkillable = job_records.read(self.directory, job_records.UNKILLABLE, job_records.UnkillableRecord)

    def read_lease(self) -> None:
        """Load lease and user from the order on disk, unless they are known. Raises ValueError like `read`."""
        if self.lease_id is None:
            plan = job_records.read(self.directory, job_records.ORDER, LaunchPlan)
            if plan is not None:
                self.take(plan)
                last = job_records.read(self.directory, job_records.DATABASE, job_records.DatabaseRecord)
                self.database_id = self.database_id if last is None else last.database_id

    def take(self, plan: LaunchPlan) -> None:
        """Take what its order says of it."""
        self.lease_id, self.uid, self.part, self.gpus = plan.lease_id, plan.uid, plan.part, plan.gpus
        self.database_id, self.node = plan.database_id, plan.settings.node

    def note_origin(self, gpus: tuple[str, ...], database_id: str | None) -> None:
        """Remember on which GPUs and from which database it is ordered now."""
        self.gpus, self.kept = gpus, None
        if database_id is None or database_id == self.database_id:
            return
        self.database_id = database_id
        try:
            job_records.write(self.directory, job_records.DATABASE, job_records.DatabaseRecord(database_id=database_id))
        except OSError as error:
            self.log_error(f"the database that it is ordered from is not on disk: {error}")

    def is_of_another(self, database_id: str | None) -> bool:
        """True if it was last ordered from another database than this one."""
        return None not in (self.database_id, database_id) and self.database_id != database_id

    def keep_on(self) -> None:
        """Let it run although its daemon does not order it, and say so once."""
        if self.kept is None:
            self.kept = f"job {self.name} runs on it, which was ordered from another database than the daemon's"
            log.warning(
                "job %s runs here, and was ordered from another database than the daemon's: it goes on, and its GPUs"
                " are not leased until it ends%s",
                self.name,
                f" (kill {self.start.supervisor.pid} ends it)" if self.start else "",
            )

    def release_lock(self) -> None:
        """Release the lock of the directory, if this worker holds it."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def log_error(self, error: str) -> None:
        """Log an error, once until there are others: several may come again with each answer of the daemon."""
        if error not in self.logged_errors:
            self.logged_errors = (*self.logged_errors, error)[-LOGGED_ERRORS:]
            log.error("job %s: %s", self.name, error)

    def report(self) -> JobReport:
        """Its report to the daemon."""
        job_id, attempt = parse_attempt_name(self.name)
        return JobReport(
            job_id=job_id,
            attempt=attempt,
            state=self._state(),
            started_at=(self.start.rank_at or (self.start.started_at if self.exit else None)) if self.start else None,
            ended_at=self.exit.ended_at if self.exit else None,
            exit_code=self.exit.exit_code if self.exit else None,
            reason=reportable(self._reason()),
            traceback=self.exit.traceback if self.exit else None,
            unkillable=self.unkillable.pids if self.unkillable and not self.exit else (),
            timed_out=self.exit.timed_out if self.exit else False,
            fence_s=self.start.fence_s if self.start else None,
            log_directory=str(self.directory / job_records.LOGS),
            follows=self.exit.follows if self.exit else False,
            fence_reached=self.exit.fence_reached if self.exit else False,
        )

    def _state(self) -> RunState:
        if self.exit is not None:
            return RunState.EXITED
        if self.start is None:
            return RunState.STARTING
        if self.start.rank_at is not None:
            return RunState.RUNNING
        waits = self.start.prepared_at is not None and self.start.launcher is None
        return RunState.PREPARED if waits else RunState.STARTING

    def _reason(self) -> str | None:
        if self.exit is not None:
            return self.exit.reason
        if self.unkillable is not None:
            return self.unkillable.reason
        return None if self.start is None else self.start.waits_for
