"""Who the caller is, as the daemon sees it."""

from __future__ import annotations

from fastapi import Request

from gpulease_protocol.tokens import IdentifiedBy, Identity
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.permissions import permissions
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.core.token_budgets import budget_use

router = new_router("/v1/me", "me")


@router.get("", operation_id="getMe")
async def show_me(caller: CallerDep, daemon: DaemonDep, request: Request) -> Identity:
    """The caller: user, role, how the daemon knows, and what they may do. For checking a token, and for programs that
    offer only what is allowed."""
    assert caller.user is not None and caller.role is not None and caller.identified_by is not None  # noqa: PT018
    may, may_own = permissions(request.app.routes, caller)
    return Identity(
        user=caller.user,
        uid=caller.uid,
        role=caller.role,
        identified_by=IdentifiedBy(caller.identified_by),
        token_id=caller.token_id,
        may=may,
        may_own=may_own,
        node=caller.node,
        worker_host=daemon.worker_host(caller.node),
        budget=None
        if caller.budget is None or caller.token_id is None
        else budget_use(daemon.ledger, caller.token_id, caller.budget, daemon.now()),
    )
