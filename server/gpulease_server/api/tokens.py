"""Bearer tokens: made, listed, revoked."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from gpulease.access import BearerToken, NewBearerToken, TokenRequest
from gpulease.errors import Unavailable
from gpulease.model import Page

from ..runtime.bearers import Bearers
from .bodies import JsonBody
from .daemon import Daemon, TheDaemon
from .identity import TheCaller
from .problems import documented

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])
ASK = JsonBody(TokenRequest)


@router.post(
    "",
    status_code=201,
    openapi_extra=ASK.openapi(),
    responses=documented("invalid_request", "too_large", "over_quota", "unavailable"),
)
async def create(asked: Annotated[TokenRequest, Depends(ASK)], daemon: TheDaemon, caller: TheCaller) -> NewBearerToken:
    """Make a bearer token for callers whom no connection names. `bearer` is shown in this answer and never again."""
    return await _bearers(daemon).create(asked, caller.user)


@router.get("", responses=documented("unavailable"))
async def list_tokens(daemon: TheDaemon) -> Page[BearerToken]:
    """Every token that was not revoked, oldest first, without what makes it one. One that has expired is listed for 30
    days more."""
    return Page(items=await _bearers(daemon).all())


@router.delete("/{token_id}", responses=documented("not_found", "unavailable"))
async def revoke(token_id: str, daemon: TheDaemon, caller: TheCaller) -> BearerToken:
    """Revoke a token: from this answer on it is refused."""
    return await _bearers(daemon).revoke(token_id, caller.user)


def _bearers(daemon: Daemon) -> Bearers:
    if daemon.bearers is None:
        raise Unavailable("This daemon keeps no tokens.", remedy="Start it with `gpulease serve`.")
    return daemon.bearers
