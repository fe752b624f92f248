"""Several URLs, and what is sent again: never what might then be done twice."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpulease import AsyncClient, Client, DaemonUnavailable, InvalidRequest, LeaseRequest, Unavailable
from gpulease_protocol import endpoints
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import NotFound, NotNow
from gpulease_protocol.host.addresses import candidates
from tests.client.fake_daemon import FakeDaemon
from tests.client.stalls import stalls

Ask = Callable[..., Any]


@pytest.fixture
def other() -> Iterator[FakeDaemon]:
    stand_in = FakeDaemon()
    yield stand_in
    stand_in.stop()


@pytest.fixture(params=["Client", "AsyncClient"])
def gpus(request: pytest.FixtureRequest) -> Ask:
    """Asks a new client of these URLs for the GPUs."""

    def ask(urls: Any, **options: Any) -> Any:
        if request.param == "Client":
            with Client(urls, **options) as client:
                return client.gpus()

        async def work() -> Any:
            async with AsyncClient(urls, **options) as client:
                return await client.gpus()

        return asyncio.run(work())

    return ask


@contextmanager
def closed_port() -> Iterator[str]:
    """A URL without a listener, which no other process can use meanwhile."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}"


@contextmanager
def packet_dropping_address() -> Iterator[str]:
    """A URL that drops packets, because its listen queue is full."""
    waiting = []
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        try:
            for _ in range(4):
                caller = socket.socket()
                waiting.append(caller)
                caller.setblocking(False)
                caller.connect_ex(full.getsockname())
            yield f"http://127.0.0.1:{full.getsockname()[1]}"
        finally:
            for caller in waiting:
                caller.close()


@contextmanager
def misbehaving(speak: Callable[[socket.socket, bytes], None]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads a request and then does with the connection what it likes, and the requests it has read."""
    read: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                with caller:
                    caller.settimeout(60)
                    try:
                        request = caller.recv(65536)
                        if request:  # not a knock
                            read.append(request)
                            speak(caller, request)
                    except OSError:
                        continue

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", read
        server.shutdown(socket.SHUT_RDWR)


def hang_up(caller: socket.socket, _: bytes) -> None:
    """Read the request and close."""


def drip(caller: socket.socket, _: bytes) -> None:
    """A body that never ends, one byte at a time."""
    caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(1000):
        caller.sendall(b" ")
        time.sleep(0.02)


def redirect(caller: socket.socket, _: bytes) -> None:
    caller.sendall(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n")


def gateway(caller: socket.socket, _: bytes) -> None:
    caller.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")


def break_off_a_stream(caller: socket.socket, _: bytes) -> None:
    caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")


BY_HAND: ApiCall[Any] = ApiCall(
    method="POST", path="/v1/leases", read=dict, body={"count": 1, "ttl_s": 60, "queue": True}
)
"""A lease request as a user might write it: without a key, so that sending it twice makes two leases."""


@pytest.mark.alone
def test_every_address_is_named_with_its_error_and_a_remedy(gpus: Ask) -> None:
    with closed_port() as a, closed_port() as b, stalls() as stalled_s:
        begun = time.monotonic()
        with pytest.raises(DaemonUnavailable, match="Check the address") as refused:
            gpus([a, b])
        assert time.monotonic() - begun < 2 + stalled_s()
    assert f"{a} (" in str(refused.value)
    assert f"{b} (" in str(refused.value)
    assert "refused" in str(refused.value).lower()


@pytest.mark.alone
@pytest.mark.parametrize("how_many", [1, 4])
def test_addresses_that_drop_packets_time_out_within_2_s_together(gpus: Ask, how_many: int) -> None:
    with packet_dropping_address() as url, stalls() as stalled_s:
        urls = [url + "/" * number for number in range(how_many)]
        begun = time.monotonic()
        with pytest.raises(DaemonUnavailable, match="timed out") as refused:
            gpus(urls)
        assert time.monotonic() - begun < 2 + stalled_s()
    assert str(refused.value).count("timed out") == how_many


@pytest.mark.alone
def test_name_resolution_times_out_within_2_s(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved.wait(30) and [])
    with stalls() as stalled_s:
        begun = time.monotonic()
        with pytest.raises(DaemonUnavailable, match="not resolved within"):
            Client("http://gpus.lab:8750").gpus()
        assert time.monotonic() - begun < 2 + stalled_s()
    resolved.set()


def test_a_name_is_resolved_at_the_exit_of_python_too(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    start, answer = threading.Thread.start, socket.getaddrinfo

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("gpulease"):  # the daemon's go on
            raise RuntimeError("can't create new thread at interpreter shutdown")  # since Python 3.12
        start(thread)

    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *more, **options: answer("127.0.0.1", *more, **options))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Client(f"http://gpus.lab:{daemon.port}") as client:
        assert client.gpus() == ()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"url": Path("/run/gpulease.sock")}, "gpulease.sock'\\) is not the address of a daemon"),
        ({"url": [5]}, "5 is not the address of a daemon"),
        ({"url": 5}, "5 is not the address of a daemon"),
        ({"token": b"secret"}, "token: this is no token"),
        ({"timeout_s": -5}, "timeout_s: must be above 0 and at most 86400 seconds, not -5"),
        ({"timeout_s": None}, "timeout_s: must be above 0"),
        ({"timeout_s": float("inf")}, "timeout_s: must be above 0"),
        ({"timeout_s": float("nan")}, "timeout_s: must be above 0"),
        ({"retry_s": -1}, "retry_s: must be 0 or more seconds, not -1"),
        ({"retry_s": None}, "retry_s: must be 0 or more seconds, not None"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_by_name_at_once(kind: Any, arguments: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        kind(**{"url": "http://127.0.0.1:8750", **arguments})
    assert "secret" not in str(refused.value)


def test_the_first_address_that_responds_is_used(gpus: Ask, daemon: FakeDaemon, other: FakeDaemon) -> None:
    with closed_port() as a:
        assert gpus([a, daemon.url, other.url]) == ()
    assert (len(daemon.request_lines), len(other.request_lines)) == (1, 0)


def test_a_standby_is_skipped_and_the_serving_daemon_is_kept(daemon: FakeDaemon, other: FakeDaemon) -> None:
    daemon.fault = lambda line: "503"
    with Client([daemon.url, other.url]) as client:
        client.gpus()
        client.gpus()
        assert (len(daemon.request_lines), len(other.request_lines)) == (1, 2)
        daemon.fault, other.fault = (lambda line: None), (lambda line: "503")
        client.gpus()
        assert (len(daemon.request_lines), len(other.request_lines)) == (2, 3)


@pytest.mark.parametrize("speak", [redirect, gateway, hang_up])
def test_a_server_that_refuses_or_hangs_up_is_skipped(gpus: Ask, daemon: FakeDaemon, speak: Any) -> None:
    with misbehaving(speak) as (url, read):
        assert gpus([url, daemon.url]) == ()
    assert [request[:3] for request in read].count(b"GET") == 1, "the other one only tries whether it speaks TLS"


def test_a_daemon_that_hangs_leaves_time_for_the_next_address(gpus: Ask, daemon: FakeDaemon, other: FakeDaemon) -> None:
    daemon.fault, daemon.hang_s = (lambda line: "hang"), 60.0
    assert gpus([daemon.url, other.url], timeout_s=4.0) == ()
    assert len(other.request_lines) == 1


def test_an_address_that_timed_out_is_avoided_while_another_responds(
    gpus: Ask, daemon: FakeDaemon, other: FakeDaemon
) -> None:
    """As a daemon that is stopped, while the standby takes over."""
    daemon.fault, daemon.hang_s = (lambda line: "hang"), 60.0
    other.fault = lambda line: "503" if len(other.request_lines) < 4 else None
    assert gpus([daemon.url, other.url], timeout_s=4.0) == ()
    assert (len(daemon.request_lines), len(other.request_lines)) == (1, 4)


def test_a_stale_read_is_returned_if_no_other_address_responds(daemon: FakeDaemon, other: FakeDaemon) -> None:
    daemon.as_of = "2026-01-01T00:00:00.000Z"
    with Client([daemon.url, other.url]) as client:
        client.gpus()
        assert (len(daemon.request_lines), len(other.request_lines), client.as_of) == (1, 1, None)
        other.stop()
        client.gpus()
        assert client.as_of == daemon.as_of
        with pytest.raises(NotFound):
            client.lease_by_id("nobody's")
    with Client(daemon.url) as client:
        client.gpus()
        assert client.as_of == daemon.as_of


def test_long_polls_are_short_where_another_daemon_may_take_over(daemon: FakeDaemon, other: FakeDaemon) -> None:
    daemon.free = False
    with Client([daemon.url, other.url]) as client, pytest.raises(NotNow):
        client.lease(count=1, wait_s=5.0)
    held = [
        float(line.partition("wait_s=")[2].partition("&")[0]) for line in daemon.request_lines if "wait_while" in line
    ]
    assert held
    assert max(held) <= 2.0


def test_if_all_are_standbys_the_error_names_them(gpus: Ask, daemon: FakeDaemon, other: FakeDaemon) -> None:
    daemon.fault = other.fault = lambda line: "503"
    with pytest.raises(Unavailable) as raised:
        gpus([daemon.url, other.url])
    assert daemon.url in raised.value.detail
    assert other.url in raised.value.detail


@pytest.mark.parametrize("stops", [False, True])
def test_a_broken_long_poll_is_repeated_at_the_next_address(daemon, other, until, stops: bool) -> None:
    """Both stand-ins show one ledger, as two daemons of one database do."""
    daemon.free = other.free = False
    other.leases, other.keys = daemon.leases, daemon.keys
    if not stops:
        daemon.fault = lambda line: "break" if "wait_while=queued" in line and not daemon.grant("L-1") else None
    held = []
    with Client([daemon.url, other.url]) as client:
        waiter = threading.Thread(target=lambda: held.append(client.lease(1, wait_s=60)))
        waiter.start()
        if stops:
            until(lambda: daemon.count("wait_while=queued") == 1)
            daemon.stop()
            until(lambda: other.count("wait_while=queued") == 1)
            other.grant("L-1")
        waiter.join(60)
        assert other.count("GET /v1/leases/L-1") >= 1
        held[0].release()
    assert daemon.only_lease()["end_reason"] == "released"


def test_a_user_without_a_home_directory_finds_the_daemon_of_the_host(monkeypatch) -> None:
    """As in a container that runs under a number of which its user database knows nothing, without HOME."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 54321)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    found = candidates(environ={"PATH": "/bin"})
    assert [one.url for one in found] in (["http://127.0.0.1:8750"], ["unix:///var/lib/gpulease/gpulease.sock"])


def test_default_addresses_are_not_interchangeable(daemon: FakeDaemon, other: FakeDaemon, monkeypatch) -> None:
    """Two local daemons have different leases: who has asked one must not end up with the other."""
    monkeypatch.delenv("GPULEASE_URL", raising=False)
    monkeypatch.setattr("gpulease_protocol.host.addresses.candidates", lambda _: candidates([daemon.url, other.url]))
    with Client(retry_s=0.2) as client:
        client.gpus()
        daemon.fault = lambda line: "503"
        with pytest.raises(Unavailable):
            client.gpus()
        daemon.stop()
        with pytest.raises(DaemonUnavailable):
            client.gpus()
    assert not other.request_lines


@pytest.mark.parametrize("fault", ["break", "hang"])
def test_a_call_that_is_not_repeatable_is_not_resent_after_a_lost_response(daemon, other, fault: str) -> None:
    daemon.hang_s = 60.0
    with Client([daemon.url, other.url], timeout_s=4.0) as client:
        client.gpus()
        daemon.fault = lambda line: fault
        with pytest.raises(DaemonUnavailable, match=daemon.url):
            client.send(BY_HAND)
    assert (daemon.count("POST"), other.count("POST")) == (1, 0)


def test_a_call_that_is_not_repeatable_is_not_resent_after_a_gateway_error() -> None:
    with misbehaving(gateway) as (url, read), Client(url) as client, pytest.raises(Unavailable):
        client.send(BY_HAND)
    assert len(read) == 1


def test_any_call_is_sent_elsewhere_if_nothing_was_sent(daemon: FakeDaemon) -> None:
    with closed_port() as a, Client([a, daemon.url]) as client:
        client.send(BY_HAND)
    assert daemon.count("POST") == 1


def test_any_call_is_resent_if_the_daemon_did_nothing(daemon: FakeDaemon, client: Client) -> None:
    faults = ["503"]
    daemon.fault = lambda line: faults.pop() if faults else None
    client.send(BY_HAND)
    assert (daemon.count("POST"), len(daemon.leases)) == (2, 1)


@pytest.mark.parametrize(
    "call",
    [
        endpoints.gpus(),
        endpoints.request_lease(LeaseRequest(count=1), "a key"),
        endpoints.renew("L-1", 7),
        endpoints.release("L-1", 7),
        endpoints.cancel_job("J-1"),
        endpoints.drain_node("a"),
    ],
    ids=lambda call: call.path,
)
def test_calls_that_are_safe_to_resend_are_repeatable(call: ApiCall[Any]) -> None:
    assert call.is_repeatable
    assert not BY_HAND.is_repeatable


def test_a_response_that_never_ends_times_out(gpus: Ask) -> None:
    begun = time.monotonic()
    with misbehaving(drip) as (url, _), pytest.raises(DaemonUnavailable, match="did not answer GET /v1/gpus"):
        gpus(url, timeout_s=1.0)
    assert time.monotonic() - begun < 20


def test_a_request_without_a_response_is_withdrawn_if_the_daemon_has_it(daemon, monkeypatch) -> None:
    def impatient(_: object, error: Exception) -> None:
        raise error

    faults = ["hang"]
    daemon.hang_s = 60.0
    with Client(daemon.url, timeout_s=2.0) as client:
        client.gpus()
        monkeypatch.setattr("gpulease.sansio.flows.Backoff.pause", impatient)
        daemon.fault = lambda line: faults.pop() if faults and line.startswith("POST /v1/leases?") else None
        with pytest.raises(DaemonUnavailable, match="did not answer POST"):
            client.lease(1)
    assert daemon.only_lease()["end_reason"] == "released"


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("http://a:1,http://b:2", ["http://a:1", "http://b:2"]),
        (" http://a:1 , unix:///run/x%2Cy.sock ,", ["http://a:1", "unix:///run/x%2Cy.sock"]),
        (["http://a:1", "http://a:1"], ["http://a:1"]),
    ],
)
def test_several_urls_are_a_list_or_separated_by_commas(given: Any, urls: list[str]) -> None:
    assert [address.url for address in candidates(given, {})] == urls
    if isinstance(given, str):
        assert [address.url for address in candidates(None, {"GPULEASE_URL": given})] == urls


@pytest.mark.parametrize("given", [",", ["http://a:1", "b"], [f"http://a:{port}" for port in range(1, 18)]])
def test_invalid_urls_are_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="url"):
        candidates(given, {})


@pytest.mark.parametrize("path", ["events", "log"])
def test_errors_do_not_show_the_password_of_an_address(path: str) -> None:
    with (
        misbehaving(break_off_a_stream) as (url, asked),
        Client(url.replace("//", "//me:hunter2@"), retry_s=0.2) as client,
    ):
        following = client.watch_events() if path == "events" else client.job_logs("job-1", follow=True)
        with pytest.raises(DaemonUnavailable) as refused:
            list(following)
    assert asked
    assert "broke off" in str(refused.value)
    assert "hunter2" not in f"{refused.value} {refused.value!r}"
