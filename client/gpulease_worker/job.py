"""One job with a directory on this node, as the worker remembers it. What is true is in the directory (`records`)."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpulease.exchange import JobReport, RunState, parts_of_run
from gpulease_worker import records
from gpulease_worker.failure import reportable

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """A job with a directory on this node."""

    directory: Path
    """Its directory; the name of it is that of the attempt (`run_name`)."""
    lease_id: str | None = None
    """The marker of its processes; None while its order cannot be read."""
    start: records.Start | None = None
    exit: records.Exit | None = None
    stuck: records.Stuck | None = None
    """What of it does not die, as was last noted."""
    child: int | None = None
    """Pid of the supervisor, when this worker started it and must reap it."""
    watched: int | None = None
    """Pidfd of the supervisor; None while none is known to live."""
    starting: asyncio.Task[None] | None = None
    """Looks for the moment at which the first rank is up."""
    seeking: asyncio.Task[None] | None = None
    """Looks for whoever has the job, while that cannot be told."""
    cleaning: bool = False
    """True while the processes of a dead supervisor are killed."""
    lock: int | None = None
    """The lock of its directory, while this worker records the end; until that is on disk, nobody can launch it."""
    stop: records.Stop | None = None
    """The last order to stop that is on disk."""
    doubtful_since_s: float | None = None
    """Since when its records cannot be read, by the monotonic clock; None while they can."""
    trouble: str = ""
    """What was last logged of it: no trouble is logged twice in a row."""

    @property
    def name(self) -> str:
        """Its id and, from the second attempt on, which that is."""
        return self.directory.name

    @property
    def adrift(self) -> bool:
        """True while nobody is known to have it: it has not been started, or the one who has it is yet to be found."""
        return self.exit is None and self.watched is None and not self.cleaning

    def read(self) -> None:
        """Take over what its directory says. Raises ValueError that names a record that cannot be read."""
        self.start = records.read(self.directory, records.START, records.Start)
        self.exit = records.read(self.directory, records.EXIT, records.Exit)
        self.read_stuck()

    def read_stuck(self) -> None:
        """Learn which of its processes do not die, while it has not ended."""
        if self.exit is None:
            with suppress(ValueError):  # it is asked again
                self.stuck = records.read(self.directory, records.STUCK, records.Stuck)

    def read_lease(self) -> None:
        """Learn the lease from the order on disk, unless it is known. Raises ValueError like `read`."""
        if self.lease_id is None:
            task = records.read(self.directory, records.ORDER, records.Task)
            self.lease_id = task.order.lease_id if task else None

    def let_go(self) -> None:
        """Give the lock of the directory back."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def say(self, trouble: str) -> None:
        """Log what is wrong with it, once until something else is."""
        if trouble != self.trouble:
            self.trouble = trouble
            log.error("job %s: %s", self.name, trouble)

    def report(self) -> JobReport:
        """What the daemon is told of it."""
        up = self.start is not None and self.start.rank_at is not None
        job_id, attempt = parts_of_run(self.name)
        state = RunState.EXITED if self.exit else RunState.RUNNING if up else RunState.STARTING
        return JobReport(
            job_id=job_id,
            attempt=attempt,
            state=state,
            started_at=(self.start.rank_at or (self.start.started_at if self.exit else None)) if self.start else None,
            ended_at=self.exit.ended_at if self.exit else None,
            exit_code=self.exit.exit_code if self.exit else None,
            reason=reportable(self.exit.reason if self.exit else self.stuck.reason if self.stuck else None),
            traceback=self.exit.traceback if self.exit else None,
            unkillable=self.stuck.pids if self.stuck and not self.exit else (),
            timed_out=self.exit.timed_out if self.exit else False,
            log_directory=str(self.directory / records.LOGS),
        )
