"""Limits of users, groups and tokens: look, set, remove."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Response
from pydantic import TypeAdapter

from gpulease_protocol.bounds import MAX_NAME
from gpulease_protocol.errors import InvalidRequest, NotFound
from gpulease_protocol.limits import LimitKind, LimitsRequest, LimitUse
from gpulease_protocol.model import Page
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.daemon_state import DaemonDep, DaemonState
from gpulease_server.api.long_lists import list_response
from gpulease_server.api.problems import error_responses
from gpulease_server.api.request_body import JsonBody
from gpulease_server.core.happenings import LimitsChanged
from gpulease_server.core.limit_changes import limit_list, limit_use
from gpulease_server.core.limit_records import LimitKey
from gpulease_server.runtime import ids

router = new_router("/v1/limits", "limits")
LIMIT_JSON: TypeAdapter[object] = TypeAdapter(LimitUse)
SET_BODY = JsonBody(LimitsRequest)
Kind = Annotated[LimitKind, Path(description="Whose limits they are.")]
Name = Annotated[
    str,
    Path(description="A user, a group, or the id of a token.", min_length=1, max_length=MAX_NAME, pattern="^[^/]*$"),
]


@router.get("", operation_id="listLimits", response_model=Page[LimitUse])
async def list_limits(daemon: DaemonDep, caller: CallerDep) -> Response:
    """The limits that hold, each with what is used of it: administrators see all that are set, others those of
    themselves, their group and their token."""
    keys = sorted(daemon.ledger.limits.records) if caller.is_admin else caller.limit_keys(daemon.ledger)
    return await list_response(keys, limit_list(daemon.ledger.limits, daemon.policy.limits, daemon.now()), LIMIT_JSON)


@router.get("/{kind}/{name}", operation_id="getLimits", responses=error_responses("not_allowed"))
async def show_limits(kind: Kind, name: Name, daemon: DaemonDep) -> LimitUse:
    """The limits that hold for a user, a group or a token, and what is used of them. Where none are set, those of the
    configuration."""
    return _shown(daemon, LimitKey(kind, name))


@router.put(
    "/{kind}/{name}",
    operation_id="replaceLimits",
    openapi_extra=SET_BODY.openapi(),
    responses=error_responses("invalid_request", "not_found"),
)
async def set_limits(
    kind: Kind, name: Name, body: Annotated[LimitsRequest, Depends(SET_BODY)], daemon: DaemonDep, caller: CallerDep
) -> LimitUse:
    """Set all limits of a user, a group or a token, in the place of those that were set before. They hold from this
    answer on, and end no lease. The event `limits.set` says who did it."""
    if not name.isprintable():
        raise InvalidRequest("name: must have characters that can be printed alone.", remedy="Correct the name.")
    key = LimitKey(kind, name)
    await _refuse_unknown_token(daemon, key)
    happening = LimitsChanged(
        cause=ids.new_id("request"), key=key, limits=body.limits(), members=tuple(body.members), by=caller.user
    )
    await daemon.submit(happening)
    return _shown(daemon, key)


@router.delete("/{kind}/{name}", operation_id="deleteLimits", responses=error_responses("not_found", "in_use"))
async def remove_limits(kind: Kind, name: Name, daemon: DaemonDep, caller: CallerDep) -> LimitUse:
    """Remove the limits that were set for a user, a group or a token, and return what holds now: for a user the
    defaults of the configuration. A group for which GPUs are reserved stays."""
    key = LimitKey(kind, name)
    await daemon.submit(LimitsChanged(cause=ids.new_id("request"), key=key, limits=None, by=caller.user))
    return _shown(daemon, key)


def _shown(daemon: DaemonState, key: LimitKey) -> LimitUse:
    return limit_use(daemon.ledger.limits, key, daemon.policy.limits, daemon.now())


async def _refuse_unknown_token(daemon: DaemonState, key: LimitKey) -> None:
    """Raise NotFound for a token that there is not: limits for a typing error would limit nothing."""
    if key.kind is not LimitKind.TOKEN or daemon.bearer_tokens is None:
        return
    if key.name not in {token.id for token in await daemon.bearer_tokens.all()}:
        raise NotFound(f"There is no token {key.name}.", remedy="`GET /v1/tokens` shows the valid ids.")
