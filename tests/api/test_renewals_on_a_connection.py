"""What a holder sees on a connection while a renewal waits for its commit.

Answers in order, a client that leaves or does not read, a daemon that stops: over real sockets, in one process, with a
store that holds a commit up.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from gpulease_server.api.access_settings import AccessSettings
from gpulease_server.api.app import Application, create_app
from gpulease_server.api.auth import peer_credentials, user_names
from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials, PeerCredentialsProtocol
from gpulease_server.api.auth.user_names import refresh_user_name
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.direct_connection import DirectConnection
from gpulease_server.api.fair_share import Turn
from gpulease_server.api.hot_path.operations import Renewal
from gpulease_server.runtime.bearer_tokens import BearerTokens
from gpulease_server.runtime.gpu_metrics.recorder import GpuMetricsRecorder
from gpulease_server.runtime.leadership.status import Leadership, LeadershipStatus
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
        """Grant the lease. The name of the tests' user is known, so that their requests need not wait for it."""
        await refresh_user_name(os.geteuid())
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


def tell(
    url: str,
    story: Callable[[Story], Awaitable[None]],
    access: AccessSettings = AccessSettings(),
) -> None:
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
                access=access,
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
        assert told.state.tasks, "a daemon that stops waits for it"
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


def tasks_of(told: Story) -> list[asyncio.Task[None]]:
    """The tasks that answer requests."""
    return [task for task in told.state.tasks if isinstance(task, asyncio.Task)]


def test_a_renewal_needs_no_task_unless_it_has_to_wait(sqlite_url: str) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            await told.hold_commit(one)
            assert not tasks_of(told)
            assert told.app.hot_path.metrics.in_flight == 1
            one.writer.write(told.renewal("behind"))
            await until(lambda: one.protocol.pipeline)
            one.protocol.pause_writing()  # as if the client did not read
            told.store.gate.set()
            await until(lambda: tasks_of(told))
            one.protocol.resume_writing()
            assert [(await one.read()).fields["x-request-id"] for _ in range(2)] == ["held", "behind"]

    tell(sqlite_url, story)


def test_a_renewal_waits_for_its_turn_and_its_answer_too(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uid, lane = 61_001, "keeping"
    peer = PeerCredentials(uid=uid, gid=uid, local=True, connection=ConnectionType.SOCKET)
    monkeypatch.setattr(peer_credentials, "peer_credentials_of", lambda _: peer)

    async def story(told: Story) -> None:
        share = told.app.hot_path.share
        async with told.connection() as one:
            for request_id in ("whose name has to be looked up", "whose name is known"):
                assert share.begins_at_once(uid, lane)
                ends_s = told.expires_at_s()
                one.writer.write(told.renewal(request_id))
                await until(lambda: tasks_of(told))
                assert told.expires_at_s() == ends_s
                assert told.app.hot_path.metrics.in_flight == 1
                share.end(uid, lane, 0.0)
                assert (await one.read()).status == 200
                await until(lambda: not told.state.tasks)
            await told.hold_commit(one)
            assert not tasks_of(told)
            assert share.begins_at_once(uid, lane), "who waits for the writer does not work"
            told.store.gate.set()
            await until(lambda: tasks_of(told))
            share.end(uid, lane, 0.0)
            assert (await one.read()).status == 200

    tell(sqlite_url, story, AccessSettings(admins=frozenset({str(uid)})))


@pytest.mark.parametrize("lane", ["keeping", "other"])
def test_what_waits_for_its_turn_goes_with_its_client(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    uid = 61_001
    peer = PeerCredentials(uid=uid, gid=uid, local=True, connection=ConnectionType.SOCKET)
    monkeypatch.setattr(peer_credentials, "peer_credentials_of", lambda _: peer)

    async def story(told: Story) -> None:
        share = told.app.hot_path.share
        show = b"GET /v1/me HTTP/1.1\r\nHost: localhost\r\n\r\n"
        request = {"keeping": told.renewal("a"), "other": show}[lane]
        assert share.begins_at_once(uid, lane)
        ends_s = told.expires_at_s()
        async with told.connection() as one:
            one.writer.write(request)
            await until(lambda: tasks_of(told))
            await asyncio.sleep(0)
        await until(lambda: not told.state.tasks)
        assert told.app.hot_path.metrics.in_flight == 0
        assert told.expires_at_s() == ends_s
        share.end(uid, lane, 0.0)
        async with told.connection() as another:
            another.writer.write(request)
            assert (await another.read()).status == 200

    tell(sqlite_url, story, AccessSettings(admins=frozenset({str(uid)})))


def test_a_renewal_whose_caller_has_to_be_looked_up_counts_once(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = 61_007
    peer = PeerCredentials(uid=uid, gid=uid, local=True, connection=ConnectionType.SOCKET)
    monkeypatch.setattr(peer_credentials, "peer_credentials_of", lambda _: peer)
    monkeypatch.delitem(user_names._cache, uid, raising=False)

    async def story(told: Story) -> None:
        async with told.connection() as one:
            for status in (200, 429):
                one.writer.write(told.renewal("a"))
                assert (await one.read()).status == status

    tell(sqlite_url, story, AccessSettings(admins=frozenset({str(uid)}), max_rps_per_user=0.001))


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
"""As Java's HttpClient and `curl --http2` send with each request."""


@pytest.mark.parametrize("size", [1, 2**20])
def test_a_request_that_offers_another_protocol_is_answered_as_any_other(sqlite_url: str, size: int) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            field = b"Content-Length"
            show = b"GET /v1/leases/%b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (told.lease_id.encode(), OFFER)
            content = b'{"token": %d}' % told.token
            chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
            chunked = told.renewal("chunked", b"").replace(b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n")
            sent = told.renewal("a").replace(field, OFFER + field) + show + told.renewal("b")
            sent += chunked.replace(b"Transfer", OFFER + b"Transfer") + chunks + told.renewal("c")
            for place in range(0, len(sent), size):
                one.protocol.data_received(sent[place : place + size])
            replies = [await one.read() for _ in range(5)]
            assert {reply.status for reply in replies} == {200}
            names = [reply.fields["x-request-id"] for reply in replies]
            assert [*names[:1], *names[2:]] == ["a", "b", "chunked", "c"]

    tell(sqlite_url, story)


@pytest.mark.parametrize(("version", "further"), [(b"HTTP/1.1", b"Connection: close\r\n"), (b"HTTP/1.0", b"")])
def test_a_request_that_offers_another_protocol_and_closes_its_connection_is_answered(
    sqlite_url: str, version: bytes, further: bytes
) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            field = b"Content-Length"
            sent = told.renewal("a").replace(field, OFFER + further + field).replace(b"HTTP/1.1", version)
            one.protocol.data_received(sent + told.renewal("dropped"))
            assert (await one.read()).fields["x-request-id"] == "a"
            assert await one.reader.read() == b""

    tell(sqlite_url, story)


def test_a_tunnel_is_refused(sqlite_url: str) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            one.writer.write(b"CONNECT / HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % OFFER)
            assert (await one.read()).status == 400

    tell(sqlite_url, story)


def test_what_comes_after_a_body_is_no_field_of_its_head(sqlite_url: str) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            head = told.renewal("a", b"").replace(b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n")
            content = b'{"token": %d}' % told.token
            one.writer.write(head + b"%x\r\n%b\r\n0\r\nAuthorization: Bearer x\r\n\r\n" % (len(content), content))
            assert (await one.read()).status == 200

    tell(sqlite_url, story)


def test_a_request_that_is_refused_for_its_body_is_not_carried_out(sqlite_url: str) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            target = f"/v1/leases/{told.lease_id}?token={told.token}"
            head = f"DELETE {target} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            one.protocol.data_received(head.encode() + b"no chunk\r\n")
            assert not told.state.tasks
            assert (await one.read()).status == 400

    tell(sqlite_url, story)


@pytest.mark.parametrize(("where", "what"), [(Renewal, "happening"), (Renewal, "answer"), (DirectConnection, "answer")])
def test_a_bug_is_answered(sqlite_url: str, monkeypatch: pytest.MonkeyPatch, where: type, what: str) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    async def story(told: Story) -> None:
        async with told.connection() as one:
            with monkeypatch.context() as patched:
                patched.setattr(where, what, fails)
                one.writer.write(told.renewal("odd"))
                assert (await one.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 500")
        async with told.connection() as another:
            another.writer.write(told.renewal("again"))
            assert (await another.read()).status == 200

    tell(sqlite_url, story)


def test_a_bug_after_the_writer_has_a_renewal_is_answered_once(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uid = 61_001
    peer = PeerCredentials(uid=uid, gid=uid, local=True, connection=ConnectionType.SOCKET)
    monkeypatch.setattr(peer_credentials, "peer_credentials_of", lambda _: peer)

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    async def story(told: Story) -> None:
        await refresh_user_name(uid)
        ends_s = told.expires_at_s()
        async with told.connection() as one:
            monkeypatch.setattr(Turn, "end_for_writer", fails)
            one.writer.write(told.renewal("odd"))
            assert (await one.reader.read()).count(b"HTTP/1.1 500") == 1
        await until(lambda: told.expires_at_s() > ends_s)
        await until(lambda: not told.state.tasks)

    tell(sqlite_url, story, AccessSettings(admins=frozenset({str(uid)})))
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_a_renewal_is_refused_while_too_many_wait_for_the_writer(sqlite_url: str) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            for most, status in ((0, 503), (1, 200)):
                told.daemon.writer._queue._most = most
                one.writer.write(told.renewal("a"))
                reply = await one.read()
                assert (reply.status, reply.fields.get("retry-after")) == (status, "1" if status == 503 else None)

    tell(sqlite_url, story)


def test_a_renewal_is_not_confirmed_once_another_daemon_has_taken_over(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            await told.hold_commit(one)
            monkeypatch.setattr(LeadershipStatus, "state", lambda _: Leadership.SUPERSEDED)
            told.store.gate.set()
            reply = await one.read()
            assert (reply.status, reply.body["outcome"]) == (503, "unknown")
            assert reply.body["request_id"] == reply.fields["x-request-id"] == "held"

    tell(sqlite_url, story)


def test_a_writer_that_ends_refuses_what_it_has_not_decided(sqlite_url: str) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one, told.connection() as other:
            await told.hold_commit(one)
            other.writer.write(told.renewal("late"))
            await until(lambda: told.app.hot_path.metrics.in_flight == 2)
            told.daemon.writer._stopping = True
            told.store.gate.set()
            assert (await one.read()).status == 200
            reply = await other.read()
            assert (reply.status, reply.fields["x-request-id"]) == (503, "late")
            assert reply.body["request_id"] == "late"

    tell(sqlite_url, story)


def test_a_connection_is_closed_that_is_idle_and_not_one_that_waits(sqlite_url: str) -> None:
    async def story(told: Story) -> None:
        async with told.connection() as one:
            one.protocol.timeout_keep_alive = 3600  # type: ignore[assignment]
            one.writer.write(told.renewal("a"))
            assert (await one.read()).status == 200
            await told.hold_commit(one)
            one.protocol._check_idle()
            told.store.gate.set()
            assert (await one.read()).status == 200
            one.protocol._check_idle()
            assert not one.protocol.transport.is_closing(), "it has been idle for less than an hour"
            one.protocol.timeout_keep_alive = 0
            one.protocol._check_idle()
            assert await one.reader.read() == b""

    tell(sqlite_url, story)
