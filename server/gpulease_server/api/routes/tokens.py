"""Bearer tokens: create, list, revoke."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends

from gpulease_protocol.errors import NotAllowed, Unavailable
from gpulease_protocol.model import Page
from gpulease_protocol.tokens import BearerToken, NewBearerToken, Role, TokenRequest
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.daemon_state import DaemonDep, DaemonState
from gpulease_server.api.problems import error_responses
from gpulease_server.api.request_body import JsonBody
from gpulease_server.runtime.bearer_tokens import BearerTokens
from gpulease_server.runtime.host_accounts import TokenAccount, find_account

router = new_router("/v1/tokens", "tokens")
CREATE_BODY = JsonBody(TokenRequest)


@router.post(
    "",
    operation_id="createToken",
    status_code=201,
    response_description="Created; `bearer` is not shown again.",
    openapi_extra=CREATE_BODY.openapi(),
    responses=error_responses("invalid_request"),
)
async def create_token(
    body: Annotated[TokenRequest, Depends(CREATE_BODY)], daemon: DaemonDep, caller: CallerDep
) -> NewBearerToken:
    """Create a bearer token, for callers whom the connection does not identify. Only this answer shows `bearer`.

    A token of a user whom the daemon's host does not have has no `uid`. It is revoked as soon as that host has such a
    user, who may be another person, unless its role is `worker`.

    Administrators named by `--admin` may not create a token with role `admin`, `worker` or `join`, nor one for another
    user of the daemon's host: it would give them more rights than they have.
    """
    bearers, account = _bearer_tokens(daemon), await asyncio.to_thread(find_account, body.user)
    _refuse_privilege_escalation(caller, body.role, account)
    return await bearers.create(body, caller.user, account)


@router.get("", operation_id="listTokens")
async def list_tokens(daemon: DaemonDep) -> Page[BearerToken]:
    """All tokens that have not been revoked, oldest first, without the secret. Expired ones are listed for 30 days."""
    return Page(items=await _bearer_tokens(daemon).all())


@router.delete("/{token_id}", operation_id="revokeToken", responses=error_responses("not_found"))
async def revoke_token(token_id: str, daemon: DaemonDep, caller: CallerDep) -> BearerToken:
    """Revoke a token. It is refused from this answer on."""
    return await _bearer_tokens(daemon).revoke(token_id, caller.user)


def _refuse_privilege_escalation(caller: Caller, role: Role, account: TokenAccount) -> None:
    """Raise `NotAllowed` for a token that may do more than the caller: its jobs run as its user, and a worker's reports
    can free GPUs."""
    if caller.may_report:
        return
    refused = "An administrator named by --admin may not create a token"
    remedy = "Ask root, the daemon's user, or a user with a token of role admin."
    if role in (Role.ADMIN, Role.WORKER, Role.JOIN):
        raise NotAllowed(f"{refused} with role {role}.", remedy=remedy)
    if account.uid is not None and account.uid != caller.uid:
        raise NotAllowed(f"{refused} for {account.user}, another user of this host.", remedy=remedy)


def _bearer_tokens(daemon: DaemonState) -> BearerTokens:
    if daemon.bearer_tokens is None:
        raise Unavailable("This daemon has no bearer tokens.", remedy="Use one that was started as a program.")
    return daemon.bearer_tokens
