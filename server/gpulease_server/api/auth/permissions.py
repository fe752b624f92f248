"""What a caller may do beyond looking, by the `operationId` of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from gpulease_protocol.tokens import Role
from gpulease_server.api.auth import job_callers
from gpulease_server.api.auth.access_rules import ACCESS_RULES, AccessRule
from gpulease_server.api.auth.callers import Caller

RULES_TO_ALL: dict[Role | None, tuple[AccessRule, ...]] = {
    Role.USER: (AccessRule.USER,),
    Role.ADMIN: (AccessRule.USER, AccessRule.HOLDER, AccessRule.ADMIN),
}
RULES_TO_OWN: dict[Role | None, tuple[AccessRule, ...]] = {
    Role.USER: (AccessRule.HOLDER,),
    Role.JOB: (AccessRule.HOLDER,),
}


def permissions(routes: Iterable[BaseRoute], caller: Caller) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the caller may do to anything, and what only to leases and jobs of their own. Operations that every caller
    may use who may look are left out, and so are those of workers. It is the same rules that refuse a request."""
    may, may_own = [], []
    to_all, to_own = RULES_TO_ALL.get(caller.role, ()), RULES_TO_OWN.get(caller.role, ())
    for route in routes:
        if not isinstance(route, APIRoute) or route.operation_id is None:
            continue
        for operation in (f"{method} {route.path}" for method in route.methods or ()):
            rule = ACCESS_RULES.get(operation)
            if caller.role is Role.JOB and operation not in job_callers.OPERATIONS:
                continue
            if rule in to_all:
                may.append(route.operation_id)
            elif rule in to_own:
                may_own.append(route.operation_id)
    return tuple(sorted(may)), tuple(sorted(may_own))
