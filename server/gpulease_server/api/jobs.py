"""Jobs: submit, watch, read their logs, cancel."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Query, Request, Response

from gpulease import arrays
from gpulease.errors import InvalidRequest, NotFound
from gpulease.model import Holder, Job, JobState, Page
from gpulease.wire import CancelRequest, JobRequest

from ..core.happenings import ArrayMember, JobCancelled, JobSubmitted, Key
from ..core.ledger import JobRecord
from ..runtime import ids
from .bodies import KEYED, JsonBody, idempotency_key
from .daemon import Daemon, TheDaemon
from .identity import TheCaller, ThePeer
from .problems import PERHAPS_PRUNED, documented
from .routers import new_router
from .visible import job_for
from .waiting import Cursor, Limit, WaitSeconds, hold, number_of

router = new_router("/v1/jobs", "jobs")
SUBMIT = JsonBody(JobRequest)
CANCEL = JsonBody(CancelRequest, empty=CancelRequest())


@router.post(
    "",
    status_code=201,
    response_description="Queued, or started at once.",
    openapi_extra=SUBMIT.openapi() | KEYED,
    responses=documented(
        "invalid_request", "never_fits", "idempotency_mismatch", "too_large", "over_quota", "unavailable"
    ),
)
async def submit(
    asked: Annotated[JobRequest, Depends(SUBMIT)],
    key: Annotated[Key | None, Depends(idempotency_key)],
    daemon: TheDaemon,
    caller: TheCaller,
    peer: ThePeer,
    response: Response,
) -> Job:
    """Submit a training. It waits for its GPUs, then a worker launches it bound to them.

    With `array` there is one for each index; the answer is the first, and its `array_id` names all of them.
    """
    first, further, array_id = _members(asked)
    answer = await daemon.writer.submit(
        JobSubmitted(
            cause=ids.make("request"),
            job_id=first.job_id,
            lease_id=first.lease_id,
            name=asked.name,
            spec=first.spec,
            array_id=array_id,
            array_index=first.index,
            array_at_most=None if asked.array is None else asked.array.at_most,
            further=further,
            demand=asked.demand(),
            holder=Holder(user=caller.user, host=daemon.host if peer.local else None, label=asked.name),
            uid=caller.uid,
            gid=caller.gid,
            key=key,
        )
    )
    if not isinstance(answer, Job):
        raise InvalidRequest("Idempotency-Key: belongs to a lease, not to a job.")
    response.headers["Location"] = f"/v1/jobs/{answer.id}"
    return answer


@router.get("")
async def list_jobs(
    daemon: TheDaemon,
    caller: TheCaller,
    state: Annotated[list[JobState] | None, Query(description="Only jobs in these states.")] = None,
    array: Annotated[str | None, Query(description="Only jobs of this array.", max_length=64)] = None,
    user: Annotated[str | None, Query(description="Only jobs of this user.", max_length=255)] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[Job]:
    """Jobs, newest first."""
    states, after = [item.value for item in state or ()], number_of(cursor)
    found = await asyncio.to_thread(daemon.store.jobs, states, after, limit, array=array, user=user)
    current = (daemon.ledger.jobs.get(record.job.id, record) for record in found)
    items = tuple(job_for(caller, record, daemon.ledger, daemon.access) for record in current)
    return Page(items=items, next=str(found[-1].number) if len(found) == limit else None)


@router.get("/{job_id}", responses=documented("not_found"))
async def show(
    job_id: str,
    daemon: TheDaemon,
    caller: TheCaller,
    request: Request,
    wait_s: WaitSeconds = 0.0,
    wait_while: Annotated[
        JobState | None, Query(description="Wait while it is in this state; the one it is in now when left out.")
    ] = None,
) -> Job:
    """One job. With `wait_s` the answer is held until its state changes."""
    state = wait_while or (await _find(daemon, job_id)).job.state

    def settled() -> bool:
        current = daemon.ledger.jobs.get(job_id)
        return current is None or current.job.state is not state or state.final

    await hold(daemon, request, caller, f"job:{job_id}", wait_s, settled)
    return job_for(caller, await _find(daemon, job_id), daemon.ledger, daemon.access)


@router.post(
    "/{job_id}/cancel",
    openapi_extra=CANCEL.openapi(),
    responses=documented("invalid_request", "not_found", "too_large", "unavailable"),
)
async def cancel(job_id: str, asked: Annotated[CancelRequest, Depends(CANCEL)], daemon: TheDaemon) -> Job:
    """Let a job end: SIGTERM to its launcher, `grace_s` seconds, then SIGKILL to all that is left of it."""
    record = await _find(daemon, job_id)
    # As of leases: while the ledger is being read, nothing is known of what runs.
    if daemon.writer.problem is None and job_id not in daemon.ledger.jobs:
        return record.job
    happening = JobCancelled(cause=ids.make("request"), job_id=job_id, grace_s=asked.grace_s)
    answer = await daemon.writer.submit(happening)
    assert isinstance(answer, Job)
    return answer


def _members(asked: JobRequest) -> tuple[ArrayMember, tuple[ArrayMember, ...], str | None]:
    """The job of a request, the further ones of an array, and the array's id."""
    spec = asked.spec()
    if asked.array is None:
        return ArrayMember(job_id=ids.make("job"), lease_id=ids.make("lease"), index=0, spec=spec), (), None
    array_id = ids.make("array")
    first, *further = (
        ArrayMember(
            job_id=ids.make("job"),
            lease_id=ids.make("lease"),
            index=index,
            spec=replace(
                spec,
                command=arrays.command_for(spec.command, index),
                environment=spec.environment | arrays.variables_for(array_id, index),
            ),
        )
        for index in arrays.indices(asked.array.indices)
    )
    return first, tuple(further), array_id


async def _find(daemon: Daemon, job_id: str) -> JobRecord:
    record = daemon.ledger.jobs.get(job_id) or await asyncio.to_thread(daemon.store.job, job_id)
    if record is None:
        raise NotFound(f"There is no job {job_id}.", remedy=PERHAPS_PRUNED.format("jobs"))
    return record
