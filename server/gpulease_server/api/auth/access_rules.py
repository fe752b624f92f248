"""Authentication and authorization: the one place that decides who a caller is and which routes they may use.

A caller is identified by, in this order: the bearer token in the Authorization header; the user id that the kernel
shows for the other end of the Unix socket or of a loopback connection (`peer_credentials`); nothing, and then only
routes with `AccessRule.ANYONE` are open. A token that is wrong or has expired is refused and never falls back to the
connection.

A lease belongs to the user in its holder, a job to the user in the holder of its lease. Neither ever changes, so a
check made here still holds when the writer handles the request.

`ACCESS_RULES` has a rule for every route. A route without one is refused to everyone, and a test fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import Enum, auto
from typing import Annotated

from fastapi import Depends, Request
from fastapi.routing import APIRoute

from gpulease_protocol.errors import NotAllowed, NotAuthenticated
from gpulease_protocol.model import Holder
from gpulease_protocol.tokens import Role
from gpulease_server.api import fair_share
from gpulease_server.api.auth import job_callers
from gpulease_server.api.auth.callers import Caller, caller_from_peer, caller_from_token, trusted_peer
from gpulease_server.api.auth.peer_credentials import PeerCredentials
from gpulease_server.api.auth.rate_limiter import RateLimiter
from gpulease_server.api.daemon_state import DaemonDep, DaemonState

HOW_TO_AUTHENTICATE = (
    "Use the daemon's Unix socket, or 127.0.0.1 on its host, or send `Authorization: Bearer TOKEN` (GPULEASE_TOKEN):"
    " an administrator creates one with `POST /v1/tokens`."
)
LEASE_KEEPING_ROUTES = frozenset(
    {"POST /v1/leases/{lease_id}/renew", "POST /v1/leases/{lease_id}/release", "DELETE /v1/leases/{lease_id}"}
)
"""Rate-limited separately, so that no one loses a lease because they send too many other requests."""


class AccessRule(Enum):
    """Who may use a route."""

    ANYONE = auto()
    """Also unknown callers."""
    KNOWN = auto()
    """Every known caller."""
    VIEWER = auto()
    """Every known caller except workers."""
    USER = auto()
    """Callers who may hold leases."""
    HOLDER = auto()
    """The user of the lease or job in the path, and administrators."""
    LIMITED = auto()
    """Whom the limits in the path are set for, and administrators."""
    ADMIN = auto()
    WORKER = auto()
    """Callers who report for nodes, which can free GPUs: root, the daemon's own user, and tokens with that role."""
    JOIN = auto()
    """Tokens of role `join`, for the node in the path."""


ACCESS_RULES: dict[str, AccessRule] = {
    "GET /": AccessRule.VIEWER,
    "GET /healthz": AccessRule.ANYONE,
    "GET /readyz": AccessRule.ANYONE,
    "GET /docs": AccessRule.ANYONE,
    "GET /v1": AccessRule.ANYONE,
    "GET /v1/me": AccessRule.KNOWN,
    "GET /v1/gpus": AccessRule.VIEWER,
    "GET /v1/gpus/history": AccessRule.VIEWER,
    "GET /v1/gpus/{uuid}": AccessRule.VIEWER,
    "GET /v1/gpus/{uuid}/history": AccessRule.VIEWER,
    "POST /v1/gpus/{uuid}/cordon": AccessRule.ADMIN,
    "POST /v1/gpus/{uuid}/uncordon": AccessRule.ADMIN,
    "GET /v1/nodes": AccessRule.VIEWER,
    "GET /v1/nodes/{name}": AccessRule.VIEWER,
    "POST /v1/nodes/{name}/drain": AccessRule.ADMIN,
    "POST /v1/nodes/{name}/resume": AccessRule.ADMIN,
    "POST /v1/nodes/{name}/pause": AccessRule.ADMIN,
    "POST /v1/nodes/{name}/forget": AccessRule.ADMIN,
    "POST /v1/nodes/{name}/exchange": AccessRule.WORKER,
    "POST /v1/nodes/{name}/logs": AccessRule.WORKER,
    "POST /v1/nodes/{name}/join": AccessRule.JOIN,
    "GET /v1/ca": AccessRule.ANYONE,
    "POST /v1/leases": AccessRule.USER,
    "POST /v1/leases/explain": AccessRule.USER,
    "GET /v1/leases": AccessRule.VIEWER,
    "GET /v1/leases/{lease_id}": AccessRule.VIEWER,
    "GET /v1/leases/{lease_id}/explain": AccessRule.VIEWER,
    "GET /v1/leases/{lease_id}/metrics": AccessRule.VIEWER,
    "POST /v1/leases/{lease_id}/renew": AccessRule.HOLDER,
    "POST /v1/leases/{lease_id}/keep": AccessRule.HOLDER,
    "POST /v1/leases/{lease_id}/release": AccessRule.HOLDER,
    "DELETE /v1/leases/{lease_id}": AccessRule.HOLDER,
    "POST /v1/jobs": AccessRule.USER,
    "POST /v1/jobs/explain": AccessRule.USER,
    "GET /v1/jobs": AccessRule.VIEWER,
    "GET /v1/jobs/{job_id}": AccessRule.VIEWER,
    "POST /v1/jobs/{job_id}/cancel": AccessRule.HOLDER,
    "GET /v1/jobs/{job_id}/logs": AccessRule.HOLDER,
    "GET /v1/jobs/{job_id}/metrics": AccessRule.VIEWER,
    "GET /v1/events": AccessRule.VIEWER,
    "GET /v1/timeline": AccessRule.VIEWER,
    "GET /v1/usage": AccessRule.VIEWER,
    "GET /metrics": AccessRule.VIEWER,
    "GET /v1/limits": AccessRule.VIEWER,
    "GET /v1/limits/{kind}/{name}": AccessRule.LIMITED,
    "PUT /v1/limits/{kind}/{name}": AccessRule.ADMIN,
    "DELETE /v1/limits/{kind}/{name}": AccessRule.ADMIN,
    "GET /v1/reservations": AccessRule.VIEWER,
    "POST /v1/reservations": AccessRule.ADMIN,
    "DELETE /v1/reservations/{reservation_id}": AccessRule.ADMIN,
    "GET /v1/tokens": AccessRule.ADMIN,
    "POST /v1/tokens": AccessRule.ADMIN,
    "DELETE /v1/tokens/{token_id}": AccessRule.ADMIN,
}
"""By method and path of the route."""


async def authorize(request: Request, daemon: DaemonDep) -> None:
    """Identify the caller, and raise `NotAuthenticated`, `NotAllowed` or `OverQuota` unless they may use the route.

    A dependency of every router; runs before the body is read. Leaves the caller in `request.state.caller`.
    """
    route = request.scope.get("route")
    assert isinstance(route, APIRoute)
    peer = trusted_peer(peer_of_request(request), daemon.access)
    request.state.caller = await authorized_caller(
        f"{request.method} {route.path}",
        request.headers.get("authorization"),
        peer,
        request.path_params,
        daemon,
        request.app.state.rate_limiter,
    )


async def authorized_caller(
    operation: str,
    header: str | None,
    peer: PeerCredentials,
    parameters: Mapping[str, str],
    daemon: DaemonState,
    rate_limiter: RateLimiter,
) -> Caller:
    """The caller, if they may use a route. Raises `NotAuthenticated`, `NotAllowed` or `OverQuota`.

    Args:
        operation: Method and path of the route.
        header: What they sent as Authorization.
        peer: The other end of the connection, as far as it can be trusted.
        parameters: The parts of the path that the route leaves open, by name.
        daemon: The daemon.
        rate_limiter: Of all its users.
    """
    rule = ACCESS_RULES.get(operation)
    access = daemon.access
    if header is None:
        caller = await caller_from_peer(peer, access, daemon.admin_groups)
    else:
        caller = await caller_from_token(header, daemon.bearer_tokens, daemon.ledger)
    if rule is AccessRule.ANYONE:
        return caller
    if caller.role is None:
        raise NotAuthenticated("The daemon cannot tell who you are.", remedy=HOW_TO_AUTHENTICATE)
    if rule is not AccessRule.WORKER and access.max_rps_per_user > 0:
        bucket = "keep" if operation in LEASE_KEEPING_ROUTES else "other"
        rate_limiter.take(f"{bucket} {caller.user}", access.max_rps_per_user, daemon.now().mono_s)
    if caller.role is Role.JOB:
        if not job_callers.is_allowed(caller, operation, parameters, daemon.ledger):
            raise _of_job(caller)
        return caller
    if not await _is_allowed(caller, rule, parameters, daemon):
        raise _refusal(caller, rule)
    if rule is AccessRule.WORKER:
        fair_share.exempt()  # a report that is late makes GPUs unknown
    return caller


async def _is_allowed(  # noqa: C901 - one case for each
    caller: Caller, rule: AccessRule | None, parameters: Mapping[str, str], daemon: DaemonState
) -> bool:
    match rule:
        case AccessRule.WORKER:
            return caller.may_report and caller.node in (None, parameters["name"])
        case AccessRule.KNOWN:
            return True
        case AccessRule.VIEWER:
            return caller.role not in (Role.WORKER, Role.JOIN)
        case AccessRule.JOIN:
            return caller.role is Role.JOIN and caller.node == parameters["name"]
        case AccessRule.USER:
            return caller.role in (Role.USER, Role.ADMIN)
        case AccessRule.HOLDER:
            if caller.is_admin:
                return True
            exists, holder = await holder_of(daemon, parameters.get("lease_id"), parameters.get("job_id"))
            if caller.role is Role.USER and exists and not caller.owns(holder):
                raise _of_another(caller, parameters.get("lease_id") or parameters["job_id"], holder)
            # If it does not exist, the route answers 404.
            return caller.role is Role.USER
        case AccessRule.LIMITED:
            asked = parameters["kind"], parameters["name"]
            own = {(key.kind, key.name) for key in caller.limit_keys(daemon.ledger)}
            return caller.is_admin or (caller.role in (Role.USER, Role.VIEWER) and asked in own)
        case AccessRule.ADMIN:
            return caller.is_admin
        case _:
            return False


async def holder_of(daemon: DaemonState, lease_id: str | None, job_id: str | None) -> tuple[bool, Holder | None]:
    """Whether this lease or job exists, and who holds it."""
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


def other_node(node: str | None) -> NotAllowed:
    """The refusal of a worker with a token for another node."""
    return NotAllowed(
        f"This token reports for node {node} and for no other.",
        remedy=f"Start the worker with --node {node}, or give it a token of its own: gpulease token create --user NAME"
        " --role worker --node NODE.",
    )


def _of_job(caller: Caller) -> NotAllowed:
    """The refusal of a job that asks for what is not its own."""
    return NotAllowed(
        f"You are {caller.job_id}, which may look at itself and at {caller.lease_id}, and renew that.",
        remedy="For more, give the job a token of its user: submit it with `GPULEASE_TOKEN` in its environment.",
    )


def _of_another(caller: Caller, noun_id: str, holder: Holder | None) -> NotAllowed:
    """The refusal of a user who is not the holder."""
    user = holder.user if holder is not None and holder.user else None
    return NotAllowed(
        f"{noun_id} belongs to {user or 'an unknown user'}; you are {caller.user}.",
        remedy=f"Ask {user or 'its holder'}, or an administrator.",
    )


def _refusal(caller: Caller, rule: AccessRule | None) -> NotAllowed:
    who = f"{caller.user} ({caller.role}, identified by {caller.identified_by})"
    match rule:
        case AccessRule.WORKER if caller.may_report:
            return other_node(caller.node)
        case AccessRule.WORKER:
            remedy = (
                "Run the worker as root or as the daemon's user on this host, or give it a token: gpulease token create"
                " --user NAME --role worker --node NODE."
            )
            return NotAllowed(f"Only a worker may report for a node, and you are {who}.", remedy=remedy)
        case AccessRule.JOIN if caller.role is Role.JOIN:
            remedy = f"Join as node {caller.node}, or ask an administrator to add this one."
            return NotAllowed(f"This join token is for node {caller.node} and for no other.", remedy=remedy)
        case AccessRule.JOIN:
            remedy = "Send a join token; an administrator makes one (`POST /v1/tokens`)."
            return NotAllowed(f"A node joins with a join token, and you are {who}.", remedy=remedy)
        case AccessRule.LIMITED:
            remedy = "Ask an administrator; `GET /v1/limits` shows your own."
            return NotAllowed(f"These limits are not yours, and you are {who}.", remedy=remedy)
        case AccessRule.ADMIN:
            remedy = "Ask one: root, the daemon's user, a user named by --admin, or one with an admin token."
            return NotAllowed(f"Only an administrator may do this, and you are {who}.", remedy=remedy)
        case None:
            return NotAllowed("This route has no access rule, which is a bug in gpulease.", remedy="Please report it.")
        case _:
            return NotAllowed(f"You are {who}, and this role may not do this.", remedy="Ask an administrator.")


def peer_of_request(request: Request) -> PeerCredentials:
    """The other end of the connection, as the kernel shows it."""
    return getattr(request.state, "peer", None) or PeerCredentials()


async def caller_of(request: Request) -> Caller:
    """The caller, whom `authorize` has identified."""
    caller: Caller = request.state.caller
    return caller


async def _trusted_peer(request: Request, daemon: DaemonDep) -> PeerCredentials:
    return trusted_peer(peer_of_request(request), daemon.access)


CallerDep = Annotated[Caller, Depends(caller_of)]
PeerDep = Annotated[PeerCredentials, Depends(_trusted_peer)]
