"""How both clients say that idle GPUs are kept on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from gpulease.brief_errors import brief_errors_of
from gpulease_protocol.endpoints import ApiCall

if TYPE_CHECKING:
    from gpulease_protocol.model import Lease

Answer = TypeVar("Answer")


@brief_errors_of
class KeepMethods:
    """Idle GPUs that are kept on purpose, for `Client`."""

    def send(self, call: ApiCall[Answer]) -> Answer:
        """What the client sends with."""
        raise NotImplementedError

    def keep(self, lease_id: str, fencing_token: int | None = None, *, reason: str, for_s: float) -> Lease:
        """Say that idle GPUs of the lease are kept on purpose for `for_s` seconds from now, and why: until then no one
        is told that it is idle, and who waits for them is told the reason. The last call counts. Administrators need no
        token for another user's lease. Raises LeaseLost, StaleToken; InvalidRequest for a longer time than the
        administrator allows."""
        from gpulease_protocol.keep import KeepRequest, keep_lease  # noqa: PLC0415 - for this call alone

        return self.send(keep_lease(lease_id, KeepRequest(reason=reason, for_s=for_s, fencing_token=fencing_token)))


@brief_errors_of
class AsyncKeepMethods:
    """The same for `AsyncClient`."""

    async def send(self, call: ApiCall[Answer]) -> Answer:
        """What the client sends with."""
        raise NotImplementedError

    async def keep(self, lease_id: str, fencing_token: int | None = None, *, reason: str, for_s: float) -> Lease:
        """Say that idle GPUs of the lease are kept on purpose for `for_s` seconds from now, and why: until then no one
        is told that it is idle, and who waits for them is told the reason. The last call counts. Administrators need no
        token for another user's lease. Raises LeaseLost, StaleToken; InvalidRequest for a longer time than the
        administrator allows."""
        from gpulease_protocol.keep import KeepRequest, keep_lease  # noqa: PLC0415 - for this call alone

        request = KeepRequest(reason=reason, for_s=for_s, fencing_token=fencing_token)
        return await self.send(keep_lease(lease_id, request))
