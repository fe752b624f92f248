"""The client's own reader of HTTP/1.1, beside `http.client`."""

from __future__ import annotations

import socket
from contextlib import closing
from http.client import HTTPResponse

import pytest

from gpulease.sansio.http1 import MAX_HEADERS, BadResponseError, HttpResponse, request_bytes

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = {
    "of a length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b : c\r\n\r\nhello",
    "empty": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "without a body": b"HTTP/1.1 204 No Content\r\n\r\n",
    "without a reason": b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx",
    "in chunks": CHUNKED + b"3\r\nhel\r\nA;x=1\r\nlo, world!\r\n0\r\nX-T: 1\r\n\r\n",
    "to the end": b"HTTP/1.1 200 OK\r\n\r\nhello\r\n",
    "that closes": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: Close\r\n\r\nok",
    "of the former version": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "after a request to go on": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok",
}
BROKEN = {
    "nothing": (b"", "broke off"),
    "a head": (b"HTTP/1.1 200 OK\r\nContent-Le", "broke off"),
    "a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", "2 bytes of its response are missing"),
    "a chunk": (
        CHUNKED + b"5\r\nhel",
        "2 bytes of its response are missing",
    ),
    "the last chunk": (CHUNKED + b"3\r\nhel\r\n", "broke off"),
    "the size of a chunk": (CHUNKED + b"-1\r\nhel\r\n", "not HTTP"),
    "the length": (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello", "not HTTP"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP"),
    "an endless line": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**17, "not HTTP"),
    "endless headers": (
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: 1\r\n" % number for number in range(MAX_HEADERS + 1)),
        "too many",
    ),
}


def arrived(data: bytes) -> socket.socket:
    """A connection on which this has arrived, and then its end."""
    here, there = socket.socketpair()
    with closing(there):
        here.settimeout(10)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        there.sendall(data)
    return here


def body(response: HttpResponse) -> bytes:
    """All of it, in small pieces."""
    pieces = []
    while piece := response.read(4):
        pieces.append(piece)
    assert response.read(4) == b""
    return b"".join(pieces)


@pytest.mark.parametrize("data", WHOLE.values(), ids=WHOLE)
def test_it_reads_what_the_standard_library_reads(data: bytes) -> None:
    with closing(arrived(data)) as ours, closing(arrived(data)) as theirs:
        expected = HTTPResponse(theirs)
        expected.begin()
        found = HttpResponse(ours)
        assert (found.status, found.reason) == (expected.status, expected.reason)
        assert found.headers == {name.lower(): value for name, value in expected.getheaders()}
        assert found.keeps_open == (not expected.will_close)
        assert body(found) == expected.read()
        found.close()
        expected.close()


@pytest.mark.parametrize(("data", "why"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_no_response(data: bytes, why: str) -> None:
    with closing(arrived(data)) as connection, pytest.raises(BadResponseError, match=why):
        body(HttpResponse(connection))


def test_a_header_of_several_lines_is_not_sent() -> None:
    with pytest.raises(ValueError, match="Authorization must be one line"):
        request_bytes("GET", "x", "/", {"Authorization": "Bearer a\r\nX-B: c"}, None)
