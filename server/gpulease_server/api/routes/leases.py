"""Leases: request, wait, renew, release, explain."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response
from pydantic import TypeAdapter

from gpulease_protocol.bounds import MAX_NAME
from gpulease_protocol.errors import InvalidRequest, LeaseLost, NotFound, StaleToken
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.host.process_id import realm
from gpulease_protocol.model import ExpectedBasis, Holder, Lease, LeaseState, Page
from gpulease_protocol.node_protocol import LeaseOwner
from gpulease_protocol.requests import MAX_TEXT, HolderProof, LeaseRequest
from gpulease_server.api.auth.access_rules import CallerDep, PeerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.auth.peer_credentials import OwnerClaim, PeerCredentials
from gpulease_server.api.auth.redaction import redact_lease, without_env
from gpulease_server.api.daemon_state import DaemonDep, DaemonState
from gpulease_server.api.lease_times import expected_starts, timed_view, with_times
from gpulease_server.api.pages import NEXT_LINK, Cursor, Limit, cursor_number, page_response
from gpulease_server.api.problems import LOCATION, error_responses
from gpulease_server.api.query_parameters import UUID_PATTERN
from gpulease_server.api.request_body import IDEMPOTENCY_KEY_PARAMETER, JsonBody, idempotency_key
from gpulease_server.api.routes import lease_changes
from gpulease_server.api.routes.adopted_process import adopted_elsewhere, adopted_here
from gpulease_server.api.routes.dry_run import explain_unmade
from gpulease_server.api.routes.lease_changes import find_lease
from gpulease_server.api.streams.long_poll import (
    LONG_SLICE_S,
    WaitSeconds,
    wait_until,
)
from gpulease_server.api.time_parameters import parse_interval
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.forecast.expected_start import explain_expected_start, with_expected_start
from gpulease_server.core.happenings import (
    AnswerLost,
    IdempotencyKey,
    LeaseRequested,
    WaiterPolled,
)
from gpulease_server.core.lease import MadeLongAgo, ended_sentence
from gpulease_server.core.order import Positions
from gpulease_server.core.presentation import lease_view
from gpulease_server.core.records import Adoption, LeaseRecord, WatchedOwner
from gpulease_server.runtime import ids
from gpulease_server.runtime.grant_waiters import COMMIT_S

router = new_router("/v1/leases", "leases")
LEASE_JSON: TypeAdapter[object] = TypeAdapter(Lease)
REQUEST_BODY = JsonBody(LeaseRequest)
PROOF_BODY = JsonBody(HolderProof)
QUEUED_RESPONSE: dict[int | str, dict[str, Any]] = {
    201: LOCATION,
    202: LOCATION | {"model": Lease, "description": "Queued; wait for the grant at `Location`."},
}


async def lease_requested(
    body: Annotated[LeaseRequest, Depends(REQUEST_BODY)],
    key: Annotated[IdempotencyKey | None, Depends(idempotency_key)],
    daemon: DaemonDep,
    caller: CallerDep,
    peer: PeerDep,
) -> LeaseRequested:
    """The happening that a request for a lease is."""
    if body.ttl_s > daemon.policy.max_ttl_s:
        raise InvalidRequest(f"ttl_s: must be at most {daemon.policy.max_ttl_s:.0f} seconds, not {body.ttl_s:.0f}.")
    watched_owner: WatchedOwner | None
    adoption: Adoption | None = None
    if body.adopt and peer.local:
        holder, watched_owner, adoption = await adopted_here(daemon, body, caller, peer)
    elif body.adopt:
        found = _remote_owner_watch(daemon, body, caller)
        holder, watched_owner, adoption = adopted_elsewhere(daemon, body, caller, found)
    else:
        holder, watched_owner = _holder(daemon, body, caller, peer)
    return LeaseRequested(
        cause=ids.new_id("request"),
        lease_id=ids.new_id("lease"),
        demand=body.demand(),
        holder=replace(holder, agent=body.agent, session=body.session, token_id=caller.token_id),
        budget=caller.budget,
        watched_owner=watched_owner,
        watch_owner=body.watch_owner,
        ttl_s=body.ttl_s,
        queue=body.queue and adoption is None,
        key=key,
        adoption=adoption,
    )


def _holder(
    daemon: DaemonState, body: LeaseRequest, caller: Caller, peer: PeerCredentials
) -> tuple[Holder, WatchedOwner | None]:
    """Who will hold the lease, and what ends it where that can be watched."""
    owner = peer.check_owner(body.owner_pid, body.owner_start_ticks)
    watched_owner = _owner_watch(daemon, owner) if peer.local else _remote_owner_watch(daemon, body, caller)
    host = daemon.host if peer.local else daemon.ledger.nodes[watched_owner.node].host if watched_owner else None
    return Holder(user=caller.user, host=host, owner_pid=owner.pid, label=body.label), watched_owner


RequestedDep = Annotated[LeaseRequested, Depends(lease_requested)]


@router.post(
    "",
    operation_id="createLease",
    status_code=201,
    response_description="Granted.",
    openapi_extra=REQUEST_BODY.openapi() | IDEMPOTENCY_KEY_PARAMETER,
    responses=QUEUED_RESPONSE
    | error_responses("invalid_request", "never_fits", "idempotency_mismatch", "not_now", "lease_lost"),
)
async def request_lease(
    requested: RequestedDep,
    daemon: DaemonDep,
    caller: CallerDep,
    request: Request,
    response: Response,
    wait_s: WaitSeconds = 0.0,
) -> Lease:
    """Request GPUs. Either all of them are granted (201), or none, and the request waits in the queue (202).

    410 if the lease has ended: the one that this Idempotency-Key made, or one that was withdrawn during the wait.
    The problem document has it as `lease`, without `env`. 429 `over_quota` if the queue is full,
    422 `over_quota` if the request alone exceeds a limit.
    """
    lease = await make_lease(requested, daemon, caller, request, wait_s)
    response.status_code, response.headers["Location"] = status_and_place(lease)
    return lease


def status_and_place(lease: Lease) -> tuple[int, str]:
    """With which status a request for this lease is answered, and the header `Location`."""
    return 202 if lease.state is LeaseState.QUEUED else 201, f"/v1/leases/{lease.id}"


async def make_lease(
    requested: LeaseRequested, daemon: DaemonState, caller: Caller, request: Request, wait_s: float
) -> Lease:
    """The lease that was requested, active or queued. Raises what the route answers otherwise."""
    try:
        answer = await daemon.submit(requested)
    except MadeLongAgo as error:
        raise LeaseLost(error.detail, remedy="Use a new Idempotency-Key for a new request.") from None
    if not isinstance(answer, Lease):
        raise InvalidRequest("Idempotency-Key: belongs to a job, not to a lease.")
    lease = answer
    if lease.state is LeaseState.QUEUED and wait_s > 0:
        await _wait_while(daemon, request, caller, lease.id, lease.state, wait_s)
    await _note_told(daemon, request, caller, lease.id, is_repeated=lease.id != requested.lease_id)
    lease = lease_view(daemon.ledger, await find_lease(daemon, lease.id), daemon.now(), daemon.policy)
    if lease.state is LeaseState.ENDED:
        raise _ended(lease)
    return lease


@router.post(
    "/explain",
    operation_id="explainLeaseRequest",
    openapi_extra=REQUEST_BODY.openapi(),
    responses=error_responses("invalid_request"),
)
async def explain_request(requested: RequestedDep, daemon: DaemonDep) -> Explanation:
    """Explain what would become of a request now: `fits_now`, `not_now` or `never`. Takes and records nothing."""
    if requested.adoption is not None:
        raise InvalidRequest("adopt: only the request itself looks at the process.", remedy="Send it; it never queues.")
    return explain_unmade(daemon, requested)


@router.get("", operation_id="listLeases", response_model=Page[Lease], responses=NEXT_LINK)
async def list_leases(
    daemon: DaemonDep,
    caller: CallerDep,
    request: Request,
    state: Annotated[list[LeaseState] | None, Query(description="Only leases in these states.")] = None,
    id_prefix: Annotated[
        str | None,
        Query(description="Only leases whose id begins like this.", pattern="^lease-[0-9a-f]{1,16}$"),
    ] = None,
    user: Annotated[str | None, Query(description="Only leases of this user.", max_length=MAX_NAME)] = None,
    label: Annotated[str | None, Query(description="Only leases with exactly this label.", max_length=MAX_TEXT)] = None,
    node: Annotated[
        str | None, Query(description="Only leases that have or had GPUs of this node.", max_length=MAX_NAME)
    ] = None,
    job: Annotated[
        str | None, Query(description="Only leases of this job, one for each attempt.", max_length=64)
    ] = None,
    gpu: Annotated[
        str | None, Query(description="Only leases that have or had the GPU with this UUID.", pattern=UUID_PATTERN)
    ] = None,
    overlaps: Annotated[
        str | None,
        Query(
            description="Only leases that held GPUs in this interval, FROM/TO in ISO 8601; `..` is an open end.",
            max_length=MAX_NAME,
        ),
    ] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    """Leases, newest first."""
    states, after = [item.value for item in state or ()], cursor_number(cursor)
    from_at, to_at = (None, None) if overlaps is None else parse_interval("overlaps", overlaps)
    records, number = await asyncio.to_thread(
        daemon.store.leases,
        states,
        after,
        limit,
        id_prefix=id_prefix,
        user=user,
        label=label,
        node=node,
        job=job,
        gpu=gpu,
        from_at=from_at,
        to_at=to_at,
        known=daemon.ledger.leases,
    )
    starts = await expected_starts(daemon, records)
    current = [daemon.ledger.leases.get(record.lease.id, record) for record in records]
    positions = Positions(daemon.ledger)

    def view(record: LeaseRecord) -> Lease:
        lease = redact_lease(caller, timed_view(daemon, record, positions))
        return with_expected_start(lease, starts)

    return await page_response(request, current, view, LEASE_JSON, number)


@router.get("/{lease_id}", operation_id="getLease", responses=error_responses("not_found"))
async def show_lease(
    lease_id: str,
    daemon: DaemonDep,
    caller: CallerDep,
    request: Request,
    wait_s: WaitSeconds = 0.0,
    wait_while: Annotated[
        LeaseState | None, Query(description="Wait while the lease is in this state; if absent, in its current state.")
    ] = None,
) -> Lease:
    """One lease. With `wait_s`, a long poll: the answer is held until the state changes. Only a long poll or renewal by
    the holder keeps a queued lease, each for its `ttl_s`; a long poll that is broken off, for a minute. `token` and
    `env` are shown only to the holder and to administrators."""
    record = await find_lease(daemon, lease_id)
    starts = await expected_starts(daemon, [record] if wait_s == 0 else [])
    if wait_s > 0:
        await _wait_while(daemon, request, caller, lease_id, wait_while or record.lease.state, wait_s)
    await _claim(daemon, request, caller, lease_id)
    lease = redact_lease(caller, timed_view(daemon, await find_lease(daemon, lease_id)))
    return with_expected_start(lease, starts)


@router.post(
    "/{lease_id}/renew",
    operation_id="renewLease",
    openapi_extra=PROOF_BODY.openapi(),
    responses=error_responses("invalid_request", "not_found", "lease_lost", "stale_token"),
)
async def renew(lease_id: str, proof: Annotated[HolderProof, Depends(PROOF_BODY)], daemon: DaemonDep) -> Lease:
    """Extend the lease to a full `ttl_s` from now. An expired one revives unless a GPU of it was granted again.
    `idle_s` tells the holder for how long its GPUs have done nothing."""
    record = await find_lease(daemon, lease_id)
    renewal = lease_changes.renewal(record, proof.fencing_token)
    return with_times(daemon, record, await lease_changes.decided(daemon, record, renewal))


@router.post(
    "/{lease_id}/release",
    operation_id="releaseLease",
    openapi_extra=PROOF_BODY.openapi(),
    responses=error_responses("invalid_request", "not_found", "lease_lost", "stale_token"),
)
async def release(
    lease_id: str, proof: Annotated[HolderProof, Depends(PROOF_BODY)], daemon: DaemonDep, caller: CallerDep
) -> Lease:
    """Give the GPUs back, or stop waiting for them. Releasing twice gives the same answer twice.

    An administrator who releases another user's lease revokes it, and needs no `token` for that.
    """
    return await _release(daemon, caller, lease_id, proof.fencing_token)


@router.delete(
    "/{lease_id}",
    operation_id="deleteLease",
    responses=error_responses("not_found", "lease_lost", "stale_token"),
)
async def delete_lease(
    lease_id: str,
    daemon: DaemonDep,
    caller: CallerDep,
    token: Annotated[
        int | None,
        Query(ge=-(2**63), lt=2**63, description="The fencing token of the lease; absent while it is queued."),
    ] = None,
) -> Lease:
    """The same as `POST /v1/leases/{lease_id}/release`. The lease stays on record, with the state `ended`."""
    return await _release(daemon, caller, lease_id, token)


@router.get("/{lease_id}/explain", operation_id="explainLease", responses=error_responses("not_found"))
async def explain_lease(lease_id: str, daemon: DaemonDep) -> Explanation:
    """Explain why the lease waits, GPU by GPU, or why it ended."""
    record = await find_lease(daemon, lease_id)
    start = (await expected_starts(daemon, [record])).get(lease_id)
    record = daemon.ledger.leases.get(lease_id, record)
    is_declared = start is not None and start.basis is ExpectedBasis.DECLARED
    explained = explain(daemon.ledger, record, daemon.now(), daemon.policy, start_known=is_declared)
    return explain_expected_start(explained, start)


def _owner_watch(daemon: DaemonState, owner: OwnerClaim) -> WatchedOwner | None:
    """What the worker of this host has to watch for the lease to end with its owner; None if it cannot watch it."""
    node, own_realm = daemon.node_here(), realm()
    if node is None or owner.watchable is None or own_realm is None:
        return None
    return WatchedOwner(node=node, realm=own_realm, owner=owner.watchable)


def _remote_owner_watch(daemon: DaemonState, body: LeaseRequest, caller: Caller) -> WatchedOwner | None:
    """As `_owner_watch`, for a caller on another host: its worker confirms that the process is that user's."""
    pid, start_ticks = body.owner_pid, body.owner_start_ticks
    user = caller.user if caller.uid is None else str(caller.uid)
    if pid is None or start_ticks is None or body.owner_realm is None or user is None:
        return None
    observations = daemon.ledger.node_observations
    nodes = sorted(name for name in daemon.ledger.nodes if name in observations)
    there = [name for name in nodes if observations[name].realm == body.owner_realm]
    if not there:
        return None
    node = body.node if body.node in there else there[0]
    owner = LeaseOwner(pid=pid, start_ticks=start_ticks, user=user)
    return WatchedOwner(node=node, realm=body.owner_realm, owner=owner)


async def _release(daemon: DaemonState, caller: Caller, lease_id: str, fencing_token: int | None) -> Lease:
    record = await find_lease(daemon, lease_id)
    return await lease_changes.decided(daemon, record, lease_changes.release(record, fencing_token, caller))


def _ended(lease: Lease) -> LeaseLost:
    """The answer to a request of an ended lease. Without `env`, because its GPUs may be someone else's by now."""
    if lease.fencing_token is None:
        detail, remedy = f"Request {lease.id} ended before it was granted: {lease.end_reason}.", "Ask again."
    else:
        detail, remedy = ended_sentence(lease), "Stop using them and ask for a new lease."
    remedy = f"{remedy} A new request needs a new Idempotency-Key."
    return LeaseLost(detail, remedy=remedy, extra={"lease": without_env(lease)})


async def _wait_while(
    daemon: DaemonState, request: Request, caller: Caller, lease_id: str, state: LeaseState, wait_s: float
) -> None:
    record = daemon.ledger.leases.get(lease_id)
    if record is None:
        return

    def has_changed() -> bool:
        current = daemon.ledger.leases.get(lease_id)
        return current is None or current.lease.state is not state or state is LeaseState.ENDED

    def keep_alive() -> None:
        if state is LeaseState.QUEUED and caller.owns(record.lease.holder):
            daemon.writer.enqueue(WaiterPolled(cause=ids.new_id("poll"), lease_id=lease_id))

    keep_alive_s = record.lease.ttl_s / 3 if record.lease.ttl_s > 0 else LONG_SLICE_S
    topic, waiters = f"lease:{lease_id}", daemon.writer.grant_waiters
    if state is not LeaseState.QUEUED or not caller.owns(record.lease.holder):
        await wait_until(daemon, request, caller, topic, wait_s, has_changed, keep_alive, keep_alive_s)
        return
    is_lost = False
    try:
        with waiters.waiting(lease_id):
            await wait_until(daemon, request, caller, topic, wait_s, has_changed, keep_alive, keep_alive_s)
            if waiters.is_told(lease_id) and not has_changed():
                await daemon.wait_for(topic, COMMIT_S)
        is_lost = await request.is_disconnected()
    except BaseException:
        is_lost = has_changed()  # its holder is not told of it
        raise
    finally:
        if is_lost:
            daemon.writer.enqueue(waiters.lost_answer(lease_id))


async def _claim(daemon: DaemonState, request: Request, caller: Caller, lease_id: str) -> None:
    """Record that the holder is told of a grant, before it is told; not if its client has gone away meanwhile.

    A database that cannot be written raises `Unavailable`: the holder asks again, and is told then.
    """
    record = daemon.ledger.leases.get(lease_id)
    is_told = lease_id not in daemon.ledger.unclaimed and not daemon.writer.grant_waiters.may_be_lost(lease_id)
    if record is None or record.lease.state is not LeaseState.ACTIVE or is_told or not caller.owns(record.lease.holder):
        return
    if not await request.is_disconnected():
        await _renew(daemon, record)


async def _note_told(
    daemon: DaemonState, request: Request, caller: Caller, lease_id: str, *, is_repeated: bool
) -> None:
    """Note whether the client that asks for a lease is told of it, or has gone away meanwhile."""
    record = daemon.ledger.leases.get(lease_id)
    if await request.is_disconnected():
        if not is_repeated:
            daemon.writer.enqueue(AnswerLost(cause=ids.new_id("request"), lease_id=lease_id))
    elif record is not None and record.lease.state is LeaseState.ACTIVE and is_repeated:
        await _renew(daemon, record)  # also where the first answer was lost and that is not decided yet
    else:
        await _claim(daemon, request, caller, lease_id)


async def _renew(daemon: DaemonState, record: LeaseRecord) -> None:
    daemon.writer.grant_waiters.note_renewed(record.lease.id)
    renewal = lease_changes.renewal(record, record.lease.fencing_token)
    with contextlib.suppress(LeaseLost, StaleToken, NotFound):  # it ends at this moment, and is shown as it is
        await daemon.submit(renewal)
