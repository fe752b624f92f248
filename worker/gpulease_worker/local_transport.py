"""Runs the flows of an exchange with a daemon of this host, over its Unix socket or loopback, in plain HTTP/1.1.

A worker reports every second for as long as its host is up. httpx2 takes several times as long for one exchange, and
16 MiB of memory. What it is good for (TLS, proxies, names of other hosts) is not needed here; see
`gpulease.sansio.direct_http`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import urlencode, urlsplit

from gpulease.sansio.effects import Attempt, Flow, FlowDriver, NotConnected, Response, ResponseLost, Result, Sleep
from gpulease.sansio.failover import Destination
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

MAX_HEAD_BYTES = 2**16
"""Longest line and most headers of a response."""
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
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            writer.transport.abort()
            raise ResponseLost(_reason(error)) from error
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
                    reader, writer = await asyncio.open_unix_connection(str(address.socket), limit=MAX_HEAD_BYTES)
                else:
                    parts = urlsplit(address.origin)
                    host, port = str(parts.hostname), parts.port or 80
                    reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD_BYTES)
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
        call, parts, body = attempt.call, urlsplit(attempt.address.origin), encoded_body(attempt.call) or b""
        query = f"?{urlencode(call.query)}" if call.query else ""
        lines = [f"{call.method} {parts.path}{call.path}{query} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in headers(call, self._destination.bearer_token).items()]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


async def _read_response(reader: asyncio.StreamReader) -> tuple[Response, bool]:
    """The response, and whether the connection is open for another one. Raises OSError, EOFError, ValueError."""
    version, number, *_ = (await _line(reader)).split(maxsplit=2)
    if not version.startswith("HTTP/1.") or not number.isdecimal() or int(number) < 200:
        raise ValueError("its response is not HTTP")
    fields: dict[str, str] = {}
    size = 0
    while line := await _line(reader):
        size += len(line)
        if size > MAX_HEAD_BYTES:
            raise ValueError("its response has too many headers")
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    has_length = "content-length" in fields
    if fields.get("transfer-encoding", "").lower() == "chunked":
        content = await _read_chunks(reader)
        has_length = True
    elif has_length:
        content = await reader.readexactly(_checked(int(fields["content-length"])))
    else:
        content = await _read_to_end(reader)
    status = int(number)
    reason = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    response = Response(
        status, reason, content, retry_after_s(fields.get("retry-after", "")), fields.get("gpulease-as-of")
    )
    is_kept = has_length and version == "HTTP/1.1" and fields.get("connection", "").lower() != "close"
    return response, is_kept


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    parts, total = [], 0
    while part := await reader.read(2**16):
        total = _checked(total + len(part))
        parts.append(part)
    return b"".join(parts)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks, total = [], 0
    while size := int((await _line(reader)).partition(";")[0], 16):
        total = _checked(total + size)
        chunks.append(await reader.readexactly(size))
        await _line(reader)
    while await _line(reader):  # trailers
        pass
    return b"".join(chunks)


async def _line(reader: asyncio.StreamReader) -> str:
    return (await reader.readuntil(b"\r\n"))[:-2].decode("latin-1")


def _checked(size: int) -> int:
    if not 0 <= size <= MAX_RESPONSE_BYTES:
        raise ValueError(f"its response is larger than {MAX_RESPONSE_BYTES} bytes")
    return size


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "its response broke off"
    return error_reason(error)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
