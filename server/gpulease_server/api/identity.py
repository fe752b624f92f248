"""Who asks, and what he may: the one place that decides it, before a route is run.

A caller is known by, in this order: the bearer token that he sends; the user id that the kernel shows of his end of the
Unix socket, or of a loopback connection (`peer`); nothing, and then he may ask for nothing but `ANYBODY`'s. A token
that is wrong or has expired is refused, whoever sends it: it never falls back to the connection.

Whose a lease is, is the user in its holder; whose a job is, that in the holder of its lease. Neither ever changes, so
what is checked here holds when the writer comes to it.

`RULES` has a rule for every route. A route without one is refused to everybody, and a test fails.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import Annotated

from fastapi import Depends, Request
from fastapi.routing import APIRoute

from gpulease.access import Role
from gpulease.errors import NotAllowed, NotAuthenticated
from gpulease.model import Holder

from .callers import Caller, by_token
from .daemon import Daemon, TheDaemon
from .peer import Peer, look_up

HOW_TO_BE_KNOWN = (
    "Use the daemon's Unix socket, or 127.0.0.1 on its host, or send `Authorization: Bearer TOKEN` (GPULEASE_TOKEN):"
    " an administrator makes one with `gpulease token create`."
)
KEEPING = frozenset({"/v1/leases/{lease_id}/renew", "/v1/leases/{lease_id}/release"})
"""Counted by themselves, so that nobody loses a lease because he asks for too many others."""


class Rule(Enum):
    """Who may use a route."""

    ANYBODY = auto()
    """Also who is not known."""
    VIEWER = auto()
    """Whoever is known, but for workers."""
    USER = auto()
    """Who may have leases."""
    HOLDER = auto()
    """A user whose lease or job the path names, and administrators."""
    ADMIN = auto()
    WORKER = auto()
    """Who reports for nodes: what he says frees GPUs. Root, the daemon's own user, and tokens for it."""


RULES: dict[str, Rule] = {
    "GET /": Rule.VIEWER,
    "GET /healthz": Rule.ANYBODY,
    "GET /readyz": Rule.ANYBODY,
    "GET /docs": Rule.ANYBODY,
    "GET /v1/gpus": Rule.VIEWER,
    "GET /v1/gpus/{uuid}": Rule.VIEWER,
    "POST /v1/gpus/{uuid}/cordon": Rule.ADMIN,
    "POST /v1/gpus/{uuid}/uncordon": Rule.ADMIN,
    "GET /v1/nodes": Rule.VIEWER,
    "GET /v1/nodes/{name}": Rule.VIEWER,
    "POST /v1/nodes/{name}/drain": Rule.ADMIN,
    "POST /v1/nodes/{name}/resume": Rule.ADMIN,
    "POST /v1/nodes/{name}/pause": Rule.ADMIN,
    "POST /v1/nodes/{name}/exchange": Rule.WORKER,
    "POST /v1/leases": Rule.USER,
    "GET /v1/leases": Rule.VIEWER,
    "GET /v1/leases/{lease_id}": Rule.VIEWER,
    "GET /v1/leases/{lease_id}/explain": Rule.VIEWER,
    "POST /v1/leases/{lease_id}/renew": Rule.HOLDER,
    "POST /v1/leases/{lease_id}/release": Rule.HOLDER,
    "POST /v1/jobs": Rule.USER,
    "GET /v1/jobs": Rule.VIEWER,
    "GET /v1/jobs/{job_id}": Rule.VIEWER,
    "POST /v1/jobs/{job_id}/cancel": Rule.HOLDER,
    "GET /v1/jobs/{job_id}/logs": Rule.HOLDER,
    "GET /v1/jobs/{job_id}/metrics": Rule.HOLDER,
    "GET /v1/events": Rule.VIEWER,
    "GET /metrics": Rule.VIEWER,
    "GET /v1/tokens": Rule.ADMIN,
    "POST /v1/tokens": Rule.ADMIN,
    "DELETE /v1/tokens/{token_id}": Rule.ADMIN,
}
"""By method and path of the route."""


async def allow(request: Request, daemon: TheDaemon) -> None:
    """Find out who asks, and raise `NotAuthenticated`, `NotAllowed` or `OverQuota` unless the route is for him.

    For every router; it runs before anything of the request is read. Leaves the caller in `request.state.caller`.
    """
    route = request.scope.get("route")
    assert isinstance(route, APIRoute)
    rule = RULES.get(f"{request.method} {route.path}")
    access = daemon.access
    header = request.headers.get("authorization")
    if header is None:
        peer = access.believed(peer_of_request(request))
        if peer.uid is not None:
            await look_up(peer.uid)
        caller = access.by_connection(peer)
    else:
        caller = await by_token(header, daemon.bearers)
    request.state.caller = caller
    if rule is Rule.ANYBODY:
        return
    if caller.role is None:
        raise NotAuthenticated("The daemon cannot tell who you are.", remedy=HOW_TO_BE_KNOWN)
    if rule is not Rule.WORKER and access.max_rps_per_user > 0:
        kept = "keep" if route.path in KEEPING else "ask"
        access.rates.take(f"{kept} {caller.user}", access.max_rps_per_user, daemon.now().mono_s)
    if not await _may(caller, rule, request, daemon):
        raise _refusal(caller, rule)


async def _may(caller: Caller, rule: Rule | None, request: Request, daemon: Daemon) -> bool:
    match rule:
        case Rule.WORKER:
            return caller.reports
        case Rule.VIEWER:
            return caller.role is not Role.WORKER
        case Rule.USER:
            return caller.role in (Role.USER, Role.ADMIN)
        case Rule.HOLDER:
            if caller.admin:
                return True
            named = request.path_params
            found, holder = await holder_of(daemon, named.get("lease_id"), named.get("job_id"))
            # Of what there is not the route says so.
            return caller.role is Role.USER and (not found or caller.owns(holder))
        case Rule.ADMIN:
            return caller.admin
        case _:
            return False


async def holder_of(daemon: Daemon, lease_id: str | None, job_id: str | None) -> tuple[bool, Holder | None]:
    """Whether there is such a lease or job, and whose it is."""
    if lease_id is None and job_id is not None:
        job = daemon.ledger.jobs.get(job_id) or await asyncio.to_thread(daemon.store.job, job_id)
        if job is None:
            return False, None
        lease_id = job.job.lease_id
        lease = daemon.ledger.leases.get(lease_id) or await asyncio.to_thread(daemon.store.lease, lease_id)
        return True, None if lease is None else lease.lease.holder
    assert lease_id is not None
    lease = daemon.ledger.leases.get(lease_id) or await asyncio.to_thread(daemon.store.lease, lease_id)
    return lease is not None, None if lease is None else lease.lease.holder


def _refusal(caller: Caller, rule: Rule | None) -> NotAllowed:
    who = f"{caller.user} ({caller.role}, known by {caller.how})"
    match rule:
        case Rule.HOLDER if caller.role is Role.USER:
            return NotAllowed(f"It is another user's, and you are {who}.", remedy="Ask its holder or an administrator.")
        case Rule.WORKER:
            remedy = (
                "Run the worker as root or as the daemon's user on this host, or give it a token: gpulease token create"
                " --user NAME --role worker."
            )
            return NotAllowed(f"Only a worker may report for a node, and you are {who}.", remedy=remedy)
        case Rule.ADMIN:
            remedy = "Ask one: root, the daemon's user, who is named by --admin, or has a token with role admin."
            return NotAllowed(f"Only an administrator may do this, and you are {who}.", remedy=remedy)
        case None:
            return NotAllowed("Nobody may use this address.", remedy="Please report it.")
        case _:
            return NotAllowed(f"You are {who}, whose role does not allow this.", remedy="Ask an administrator.")


def peer_of_request(request: Request) -> Peer:
    """The other end of the connection, as the kernel shows it."""
    return getattr(request.state, "peer", None) or Peer()


async def caller_of(request: Request) -> Caller:
    """Who asks; `allow` has found out."""
    caller: Caller = request.state.caller
    return caller


async def _believed_peer(request: Request, daemon: TheDaemon) -> Peer:
    return daemon.access.believed(peer_of_request(request))


TheCaller = Annotated[Caller, Depends(caller_of)]
ThePeer = Annotated[Peer, Depends(_believed_peer)]
