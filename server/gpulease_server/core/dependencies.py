"""Jobs that wait for other jobs (`after`): they join the queue when those have ended.

A dependency names a job, or an array for all of its jobs, and asks that it has `succeeded`, or just `ended`.

    submitted --all met--> in the queue --grant--> starting
        |    --some not--> waits for jobs --the last one is met--> in the queue, at its end
        |                       |
        |                       +--one cannot be met any more, cancel--> cancelled
        +--one cannot be met any more: refused

A job that waits for others has a queued lease that is not in `Ledger.queue`: it reserves no GPU, delays no one, and no
turn looks at it. It counts against the limits of waiting requests, and takes its place at the end of the queue when it
joins, like a retry: to have waited for one's own job gives no precedence over others.

What must always hold
---------------------
1. What is unmet is derived and never stored: a dependency is unmet while its job, or a job of its array, has not ended.
   The end of a job and what follows from it for those that wait (to join, to be cancelled, and those that wait for
   them) is one turn, so one transaction. After a restart what has ended is therefore met.
2. A lease is in `Ledger.queue` or in `Ledger.waiting_for_jobs` while it is queued, and never in both.
3. The end of a job costs as much as there are jobs that wait for it (`Ledger.dependents`), and nothing else; with those
   that are cancelled with it, `Policy.max_waiting_for_jobs` of each user at most. A job can only name jobs that were
   there before it, so there are no circles. A chain is cancelled in a loop, whatever its length.

| what happens | what follows |
|---|---|
| a job is tried again | it has not ended: those after it wait on |
| a job fails, is cancelled, timed out or lost | those that need its success are cancelled, with its name |
| the same of one job of an array | the same at once, without waiting for the rest of the array |
| a job that waits is cancelled | it ends at once, as in the queue |
| it names a job that succeeded long ago | met, also where only the database knows that job |
| it names a job that has failed, or that there is not | refused |
| a job ends while a submission that names it is under way | the turn looks again (`check`), whatever the API saw |
| SIGKILL of the daemon before the turn's commit | the worker reports the end again, and the turn is taken again |
| SIGKILL after it | the job is in the queue, or cancelled; it is granted once, as its lease is |
"""

from __future__ import annotations

from collections.abc import Iterable

from gpulease_protocol.errors import GpuleaseError, InvalidRequest, Unavailable
from gpulease_protocol.model import Job, JobDependency, JobState
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import DependencyMet, LeaseRecord
from gpulease_server.core.turn import Turn

MAX_NAMED = 3
"""Dependencies that a sentence names."""


def check(ledger: Ledger, dependencies: Iterable[JobDependency], live: frozenset[str]) -> GpuleaseError | None:
    """Why a job with these dependencies is refused; None if it is not. `live`: those that had not ended when the API
    looked; all others were met then, and stay so."""
    for dependency in dependencies:
        name, needs_success = dependency.job, dependency.when == "succeeded"
        if name not in live:
            continue
        if ledger.is_live(name):
            if needs_success and name in ledger.job_index.failed_in_array:
                return cannot_be_met(f"{ledger.job_index.failed_in_array[name]} of {name} has not succeeded")
        elif name not in ledger.jobs:
            return Unavailable(f"{name} ended at this moment.", remedy="Nothing was done. Ask again.")
        elif needs_success and ledger.jobs[name].job.state is not JobState.SUCCEEDED:
            return cannot_be_met(ended_otherwise(ledger.jobs[name].job))
    return None


def cannot_be_met(why: str) -> InvalidRequest:
    """The refusal of a job that would wait for the success of one that has ended otherwise."""
    detail = f"after: {why}, and only its success would let this job start."
    return InvalidRequest(detail, remedy="Ask for any end, with `when` as `ended`, or leave it out of `after`.")


def reason_to_wait(dependencies: Iterable[JobDependency]) -> str:
    """The `reason` of a job that waits for others."""
    first, *others = dependencies
    ends = "has succeeded" if first.when == "succeeded" else "has ended"
    more = f" and {len(others)} more of its `after`" if others else ""
    return f"waits until {first.job} {ends}{more}"


def waits_for(ledger: Ledger, record: LeaseRecord) -> tuple[JobDependency, ...]:
    """What the job of a queued lease still waits for; empty for one that is in the queue."""
    if record.lease.id not in ledger.waiting_for_jobs:
        return ()
    known = ledger.jobs[record.lease.job_id or ""]
    unmet = ledger.unmet[known.job.id]
    return tuple(dependency for dependency in known.job.after if dependency.job in unmet)


def describe(dependencies: tuple[JobDependency, ...]) -> str:
    """What a job still waits for, in words."""
    words = {"succeeded": "has succeeded", "ended": "has ended"}
    named = [f"{one.job} {words.get(one.when, one.when)}" for one in dependencies[:MAX_NAMED]]
    more = len(dependencies) - len(named)
    return "it waits until " + " and ".join(named) + (f", and for {more} more" if more else "")


def release_dependents(turn: Turn, job: Job) -> dict[str, str]:
    """Let those that waited for a job that has just ended join the queue, as far as nothing else keeps them. Returns
    the ids of those that must be cancelled, each with the reason."""
    ledger = turn.ledger
    names = [job.id] if job.array_id is None else [job.id, job.array_id]
    doomed: dict[str, str] = {}
    if job.state is not JobState.SUCCEEDED:
        for name in names:
            of_array = f", a job of {name}" if name != job.id else ""
            reason = f"{ended_otherwise(job)}{of_array}, and this job was to start only after its success"
            doomed |= dict.fromkeys(ledger.dependents.get((name, "succeeded"), ()), reason)
    for name in names:
        if ledger.is_live(name):
            continue
        for when in ("succeeded", "ended"):
            for job_id in list(ledger.dependents.get((name, when), ())):
                if job_id not in doomed:
                    _meet(turn, job_id, name)
    return doomed


def _meet(turn: Turn, job_id: str, name: str) -> None:
    ledger, record = turn.ledger, turn.ledger.jobs[job_id]
    if ledger.unmet[job_id] == {name: None}:
        # Before it is in the queue, because its place there follows from the number.
        lease, now = ledger.leases[record.job.lease_id], turn.now
        number = ledger.next_number
        turn.put(replace(lease, number=number, renewed_at=now.at, requested_at_s=now.mono_s))
        turn.put(DependencyMet(job_id, name))
        turn.put(replace(record, job=replace(record.job, reason="waiting for its GPUs")))
        turn.emit("job.ready", job_id=job_id, lease_id=record.job.lease_id, reason=f"{name} has ended")
    else:
        turn.put(DependencyMet(job_id, name))


def ended_otherwise(job: Job) -> str:
    """How a job has ended that has not succeeded: "job-1 timed out"."""
    words = {JobState.TIMED_OUT: "timed out", JobState.CANCELLED: "was cancelled", JobState.LOST: "is lost"}
    return f"{job.id} {words.get(job.state, job.state.value)}"
