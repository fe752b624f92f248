"""`GET /v1/events` as server-sent events: what is recorded, as it is committed, for ever.

    id: 4711                        `seq`, for Last-Event-ID
    event: lease.granted            its `kind`
    data: {"seq": 4711, ...}        the event, as in a page

A stream wakes when a turn with events was committed (`Topics`) and sends what it has not sent yet: from memory if that
reaches back far enough (`runtime.recent`), else in pages from the database. So it holds a position and one batch,
whatever its reader does:

| what happens | what follows |
|---|---|
| nothing for `KEEP_ALIVE_S` | a comment, which shows both sides that the other is there |
| the reader is slower than the events | `send` waits for him; he reads from the database until he has caught up |
| he takes nothing at all | the connection ends (`connection.stalled_s`) |
| what he needs next has been pruned | an event `events_pruned` with the problem that a page would answer; the end |
| the reader's token is revoked or expires | nothing more but a comment; the end |
| the daemon stops, or another one has taken over | a comment that says so; the end. `seq` goes on in the next daemon |
| the daemon stands by | 503, as for every wait; the writer is named |
| the database cannot be read while he is behind | a comment; the end. He comes back with Last-Event-ID |
| `MAX_STREAMS` are open | 503 with Retry-After |

What is sent is committed, and a commit proves the term: no event is ever shown that another daemon does not have.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpulease.errors import EventsPruned, InvalidRequest, Unavailable
from gpulease.model import Event

from ..runtime.recent import EVENTS
from .callers import Caller
from .connection import SHARE
from .daemon import Daemon
from .visible import event_for, kinds_hidden

MEDIA_TYPE = "text/event-stream"
MAX_STREAMS = 512
"""Streams at one time."""
MAX_BATCH = 200
"""Events that are sent at once."""
KEEP_ALIVE_S = 15.0
NOT_KNOWN = b": the token is in force no more\n\n"
RETRY_MS = 1000
"""How long a browser waits before it comes back."""
EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def wanted(request: Request) -> bool:
    """True when the caller asks for a stream and not for a page."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def pruned(after: int, pruned_seq: int) -> EventsPruned:
    """What to say to who wants events that are gone."""
    return EventsPruned(
        f"Events {after + 1} to {pruned_seq} are no longer kept.",
        remedy=f"Go on with after={pruned_seq}, and look at leases, jobs and GPUs for what they are now.",
        extra={"pruned_seq": pruned_seq},
    )


async def opened(daemon: Daemon, caller: Caller, request: Request, after: int | None) -> EventStream:
    """A stream of what comes after `after`; Last-Event-ID counts more, since a browser adds it when it comes back. With
    neither, of what comes from now on. Raises EventsPruned, InvalidRequest, Unavailable."""
    said = request.headers.get("last-event-id")
    if said:
        if not said.isascii() or not said.isdigit() or len(said) > 18:
            raise InvalidRequest(f"Last-Event-ID: {said[:40]!r} is not the `id` of an event.")
        after = int(said)
    position = daemon.writer.recent.last_seq if after is None else after
    if 0 < position < daemon.writer.recent.last_seq and daemon.writer.recent.after(position, 1) is None:
        _, pruned_seq = await asyncio.to_thread(daemon.store.history, position, 1)
        if position < pruned_seq:
            raise pruned(position, pruned_seq)
    streams = open_streams(request)
    own = sum(stream.whose == caller.user for stream in streams)
    if len(streams) >= MAX_STREAMS or (own >= MAX_STREAMS // SHARE and not caller.admin):
        error = Unavailable(
            f"{own} of your streams of events and {len(streams)} of all are open already.",
            remedy="Read pages, or ask again.",
        )
        error.retry_after_s = 10.0
        raise error
    return EventStream(daemon, caller, position, streams)


def open_streams(request: Request) -> set[Any]:
    """The streams of this application that are open."""
    state = request.app.state
    if not hasattr(state, "event_streams"):
        state.event_streams = set()
    found: set[Any] = state.event_streams
    return found


class EventStream(Response):
    """The answer that does not end."""

    def __init__(self, daemon: Daemon, caller: Caller, position: int, streams: set[Any]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, headers, MEDIA_TYPE)
        del self.headers["content-length"]
        self.whose = caller.user
        self._daemon = daemon
        self._caller = caller
        self._position = position
        self._streams = streams
        self._over = False
        streams.add(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until either side ends."""
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # An id without data: whoever loses the connection before the first event goes on here.
            await _part(send, f"retry: {RETRY_MS}\nid: {self._position}\n\n".encode())
            while not (self._over or gone.done()):
                async for part in self._news():
                    await _part(send, part)
                if self._over:
                    break
                if self._daemon.stopping.is_set() or self._daemon.standing.superseded:
                    await _part(send, b": the daemon is shutting down; go on with Last-Event-ID\n\n")
                    break
                if not self._daemon.knows(self._caller):
                    await _part(send, NOT_KNOWN)
                    break
                if not await self._wait(gone):
                    await _part(send, b": nothing new\n\n")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._streams.discard(self)

    async def _news(self) -> AsyncIterator[bytes]:
        """What there is after the position, in parts; moves the position."""
        recent = self._daemon.writer.recent
        while self._position < recent.last_seq and not self._daemon.stopping.is_set():
            last_seq = recent.last_seq
            found = recent.after(self._position, MAX_BATCH)
            if found is None:
                try:
                    found, pruned_seq = await asyncio.to_thread(self._daemon.store.history, self._position, MAX_BATCH)
                except (OperationalError, InterfaceError, PoolTimeout):
                    self._over = True
                    yield b": the database cannot be read now; go on with Last-Event-ID\n\n"
                    return
                if 0 < self._position < pruned_seq:
                    self._over = True
                    problem = json.dumps(pruned(self._position, pruned_seq).problem())
                    yield f"event: events_pruned\ndata: {problem}\n\n".encode()
                    return
            self._position = found[-1].seq if found else last_seq  # none: all of them have been pruned
            ledger = self._daemon.ledger
            if not self._daemon.knows(self._caller):
                self._over = True
                yield NOT_KNOWN
                return
            hidden = kinds_hidden(self._caller)
            shown = [event for event in found or () if hidden is None or not event.kind.startswith(hidden)]
            if shown:
                yield b"".join(_spelled(event_for(self._caller, event, ledger)) for event in shown)

    async def _wait(self, gone: asyncio.Future[None]) -> bool:
        """True when there may be news, False when the time was over."""
        news = asyncio.ensure_future(self._changed())
        try:
            done, _ = await asyncio.wait({news, gone}, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        return bool(done)

    async def _changed(self) -> None:
        daemon = self._daemon
        # Looked at here, in the task that waits: no change falls between the two.
        if daemon.writer.recent.last_seq <= self._position and not daemon.stopping.is_set():
            await daemon.writer.topics.wait(EVENTS, 2 * KEEP_ALIVE_S)


async def _gone(receive: Receive) -> None:
    """Return when the caller has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


@lru_cache(maxsize=4096)
def _spelled(event: Event) -> bytes:
    """An event as it is sent; made once for all streams."""
    kind = event.kind.replace("\r", " ").replace("\n", " ")
    return f"id: {event.seq}\nevent: {kind}\ndata: ".encode() + EVENT.dump_json(event) + b"\n\n"
