"""Several URLs, and what is sent again: never what might then be done twice."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gpulease import AsyncClient, Client, DaemonUnavailable, InvalidRequest, LeaseRequest, Unavailable, calls
from gpulease.addresses import candidates
from gpulease.calls import Call
from gpulease.errors import NotFound, NotNow

from .stand_in import StandIn

Ask = Callable[..., Any]


@pytest.fixture
def other() -> Iterator[StandIn]:
    stand_in = StandIn()
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
def nobody() -> Iterator[str]:
    """A URL where nobody listens, and nobody else will while it is used."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def swallowing() -> Iterator[str]:
    """A URL whose packets are swallowed: the queue of those who wait to be accepted is full."""
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
                    caller.settimeout(5)
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
    for _ in range(200):
        caller.sendall(b" ")
        time.sleep(0.02)


def redirect(caller: socket.socket, _: bytes) -> None:
    caller.sendall(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n")


def gateway(caller: socket.socket, _: bytes) -> None:
    caller.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")


def break_off_a_stream(caller: socket.socket, _: bytes) -> None:
    caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")


BY_HAND: Call[Any] = Call(method="POST", path="/v1/leases", read=dict, body={"count": 1, "ttl_s": 60, "queue": True})
"""A request for a lease as somebody might write it: without a key, so that twice is two leases."""


def test_every_address_is_named_with_its_error_and_the_command_that_starts_a_daemon(gpus: Ask) -> None:
    with nobody() as a, nobody() as b:
        begun = time.monotonic()
        with pytest.raises(DaemonUnavailable, match="gpulease serve") as refused:
            gpus([a, b])
    assert time.monotonic() - begun < 2
    assert f"{a} (" in str(refused.value)
    assert f"{b} (" in str(refused.value)
    assert "refused" in str(refused.value).lower()


@pytest.mark.parametrize("how_many", [1, 4])
def test_addresses_that_swallow_packets_are_given_up_within_2_s_together(gpus: Ask, how_many: int) -> None:
    with swallowing() as url:
        urls = [url + "/" * number for number in range(how_many)]
        begun = time.monotonic()
        with pytest.raises(DaemonUnavailable, match="timed out") as refused:
            gpus(urls)
        assert time.monotonic() - begun < 2
    assert str(refused.value).count("timed out") == how_many


def test_a_name_that_is_not_resolved_is_given_up_within_2_s(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved.wait(30) and [])
    begun = time.monotonic()
    with pytest.raises(DaemonUnavailable, match="not resolved within"):
        Client("http://gpus.lab:8750").gpus()
    assert time.monotonic() - begun < 2
    resolved.set()


def test_the_first_that_answers_is_asked(gpus: Ask, daemon: StandIn, other: StandIn) -> None:
    with nobody() as a:
        assert gpus([a, daemon.url, other.url]) == ()
    assert (len(daemon.seen), len(other.seen)) == (1, 0)


def test_a_standby_is_passed_over_and_who_serves_is_kept(daemon: StandIn, other: StandIn) -> None:
    daemon.fault = lambda line: "503"
    with Client([daemon.url, other.url]) as client:
        client.gpus()
        client.gpus()
        assert (len(daemon.seen), len(other.seen)) == (1, 2)
        daemon.fault, other.fault = (lambda line: None), (lambda line: "503")
        client.gpus()
        assert (len(daemon.seen), len(other.seen)) == (2, 3)


@pytest.mark.parametrize("speak", [redirect, gateway, hang_up])
def test_who_refuses_to_serve_or_hangs_up_is_passed_over(gpus: Ask, daemon: StandIn, speak: Any) -> None:
    with misbehaving(speak) as (url, read):
        assert gpus([url, daemon.url]) == ()
    assert len(read) == 1


def test_one_that_hangs_leaves_time_for_the_next(gpus: Ask, daemon: StandIn, other: StandIn) -> None:
    daemon.fault = lambda line: "hang"
    assert gpus([daemon.url, other.url], timeout_s=1.0) == ()
    assert len(other.seen) == 1


def test_one_that_says_nothing_in_time_is_left_alone_while_another_answers(
    gpus: Ask, daemon: StandIn, other: StandIn
) -> None:
    """As a daemon that is stopped, while the standby takes over."""
    daemon.fault = lambda line: "hang"
    other.fault = lambda line: "503" if len(other.seen) < 4 else None
    assert gpus([daemon.url, other.url], timeout_s=0.5) == ()
    assert (len(daemon.seen), len(other.seen)) == (1, 4)


def test_a_copy_is_returned_where_no_other_address_answers(daemon: StandIn, other: StandIn) -> None:
    daemon.as_of = "2026-01-01T00:00:00.000Z"
    with Client([daemon.url, other.url]) as client:
        client.gpus()
        assert (len(daemon.seen), len(other.seen), client.as_of) == (1, 1, None)
        other.stop()
        client.gpus()
        assert client.as_of == daemon.as_of
        with pytest.raises(NotFound):
            client.lease_by_id("nobody's")
    with Client(daemon.url) as client:
        client.gpus()
        assert client.as_of == daemon.as_of


def test_long_polls_are_short_where_another_daemon_may_take_over(daemon: StandIn, other: StandIn) -> None:
    daemon.free = False
    with Client([daemon.url, other.url]) as client, pytest.raises(NotNow):
        client.lease(count=1, wait_s=5.0)
    held = [float(line.partition("wait_s=")[2].partition("&")[0]) for line in daemon.seen if "wait_while" in line]
    assert held
    assert max(held) <= 2.0


def test_when_all_are_standbys_the_answer_names_them(gpus: Ask, daemon: StandIn, other: StandIn) -> None:
    daemon.fault = other.fault = lambda line: "503"
    with pytest.raises(Unavailable) as raised:
        gpus([daemon.url, other.url])
    assert daemon.url in raised.value.detail
    assert other.url in raised.value.detail


@pytest.mark.parametrize("stops", [False, True])
def test_a_long_poll_that_breaks_is_asked_again_at_the_next(daemon, other, until, stops: bool) -> None:
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
        waiter.join(20)
        assert other.count("GET /v1/leases/L-1") >= 1
        held[0].release()
    assert daemon.only_lease()["end_reason"] == "released"


def test_places_where_a_daemon_may_be_are_not_ways_to_one_service(daemon: StandIn, other: StandIn, monkeypatch) -> None:
    """Two local daemons have different leases: who has asked one must not end up with the other."""
    monkeypatch.delenv("GPULEASE_URL", raising=False)
    monkeypatch.setattr("gpulease.addresses.candidates", lambda _: candidates([daemon.url, other.url]))
    with Client(retry_s=0.2) as client:
        client.gpus()
        daemon.fault = lambda line: "503"
        with pytest.raises(Unavailable):
            client.gpus()
        daemon.stop()
        with pytest.raises(DaemonUnavailable):
            client.gpus()
    assert not other.seen


@pytest.mark.parametrize("fault", ["break", "hang"])
def test_what_might_be_done_twice_is_not_sent_again_after_a_lost_answer(daemon, other, fault: str) -> None:
    with Client([daemon.url, other.url], timeout_s=0.3) as client:
        client.gpus()
        daemon.fault = lambda line: fault
        with pytest.raises(DaemonUnavailable, match=daemon.url):
            client.send(BY_HAND)
    assert (daemon.count("POST"), other.count("POST")) == (1, 0)


def test_a_gateway_that_does_not_say_that_nothing_was_done_ends_what_might_be_done_twice() -> None:
    with misbehaving(gateway) as (url, read), Client(url) as client, pytest.raises(Unavailable):
        client.send(BY_HAND)
    assert len(read) == 1


def test_anything_is_sent_elsewhere_when_nothing_was_sent(daemon: StandIn) -> None:
    with nobody() as a, Client([a, daemon.url]) as client:
        client.send(BY_HAND)
    assert daemon.count("POST") == 1


def test_anything_is_sent_again_when_the_daemon_says_that_nothing_was_done(daemon: StandIn, client: Client) -> None:
    faults = ["503"]
    daemon.fault = lambda line: faults.pop() if faults else None
    client.send(BY_HAND)
    assert (daemon.count("POST"), len(daemon.leases)) == (2, 1)


@pytest.mark.parametrize(
    "call",
    [
        calls.gpus(),
        calls.request_lease(LeaseRequest(count=1), "a key"),
        calls.renew("L-1", 7),
        calls.release("L-1", 7),
        calls.cancel_job("J-1"),
        calls.drain_node("a"),
    ],
    ids=lambda call: call.path,
)
def test_what_is_safe_to_repeat_says_so(call: Call[Any]) -> None:
    assert call.repeatable
    assert not BY_HAND.repeatable


def test_an_answer_that_never_ends_is_given_up_in_time(gpus: Ask) -> None:
    begun = time.monotonic()
    with misbehaving(drip) as (url, _), pytest.raises(DaemonUnavailable, match="did not answer GET /v1/gpus"):
        gpus(url, timeout_s=0.3)
    assert time.monotonic() - begun < 3


def test_a_request_that_is_given_up_unanswered_is_taken_back_if_the_daemon_has_it_after_all(
    daemon, monkeypatch
) -> None:
    def impatient(_: object, error: Exception) -> None:
        raise error

    faults = ["hang"]
    with Client(daemon.url, timeout_s=0.2) as client:
        client.gpus()
        monkeypatch.setattr("gpulease.talk.Patience.pause", impatient)
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
def test_several_urls_are_a_list_or_have_commas(given: Any, urls: list[str]) -> None:
    assert [address.url for address in candidates(given, {})] == urls
    if isinstance(given, str):
        assert [address.url for address in candidates(None, {"GPULEASE_URL": given})] == urls


@pytest.mark.parametrize("given", [",", ["http://a:1", "b"], [f"http://a:{port}" for port in range(1, 18)]])
def test_urls_that_make_no_sense_are_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="url"):
        candidates(given, {})


@pytest.mark.parametrize("path", ["events", "log"])
def test_a_password_in_an_address_is_in_no_error(path: str) -> None:
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
