"""A client that goes away while it waits: the daemon knows at once, without looking at each long poll now and then."""

from __future__ import annotations

import socket
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.daemon import DaemonProcess, eventually

BODY = b'{"count": 1, "ttl_s": 7200, "label": "waits"}'
NOTICED_S = 30.0
"""Less than the time after which a long poll looks by itself, which is 60 s."""


def ask_and_wait(running: DaemonProcess, over: str, behind: bytes = b"") -> socket.socket:
    """A connection whose request waits in the queue, with another one `behind` it."""
    if over == "socket":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(running.socket))
    else:
        connection = socket.create_connection(("127.0.0.1", running.port))
    head = f"POST /v1/leases?wait_s=600 HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + BODY + behind)
    return connection


def waiting(running: DaemonProcess) -> list[dict[str, Any]]:
    """The requests of this test that wait."""
    return [lease for lease in running.leases("queued") if lease["holder"]["label"] == "waits"]


def left_s(running: DaemonProcess) -> float:
    """How long the request that waits lasts if nothing is heard of its client."""
    (lease,) = waiting(running)
    return (datetime.fromisoformat(lease["expires_at"]) - datetime.now(UTC)).total_seconds()


@pytest.mark.parametrize(
    "behind", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["alone", "pipelined"]
)
@pytest.mark.parametrize("over", ["tcp", "socket"])
def test_a_request_whose_client_goes_away_lasts_a_minute_from_then_and_not_its_ttl(
    running: DaemonProcess, over: str, behind: bytes
) -> None:
    held = running.request_lease(4, wait_s=30)
    with ask_and_wait(running, over, behind):
        eventually(lambda: len(waiting(running)) == 1, 30)
        assert left_s(running) > 7000
    eventually(lambda: left_s(running) <= 60, NOTICED_S)
    (given_up,) = waiting(running)
    assert running.call("DELETE", f"/v1/leases/{given_up['id']}").status == 200, "else it would get the GPUs"
    running.release(held)
