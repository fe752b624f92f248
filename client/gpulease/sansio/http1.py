"""HTTP/1.1 on a connected socket: one request, and its response.

`http.client` does the same, and imports parsers of mail and TLS for it: 10 ms, a tenth of `gpulease status`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

MAX_LINE_BYTES, MAX_HEADERS = 2**16, 100
"""Longest line of a response before its body, and most headers."""
MAX_SIZE_DIGITS = 15
"""Most digits of a length."""
LINE_BREAK = re.compile(r"[\r\n]")


class BadResponseError(Exception):
    """What has arrived is no HTTP, or broke off."""


def send_request(
    connection: socket.socket, method: str, host: str, target: str, headers: Mapping[str, str], body: bytes | None
) -> None:
    """Send a request whole. Raises OSError, UnicodeEncodeError, and ValueError for a header of several lines."""
    for name, value in headers.items():
        if LINE_BREAK.search(value):
            raise ValueError(f"{name} must be one line")
    fields = {"Host": host, "Accept-Encoding": "identity", "Content-Length": str(len(body or b"")), **headers}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    connection.sendall("\r\n".join(lines).encode("latin-1") + (body or b""))


class HttpResponse:
    """A response whose head has arrived. Raises OSError, BadResponseError.

    Args:
        connection: Where it arrives; stays open when the response is closed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rb")
        try:
            self._read_head()
        except BaseException:
            self._stream.close()
            raise

    def _read_head(self) -> None:
        self.status = 100
        while self.status == 100:  # "go on", before the response proper
            version, _, rest = self._line().partition(" ")
            number, _, self.reason = rest.partition(" ")
            if not version.startswith("HTTP/1.") or not re.fullmatch(r"[1-9]\d\d", number):
                raise BadResponseError("its response is not HTTP")
            self.status = int(number)
            self.headers = self._headers()
            """Its headers by their names in lower case."""
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = "0" if self.status in (204, 304) else self.headers.get("content-length")
        self.missing = 0 if self._chunked else None if length is None else _size(length, 10)
        """Bytes that have yet to arrive, of the body or of this chunk; None if the end of the connection ends it."""
        self._begun = self._ended = False
        closes = version == "HTTP/1.0" or "close" in self.headers.get("connection", "").lower()
        self.keeps_open = not closes and (self._chunked or self.missing is not None)
        """True if the connection can be used for another request after the body."""

    def read(self, limit: int) -> bytes:
        """The next bytes of the body, at most `limit`; none at its end. Raises OSError, BadResponseError."""
        if self._chunked and self.missing == 0 and not self._ended:
            self._next_chunk()
        if self.missing == 0:
            return b""
        data = self._stream.read1(limit if self.missing is None else min(limit, self.missing))
        if self.missing is not None:
            if not data:
                raise BadResponseError(f"{self.missing} bytes of its response are missing")
            self.missing -= len(data)
        return data

    def close(self) -> None:
        """Read no more of it."""
        self._stream.close()

    def _next_chunk(self) -> None:
        if self._begun:
            self._line()  # what ends the last one
        self._begun = True
        self.missing = _size(self._line().partition(";")[0].strip(), 16)
        if self.missing == 0:
            self._ended = True
            self._headers()

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        while line := self._line():
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
            if len(headers) > MAX_HEADERS:
                raise BadResponseError("its response has too many headers")
        return headers

    def _line(self) -> str:
        line = self._stream.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            too_long = len(line) >= MAX_LINE_BYTES
            raise BadResponseError("its response is not HTTP" if too_long else "its response broke off")
        return line.decode("latin-1").rstrip("\r\n")


def _size(text: str, base: int) -> int:
    if not re.fullmatch(r"[0-9a-fA-F]+" if base == 16 else r"[0-9]+", text) or len(text) > MAX_SIZE_DIGITS:
        raise BadResponseError("its response is not HTTP")
    return int(text, base)
