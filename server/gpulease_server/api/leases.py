"""Leases: ask, wait, renew, release, explain."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response

from gpulease.errors import InvalidRequest, NotFound
from gpulease.explanation import Explanation
from gpulease.model import Holder, Lease, LeaseState, Page
from gpulease.owner import realm
from gpulease.wire import HolderProof, LeaseRequest

from ..core.explain import explain
from ..core.happenings import Key, LeaseAsked, LeaseReleased, LeaseRenewed, WaiterSeen
from ..core.lease import long_ended
from ..core.ledger import LeaseRecord, OwnerWatch
from ..core.view import lease_view
from ..runtime import ids
from .bodies import KEYED, JsonBody, idempotency_key
from .callers import Caller
from .daemon import Daemon, TheDaemon
from .identity import TheCaller, ThePeer
from .problems import PERHAPS_PRUNED, documented
from .routers import new_router
from .visible import lease_for
from .waiting import SLICE_S, Cursor, Limit, WaitSeconds, hold, number_of

router = new_router("/v1/leases", "leases")
ASK = JsonBody(LeaseRequest)
PROOF = JsonBody(HolderProof)
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {"model": Lease, "description": "Queued; `Location` is where to wait for the grant."}
}
TheKey = Annotated[Key | None, Depends(idempotency_key)]


@router.post(
    "",
    status_code=201,
    response_description="Granted.",
    openapi_extra=ASK.openapi() | KEYED,
    responses=ACCEPTED
    | documented(
        "invalid_request", "never_fits", "idempotency_mismatch", "not_now", "too_large", "over_quota", "unavailable"
    ),
)
async def ask(
    asked: Annotated[LeaseRequest, Depends(ASK)],
    key: TheKey,
    daemon: TheDaemon,
    caller: TheCaller,
    peer: ThePeer,
    request: Request,
    response: Response,
    wait_s: WaitSeconds = 0.0,
) -> Lease:
    """Ask for GPUs. All of them are granted (201), or none: then the request waits in the queue (202)."""
    if asked.ttl_s > daemon.policy.max_ttl_s:
        raise InvalidRequest(f"ttl_s: must be at most {daemon.policy.max_ttl_s:.0f} seconds, not {asked.ttl_s:.0f}.")
    host, owner, world = (
        daemon.host if peer.local else None,
        peer.owner(asked.owner_pid, asked.owner_start_ticks),
        realm(),
    )
    watched = None
    if daemon.local_node is not None and owner.watchable is not None and world is not None:
        watched = OwnerWatch(node=daemon.local_node, realm=world, owner=owner.watchable)
    answer = await daemon.writer.submit(
        LeaseAsked(
            cause=ids.make("request"),
            lease_id=ids.make("lease"),
            demand=asked.demand(),
            holder=Holder(user=caller.user, host=host, owner_pid=owner.pid, label=asked.label),
            watched=watched,
            ttl_s=asked.ttl_s,
            queue=asked.queue,
            key=key,
        )
    )
    if not isinstance(answer, Lease):
        raise InvalidRequest("Idempotency-Key: belongs to a job, not to a lease.")
    lease = answer
    if lease.state is LeaseState.QUEUED and wait_s > 0:
        await _hold_while(daemon, request, caller, lease.id, lease.state, wait_s)
        lease = _view(daemon, await _find(daemon, lease.id))
    response.status_code = 202 if lease.state is LeaseState.QUEUED else 201
    response.headers["Location"] = f"/v1/leases/{lease.id}"
    return lease


@router.get("")
async def list_leases(
    daemon: TheDaemon,
    caller: TheCaller,
    state: Annotated[list[LeaseState] | None, Query(description="Only leases in these states.")] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[Lease]:
    """Leases, newest first."""
    states, after = [item.value for item in state or ()], number_of(cursor)
    found = await asyncio.to_thread(daemon.store.leases, states, after, limit)
    views = (_view(daemon, daemon.ledger.leases.get(record.lease.id, record)) for record in found)
    items = tuple(lease_for(caller, lease) for lease in views)
    return Page(items=items, next=str(found[-1].number) if len(found) == limit else None)


@router.get("/{lease_id}", responses=documented("not_found"))
async def show(
    lease_id: str,
    daemon: TheDaemon,
    caller: TheCaller,
    request: Request,
    wait_s: WaitSeconds = 0.0,
    wait_while: Annotated[
        LeaseState | None, Query(description="Wait while it is in this state; the one it is in now when left out.")
    ] = None,
) -> Lease:
    """One lease. With `wait_s` the answer is held until its state changes; its holder's waiting keeps a queued lease
    alive. Its `token` and `env` are for its holder and for administrators."""
    record = await _find(daemon, lease_id)
    if wait_s > 0:
        await _hold_while(daemon, request, caller, lease_id, wait_while or record.lease.state, wait_s)
        record = await _find(daemon, lease_id)
    return lease_for(caller, _view(daemon, record))


@router.post(
    "/{lease_id}/renew",
    openapi_extra=PROOF.openapi(),
    responses=documented("invalid_request", "not_found", "lease_lost", "stale_token", "too_large", "unavailable"),
)
async def renew(lease_id: str, proof: Annotated[HolderProof, Depends(PROOF)], daemon: TheDaemon) -> Lease:
    """Make the lease last a full `ttl_s` from now. One that has expired revives while its GPUs went to nobody else."""
    happening = LeaseRenewed(cause=ids.make("request"), lease_id=lease_id, token=proof.token)
    return await _act(daemon, await _find(daemon, lease_id), happening)


@router.post(
    "/{lease_id}/release",
    openapi_extra=PROOF.openapi(),
    responses=documented(
        "invalid_request", "not_found", "lease_lost", "stale_token", "not_allowed", "too_large", "unavailable"
    ),
)
async def release(
    lease_id: str, proof: Annotated[HolderProof, Depends(PROOF)], daemon: TheDaemon, caller: TheCaller
) -> Lease:
    """Give the GPUs back, or stop waiting for them. Saying it twice is answered the same twice.

    An administrator who releases another user's lease revokes it, and needs no token for that.
    """
    record = await _find(daemon, lease_id)
    revoked_by = None if caller.owns(record.lease.holder) else caller.user
    happening = LeaseReleased(cause=ids.make("request"), lease_id=lease_id, token=proof.token, revoked_by=revoked_by)
    return await _act(daemon, record, happening)


@router.get("/{lease_id}/explain", responses=documented("not_found"))
async def explain_lease(lease_id: str, daemon: TheDaemon) -> Explanation:
    """Why the lease waits, GPU by GPU, or why it ended."""
    record = await _find(daemon, lease_id)
    return explain(daemon.ledger, record, daemon.now(), daemon.policy)


async def _act(daemon: Daemon, record: LeaseRecord, happening: LeaseRenewed | LeaseReleased) -> Lease:
    # What is in the database alone ended long ago, unless the ledger is still being read: then nothing is known yet.
    if daemon.writer.problem is None and happening.lease_id not in daemon.ledger.leases:
        return long_ended(record.lease, happening)
    answer = await daemon.writer.submit(happening)
    assert isinstance(answer, Lease)
    return answer


async def _find(daemon: Daemon, lease_id: str) -> LeaseRecord:
    record = daemon.ledger.leases.get(lease_id) or await asyncio.to_thread(daemon.store.lease, lease_id)
    if record is None:
        raise NotFound(f"There is no lease {lease_id}.", remedy=PERHAPS_PRUNED.format("leases"))
    return record


async def _hold_while(
    daemon: Daemon, request: Request, caller: Caller, lease_id: str, state: LeaseState, wait_s: float
) -> None:
    record = daemon.ledger.leases.get(lease_id)
    if record is None:
        return

    def settled() -> bool:
        current = daemon.ledger.leases.get(lease_id)
        return current is None or current.lease.state is not state or state is LeaseState.ENDED

    def alive() -> None:
        if state is LeaseState.QUEUED and caller.owns(record.lease.holder):
            daemon.writer.tell(WaiterSeen(cause=ids.make("poll"), lease_id=lease_id))

    slice_s = min(SLICE_S, record.lease.ttl_s / 3) if record.lease.ttl_s > 0 else SLICE_S
    await hold(daemon, request, caller, f"lease:{lease_id}", wait_s, settled, alive, slice_s)


def _view(daemon: Daemon, record: LeaseRecord) -> Lease:
    return lease_view(daemon.ledger, record, daemon.now(), daemon.policy)
