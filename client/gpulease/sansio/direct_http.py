"""Plain HTTP to a daemon on this host, over its Unix socket or loopback.

To import httpx2 takes longer than all else that `gpulease status` does, and what it is good for (TLS, proxies, names of
other hosts) is not needed here.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from contextlib import suppress
from urllib.parse import urlencode, urlsplit

from gpulease.sansio.effects import Attempt, NotConnected, Response, ResponseLost
from gpulease.sansio.failover import Destination
from gpulease.sansio.http1 import BadResponseError, HttpResponse, request_bytes
from gpulease.sansio.http_requests import encoded_body, error_reason, headers, not_utf_8, retry_after_s
from gpulease.sansio.server_check import check_server
from gpulease_protocol.host.addresses import Address

CHUNK_BYTES = 2**16
NO_WAIT_S = 0.001
"""Enough to take what has arrived."""


class DirectHttp:
    """Connections to one address, each kept for the next call. Safe to use from several threads."""

    def __init__(self, address: Address, destination: Destination) -> None:
        self._address = address
        self._destination = destination
        self._host = urlsplit(address.origin).netloc.rpartition("@")[2]
        self._idle: list[tuple[socket.socket, int]] = []
        """Each with its inode."""
        self._closed = False

    def close(self) -> None:
        """Close the connections that are idle now; others are closed after their response."""
        self._closed = True
        while self._idle:
            connection, inode = self._idle.pop()
            if _is_own(connection, inode):
                connection.close()

    def send(self, attempt: Attempt) -> ArrivingResponse:
        """The response, as soon as its headers are there. Raises NotConnected, ResponseLost, InvalidRequest."""
        call = attempt.call
        try:
            query = f"?{urlencode(call.query)}" if call.query else ""
            target = urlsplit(self._address.origin).path + call.path + query
            body = encoded_body(call)
        except UnicodeEncodeError as error:
            raise not_utf_8(error, call) from error
        connection = self._connection(attempt)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # it may have refused a long body with an answer
                values = headers(call, self._destination.bearer_token)
                connection.sendall(request_bytes(call.method, self._host, target, values, body))
            return ArrivingResponse(self, connection, HttpResponse(connection))
        except (OSError, BadResponseError) as error:
            connection.close()
            raise lost(error) from error
        except UnicodeEncodeError as error:
            connection.close()
            raise not_utf_8(error, call) from error
        except BaseException:  # Ctrl-C
            connection.close()
            raise

    def keep(self, connection: socket.socket) -> None:
        """Take back a connection once its response has been read to the end."""
        try:
            inode = os.fstat(connection.fileno()).st_ino
        except OSError:  # closed by its number, with all others of this process
            connection.detach()
            return
        self._idle.append((connection, inode))
        if self._closed:  # perhaps since this call began
            self.close()

    def _connection(self, attempt: Attempt) -> socket.socket:
        while self._idle:
            with suppress(IndexError):  # another thread was first
                connection, inode = self._idle.pop()
                if not _is_own(connection, inode):
                    continue
                if _is_usable(connection):
                    connection.settimeout(attempt.timeout_s)
                    return connection
                connection.close()
        try:
            connection = _connected(self._address, self._destination, attempt.connect_timeout_s)
        except OSError as error:
            raise NotConnected(error_reason(error)) from error
        connection.settimeout(attempt.timeout_s)
        return connection


class ArrivingResponse:
    """A response with a body that is still to be read."""

    def __init__(self, connections: DirectHttp, connection: socket.socket, response: HttpResponse) -> None:
        self._connections = connections
        self._connection = connection
        self._response = response
        self._read = False
        self._done = False

    @property
    def is_success(self) -> bool:
        """True for a 2xx status."""
        return 200 <= self._response.status < 300

    def response_with(self, content: bytes = b"") -> Response:
        """The response as flows see it."""
        response = self._response
        wait_s = retry_after_s(response.headers.get("retry-after", ""))
        return Response(response.status, response.reason, content, wait_s, response.headers.get("gpulease-as-of"))

    def next_chunk(self) -> bytes | None:
        """The next bytes of the body, None at its end. Raises ResponseLost if it breaks off."""
        try:
            chunk = self._response.read(CHUNK_BYTES)
        except (OSError, BadResponseError) as error:
            raise lost(error) from error
        self._read = not chunk
        return chunk or None

    def wait_no_longer(self) -> None:
        """Have `next_chunk` raise ResponseLost for what has not arrived yet."""
        self._connection.settimeout(NO_WAIT_S)

    def close(self) -> None:
        """Keep the connection if the body was read to its end, else close it. A second call does nothing, because the
        connection may be another call's by then."""
        if self._done:
            return
        self._done = True
        self._response.close()
        if self._read and self._response.keeps_open:
            self._connections.keep(self._connection)
        else:
            self._connection.close()


def _connected(address: Address, destination: Destination, timeout_s: float) -> socket.socket:
    """A connection, after a look at who serves it. Raises OSError, NotConnected."""
    if address.socket is None:
        parts = urlsplit(address.origin)
        connection = socket.create_connection((str(parts.hostname), parts.port or 80), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        connection = socket.socket(socket.AF_UNIX)
    try:
        if address.socket is not None:
            connection.settimeout(timeout_s)
            connection.connect(os.fspath(address.socket))
        check_server(connection, destination)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_own(connection: socket.socket, inode: int) -> bool:
    """False if this process has closed all its descriptors meanwhile, as daemons do. The number may be that of a file
    now, into which a request must not be written."""
    try:
        seen = os.fstat(connection.fileno())
    except OSError:
        seen = None
    if seen is not None and stat.S_ISSOCK(seen.st_mode) and seen.st_ino == inode:
        return True
    connection.detach()
    return False


def _is_usable(connection: socket.socket) -> bool:
    """False if the daemon has closed it meanwhile."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)


def lost(error: Exception) -> ResponseLost:
    """A failure after the connection was made: the daemon may have received the call."""
    return ResponseLost(error_reason(error), timed_out=isinstance(error, TimeoutError))
