"""What a holder sees on a connection while a renewal waits for its commit.

Answers in order, a client that leaves or does not read, a daemon that stops: over real sockets, in one process, with a
store that holds a commit up.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from gpulease_server.api.app import Application, create_app
from gpulease_server.api.auth.peer_credentials import PeerCredentialsProtocol
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.runtime.bearer_tokens import BearerTokens
from gpulease_server.runtime.gpu_metrics.recorder import GpuMetricsRecorder
from gpulease_server.runtime.reading_age import DesiredStateTickets
from tests.runtime.faults import FaultyStore, ask, report, writing

BEHIND = 30
"""Requests on one connection at once; 32 may wait."""


@dataclass
class Reply:
    """One answer of the daemon."""

    status: int
    fields: dict[str, str]
    body: Any


class Connection:
    """A client's end of a connection, and the daemon's."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: PeerCredentialsProtocol
    ) -> None:
        self.reader, self.writer, self.protocol = reader, writer, protocol

    async def read(self) -> Reply:
        """The next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(re.findall(r"^([\w-]+): (.*)\r$", head, re.MULTILINE))
        return Reply(int(head[9:12]), fields, json.loads(await self.reader.readexactly(int(fields["content-length"]))))


class Story:
    """A daemon with one lease, whose holder has connections to it."""

    def __init__(self, daemon: DaemonState, store: FaultyStore, app: Application) -> None:
        self.daemon, self.store, self.app = daemon, store, app
        self.state = ServerState()
        self.config = uvicorn.Config(app, ws="none", log_config=None, lifespan="off", proxy_headers=False)
        self.lease_id, self.token = "", 0

    async def begin(self) -> None:
        """Grant the lease."""
        await report(self.daemon.writer)
        lease: Any = await self.daemon.writer.submit(ask())
        self.lease_id, self.token = lease.id, lease.fencing_token

    def renewal(self, request_id: str, body: bytes | None = None) -> bytes:
        """A renewal as bytes."""
        content = json.dumps({"token": self.token}).encode() if body is None else body
        head = f"POST /v1/leases/{self.lease_id}/renew HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {request_id}\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A new connection."""
        loop = asyncio.get_running_loop()
        own, theirs = socket.socketpair()
        _, protocol = await loop.connect_accepted_socket(
            lambda: PeerCredentialsProtocol(self.config, self.state, {}, loop), theirs
        )
        reader, writer = await asyncio.open_unix_connection(sock=own)
        try:
            yield Connection(reader, writer, protocol)
        finally:
            writer.close()

    async def hold_commit(self, connection: Connection) -> None:
        """Renew; return when the renewal is being committed, which goes on with `store.gate`."""
        self.store.entered.clear()
        self.store.gate.clear()
        connection.writer.write(self.renewal("held"))
        assert await asyncio.to_thread(self.store.entered.wait, 30)

    def expires_at_s(self) -> float:
        """When the lease ends, as it is committed."""
        return self.daemon.ledger.deadlines[self.lease_id]


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 - no one signals to a test
        await asyncio.sleep(0.001)


def tell(url: str, story: Callable[[Story], Awaitable[None]]) -> None:
    """Run a story."""

    async def told() -> None:
        async with asyncio.timeout(60), writing(url) as (writer, store):
            daemon = DaemonState(
                writer=writer,
                store=store,
                tickets=DesiredStateTickets(),
                recorder=GpuMetricsRecorder(store, writer),
                host="here",
                bearer_tokens=BearerTokens(store, writer),
            )
            app = create_app(daemon)
            assert isinstance(app, Application)
            one = Story(daemon, store, app)
            await one.begin()
            await story(one)
            await until(lambda: not one.state.tasks)
            assert app.hot_path.metrics.in_flight == 0

    asyncio.run(told())


def test_renewals_that_are_sent_at_once_are_answered_in_order(sqlite_url: str) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            bad = told.renewal("bad", b'{"token": "1"}')
            one.writer.write(told.renewal("a") + bad + told.renewal("b"))
            replies = [await one.read() for _ in range(3)]
            assert [reply.fields["x-request-id"] for reply in replies] == ["a", "bad", "b"]
            assert [reply.status for reply in replies] == [200, 422, 200]
            assert replies[1].body["code"] == "invalid_request"

    tell(sqlite_url, story)


def test_a_renewal_whose_client_has_left_counts(sqlite_url: str) -> None:
    async def story(told: Story) -> None:
        before_s = told.expires_at_s()
        async with told.connection() as one:
            await told.hold_commit(one)
        await until(lambda: not told.state.connections)
        told.store.gate.set()
        await until(lambda: told.expires_at_s() > before_s)
        async with told.connection() as another:
            another.writer.write(told.renewal("again"))
            assert (await another.read()).status == 200

    tell(sqlite_url, story)


def test_a_holder_who_does_not_read_gets_every_answer_later(sqlite_url: str) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            one.protocol.transport.set_write_buffer_limits(high=0)  # paused by the first byte that waits
            one.protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            one.writer.transport.pause_reading()  # type: ignore[attr-defined]
            one.writer.write(b"".join(told.renewal(f"r{number}") for number in range(BEHIND)))
            await until(lambda: one.protocol.flow.write_paused)
            turns = told.daemon.writer.published
            await until(lambda: told.daemon.writer.published > turns)  # one more has an answer, which cannot be sent
            one.writer.transport.resume_reading()  # type: ignore[attr-defined]
            replies = [await one.read() for _ in range(BEHIND)]
        assert [reply.fields["x-request-id"] for reply in replies] == [f"r{number}" for number in range(BEHIND)]
        assert {reply.status for reply in replies} == {200}

    tell(sqlite_url, story)


@pytest.mark.parametrize("behind", [0, 2])
def test_a_daemon_that_stops_answers_what_it_has_of_a_connection(sqlite_url: str, behind: int) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            await told.hold_commit(one)
            one.writer.write(b"".join(told.renewal(f"behind-{number}") for number in range(behind)))
            await until(lambda: len(one.protocol.pipeline) == behind)
            one.protocol.shutdown()
            told.store.gate.set()
            replies = [await one.read() for _ in range(1 + behind)]
            assert [reply.fields["x-request-id"] for reply in replies] == ["held", "behind-0", "behind-1"][: 1 + behind]
            assert {(reply.status, reply.body["id"]) for reply in replies} == {(200, told.lease_id)}
            assert replies[-1].fields["connection"] == "close"
            assert await one.reader.read() == b""

    tell(sqlite_url, story)
