"""Looks up what a new job waits for, also among the jobs that only the database knows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gpulease_protocol.errors import GpuleaseError, InvalidRequest
from gpulease_protocol.model import JobDependency, JobState
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.problems import MAYBE_PRUNED
from gpulease_server.core.dependencies import cannot_be_met, ended_otherwise

FAILED_STATES = tuple(state.value for state in JobState if state.final and state is not JobState.SUCCEEDED)


async def look_up(
    daemon: DaemonState, dependencies: Sequence[JobDependency]
) -> tuple[frozenset[str], GpuleaseError | None]:
    """The names of those that have not ended, and why one can never be met; None if all can."""
    if not dependencies:
        return frozenset(), None
    live = frozenset(one.job for one in dependencies if daemon.ledger.is_live(one.job))
    return live, await asyncio.to_thread(_problem, daemon, dependencies, live)


def _problem(daemon: DaemonState, dependencies: Sequence[JobDependency], live: frozenset[str]) -> GpuleaseError | None:
    for one in dependencies:
        is_array = one.job.startswith("array-")
        if (problem := (_problem_of_array if is_array else _problem_of_job)(daemon, one, live)) is not None:
            return problem
    return None


def _problem_of_job(daemon: DaemonState, one: JobDependency, live: frozenset[str]) -> GpuleaseError | None:
    if one.job in live:
        return None
    record = daemon.ledger.jobs.get(one.job) or daemon.store.job(one.job)
    if record is None:
        return InvalidRequest(f"after: there is no job {one.job}.", remedy=MAYBE_PRUNED.format("jobs"))
    if one.when == "succeeded" and record.job.state is not JobState.SUCCEEDED:
        return cannot_be_met(ended_otherwise(record.job))
    return None


def _problem_of_array(daemon: DaemonState, one: JobDependency, live: frozenset[str]) -> GpuleaseError | None:
    known = daemon.ledger.jobs
    if one.job not in live and not daemon.store.jobs((), None, 1, array=one.job, known=known)[0]:
        return InvalidRequest(f"after: there is no array {one.job}.", remedy=MAYBE_PRUNED.format("jobs"))
    if one.when == "succeeded":
        failed, _ = daemon.store.jobs(FAILED_STATES, None, 1, array=one.job, known=known)
        if failed:
            return cannot_be_met(f"{ended_otherwise(failed[0].job)}, a job of {one.job}")
    return None
