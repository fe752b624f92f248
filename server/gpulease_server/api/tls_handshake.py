"""TLS handshakes: counts and limits connections from the moment they are accepted.

The event loop tells its protocol of a TLS connection only when its handshake is complete, so those that never complete
it would be no one's, and without a number: they would take every file descriptor, and keep even root from the Unix
socket. So they are accepted here, where the kernel shows their users before a byte of them is read.

| a connection | result |
|---|---|
| one too many, of all or of its user, with those whose handshake is complete | closed |
| has not completed its handshake after `HANDSHAKE_S` | closed |
| sends something other than TLS | closed |
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from gpulease_server.api.auth.peer_credentials import PeerCredentialsProtocol, peer_credentials

HANDSHAKE_S = 10.0
RETRY_S = 1.0
"""Pause after a connection could not be accepted, as without a free file descriptor."""


class TlsListener:
    """Accepts connections of one socket, and makes an HTTP protocol for each whose handshake is complete.

    Args:
        listener: Listens.
        context: The certificate.
        make_protocol: Makes the HTTP protocol.
    """

    open_by_uid: ClassVar[Counter[int | None]] = Counter()
    """Connections of all listeners with a handshake that is not complete, by user id; None: unknown."""

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, make_protocol: Callable[[], PeerCredentialsProtocol]
    ) -> None:
        self._listener = listener
        self._context = context
        self._make_protocol = make_protocol
        self._handshakes: set[asyncio.Task[None]] = set()
        listener.setblocking(False)

    async def run(self) -> None:
        """Accept until cancelled; handshakes end with it."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError:
                    await asyncio.sleep(RETRY_S)
                    continue
                self._begin(connection)
        finally:
            for task in self._handshakes:
                task.cancel()

    def _begin(self, connection: socket.socket) -> None:
        protocol = self._make_protocol()
        try:
            uid = peer_credentials(connection, connection.getpeername(), connection.getsockname()).uid
        except OSError:  # it has gone
            connection.close()
            return
        protocol.peer_uid = uid
        if not protocol.has_room(self.open_by_uid):
            connection.close()
            return
        self.open_by_uid[uid] += 1
        task = asyncio.get_running_loop().create_task(self._shake_hands(connection, protocol))
        self._handshakes.add(task)
        task.add_done_callback(lambda _: self._end(task, uid))

    def _end(self, task: asyncio.Task[None], uid: int | None) -> None:
        self._handshakes.discard(task)
        self.open_by_uid[uid] -= 1
        if not self.open_by_uid[uid]:
            del self.open_by_uid[uid]

    async def _shake_hands(self, connection: socket.socket, protocol: PeerCredentialsProtocol) -> None:
        with suppress(OSError):  # ssl.SSLError and TimeoutError are, too
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
