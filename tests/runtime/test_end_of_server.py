"""A daemon that is told to end while it ends."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import uvicorn

from gpulease_protocol.errors import GpuleaseError
from gpulease_server.serving import SocketsServer


class Quick(SocketsServer):
    """Ends as soon as it serves."""

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()


def test_the_lock_may_find_another_writer_after_the_server_has_ended() -> None:
    server = Quick(uvicorn.Config(cast("Any", None)), cast("Any", None), cast("Any", None))
    asyncio.run(server.startup())
    superseded = GpuleaseError("Another daemon has taken over the database.")
    server.end(superseded)
    assert (server.failure, server.should_exit) == (superseded, True)
