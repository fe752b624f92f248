"""The worker's plain HTTP to a daemon of its own host, against a server that answers byte by byte as a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpulease.sansio import failover as failover_rules
from gpulease.sansio.failover import Destination, Failover
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import DaemonUnavailable, GpuleaseError, NotFound
from gpulease_protocol.host.addresses import candidates
from gpulease_worker.local_transport import LocalTransport, is_enough_for

LENGTH = b'HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{"a": 1}'
CHUNKS = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\n{"a\r\n5\r\n": 1}\r\n0\r\n\r\n'
CLOSES = b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 8\r\n\r\n{"a": 1}'
UNTIL_THE_END = b'HTTP/1.0 200 OK\r\n\r\n{"a": 1}'
REFUSED = (
    b"HTTP/1.1 404 Not Found\r\ncontent-type: application/problem+json\r\ncontent-length: 42\r\n\r\n"
    b'{"code": "not_found", "detail": "Nothing"}'
)


@pytest.fixture(autouse=True)
def time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gets no CPU for a second has not failed to connect."""
    for bound in ("CONNECT_TIMEOUT_S", "CONNECT_ALL_TIMEOUT_S"):
        monkeypatch.setattr(failover_rules, bound, 60.0)


class Played:
    """A daemon on a Unix socket that gives these answers, one after the other, and closes after those that say so."""

    def __init__(self, path: Path, *answers: bytes) -> None:
        self.path = path
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.requested = asyncio.Event()
        self.closed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split()[0])
                self.requests.append(head + await reader.readexactly(size))
                self.requested.set()
                answer = self.answers.pop(0) if self.answers else b""
                writer.write(answer)
                await writer.drain()
                if not self.answers and not answer:
                    await reader.read()
                    return
                if answer not in (LENGTH, CHUNKS, REFUSED):
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()
            self.closed.set()


def call(**what: Any) -> ApiCall[Any]:
    return ApiCall(**{"method": "POST", "path": "/v1/x", "body": {"b": 2}, "read": lambda found: found} | what)


@asynccontextmanager
async def talking(path: Path, *answers: bytes, timeout_s: float = 60.0) -> AsyncIterator[tuple[Played, Any]]:
    """A played daemon, and a function that sends it calls."""
    played = Played(path, *answers)
    server = await asyncio.start_unix_server(played.serve, str(path))
    destination = Destination(candidates(f"unix://{path}"), True, "secret", timeout_s, use_proxies=False)
    assert is_enough_for(destination)
    transport, failover = LocalTransport(destination), Failover(destination)
    try:
        yield played, lambda **what: transport.run(failover.send(call(**what)))
    finally:
        await transport.close()
        server.close()


def story(tell: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(tell(), 60))


@pytest.mark.parametrize(
    ("answer", "connections"), [(LENGTH, 1), (CHUNKS, 1), (CLOSES, 2), (UNTIL_THE_END, 2)], ids=str
)
def test_an_answer_is_read_and_the_connection_kept_where_it_may_be(
    tmp_path: Path, answer: bytes, connections: int
) -> None:
    async def tell() -> None:
        async with talking(tmp_path / "s", answer, answer) as (played, send):
            assert [await send(), await send()] == [{"a": 1}, {"a": 1}]
            assert played.connections == connections
            head, _, body = played.requests[0].partition(b"\r\n\r\n")
            assert head.startswith(b"POST /v1/x HTTP/1.1\r\nHost: ")
            assert b"Authorization: Bearer secret" in head
            assert body == b'{"b":2}'

    story(tell)


def test_a_refusal_is_the_daemons_error(tmp_path: Path) -> None:
    async def tell() -> None:
        async with talking(tmp_path / "s", REFUSED, LENGTH) as (played, send):
            with pytest.raises(NotFound, match="Nothing"):
                await send()
            assert await send() == {"a": 1}
            assert played.connections == 1

    story(tell)


@pytest.mark.parametrize(
    "answer",
    [
        LENGTH[:-1],
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\n" + b"a" * 200_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
    ],
    ids=range(8),
)
def test_an_answer_that_is_none_or_breaks_off_fails_that_call_alone(tmp_path: Path, answer: bytes) -> None:
    async def tell() -> None:
        async with talking(tmp_path / "s", answer, LENGTH) as (_, send):
            with pytest.raises(DaemonUnavailable):
                await send()
            assert await send() == {"a": 1}

    story(tell)


def test_an_answer_that_does_not_come_in_time_fails(tmp_path: Path) -> None:
    async def tell() -> None:
        async with talking(tmp_path / "s", timeout_s=0.05) as (played, send):
            with pytest.raises(GpuleaseError):
                await send()
            await played.closed.wait()

    story(tell)


def test_a_call_that_is_cancelled_closes_its_connection(tmp_path: Path) -> None:
    async def tell() -> None:
        async with talking(tmp_path / "s") as (played, send):
            sending = asyncio.create_task(send())
            await played.requested.wait()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await played.closed.wait()
            played.answers.append(LENGTH)
            assert await send() == {"a": 1}
            assert played.connections == 2

    story(tell)


def test_no_daemon_is_not_connected(tmp_path: Path) -> None:
    async def tell() -> None:
        destination = Destination(candidates(f"unix://{tmp_path}/none"), True, None, 5.0, use_proxies=False)
        with pytest.raises(DaemonUnavailable, match="No such file"):
            await LocalTransport(destination).run(Failover(destination).send(call()))

    story(tell)


@pytest.mark.parametrize(
    ("url", "enough"),
    [
        ("unix:///run/s", True),
        ("http://127.0.0.1:8750", True),
        ("https://127.0.0.1:8750", False),
        ("http://gpubox:8750", False),
        ("http://127.0.0.1:8750,http://gpubox:8750", False),
    ],
)
def test_it_is_enough_for_plain_http_on_this_host(url: str, enough: bool) -> None:
    assert is_enough_for(Destination(candidates(url.split(",")), True, None, 5.0)) is enough
