"""Whom a TCP connection is believed to be from."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import signal
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease_protocol.host import sock_diag
from gpulease_protocol.host.tcp_socket_owner import is_loopback, owner_of_connection, owner_of_server
from gpulease_server.api.auth import user_names
from gpulease_server.api.auth.peer_credentials import peer_credentials_of
from tests.daemon import DaemonProcess
from tests.ports import free_port

HERE, THERE = ("127.0.0.1", 40000), ("127.0.0.1", 8750)
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def row(local: str, remote: str, uid: int, inode: int, state: str = "01") -> str:
    queues = "00000000:00000000 00:00000000 00000000"
    return f"   0: {local} {remote} {state} {queues} {uid:5} 0 {inode} 1 0000 20 4 30 10 -1\n"


MINE, DAEMONS = "0100007F:9C40", "0100007F:222E"


@pytest.mark.parametrize(
    ("rows", "uid"),
    [
        ([row(MINE, DAEMONS, 1000, 77)], 1000),
        ([row(MINE, DAEMONS, 0, 77)], 0),
        # A socket that was closed after the request was sent shows 0, and belongs to no one.
        ([row(MINE, DAEMONS, 0, 0, "05")], None),
        ([row(MINE, DAEMONS, 0, 0, "06")], None),
        # Root has a connection from the same port to another one.
        ([row(MINE, "0100007F:1538", 0, 55), row(MINE, DAEMONS, 1000, 77)], 1000),
        ([row(MINE, "0100007F:1538", 0, 55)], None),
        # Someone who is only about to connect from the port of one who has long hung up.
        ([row(MINE, DAEMONS, 0, 99, "02")], None),
        # The daemon's own end of the connection.
        ([row(DAEMONS, MINE, 0, 88)], None),
        ([], None),
    ],
)
def test_a_connection_belongs_to_its_user_and_a_closed_one_to_no_one(
    tmp_path: Path, rows: list[str], uid: int | None
) -> None:
    (tmp_path / "tcp").write_text(HEAD + "".join(rows))
    assert owner_of_connection(HERE, THERE, tmp_path) == uid


MAPPED = "0000000000000000FFFF0000"
ONE = "00000000000000000000000001000000"


@pytest.mark.parametrize(
    ("host", "local", "remote"),
    [("127.0.0.1", f"{MAPPED}{MINE}", f"{MAPPED}{DAEMONS}"), ("::1", f"{ONE}:9C40", f"{ONE}:222E")],
    ids=["an IPv6 socket to 127.0.0.1", "::1"],
)
def test_a_connection_of_an_ipv6_socket_belongs_to_its_user(tmp_path: Path, host: str, local: str, remote: str) -> None:
    (tmp_path / "tcp").write_text(HEAD)
    (tmp_path / "tcp6").write_text(HEAD + row(local, remote, 1000, 77))
    assert owner_of_connection((host, 40000), (host, 8750), tmp_path) == 1000
    assert owner_of_connection((host, 40001), (host, 8750), tmp_path) is None


def test_a_real_ipv6_socket_connected_to_127_0_0_1_belongs_to_its_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET6) as caller:
        caller.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        accepted, address = listener.accept()
        with accepted:
            assert owner_of_connection(address, accepted.getsockname()) == os.getuid()


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_only_loopback_addresses_are_this_host(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def test_a_client_that_has_disconnected_is_not_identified() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        own = caller.getsockname()
        accepted, _ = listener.accept()
        with accepted:
            assert owner_of_connection(own, listener.getsockname()) == os.getuid()
            caller.sendall(b"POST /v1/jobs")
            caller.close()
            assert owner_of_connection(own, listener.getsockname()) is None


@pytest.mark.parametrize(
    ("rows", "uid"),
    [
        ([row(DAEMONS, MINE, 1000, 88)], 1000),
        # Not accepted yet: it is in the listener's queue.
        ([row(DAEMONS, MINE, 0, 0), row(DAEMONS, "00000000:0000", 1000, 77, "0A")], 1000),
        ([row(DAEMONS, MINE, 0, 0, "03"), row("00000000:222E", "00000000:0000", 1000, 77, "0A")], 1000),
        ([row(DAEMONS, MINE, 0, 0), row(DAEMONS, "00000000:0000", 0, 77, "0A")], 0),
        # Accepted and closed: who listens now need not be who had it.
        ([row(DAEMONS, MINE, 0, 0, "05"), row(DAEMONS, "00000000:0000", 0, 77, "0A")], None),
        ([row(DAEMONS, MINE, 0, 0)], None),
        # In another network namespace there may be a server, and here a listener at the same port.
        ([row(DAEMONS, "00000000:0000", 0, 77, "0A")], None),
    ],
)
def test_a_server_is_who_has_accepted_or_else_who_listens(tmp_path: Path, rows: list[str], uid: int | None) -> None:
    (tmp_path / "tcp").write_text(HEAD + "".join(rows))
    assert owner_of_server(THERE, HERE, tmp_path) == uid


@pytest.mark.parametrize("proc_net", ["/proc/net", "/proc/self/net"], ids=["sock_diag", "tables"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_real_server_is_found_before_and_after_it_accepts(host: str, proc_net: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as caller,
    ):
        there, here = caller.getpeername()[:2], caller.getsockname()[:2]
        assert owner_of_server(there, here, Path(proc_net)) == os.getuid()
        accepted, _ = listener.accept()
        assert owner_of_server(there, here, Path(proc_net)) == os.getuid()
        accepted.close()
        assert owner_of_server(there, here, Path(proc_net)) is None


def test_a_kernel_without_tcp_diagnostics_is_asked_by_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sock_diag.finds_sockets()
    monkeypatch.setattr(sock_diag, "_ask", lambda family, socket_id: None)
    monkeypatch.setattr(sock_diag, "finds_sockets", sock_diag.finds_sockets.__wrapped__)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as caller:
        assert owner_of_server(caller.getpeername(), caller.getsockname()) == os.getuid()
        accepted, _ = listener.accept()
        with accepted:
            assert owner_of_server(caller.getpeername(), caller.getsockname()) == os.getuid()
            assert owner_of_connection(caller.getsockname(), accepted.getsockname()) == os.getuid()


def test_a_server_that_speaks_ipv4_on_an_ipv6_socket_is_found() -> None:
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as caller,
    ):
        for proc_net in ("/proc/net", "/proc/self/net"):
            assert owner_of_server(caller.getpeername(), caller.getsockname(), Path(proc_net)) == os.getuid()


class OldTransport(asyncio.BaseTransport):
    """An accepted connection, with the addresses that it had then."""

    def __init__(self, accepted: socket.socket) -> None:
        self.sock, self.peer, self.own = accepted, accepted.getpeername(), accepted.getsockname()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": self.sock, "peername": self.peer, "sockname": self.own}.get(name, default)


def test_who_takes_over_the_port_of_a_client_that_hung_up_is_not_taken_for_it() -> None:
    """The client resets its connection, and another process connects from the same port before anyone has looked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", free_port()))
        accepted, _ = listener.accept()
        with accepted:
            transport = OldTransport(accepted)
            assert peer_credentials_of(transport).uid == os.getuid()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(transport.peer)
                other.connect(listener.getsockname())
                assert owner_of_connection(transport.peer, transport.own) == os.getuid(), "it has the same addresses"
                assert peer_credentials_of(transport).uid is None


def test_a_client_that_has_sent_its_last_byte_and_waits_is_identified() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            client.shutdown(socket.SHUT_WR)
            assert accepted.recv(1) == b""
            assert peer_credentials_of(OldTransport(accepted)).uid == os.getuid()


def test_sock_diag_and_proc_net_tcp_agree() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as caller:
        here, there = caller.getsockname(), listener.getsockname()
        told = sock_diag.connected(here, there)
        assert told is not None
        assert (told.uid, told.inode) == (os.getuid(), os.fstat(caller.fileno()).st_ino)
        assert owner_of_connection(here, there, Path("/proc/self/net")) == os.getuid()
        assert sock_diag.connected(there, (there[0], here[1] ^ 1)) is None, "who listens is not who has called"


def test_a_request_of_a_client_that_has_disconnected_is_not_carried_out(api: DaemonProcess) -> None:
    """The client would retry, and not be recognized as the same: there would be two leases, one without a holder."""
    body = json.dumps({"count": 1, "ttl_s": 60}).encode()
    head = (
        f"POST /v1/leases HTTP/1.1\r\nHost: 127.0.0.1:{api.port}\r\nContent-Type: application/json\r\n"
        f"Idempotency-Key: hung-up\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    assert api.process is not None
    api.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", api.port)) as caller:
                caller.sendall(head.encode() + body)
    finally:
        api.process.send_signal(signal.SIGCONT)
    again = api.call(
        "POST", "/v1/leases", raw=body, **{"Content-Type": "application/json", "Idempotency-Key": "hung-up"}
    )
    assert again.status == 201
    leases = api.call("GET", "/v1/leases?state=active&state=queued").json["items"]
    assert [lease["id"] for lease in leases] == [again.json["id"]]
    assert leases[0]["holder"]["user"] is not None


def test_a_user_directory_that_hangs_delays_only_unknown_users(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, now_s = threading.Event(), [0.0]

    def hang(uid: int) -> pwd.struct_passwd:
        assert answers.wait(60)
        return pwd.struct_passwd((f"user{uid}", "x", uid, uid, "", "/", "/bin/sh"))

    monkeypatch.setattr(user_names.pwd, "getpwuid", hang)
    monkeypatch.setattr(user_names, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(user_names, "_cache", {1: user_names.CachedName("known", -1.0)})

    async def main() -> None:
        async with asyncio.timeout(30):
            unknown = asyncio.create_task(user_names.refresh_user_name(2))
            await user_names.refresh_user_name(1)
            assert user_names.user_name(1) == "known", "it was known before, and counts until there is an answer"
            assert not unknown.done()
            answers.set()
            await unknown
        assert user_names.user_name(2) == "user2"

    asyncio.run(main())
    assert user_names.user_name(3) == "3"


def test_a_user_with_very_many_uids_costs_no_one_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one who is root of a user namespace with a range of /etc/subuid: each of those uids connects once."""

    def one_of_ten_has_a_name(uid: int) -> pwd.struct_passwd:
        if uid % 10:
            raise KeyError(uid)
        return pwd.struct_passwd((f"user{uid}", "x", uid, uid, "", "/", "/bin/sh"))

    monkeypatch.setattr(user_names.pwd, "getpwuid", one_of_ten_has_a_name)
    monkeypatch.setattr(user_names, "_cache", {})
    monkeypatch.setattr(user_names, "MAX_CACHED_NAMES", 100)

    async def main() -> None:
        await user_names.refresh_user_name(10)
        for uid in range(1001, 1401):
            if uid % 10:
                await user_names.refresh_user_name(uid)
        await user_names.refresh_user_name(20)

    asyncio.run(main())
    assert user_names.user_name(20) == "user20", "who comes later has their name, and what it allows"
    assert user_names.user_name(10) == "user10"
    assert len(user_names._cache) <= 100
