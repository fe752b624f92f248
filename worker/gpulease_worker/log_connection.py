"""Sends pieces of logs to the daemon, beside the worker's reports: one may be held while a caller takes none."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from gpulease.sansio.failover import Destination, Failover
from gpulease_protocol import codec
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.node_protocol import LogPiece, LogProgress
from gpulease_worker.local_transport import LocalTransport, is_enough_for

if TYPE_CHECKING:
    from gpulease.sansio.async_transport import AsyncTransport

HOLD_S = 25.0
"""Longer than the daemon holds its answer."""


class LogConnection:
    """Connections for as many pieces as are under way at a time."""

    def __init__(self, destination: Destination, node: str) -> None:
        self._destination = destination
        self._path = f"/v1/nodes/{quote(node, safe='')}/logs"
        self._idle: list[tuple[AsyncTransport | LocalTransport, Failover]] = []

    async def send(self, piece: LogPiece) -> LogProgress:
        """Send a piece to the daemon that serves. Raises GpuleaseError."""
        call = ApiCall(
            method="POST",
            path=self._path,
            body=codec.to_json(piece),
            read=lambda document: codec.from_json(LogProgress, document),
            hold_s=HOLD_S,
            idempotent=True,
        )
        if not self._idle:
            self._idle.append((new_transport(self._destination), Failover(self._destination)))
        transport, failover = self._idle.pop()
        try:
            return await transport.run(failover.send(call))
        finally:
            if failover.destination is self._destination:
                self._idle.append((transport, failover))
            else:
                await transport.close()

    async def begin_again(self, destination: Destination) -> None:
        """Send what comes next over new connections."""
        self._destination = destination
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        while self._idle:
            await self._idle.pop()[0].close()


def new_transport(destination: Destination) -> AsyncTransport | LocalTransport:
    """A transport that is enough for where the daemon is."""
    if is_enough_for(destination):
        return LocalTransport(destination)
    from gpulease.sansio.async_transport import AsyncTransport  # noqa: PLC0415 - 80 ms and 16 MiB

    return AsyncTransport(destination)
