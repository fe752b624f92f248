"""What both clients can do with limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulease.brief_errors import brief_errors_of
from gpulease.keep_methods import AsyncKeepMethods, KeepMethods
from gpulease_protocol import limit_endpoints

if TYPE_CHECKING:
    from gpulease_protocol.limits import LimitKind, LimitsRequest, LimitUse


@brief_errors_of
class LimitMethods(KeepMethods):
    """Limits of users, groups and tokens, for `Client`."""

    def limits(self) -> tuple[LimitUse, ...]:
        """The limits that hold, and what is used of them: all that are set for administrators, else your own."""
        return self.send(limit_endpoints.limits()).items

    def limits_of(self, kind: LimitKind, name: str) -> LimitUse:
        """The limits that hold for a user, a group or a token. Raises NotAllowed unless they are yours."""
        return self.send(limit_endpoints.limits_of(kind, name))

    def set_limits(self, kind: LimitKind, name: str, request: LimitsRequest) -> LimitUse:
        """Set all limits of a user, a group or a token; they end no lease. For administrators."""
        return self.send(limit_endpoints.set_limits(kind, name, request))

    def remove_limits(self, kind: LimitKind, name: str) -> LimitUse:
        """Remove the limits that were set; what holds then. For administrators. Raises NotFound."""
        return self.send(limit_endpoints.remove_limits(kind, name))


@brief_errors_of
class AsyncLimitMethods(AsyncKeepMethods):
    """The same for `AsyncClient`."""

    async def limits(self) -> tuple[LimitUse, ...]:
        """The limits that hold, and what is used of them: all that are set for administrators, else your own."""
        return (await self.send(limit_endpoints.limits())).items

    async def limits_of(self, kind: LimitKind, name: str) -> LimitUse:
        """The limits that hold for a user, a group or a token. Raises NotAllowed unless they are yours."""
        return await self.send(limit_endpoints.limits_of(kind, name))

    async def set_limits(self, kind: LimitKind, name: str, request: LimitsRequest) -> LimitUse:
        """Set all limits of a user, a group or a token; they end no lease. For administrators."""
        return await self.send(limit_endpoints.set_limits(kind, name, request))

    async def remove_limits(self, kind: LimitKind, name: str) -> LimitUse:
        """Remove the limits that were set; what holds then. For administrators. Raises NotFound."""
        return await self.send(limit_endpoints.remove_limits(kind, name))
