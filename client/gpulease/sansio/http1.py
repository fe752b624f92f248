"""HTTP/1.1 as the client and the worker speak it: the bytes of a request, and where a response ends.

`http.client` does the same, and imports parsers of mail and TLS for it: 10 ms, a tenth of `gpulease status`; and it
cannot be used in an event loop. A response is read by generators that do no I/O, so that a socket and an event loop
share them.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Generator, Mapping

from gpulease.sansio.effects import Result

MAX_LINE_BYTES, MAX_HEADERS = 2**16, 100
"""Longest line of a response before its body, and most headers."""
MAX_SIZE_DIGITS = 15
"""Most digits of a length."""
LINE_BREAK = re.compile(r"[\r\n]")
Reading = Generator[int, bytes, Result]
"""Yields the most bytes that may be read next, or `LINE` for a line of at most `MAX_LINE_BYTES`, and is sent what has
come: at least one byte, except at the end of the connection. Raises BadResponseError."""
LINE = 0


class BadResponseError(Exception):
    """What has arrived is no HTTP, or broke off."""


def request_bytes(method: str, host: str, target: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """A request. Raises UnicodeEncodeError, and ValueError for a header of several lines."""
    for name, value in headers.items():
        if LINE_BREAK.search(value):
            raise ValueError(f"{name} must be one line")
    fields = {"Host": host, "Accept-Encoding": "identity", "Content-Length": str(len(body or b"")), **headers}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + (body or b"")


class ResponseReader:
    """What a response says, as it is read: first its head, then its body, piece by piece."""

    status: int
    reason: str
    headers: dict[str, str]
    """By their names in lower case."""
    keeps_open: bool
    """True if the connection can be used for another request after the body."""

    def head(self) -> Reading[None]:
        """Read everything before the body."""
        self.status = 100
        while self.status == 100:  # "go on", before the response proper
            version, _, rest = (yield from _line()).partition(" ")
            number, _, self.reason = rest.partition(" ")
            if not version.startswith("HTTP/1.") or not re.fullmatch(r"[1-9]\d\d", number):
                raise BadResponseError("its response is not HTTP")
            self.status = int(number)
            self.headers = yield from _headers()
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = "0" if self.status in (204, 304) else self.headers.get("content-length")
        self._missing = 0 if self._chunked else None if length is None else _size(length, 10)
        """Bytes that have yet to arrive, of the body or of this chunk; None if the end of the connection ends it."""
        self._begun = self._ended = False
        closes = version == "HTTP/1.0" or "close" in self.headers.get("connection", "").lower()
        self.keeps_open = not closes and (self._chunked or self._missing is not None)

    def piece(self, limit: int) -> Reading[bytes]:
        """Read the next bytes of the body, at most `limit`; none at its end."""
        if self._chunked and self._missing == 0 and not self._ended:
            yield from self._next_chunk()
        if self._missing == 0:
            return b""
        data = yield limit if self._missing is None else min(limit, self._missing)
        if self._missing is not None:
            if not data:
                raise BadResponseError(f"{self._missing} bytes of its response are missing")
            self._missing -= len(data)
        return data

    def _next_chunk(self) -> Reading[None]:
        if self._begun:
            yield from _line()  # what ends the last one
        self._begun = True
        self._missing = _size((yield from _line()).partition(";")[0].strip(), 16)
        if self._missing == 0:
            self._ended = True
            yield from _headers()


class HttpResponse(ResponseReader):
    """A response on a socket, once its head has arrived. Raises OSError, BadResponseError.

    Args:
        connection: Where it arrives; stays open when the response is closed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rb")
        try:
            self._run(self.head())
        except BaseException:
            self._stream.close()
            raise

    def read(self, limit: int) -> bytes:
        """The next bytes of the body, at most `limit`; none at its end. Raises OSError, BadResponseError."""
        return self._run(self.piece(limit))

    def close(self) -> None:
        """Read no more of it."""
        self._stream.close()

    def _run(self, reading: Reading[Result]) -> Result:
        stream = self._stream
        try:
            wanted = next(reading)
            while True:
                wanted = reading.send(stream.read1(wanted) if wanted else stream.readline(MAX_LINE_BYTES))
        except StopIteration as end:
            result: Result = end.value
            return result


def _headers() -> Reading[dict[str, str]]:
    headers: dict[str, str] = {}
    while line := (yield from _line()):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
        if len(headers) > MAX_HEADERS:
            raise BadResponseError("its response has too many headers")
    return headers


def _line() -> Reading[str]:
    line = yield LINE
    if not line.endswith(b"\n"):
        too_long = len(line) >= MAX_LINE_BYTES
        raise BadResponseError("its response is not HTTP" if too_long else "its response broke off")
    return line.decode("latin-1").rstrip("\r\n")


def _size(text: str, base: int) -> int:
    if not re.fullmatch(r"[0-9a-fA-F]+" if base == 16 else r"[0-9]+", text) or len(text) > MAX_SIZE_DIGITS:
        raise BadResponseError("its response is not HTTP")
    return int(text, base)
