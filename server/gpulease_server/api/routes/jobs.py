"""Jobs: submit, watch, cancel."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Query, Request, Response
from pydantic import TypeAdapter

from gpulease_protocol import job_arrays
from gpulease_protocol.bounds import MAX_NAME
from gpulease_protocol.errors import InvalidRequest, NotFound
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.model import Holder, Job, JobState, Page
from gpulease_protocol.requests import MAX_TEXT, CancelRequest, JobRequest
from gpulease_server.api import fair_share
from gpulease_server.api.auth.access_rules import CallerDep, PeerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.redaction import redact_job
from gpulease_server.api.daemon_state import DaemonDep, DaemonState
from gpulease_server.api.pages import NEXT_LINK, Cursor, Limit, cursor_number, page_response
from gpulease_server.api.problems import LOCATION, MAYBE_PRUNED, error_responses
from gpulease_server.api.request_body import IDEMPOTENCY_KEY_PARAMETER, LARGE_BYTES, JsonBody, idempotency_key
from gpulease_server.api.routes import job_dependencies
from gpulease_server.api.routes.dry_run import explain_unmade
from gpulease_server.api.streams.long_poll import (
    WaitSeconds,
    wait_until,
)
from gpulease_server.core.footprint import shown_characters
from gpulease_server.core.happenings import CancelRequested, IdempotencyKey, JobSubmitted, SubmittedJob
from gpulease_server.core.lease import MadeLongAgo
from gpulease_server.core.presentation import job_view
from gpulease_server.core.records import JobRecord
from gpulease_server.runtime import ids

router = new_router("/v1/jobs", "jobs")
JOB_JSON: TypeAdapter[object] = TypeAdapter(Job)
SUBMIT_BODY = JsonBody(JobRequest)
CANCEL_BODY = JsonBody(CancelRequest, empty=CancelRequest())


async def job_submitted(
    body: Annotated[JobRequest, Depends(SUBMIT_BODY)],
    key: Annotated[IdempotencyKey | None, Depends(idempotency_key)],
    daemon: DaemonDep,
    caller: CallerDep,
    peer: PeerDep,
) -> JobSubmitted:
    """The happening that a request for a job is."""
    jobs, array_id = _submitted_jobs(body)
    after_live, after_refused = await job_dependencies.look_up(daemon, body.after)
    if array_id is not None:
        fair_share.count_writing()
    return JobSubmitted(
        cause=ids.new_id("request"),
        jobs=jobs,
        name=body.name,
        array_id=array_id,
        array_at_most=None if body.array is None else body.array.at_most,
        demand=body.demand(),
        holder=Holder(
            user=caller.user,
            host=daemon.host if peer.local else None,
            label=body.name,
            agent=body.agent,
            session=body.session,
            token_id=caller.token_id,
        ),
        budget=caller.budget,
        uid=caller.uid,
        gid=caller.gid,
        after=tuple(body.after),
        after_live=after_live,
        after_refused=after_refused,
        key=key,
    )


SubmittedDep = Annotated[JobSubmitted, Depends(job_submitted)]


@router.post(
    "",
    operation_id="createJob",
    status_code=201,
    response_description="Queued, or starting already.",
    openapi_extra=SUBMIT_BODY.openapi() | IDEMPOTENCY_KEY_PARAMETER,
    responses=error_responses("invalid_request", "never_fits", "idempotency_mismatch") | {201: LOCATION},
)
async def submit(submitted: SubmittedDep, daemon: DaemonDep, response: Response) -> Job:
    """Submit a job. It waits for its GPUs, then a worker launches it bound to them.

    With `array` there is one job for each index; the answer is the first one, and its `array_id` names all of them.
    With `after` it joins the queue when those jobs have ended; 422 if one that must succeed has failed.
    429 `over_quota` where the queue has no room for them, 422 `over_quota` where the request alone exceeds a limit.
    """
    answer: object
    try:
        answer = await daemon.submit(submitted)
    except MadeLongAgo as error:
        answer = (await find_job(daemon, error.result_id)).job
    if not isinstance(answer, Job):
        raise InvalidRequest("Idempotency-Key: belongs to a lease, not to a job.")
    response.headers["Location"] = f"/v1/jobs/{answer.id}"
    return _view(daemon, answer)


@router.post(
    "/explain",
    operation_id="explainJobRequest",
    openapi_extra=SUBMIT_BODY.openapi(),
    responses=error_responses("invalid_request"),
)
async def explain_request(submitted: SubmittedDep, daemon: DaemonDep) -> Explanation:
    """Explain what would become of a request now: `fits_now`, `not_now` or `never`. Takes and records nothing."""
    return explain_unmade(daemon, submitted)


@router.get("", operation_id="listJobs", response_model=Page[Job], responses=NEXT_LINK)
async def list_jobs(
    daemon: DaemonDep,
    caller: CallerDep,
    request: Request,
    state: Annotated[list[JobState] | None, Query(description="Only jobs in these states.")] = None,
    array: Annotated[str | None, Query(description="Only jobs of this array.", max_length=64)] = None,
    id_prefix: Annotated[
        str | None,
        Query(
            description="Only jobs with an id, or an array id, that begins like this.",
            pattern="^(job|array)-[0-9a-f]{1,16}$",
        ),
    ] = None,
    user: Annotated[str | None, Query(description="Only jobs of this user.", max_length=MAX_NAME)] = None,
    name: Annotated[str | None, Query(description="Only jobs of exactly this name.", max_length=MAX_TEXT)] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    """Jobs, newest first."""
    states, after = [item.value for item in state or ()], cursor_number(cursor)
    records, number = await asyncio.to_thread(
        daemon.store.jobs,
        states,
        after,
        limit,
        array=array,
        user=user,
        name=name,
        id_prefix=id_prefix,
        known=daemon.ledger.jobs,
    )
    current = [daemon.ledger.jobs.get(record.job.id, record) for record in records]

    def view(record: JobRecord) -> Job:
        return redact_job(caller, record, daemon.ledger, daemon.access)

    return await page_response(request, current, view, JOB_JSON, number)


@router.get("/{job_id}", operation_id="getJob", responses=error_responses("not_found"))
async def show_job(
    job_id: str,
    daemon: DaemonDep,
    caller: CallerDep,
    request: Request,
    wait_s: WaitSeconds = 0.0,
    wait_while: Annotated[
        JobState | None, Query(description="Wait while the job is in this state; if absent, in its current state.")
    ] = None,
) -> Job:
    """One job. With `wait_s`, a long poll: the answer is held until the state changes."""
    state = wait_while or (await find_job(daemon, job_id)).job.state

    def has_changed() -> bool:
        current = daemon.ledger.jobs.get(job_id)
        return current is None or current.job.state is not state or state.final

    await wait_until(daemon, request, caller, f"job:{job_id}", wait_s, has_changed)
    return redact_job(caller, await find_job(daemon, job_id), daemon.ledger, daemon.access)


@router.post(
    "/{job_id}/cancel",
    operation_id="cancelJob",
    openapi_extra=CANCEL_BODY.openapi(),
    responses=error_responses("invalid_request", "not_found"),
)
async def cancel(job_id: str, body: Annotated[CancelRequest, Depends(CANCEL_BODY)], daemon: DaemonDep) -> Job:
    """Cancel a job: SIGTERM to its launcher, and after `grace_s` seconds SIGKILL to all its remaining processes."""
    record = await find_job(daemon, job_id)
    # A job that is only in the database ended long ago, unless the ledger is still being read.
    if daemon.writer.problem is None and job_id not in daemon.ledger.jobs:
        return job_view(record)
    if shown_characters(record) > LARGE_BYTES:
        fair_share.count_writing()
    happening = CancelRequested(cause=ids.new_id("request"), job_id=job_id, grace_s=body.grace_s)
    answer = await daemon.submit(happening)
    assert isinstance(answer, Job)
    return _view(daemon, answer)


def _submitted_jobs(body: JobRequest) -> tuple[tuple[SubmittedJob, ...], str | None]:
    """The job of a request, or all jobs of its array, and the array's id."""
    spec = body.spec()
    if body.array is None:
        return (SubmittedJob(job_id=ids.new_id("job"), lease_id=ids.new_id("lease"), spec=spec),), None
    array_id = ids.new_id("array")
    jobs = (
        SubmittedJob(
            job_id=ids.new_id("job"),
            lease_id=ids.new_id("lease"),
            index=index,
            spec=replace(
                spec,
                command=job_arrays.member_command(spec.command, index),
                environment=spec.environment | job_arrays.member_environment(array_id, index),
            ),
        )
        for index in job_arrays.parse_indices(body.array.indices)
    )
    return tuple(jobs), array_id


def _view(daemon: DaemonState, job: Job) -> Job:
    """A job that the core has answered with, for its holder."""
    record = daemon.ledger.jobs.get(job.id)
    return job if record is None else job_view(replace(record, job=job))


async def find_job(daemon: DaemonState, job_id: str) -> JobRecord:
    """The job, from memory or from the database. Raises `NotFound`."""
    record = daemon.ledger.jobs.get(job_id) or await asyncio.to_thread(daemon.store.job, job_id)
    if record is None:
        raise NotFound(f"There is no job {job_id}.", remedy=MAYBE_PRUNED.format("jobs"))
    return record
