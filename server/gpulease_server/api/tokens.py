"""Bearer tokens: made, listed, revoked."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends

from gpulease.access import BearerToken, NewBearerToken, Role, TokenRequest
from gpulease.errors import NotAllowed, Unavailable
from gpulease.model import Page

from ..runtime.bearers import Account, Bearers, account_of
from .bodies import JsonBody
from .callers import Caller
from .daemon import Daemon, TheDaemon
from .identity import TheCaller
from .problems import documented
from .routers import new_router

router = new_router("/v1/tokens", "tokens")
ASK = JsonBody(TokenRequest)


@router.post(
    "",
    status_code=201,
    response_description="Made; its `bearer` is not shown again.",
    openapi_extra=ASK.openapi(),
    responses=documented("invalid_request", "not_allowed", "too_large", "over_quota", "unavailable"),
)
async def create(asked: Annotated[TokenRequest, Depends(ASK)], daemon: TheDaemon, caller: TheCaller) -> NewBearerToken:
    """Make a bearer token for callers whom no connection names. `bearer` is shown in this answer and never again.

    Who is an administrator by `--admin` alone makes none of role `admin` or `worker`, and none of another user whom the
    daemon's host knows: with it he would be more than he is.
    """
    bearers, account = _bearers(daemon), await asyncio.to_thread(account_of, asked.user)
    _require_no_more_than(caller, asked.role, account)
    return await bearers.create(asked, caller.user, account)


@router.get("", responses=documented("unavailable"))
async def list_tokens(daemon: TheDaemon) -> Page[BearerToken]:
    """Every token that was not revoked, oldest first, without what makes it one. One that has expired is listed for 30
    days more."""
    return Page(items=await _bearers(daemon).all())


@router.delete("/{token_id}", responses=documented("not_found", "unavailable"))
async def revoke(token_id: str, daemon: TheDaemon, caller: TheCaller) -> BearerToken:
    """Revoke a token: from this answer on it is refused."""
    return await _bearers(daemon).revoke(token_id, caller.user)


def _require_no_more_than(caller: Caller, role: Role, account: Account) -> None:
    """Raise `NotAllowed` for a token that may do what the caller may not: jobs run as its user, reports free GPUs."""
    if caller.reports:
        return
    refused = "Who is an administrator by --admin alone makes no token"
    remedy = "Ask root, the daemon's user, or who has a token with role admin."
    if role in (Role.ADMIN, Role.WORKER):
        raise NotAllowed(f"{refused} with role {role}.", remedy=remedy)
    if account.uid is not None and account.uid != caller.uid:
        raise NotAllowed(f"{refused} of {account.user}, another user of this host.", remedy=remedy)


def _bearers(daemon: Daemon) -> Bearers:
    if daemon.bearers is None:
        raise Unavailable("This daemon keeps no tokens.", remedy="Start it with `gpulease serve`.")
    return daemon.bearers
