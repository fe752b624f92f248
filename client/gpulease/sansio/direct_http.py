"""Plain HTTP to a daemon on this host, over its Unix socket or loopback, with the standard library.

To import httpx2 takes longer than all else that `gpulease status` does, and what it is good for (TLS, proxies, names of
other hosts) is not needed here.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from urllib.parse import urlencode, urlsplit

from gpulease.sansio.effects import Attempt, NotConnected, Response, ResponseLost
from gpulease.sansio.failover import Destination
from gpulease.sansio.http_requests import encoded_body, error_reason, headers, not_utf_8, retry_after_s
from gpulease.sansio.server_check import check_server
from gpulease_protocol.host.addresses import Address

CHUNK_BYTES = 2**16


class DirectHttp:
    """Connections to one address, each kept for the next call. Safe to use from several threads."""

    def __init__(self, address: Address, destination: Destination) -> None:
        self._address = address
        self._destination = destination
        self._idle: list[_Connection] = []
        self._closed = False

    def close(self) -> None:
        """Close the connections that are idle now; others are closed after their response."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

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
                connection.request(call.method, target, body, headers(call, self._destination.bearer_token))
            return ArrivingResponse(self, connection, connection.getresponse())
        except (OSError, HTTPException) as error:
            connection.close()
            raise lost(error) from error
        except UnicodeEncodeError as error:
            connection.close()
            raise not_utf_8(error, call) from error
        except BaseException:  # Ctrl-C
            connection.close()
            raise

    def keep(self, connection: _Connection) -> None:
        """Take back a connection whose response has been read to its end."""
        self._idle.append(connection)
        if self._closed:  # perhaps since this call began
            self.close()

    def _connection(self, attempt: Attempt) -> _Connection:
        while self._idle:
            with suppress(IndexError):  # another thread was first
                connection = self._idle.pop()
                if connection.is_usable():
                    connection.wait_at_most(attempt.timeout_s)
                    return connection
                connection.close()
        connection = _Connection(self._address, self._destination, attempt.connect_timeout_s)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise NotConnected(error_reason(error)) from error
        except BaseException:
            connection.close()
            raise
        connection.wait_at_most(attempt.timeout_s)
        return connection


class ArrivingResponse:
    """A response whose body is still to be read."""

    def __init__(self, connections: DirectHttp, connection: _Connection, response: HTTPResponse) -> None:
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
        wait_s = retry_after_s(response.headers.get("Retry-After", ""))
        return Response(response.status, response.reason, content, wait_s, response.headers.get("Gpulease-As-Of"))

    def next_chunk(self) -> bytes | None:
        """The next bytes of the body, None at its end. Raises ResponseLost if it breaks off."""
        try:
            chunk = b"" if self._response.length == 0 else self._response.read1(CHUNK_BYTES)
        except (OSError, HTTPException) as error:
            raise lost(error) from error
        if not chunk and self._response.length:
            raise ResponseLost(f"{self._response.length} bytes of its response are missing")
        self._read = not chunk
        return chunk or None

    def close(self) -> None:
        """Keep the connection if the body was read to its end, else close it. A second call does nothing, because the
        connection may be another call's by then."""
        if self._done:
            return
        self._done = True
        self._response.close()
        if self._read and not self._response.will_close:
            self._connections.keep(self._connection)
        else:
            self._connection.close()


class _Connection(HTTPConnection):
    def __init__(self, address: Address, destination: Destination, timeout_s: float) -> None:
        parts = urlsplit(address.origin)
        super().__init__(str(parts.hostname), parts.port, timeout=timeout_s)
        self._address = address
        self._destination = destination

    def connect(self) -> None:
        """Connect, and see who serves the connection. Raises OSError, NotConnected."""
        if self._address.socket is None:
            self.sock = socket.create_connection((self.host, self.port), self.timeout)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(os.fspath(self._address.socket))
        check_server(self.sock, self._destination)

    def wait_at_most(self, seconds: float) -> None:
        """Set the time limit of each read and write."""
        self.sock.settimeout(seconds)

    def is_usable(self) -> bool:
        """False if the daemon has closed it meanwhile, or said with its response that it would."""
        if self.sock is None:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)


def lost(error: Exception) -> ResponseLost:
    """A failure after the connection was made: the daemon may have received the call."""
    reason = "its response broke off" if isinstance(error, IncompleteRead) else error_reason(error)
    return ResponseLost(reason, timed_out=isinstance(error, TimeoutError))
