"""What goes over a connection is the same byte for byte, whether the answer is written at once or in messages."""

from __future__ import annotations

import re
import socket
import time
from contextlib import closing

import pytest

from tests.daemon import DaemonProcess

APPLICATION = b'If-None-Match: "none"\r\n'
"""A field that changes nothing, and which the hot path does not take."""
CHANGING = re.compile(
    rb'((?:date|etag|content-length): )[^\r]*|("(?:expires_at|held_for_s|idle_s)":)(?:"[^"]*"|[^,}]*)'
)
"""What may differ from one answer to the next; a time without its last digit makes the answer shorter."""


def over_the_wire(api: DaemonProcess, *parts: bytes, more: bytes = b"") -> bytes:
    """What the daemon sends until the last request is answered. `{more}` is put into each head."""
    with closing(socket.create_connection(("127.0.0.1", api.port), timeout=30)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, part in enumerate(parts):
            if number:
                time.sleep(0.05)  # so that it arrives by itself; nothing depends on it
            connection.sendall(part.replace(b"{more}", more))
        received = b""
        while answers(received) < sum(part.count(b" HTTP/1.") for part in parts):
            some = connection.recv(65536)
            if not some:
                break
            received += some
    return CHANGING.sub(rb"\1\2", received)


def answers(received: bytes) -> int:
    """How many whole answers this is."""
    count = 0
    while (end := received.find(b"\r\n\r\n")) >= 0:
        length = re.search(rb"content-length: (\d+)", received[:end])
        size = end + 4 + (int(length[1]) if length else 0)
        if len(received) < size:
            break
        count += not received.startswith(b"HTTP/1.1 100")
        received = received[size:]
    return count


def head(line: str, length: int | None = None, *fields: str, version: str = "1.1") -> bytes:
    """The head of a request with the id `wire`."""
    lines = [f"{line} HTTP/{version}", "Host: 127.0.0.1", "X-Request-Id: wire", *fields]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return "\r\n".join(lines).encode() + b"\r\n{more}\r\n"


@pytest.fixture
def lease(api: DaemonProcess) -> dict[str, object]:
    found: dict[str, object] = api.call("POST", "/v1/leases", {"count": 1, "label": "wire"}).json
    return found


def test_the_same_bytes_are_on_the_wire(api: DaemonProcess, lease: dict[str, object]) -> None:
    path, proof = f"/v1/leases/{lease['id']}", f'{{"token": {lease["token"]}}}'.encode()
    renew, read = head(f"POST {path}/renew", len(proof)), head(f"GET {path}")
    conversations: dict[str, tuple[bytes, ...]] = {
        "one request": (renew + proof,),
        "a wrong token": (head(f"POST {path}/renew", 13) + b'{"token": 99}',),
        "a release with a wrong token": (head(f"POST {path}/release", 13) + b'{"token": 99}',),
        "a deletion with a wrong token": (head(f"DELETE {path}?token=99"),),
        "no token": (head(f"POST {path}/renew", 14) + b'{"token": "1"}',),
        "a body that comes later": (renew, proof),
        "a body in two parts": (renew + proof[:3], proof[3:]),
        "two at once": (renew + proof + renew + proof,),
        "three at once, one of which is refused": (read + head("POST /v1/leases", 1) + b"{" + read,),
        "the last one": (head(f"GET {path}", None, "Connection: close"),),
        "of HTTP/1.0": (head(f"GET {path}", version="1.0"),),
        "of HTTP/1.0 that stays": (head(f"GET {path}", None, "Connection: keep-alive", version="1.0"),),
        "that wants to be told to go on": (head(f"POST {path}/renew", len(proof), "Expect: 100-continue"), proof),
        "with a body that is too long": (head(f"POST {path}/renew", 20_000) + b" " * 20_000,),
        "with a length that is too long for a number": (
            head(f"POST {path}/renew", None, f"Content-Length: {len(proof):05000}") + proof,
        ),
        "of what there is not": (head("DELETE /v1/leases/none"),),
    }
    for name, parts in conversations.items():
        hot, plain = (over_the_wire(api, *parts, more=more) for more in (b"", APPLICATION))
        assert hot == plain, name
        assert hot.count(b"x-request-id: wire") == sum(part.count(b" HTTP/1.") for part in parts), name
