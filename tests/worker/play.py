"""Drives a `JobReconciler` without a worker: orders go in, reports come out, and the supervisors are real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar

from gpulease_protocol.node_protocol import JobOrder, JobReport, RunState
from gpulease_worker.jobs.job_settings import JobSettings
from gpulease_worker.jobs.reconciler import KEEP_JOBS, JobReconciler

DEADLINE_S = 60.0


class Worker:
    """The jobs of one data directory, as a worker has them."""

    running: ClassVar[list[Worker]] = []
    """Those of this story."""

    def __init__(self, data_dir: Path, keep: int = KEEP_JOBS, settings: JobSettings | None = None) -> None:
        self.changed = asyncio.Event()
        self.jobs = JobReconciler(data_dir, "http://127.0.0.1:1", self.changed.set, settings, keep)
        self.running.append(self)
        self.jobs.recover()

    async def until(
        self, orders: Sequence[JobOrder], state: RunState, database_id: str | None = None
    ) -> tuple[JobReport, ...]:
        """Follow the orders until every job is in a state."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self.changed.clear()
                self.jobs.reconcile(orders, database_id)
                reports = self.jobs.reports()
                if len(reports) == len(orders) and all(report.state is state for report in reports):
                    return reports
                await self.changed.wait()

    async def end_of(self, job: JobOrder) -> JobReport:
        (report,) = await self.until([job], RunState.EXITED)
        return report


def play(
    data_dir: Path,
    story: Callable[[Worker], Awaitable[None]],
    keep: int = KEEP_JOBS,
    settings: JobSettings | None = None,
) -> None:
    async def act() -> None:
        try:
            await story(Worker(data_dir, keep, settings))
        finally:
            while Worker.running:
                Worker.running.pop().jobs.close()

    asyncio.run(act())


async def soon(condition: Callable[[], object], what: str) -> None:
    """Until a condition is true, with the event loop running."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.01)
