"""What a connection may do before a request is one: every bound of `api/http_limits.py`, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from gpulease_server.api.http_limits import LimitedHttpProtocol
from gpulease_server.api.problems import ERRORS_OF_EVERY_ROUTE

GET = b"GET /quick HTTP/1.1\r\nHost: localhost\r\n\r\n"
PATIENCE_S = 30.0


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, unless told to hold; then answers, at length where that is asked for."""
    if scope["path"] == "/hold":
        await scope["state"]["go"].wait()
    elif scope["path"] != "/quick":
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        if message["type"] == "http.disconnect":
            return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(2000 if scope["path"] == "/long" else 1):
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Short(LimitedHttpProtocol):
    head_s = body_s = stalled_s = 1.5
    max_connections = 8
    peer_uid = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.peer_uid = type(self).peer_uid  # a test may change it for the next connection
        super().connection_made(transport)


class Served:
    """The protocol on a port of its own, in a thread."""

    def __init__(self) -> None:
        self.port = 0
        self.state = ServerState()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(PATIENCE_S)

    async def _serve(self) -> None:
        self.loop, self.go, self._ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        config = uvicorn.Config(application, ws="none", log_config=None)
        protocol = lambda: Short(config, self.state, {"go": self.go}, self.loop)  # noqa: E731
        server = await self.loop.create_server(protocol, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._ended.wait()
        server.close()
        for connection in list(self.state.connections):
            connection.transport.abort()
        if self.state.tasks:
            await asyncio.wait(list(self.state.tasks), timeout=PATIENCE_S)

    def soon(self, call: Callable[[], Any]) -> None:
        self.loop.call_soon_threadsafe(call)

    def close(self) -> None:
        self.soon(self.go.set)
        self.soon(self._ended.set)
        self._thread.join()

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as one:
            yield one

    def answer(self, *pieces: bytes) -> tuple[int, str]:
        """Status and code of the problem that all of this is answered with, after which the connection is closed."""
        with self.connection() as one:
            for piece in pieces:
                one.sendall(piece)
            return problem(everything(one))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    # All connections of a process are counted together, and a test that changes whose they are leaves some counted.
    monkeypatch.setattr(Short, "open_by_uid", Counter())
    monkeypatch.setattr(Short, "request_bytes_by_uid", Counter())
    running = Served()
    try:
        yield running
    finally:
        running.close()


def everything(one: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    try:
        while piece := one.recv(65536):
            found += piece
    except ConnectionResetError:
        pass  # it was closed although more had been sent
    return found


def problem(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert "content-type: application/problem+json" in lines
    assert "connection: close" in lines
    assert "x-content-type-options: nosniff" in lines
    document = json.loads(body)
    assert f"x-request-id: {document['request_id']}" in lines
    assert document["detail"]
    return document["status"], document["code"]


def test_a_timely_request_is_answered(served: Served) -> None:
    with served.connection() as one:
        one.sendall(GET)
        assert one.recv(12) == b"HTTP/1.1 200"


def test_a_silent_connection_is_closed(served: Served) -> None:
    with served.connection() as one:
        assert everything(one) == b""


@pytest.mark.parametrize(
    "half",
    [b"G", b"GET / HTTP/1.1\r\nHost: loc", GET[:-2], b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"],
    ids=["a letter", "half a field", "no empty line", "half a body"],
)
def test_an_incomplete_head_is_answered_408_and_closed(served: Served, half: bytes) -> None:
    assert served.answer(half) == (408, "too_slow")


def test_an_incomplete_chunk_is_answered_408_and_closed(served: Served) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert served.answer(head, b"400\r\nabc") == (408, "too_slow")


def test_a_byte_now_and_then_does_not_extend_the_time_limit(served: Served) -> None:
    with served.connection() as one:
        one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nA: ")
        one.settimeout(0.1)
        answer = b""
        for _ in range(int(PATIENCE_S / 0.1)):
            try:
                one.sendall(b"x")
                answer = one.recv(65536)
                break
            except TimeoutError:
                continue
        assert b" 408 " in answer


def test_a_connection_may_be_idle_between_two_requests(served: Served) -> None:
    with served.connection() as one:
        answer = b""
        one.sendall(GET)
        while not answer.endswith(b"0\r\n\r\n"):
            answer += one.recv(65536)
        one.settimeout(4.0)
        with pytest.raises(TimeoutError):
            one.recv(1)  # longer than a head may take
        one.settimeout(PATIENCE_S)
        one.sendall(GET)
        assert one.recv(12) == b"HTTP/1.1 200"


def test_a_body_that_the_application_does_not_read_has_time(served: Served) -> None:
    """The application reads nothing for longer than a body may take, so that it cannot arrive."""
    with served.connection() as one:
        one.sendall(b"POST /hold HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b"x" * 100000)
        one.settimeout(4.0)
        with pytest.raises(TimeoutError):
            one.recv(1)
        served.soon(served.go.set)
        one.settimeout(PATIENCE_S)
        assert one.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 2**18 + b"\r\n\r\n", (431, "too_large")),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 2**18, (431, "too_large")),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 201 + b"\r\n", (431, "too_large")),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 100_000, (431, "too_large")),
        (b"GET /" + b"x" * 60_001 + b" HTTP/1.1\r\nHost: x\r\n\r\n", (414, "too_large")),
        (b"GET /" + b"x" * 80_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", (414, "too_large")),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (400, "invalid_request")),
        (b"\xff\xfe\x00\r\n\r\n", (400, "invalid_request")),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", (400, "invalid_request")),
        (b"HELO localhost\r\n", (400, "invalid_request")),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n", (400, "invalid_request")),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", (400, "invalid_request")),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", (400, "invalid_request")),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            (400, "invalid_request"),
        ),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", (400, "invalid_request")),
    ],
    ids=[
        "one long field",
        "an endless field",
        "many fields",
        "endless fields",
        "a long address",
        "an address too long for the parser",
        "TLS",
        "bytes",
        "no ASCII",
        "another protocol",
        "NUL",
        "a negative length",
        "two lengths",
        "a length and chunks",
        "no chunk",
    ],
)
def test_invalid_http_is_refused(served: Served, request_: bytes, expected: tuple[int, str]) -> None:
    assert served.answer(request_) == expected
    assert expected[0] in {kind.status for kind in ERRORS_OF_EVERY_ROUTE}, "OpenAPI does not have it"


def test_garbage_after_a_request_does_not_cost_its_answer(served: Served) -> None:
    with served.connection() as one:
        one.sendall(GET.replace(b"/quick", b"/hold") + b"nonsense\r\n\r\n")
        served.soon(served.go.set)
        answer = everything(one)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"0\r\n\r\n"), "the answer was cut off"
    assert answer.count(b"HTTP/1.1") == 1


def test_thousands_of_pipelined_requests_are_not_kept(served: Served) -> None:
    with served.connection() as one:
        one.sendall(GET.replace(b"/quick", b"/hold") * 4000)
        assert everything(one) == b""


def test_a_client_that_never_reads_its_answer_is_disconnected(served: Served) -> None:
    with served.connection() as one:
        one.sendall(GET.replace(b"/quick", b"/long"))
        with served.connection() as other:
            other.sendall(GET)
            assert other.recv(12) == b"HTTP/1.1 200"
        ended = threading.Event()

        def look() -> None:
            if served.state.tasks:
                served.loop.call_later(0.05, look)
            else:
                ended.set()

        served.soon(look)
        assert ended.wait(PATIENCE_S), "the application still sends"


def test_a_slow_reader_gets_the_complete_answer(served: Served) -> None:
    with served.connection() as one:
        one.sendall(GET.replace(b"/quick", b"/long"))
        size, pause = 0, threading.Event()
        while piece := one.recv(2**20):
            size += len(piece)
            if size < 2**26:
                pause.wait(0.03)
        assert size > 2000 * 65536


def test_connections_over_the_limit_are_refused_and_the_others_served(served: Served) -> None:
    with served.connection() as first:
        first.sendall(GET.replace(b"/quick", b"/hold"))
        others = [
            socket.create_connection(("127.0.0.1", served.port), PATIENCE_S) for _ in range(Short.max_connections)
        ]
        try:
            assert problem(everything(others[-1])) == (503, "unavailable")
            served.soon(served.go.set)
            assert first.recv(12) == b"HTTP/1.1 200"
        finally:
            for other in others:
                other.close()


@pytest.mark.parametrize(("uid", "most"), [(54321, 2), (None, 4)])
def test_one_user_cannot_take_all_connections(
    served: Served, monkeypatch: pytest.MonkeyPatch, uid: int | None, most: int
) -> None:
    monkeypatch.setattr(Short, "peer_uid", uid)
    with contextlib.ExitStack() as stack:
        own = [stack.enter_context(served.connection()) for _ in range(most)]
        for one in own:
            one.sendall(GET.replace(b"/quick", b"/hold"))
        with served.connection() as further:
            assert problem(everything(further)) == (503, "unavailable")
        monkeypatch.setattr(Short, "peer_uid", 77777)
        with served.connection() as other:
            other.sendall(GET)
            assert other.recv(12) == b"HTTP/1.1 200"
        served.soon(served.go.set)
        assert own[0].recv(12) == b"HTTP/1.1 200"


def until(condition: Callable[[], bool]) -> None:
    """Return when this is true."""
    end, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.01)


def posted(size: int, sent: int) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + b"x" * sent


@pytest.mark.parametrize(("uid", "most"), [(54321, 100_000), (None, 200_000)])
def test_one_user_cannot_fill_the_memory_with_requests(
    served: Served, monkeypatch: pytest.MonkeyPatch, uid: int | None, most: int
) -> None:
    monkeypatch.setattr(Short, "max_request_bytes", 400_000)
    monkeypatch.setattr(Short, "body_s", 2 * PATIENCE_S)
    monkeypatch.setattr(Short, "peer_uid", uid)
    with served.connection() as first:
        first.sendall(posted(size=500_000, sent=most - 10_000))
        until(lambda: Short.request_bytes_by_uid[uid] >= most - 10_000)
        assert served.answer(posted(size=20_000, sent=20_000)) == (503, "unavailable")
        monkeypatch.setattr(Short, "peer_uid", 77777)
        with served.connection() as other:
            other.sendall(posted(size=20_000, sent=20_000))
            assert other.recv(12) == b"HTTP/1.1 200"
    until(lambda: not Short.request_bytes_by_uid)


def test_a_request_counts_until_its_request_is_answered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Short, "max_request_bytes", 400_000)
    monkeypatch.setattr(Short, "peer_uid", 54321)
    with served.connection() as one:
        for _ in range(10):
            one.sendall(posted(size=60_000, sent=60_000))
            answer = one.recv(2**20)
            assert answer.startswith(b"HTTP/1.1 200")
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                answer += one.recv(2**20)
    until(lambda: not Short.request_bytes_by_uid)


def test_heads_that_wait_for_their_answers_count_too(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Short, "max_request_bytes", 400_000)
    monkeypatch.setattr(Short, "peer_uid", 54321)
    large = b"GET /hold HTTP/1.1\r\nHost: x\r\nX-Large: %b\r\n\r\n" % (b"x" * 60_000)
    with served.connection() as first:
        first.sendall(large)
        until(lambda: Short.request_bytes_by_uid[54321] >= 60_000)
        assert served.answer(large) == (503, "unavailable")
        served.soon(served.go.set)
        assert first.recv(12) == b"HTTP/1.1 200"
        until(lambda: not Short.request_bytes_by_uid)


@pytest.mark.parametrize(("why", "logged"), [("Task cancelled, timeout graceful shutdown exceeded", 0), ("a bug", 1)])
def test_a_request_that_is_broken_off_by_a_stop_is_not_logged_as_a_bug(
    served: Served, caplog: pytest.LogCaptureFixture, why: str, logged: int
) -> None:
    def stop() -> None:  # as uvicorn.Server.shutdown
        for task in served.state.tasks:
            task.cancel(msg=why)

    with served.connection() as one:
        one.sendall(GET.replace(b"/quick", b"/hold"))
        until(lambda: bool(served.state.tasks))
        served.soon(stop)
        assert everything(one).startswith(b"HTTP/1.1 500 ")
    assert [record.name for record in caplog.records].count("uvicorn.error.connection") == logged
