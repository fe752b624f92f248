"""Ports of the lease range on which a process listens."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpulease_protocol.node_protocol import LEASE_PORTS
from gpulease_worker.jobs import listening_ports


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    """A socket bound to a free port of the range, not yet listening."""
    for port in reversed(LEASE_PORTS):
        with socket.socket() as candidate, suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            yield candidate
            return
    raise AssertionError("no port of the range is free")


def test_a_port_is_in_use_while_a_process_listens_on_it(bound: socket.socket) -> None:
    port = bound.getsockname()[1]
    assert port not in listening_ports.in_use()
    bound.listen()
    assert port in listening_ports.in_use()
    assert set(listening_ports.in_use()) <= set(LEASE_PORTS)


def test_while_the_ports_are_unreadable_the_last_result_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", full)
    assert listening_ports.in_use((21003, 21001)) == (21001, 21003)
