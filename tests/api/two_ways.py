"""Has one conversation with two daemons, of which one has no hot path, and notes every byte of what they answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

from gpulease_server.api.access_settings import AccessSettings
from gpulease_server.api.app import Application, create_app
from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.middleware import request_log
from gpulease_server.core.records import Instant
from gpulease_server.runtime import clock, ids
from gpulease_server.runtime.bearer_tokens import BearerTokens
from gpulease_server.runtime.gpu_metrics.recorder import GpuMetricsRecorder
from gpulease_server.runtime.leadership.status import LeadershipStatus
from gpulease_server.runtime.reading_age import DesiredStateTickets
from gpulease_server.store import fencing
from gpulease_server.store.database import upgrade
from tests.runtime.faults import FaultyStore, report, writing

ROOT = PeerCredentials(uid=0, gid=0, local=True, connection=ConnectionType.SOCKET)
ADA = PeerCredentials(uid=61_001, gid=61_001, local=True, connection=ConnectionType.SOCKET)
EVE = PeerCredentials(uid=61_002, gid=61_002, local=True, connection=ConnectionType.LOOPBACK)
STRANGER = PeerCredentials()
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Reply:
    """Everything of an answer. A client that has gone has none."""

    status: int | None
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


class Clock:
    """A clock that only the conversation moves."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def __call__(self) -> Instant:
        return Instant(at=NOON + timedelta(seconds=self.passed_s), mono_s=1000.0 + self.passed_s)


@dataclass
class Side:
    """One of the two daemons, and what was heard of it."""

    app: Application
    daemon: DaemonState
    leadership: LeadershipStatus
    store: FaultyStore
    clock: Clock
    has_hot_path: bool
    replies: list[tuple[str, Reply]] = field(default_factory=list)
    """In the order in which they were asked for."""
    hot: Counter[str] = field(default_factory=Counter)
    """How many requests took the hot path, by method and route."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """What was logged of requests."""
    ids: Counter[str] = field(default_factory=Counter)
    """How many ids were made, by kind."""

    async def begin(self, *arguments: Any, **options: Any) -> asyncio.Task[Reply]:
        """As `send`, for one that waits: returns once it has its id, so that each side counts requests in one order."""
        before = self.ids["request"]
        task = asyncio.create_task(self.send(*arguments, **options))
        async with asyncio.timeout(30):
            while self.ids["request"] == before:  # noqa: ASYNC110 - no one signals to a test
                await asyncio.sleep(0.001)
        return task

    async def send(
        self,
        method: str,
        target: str,
        body: Any = None,
        *,
        peer: PeerCredentials = ROOT,
        parts: Sequence[bytes] | None = None,
        fields: Sequence[tuple[str, str]] = (),
        length: int | None = None,
        leaves: bool = False,
    ) -> Reply:
        """One request and its answer.

        Args:
            method: The method.
            target: Path and query.
            body: To send as JSON; bytes as they are.
            peer: Who sends it.
            parts: The same in parts.
            fields: Of the head, beside `Host`, `X-Request-Id` and `Content-Length`.
            length: In place of the true content length; -1 to send none.
            leaves: The client goes before all of its body has arrived.
        """
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        parts = [raw] if parts is None else parts
        size = sum(map(len, parts)) if length is None else length
        names = {name.lower() for name, _ in fields}
        head = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields]
        head += [] if "host" in names else [(b"host", b"127.0.0.1:8750")]
        head += [(b"content-length", str(size).encode())] if size > 0 and "transfer-encoding" not in names else []
        path, _, query = target.partition("?")
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "server": ("127.0.0.1", 8750),
            "client": ("127.0.0.1", 5000),
            "scheme": "http",
            "root_path": "",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": head,
            "state": {"peer": peer},
        }
        incoming = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        incoming[-1]["more_body"] = leaves
        waiting = iter(incoming)
        sent: list[Message] = []

        async def receive() -> Message:
            message = next(waiting, None)
            if message is None and not leaves:
                await asyncio.Event().wait()
            return message or {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        asked = f"{method} {target[:100]} {raw[:100]!r} {list(fields)} {peer.uid}"
        place = len(self.replies)
        self.replies.append((asked, Reply(None, (), b"")))
        ask: Callable[..., Awaitable[None]] = self.app if self.has_hot_path else self._without_hot_path
        async with asyncio.timeout(30):
            await asyncio.create_task(ask(scope, receive, send))  # type: ignore[arg-type]
        start = next((one for one in sent if one["type"] == "http.response.start"), None)
        content = b"".join(one.get("body", b"") for one in sent if one["type"] == "http.response.body")
        found = Reply(start["status"], tuple(map(tuple, start["headers"])), content) if start else Reply(None, (), b"")
        self.replies[place] = asked, found
        return found

    async def _without_hot_path(self, *arguments: Any) -> None:
        await FastAPI.__call__(self.app, *arguments)

    def counted(self) -> dict[tuple[str, ...], float]:
        """The requests that `/metrics` shows, by method, route and status."""
        families = self.app.hot_path.metrics.registry.collect()
        return {
            tuple(sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
            if sample.name in ("gpulease_http_requests_total", "gpulease_http_request_duration_seconds_count")
        }


Conversation = Callable[[Side], Awaitable[None]]


def both(
    tmp_path: Path, patch: pytest.MonkeyPatch, conversation: Conversation, access: AccessSettings | None = None
) -> tuple[Side, Side]:
    """The same conversation with a daemon with the hot path, and with one without; both have four free GPUs."""
    hot = asyncio.run(_converse(tmp_path / "hot.db", patch, conversation, access, has_hot_path=True))
    plain = asyncio.run(_converse(tmp_path / "plain.db", patch, conversation, access, has_hot_path=False))
    return hot, plain


async def _converse(
    file: Path,
    patch: pytest.MonkeyPatch,
    conversation: Conversation,
    access: AccessSettings | None,
    *,
    has_hot_path: bool,
) -> Side:
    numbers: Counter[str] = Counter()

    def new_id(kind: str) -> str:
        numbers[kind] += 1
        return f"{kind}-{numbers[kind]:016x}"

    patch.setattr(request_log, "SLOW_S", float("inf"))  # which request a busy machine delays is chance
    patch.setattr(ids, "new_id", new_id)
    patch.setattr(fencing, "new_database_id", lambda: "database-1")
    patch.setattr(ids, "first_ticket", itertools.count(1000).__next__)
    patch.setattr(ids, "new_bearer_token", lambda token_id: f"{token_id}.secret")
    moment = Clock()
    patch.setattr(clock, "now", moment)
    patch.setattr(clock, "mono_s", lambda: moment().mono_s)
    patch.setattr(clock, "wall", lambda: moment().at)
    url = f"sqlite:///{file}"
    upgrade(url)
    async with asyncio.timeout(120), writing(url) as (writer, store):
        await report(writer)
        leadership = LeadershipStatus()
        daemon = DaemonState(
            writer=writer,
            store=store,
            tickets=DesiredStateTickets(),
            recorder=GpuMetricsRecorder(store, writer),
            host="here",
            leadership=leadership,
            access=access or AccessSettings(),
            bearer_tokens=BearerTokens(store, writer),
        )
        app = create_app(daemon)
        side = Side(app, daemon, leadership, store, moment, has_hot_path, ids=numbers)
        answers = app.hot_path.answers

        async def answers_and_counts(scope: Any, receive: Any, send: Any) -> bool:
            answered = await answers(scope, receive, send)
            side.hot[scope["method"]] += answered
            return answered

        patch.setattr(app.hot_path, "answers", answers_and_counts)
        noted = _Noted(side.lines)
        log = logging.getLogger("gpulease.requests")
        patch.setattr(log, "level", logging.DEBUG)
        log.addHandler(noted)
        try:
            await conversation(side)
        finally:
            log.removeHandler(noted)
    return side


class _Noted(logging.Handler):
    """Notes the fields of lines."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        what: dict[str, Any] = dict(getattr(record, "fields", {}))
        what.pop("took_s", None)
        self.lines.append(what | {"level": record.levelname, "message": record.getMessage()})
