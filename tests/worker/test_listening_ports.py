"""Ports of the lease range on which a process listens."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_protocol.node_protocol import LEASE_PORTS
from gpulease_worker.jobs import listening_ports

NO_SUCH_FILE = struct.pack("=IHHIIi", 20, listening_ports.NLMSG_ERROR, 0, 0, 0, -errno.ENOENT)
"""What a kernel without sock_diag answers."""


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def bound(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A socket bound to a port of the range, not yet listening; no other test has it in the other family."""
    for port in reversed(LEASE_PORTS):
        with socket.socket(socket.AF_INET) as one, socket.socket(socket.AF_INET6) as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("::1", port))
            except OSError:
                continue
            yield one if request.param == socket.AF_INET else other
            return
    raise AssertionError("no port of the range is free")


@pytest.fixture(params=["sock_diag", "tables"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the ports come from; what is not asked for them is broken."""
    if request.param == "tables":
        monkeypatch.setattr(socket.socket, "recv", lambda *_: NO_SUCH_FILE)
    else:
        monkeypatch.setattr(Path, "read_text", full)
    return str(request.param)


def full(self: Path) -> str:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.usefixtures("source")
def test_a_port_is_in_use_while_a_process_listens_on_it(bound: socket.socket) -> None:
    port = bound.getsockname()[1]
    assert port not in listening_ports.in_use()
    bound.listen()
    assert port in listening_ports.in_use()
    assert set(listening_ports.in_use()) <= set(LEASE_PORTS)
    with socket.create_connection(bound.getsockname()[:2]):
        assert listening_ports.in_use().count(port) == 1, "a connection is no listener"


def test_while_the_ports_are_unreadable_the_last_result_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "recv", lambda *_: NO_SUCH_FILE)
    monkeypatch.setattr(Path, "read_text", full)
    assert listening_ports.in_use((21003, 21001)) == (21001, 21003)
