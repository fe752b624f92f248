"""The application without sockets: a request is a coroutine, and the network between client and daemon is simulated."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials

if TYPE_CHECKING:
    from tests.simulation.world import World


class NoAnswer(Exception):
    """The client knows nothing: the request or the answer was lost, or the daemon is not there."""


class NotThere(NoAnswer):
    """No daemon runs, so nothing was sent."""


class Network:
    """Carries requests to the daemon: late, twice, or not at all, as the world's chance has it."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def call(
        self,
        who: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        patience_s: float = 3.0,
        twice: bool = True,
        uid: int | None = None,
        bearer: str | None = None,
    ) -> tuple[int, Any]:
        """Status and JSON of the answer. Raises `NoAnswer`. Without a `uid` it is that of root, the administrator; a
        bearer token counts in its place."""
        world = self.world
        world.step(f"{who} > {method} {path}")
        await self._travel()
        await self._maybe_lost(0.03, f"{who} | request lost", patience_s)
        if world.daemon is None:
            raise NotThere
        gone = asyncio.Event()
        serving = world.daemon.spawn(self._serve(method, path, body, key, gone, uid, bearer))
        if twice and world.happens(0.03):
            world.spawn(self._again(method, path, body, key, uid, bearer))
        try:
            await asyncio.wait({serving}, timeout=patience_s)
        finally:
            gone.set()
        if not serving.done() or serving.cancelled():
            world.step(f"{who} | no answer")
            raise NoAnswer
        status, content = serving.result()
        world.step(f"{who} < {status}")
        await self._travel()
        await self._maybe_lost(0.04, f"{who} | answer lost", patience_s)
        return status, content

    async def _maybe_lost(self, share: float, what: str, patience_s: float) -> None:
        """Lose a message, with this probability; its waiter gives up some time later."""
        if self.world.happens(share):
            self.world.step(what)
            await asyncio.sleep(self.world.chance.uniform(0.05, patience_s))
            raise NoAnswer

    async def _again(
        self, method: str, path: str, body: Any, key: str | None, uid: int | None, bearer: str | None
    ) -> None:
        """The same request once more, later, by a proxy on the way; its answer goes nowhere."""
        await asyncio.sleep(self.world.chance.choice((0.05, 0.5, 5.0)) * self.world.chance.random())
        if self.world.daemon is not None:
            self.world.step(f"again > {method} {path}")
            gone = asyncio.Event()
            gone.set()
            self.world.daemon.spawn(self._serve(method, path, body, key, gone, uid, bearer))

    async def _travel(self) -> None:
        slow = self.world.happens(0.03)
        await asyncio.sleep(self.world.chance.uniform(0.05, 1.5) if slow else self.world.chance.uniform(0.0002, 0.01))

    async def _serve(
        self,
        method: str,
        path: str,
        body: Any,
        key: str | None,
        gone: asyncio.Event,
        uid: int | None,
        bearer: str | None,
    ) -> tuple[int, Any]:
        raw = b"" if body is None else json.dumps(body).encode()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        if key is not None:
            headers.append((b"idempotency-key", key.encode()))
        if bearer is not None:
            headers.append((b"authorization", f"Bearer {bearer}".encode()))
        return await request(self.world.app, method, path, headers, raw, gone, uid)


async def request(
    app: FastAPI,
    method: str,
    path: str,
    headers: list[tuple[bytes, bytes]],
    raw: bytes,
    gone: asyncio.Event,
    uid: int | None = None,
) -> tuple[int, Any]:
    """One request by the ASGI protocol. `gone` is set when the client hangs up."""
    path, _, query = path.partition("?")
    sent, status, parts = False, 0, []

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": raw, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    peer = PeerCredentials(
        uid=os.geteuid() if uid is None else uid, connection=ConnectionType.SOCKET
    )  # on another host
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "state": {"peer": peer},
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8750),
    }
    await app(scope, receive, send)  # type: ignore[arg-type]
    content = b"".join(parts)
    return status, json.loads(content) if content else None
