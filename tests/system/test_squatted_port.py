"""The daemon's addresses and another user who wants them: before it starts, while it restarts, and at ::1."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease import Client, DaemonUnavailable
from gpulease_server import listeners
from tests.daemon import Answer, DaemonProcess, eventually
from tests.http_as_user import call
from tests.squatter import EVE, ROOT, TOKEN, Squatter

AS_ANOTHER_USER = pytest.mark.skipif(not ROOT, reason="only root can be another user")


class OverSocket(DaemonProcess):
    """A daemon whose port may be another user's: whether it is up is seen by its socket."""

    def get(self, path: str) -> Answer:
        """What a GET of this path over the socket is answered."""
        return call(self.socket, "GET", path)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon that a test starts."""
    process = OverSocket(tmp_path / "d", "--simulate", "1")
    try:
        yield process
    finally:
        if process.process is not None:
            process.stop()


def over_tcp(host: str, port: int) -> bytes:
    """What /healthz of the daemon at this address is answered."""
    with socket.create_connection((host, port), 60) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return connection.makefile("rb").read()


def test_the_daemon_has_the_port_of_both_loopback_addresses(running: DaemonProcess) -> None:
    running.start()
    for host in ("127.0.0.1", "::1"):
        assert b'{"status":"ok"}' in over_tcp(host, running.port)
    listens = f"gpulease listens on {running.url} and http://[::1]:{running.port} and unix://{running.socket}"
    assert listens in running.output.read_text()
    with Client(f"http://[::1]:{running.port}") as client:
        assert client.gpus(), "this user is known there, too"


@AS_ANOTHER_USER
def test_nothing_is_sent_to_who_takes_the_port_during_a_restart(running: DaemonProcess, tmp_path: Path) -> None:
    running.start()
    with Client(running.url, token=TOKEN, retry_s=0.5) as by_port, Client(f"unix://{running.socket}") as by_socket:
        assert by_socket.gpus()
        running.kill()
        with Squatter(("127.0.0.1", running.port), tmp_path / "record") as eve:
            with pytest.raises(DaemonUnavailable, match=f"served by user {EVE}, not by root"):
                by_port.gpus()
            running.start()
            said = f"127.0.0.1:{running.port} is taken by user {EVE}: this daemon serves without it"
            assert said in running.output.read_text()
            assert by_socket.gpus(), "the socket is served"
            assert b'{"status":"ok"}' in over_tcp("::1", running.port)
            with pytest.raises(DaemonUnavailable, match=f"served by user {EVE}"):
                by_port.gpus()
            eventually(eve.has_got_nothing, 60, lambda: repr(eve.recorded))
        eventually(lambda: f"gpulease listens on 127.0.0.1:{running.port} now" in running.output.read_text(), 60)
        assert b'{"status":"ok"}' in over_tcp("127.0.0.1", running.port)


@AS_ANOTHER_USER
def test_who_has_the_port_at_the_other_address_is_named(running: DaemonProcess, tmp_path: Path) -> None:
    with Squatter(("::1", running.port), tmp_path / "record") as eve:
        running.start()
        assert f"[::1]:{running.port} is taken by user {EVE}" in running.output.read_text()
        with Client(running.url) as client:
            assert client.gpus()
        client = Client(f"http://[::1]:{eve.port}", token=TOKEN)
        with client, pytest.raises(DaemonUnavailable, match="served by user"):
            client.gpus()
        eventually(eve.has_got_nothing, 60, lambda: repr(eve.recorded))


@AS_ANOTHER_USER
def test_no_one_takes_the_port_beside_the_daemon(running: DaemonProcess, tmp_path: Path) -> None:
    running.start()
    for host in ("127.0.0.1", "::1", "0.0.0.0", "::"):
        eve = Squatter((host, running.port), tmp_path / "record")
        with pytest.raises(AssertionError, match="Address already in use"), eve:
            pass


def test_a_port_that_is_bound_listens() -> None:
    """Of one that does not, another user could take the port: both sockets allow to reuse the address."""
    made, missing = listeners.listen_tcp("127.0.0.1", 0)
    port = made[0].getsockname()[1]
    with made[0], socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError) as refused:
            other.bind(("127.0.0.1", port))
        assert refused.value.errno == errno.EADDRINUSE
    for one in made:
        one.close()
    assert missing == []


def test_a_host_without_ipv6_has_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(self: listeners.TcpAddress) -> socket.socket:
        if self.host == "::1":
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        return socket.create_server((self.host, self.port))

    monkeypatch.setattr(listeners.TcpAddress, "try_listen", listen)
    made, missing = listeners.listen_tcp("localhost", 0)
    assert (len(made), missing) == (1, [])
    made[0].close()


def test_an_address_that_is_named_stands_alone() -> None:
    made, _ = listeners.listen_tcp("::1", 0)
    assert [one.getsockname()[0] for one in made] == ["::1"]
    made[0].close()


def test_a_socket_whose_listener_accepts_no_one_is_another_process(tmp_path: Path) -> None:
    """Not one that the daemon waits for: in a directory that all may write, any user can listen first."""
    path = tmp_path / "gpulease.sock"
    with socket.socket(socket.AF_UNIX) as squatter, socket.socket(socket.AF_UNIX) as first:
        squatter.bind(str(path))
        squatter.listen(0)
        first.connect(str(path))
        refused: list[Exception] = []

        def start() -> None:
            try:
                listeners.listen_unix(path, 0o666).close()
            except listeners.CannotStart as error:
                refused.append(error)

        starting = threading.Thread(target=start, daemon=True)
        starting.start()
        starting.join(20)
    assert [str(error) for error in refused] == [f"Another process listens on {path}. Give another --socket."]
