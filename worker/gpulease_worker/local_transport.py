"""Runs the flows of an exchange with a daemon of this host, over its Unix socket or loopback, in plain HTTP/1.1.

A worker reports every second for as long as its host is up. httpx2 takes several times as long for one exchange, and
16 MiB of memory. What it is good for (TLS, proxies, names of other hosts) is not needed here; see
`gpulease.sansio.direct_http`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlencode, urlsplit

from gpulease.sansio.effects import Attempt, Flow, FlowDriver, NotConnected, Response, ResponseLost, Result, Sleep
from gpulease.sansio.failover import Destination
from gpulease.sansio.http1 import MAX_LINE_BYTES, BadResponseError, Reading, ResponseReader, request_bytes
from gpulease.sansio.http_requests import (
    MAX_RESPONSE_BYTES,
    encoded_body,
    error_reason,
    headers,
    not_utf_8,
    retry_after_s,
)
from gpulease.sansio.server_check import check_server
from gpulease.sansio.tls_errors import may_speak_tls, speaks_tls, use_https
from gpulease_protocol.host.addresses import Address

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def is_enough_for(destination: Destination) -> bool:
    """True if each of the daemon's addresses is on this host and in plain HTTP."""
    return all(address.local and address.origin.startswith("http:") for address in destination.addresses)


class LocalTransport:
    """One connection to each address, for one event loop and one call at a time.

    Args:
        destination: Where the daemon is; see `is_enough_for`.
    """

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._idle: dict[Address, Connection] = {}
        self._contacted: set[Address] = set()
        """Where a response has come from."""

    async def close(self) -> None:
        """Close every connection."""
        while self._idle:
            _, (_, writer) = self._idle.popitem()
            await _close(writer)

    async def run(self, flow: Flow[Result]) -> Result:
        """What the flow returns. If the task is cancelled, the flow ends where it is: it sends nothing more."""
        driver = FlowDriver(flow)
        while (effect := driver.next_effect()) is not None:
            try:
                if isinstance(effect, Attempt):
                    driver.outcome = await self._attempt(effect)
                else:
                    assert isinstance(effect, Sleep)
                    await asyncio.sleep(effect.seconds)
            except Exception as error:
                driver.failure = error
        return driver.result

    async def _attempt(self, attempt: Attempt) -> Response:
        try:
            async with asyncio.timeout(attempt.timeout_s + attempt.connect_timeout_s):
                response = await self._exchange(attempt)
        except TimeoutError as error:
            raise ResponseLost("its response did not end in time", timed_out=True) from error
        except ResponseLost as error:
            suspicious = attempt.address not in self._contacted and may_speak_tls(error, attempt.address)
            if suspicious and await asyncio.to_thread(speaks_tls, attempt.address, self._destination):
                raise use_https(attempt.address) from error
            raise
        self._contacted.add(attempt.address)
        return response

    async def _exchange(self, attempt: Attempt) -> Response:
        """Send the call and read the response. The connection is kept only if both succeed."""
        try:
            request = self._request(attempt)
        except UnicodeEncodeError as error:
            raise not_utf_8(error, attempt.call) from error
        reader, writer = await self._connection(attempt)
        try:
            writer.write(request)
            await writer.drain()
            response, is_kept = await _read_response(reader)
        except (OSError, ValueError, BadResponseError) as error:  # ValueError: a line that does not end
            writer.transport.abort()
            raise ResponseLost(error_reason(error)) from error
        except BaseException:  # cancelled: its response is still to come
            writer.transport.abort()
            raise
        if is_kept:
            self._idle[attempt.address] = reader, writer
        else:
            writer.close()
        return response

    async def _connection(self, attempt: Attempt) -> Connection:
        """The connection of the last call, or a new one where the daemon has closed that meanwhile."""
        if attempt.address in self._idle:
            reader, writer = self._idle.pop(attempt.address)
            if not (writer.is_closing() or reader.at_eof() or reader.exception()):
                return reader, writer
            writer.close()
        return await self._connect(attempt)

    async def _connect(self, attempt: Attempt) -> Connection:
        address = attempt.address
        try:
            async with asyncio.timeout(attempt.connect_timeout_s):
                if address.socket is not None:
                    reader, writer = await asyncio.open_unix_connection(str(address.socket), limit=MAX_LINE_BYTES)
                else:
                    parts = urlsplit(address.origin)
                    host, port = str(parts.hostname), parts.port or 80
                    reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
        except TimeoutError as error:
            raise NotConnected("timed out") from error
        except OSError as error:
            raise NotConnected(error_reason(error)) from error
        try:
            check_server(writer.get_extra_info("socket"), self._destination)
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    def _request(self, attempt: Attempt) -> bytes:
        call, parts = attempt.call, urlsplit(attempt.address.origin)
        query = f"?{urlencode(call.query)}" if call.query else ""
        host, target = parts.netloc.rpartition("@")[2], f"{parts.path}{call.path}{query}"
        values = headers(call, self._destination.bearer_token)
        return request_bytes(call.method, host, target, values, encoded_body(call))


async def _read_response(reader: asyncio.StreamReader) -> tuple[Response, bool]:
    """The response, and whether the connection can be used for another call. Raises OSError, ValueError,
    BadResponseError."""
    response, pieces, size = ResponseReader(), [], 0
    await _run(response.head(), reader)
    while piece := await _run(response.piece(2**16), reader):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_RESPONSE_BYTES:
            raise BadResponseError(f"its response is larger than {MAX_RESPONSE_BYTES} bytes")
    wait_s, as_of = retry_after_s(response.headers.get("retry-after", "")), response.headers.get("gpulease-as-of")
    return Response(response.status, response.reason, b"".join(pieces), wait_s, as_of), response.keeps_open


async def _run(reading: Reading[Result], reader: asyncio.StreamReader) -> Result:
    try:
        wanted = next(reading)
        while True:
            wanted = reading.send(await (reader.read(wanted) if wanted else reader.readline()))
    except StopIteration as end:
        result: Result = end.value
        return result


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
