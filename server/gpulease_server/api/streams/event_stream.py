"""`GET /v1/events` as server-sent events: an endless stream of events, as they are committed.

    id: 4711                        `seq`, for Last-Event-ID
    event: lease.granted            its `kind`
    data: {"seq": 4711, ...}        the event, as in a page

A stream wakes when a turn with events was committed and sends what it has not sent yet: from memory if that reaches
back far enough (`runtime.recent_events`), otherwise in pages from the database. So it holds a position and one batch,
whatever its client does:

| what happens | result |
|---|---|
| no event for `KEEP_ALIVE_S` | a comment, which shows both sides that the other is there |
| the client is slower than the events | `send` waits for it; it is served from the database until it has caught up |
| the client reads nothing at all | the connection is closed (`http_limits`, `stalled_s`) |
| the events that it needs next have been pruned | an event `events_pruned` with the problem of a page; the end |
| Last-Event-ID is of another database, which had more events | 410, as for events that have been pruned |
| the client's token is revoked or expires | a comment; the end |
| the daemon stops, or another one has taken over | a comment; the end. `seq` continues in the next daemon |
| the daemon is a standby | 503, as for every long poll; it names the writer |
| the database cannot be read while the client is behind | a comment; the end. It reconnects with Last-Event-ID |
| `MAX_STREAMS` are open | 503 with Retry-After |

Only committed events are sent, and a commit proves that this daemon is the writer: no event is ever shown that another
daemon does not have.
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

from gpulease_protocol.errors import EventsPruned, InvalidRequest, Unavailable
from gpulease_protocol.model import Event
from gpulease_server.api import fair_share
from gpulease_server.api.auth.callers import Caller, is_still_valid
from gpulease_server.api.auth.redaction import hidden_kinds, redact_event
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.headers import UNBUFFERED
from gpulease_server.api.http_limits import USER_SHARE
from gpulease_server.runtime.recent_events import EVENTS_KEY
from gpulease_server.store.event_pages import EventFilter, FoundEvents, find_events

MEDIA_TYPE = "text/event-stream"
MAX_STREAMS = 512
"""Streams at one time."""
MAX_BATCH = 200
"""Events in one part."""
KEEP_ALIVE_S = 15.0
TOKEN_INVALID = b": the token is no longer valid\n\n"
RETRY_MS = 1000
"""How long a browser waits before it reconnects."""
EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def is_requested(request: Request) -> bool:
    """True if the caller asks for a stream rather than a page."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def events_pruned(after: int, pruned_seq: int) -> EventsPruned:
    """The error for events that have been pruned."""
    return EventsPruned(
        f"Events {after + 1} to {pruned_seq} have been pruned.",
        remedy=f"Continue with after={pruned_seq}, and read the current state from leases, jobs and GPUs.",
        extra={"pruned_seq": pruned_seq},
    )


def require_kept(after: int, found: FoundEvents) -> None:
    """Raise EventsPruned if the events after `after` have been pruned, or if there has never been an event `after`:
    the caller saw it in another database, and would miss events until this one has as many."""
    last_seq = max(found.last_seq, found.pruned_seq)
    if after > last_seq:
        raise EventsPruned(
            f"There is no event {after}: the newest is {last_seq}. The database may have been replaced by an older"
            " one, as a backup is.",
            remedy=f"Continue with after={last_seq}, and read the current state from leases, jobs and GPUs.",
            extra={"pruned_seq": last_seq},
        )
    if 0 < after < found.pruned_seq:
        raise events_pruned(after, found.pruned_seq)


async def open_stream(daemon: DaemonState, caller: Caller, request: Request, after: int | None) -> EventStream:
    """A stream of the events after `after`, or after Last-Event-ID, which takes precedence because browsers add it when
    they reconnect. With neither, of new events only. Raises EventsPruned, InvalidRequest, Unavailable."""
    last_event_id = request.headers.get("last-event-id")
    if last_event_id:
        if not last_event_id.isascii() or not last_event_id.isdigit() or len(last_event_id) > 18:
            raise InvalidRequest(f"Last-Event-ID: {last_event_id[:40]!r} is not the `id` of an event.")
        after = int(last_event_id)
    recent = daemon.writer.recent_events
    position = recent.last_seq if after is None else after
    # An event may be in the database, and in a page, a moment before it is among the recent ones.
    if position > recent.last_seq or (position > 0 and recent.after(position, 1) is None):
        found = await asyncio.to_thread(find_events, daemon.store.engine, EventFilter(), 1, after=position)
        require_kept(position, found)
    streams = open_streams(request)
    own = sum(stream.user == caller.user for stream in streams)
    if len(streams) >= MAX_STREAMS or (own >= MAX_STREAMS // USER_SHARE and not caller.is_admin):
        error = Unavailable(
            f"Too many event streams are open: {len(streams)}, {own} of them yours.",
            remedy="Read pages, or try again later.",
        )
        error.retry_after_s = 10.0
        raise error
    return EventStream(daemon, caller, position, streams)


def open_streams(request: Request) -> set[Any]:
    """The open streams of this application."""
    state = request.app.state
    if not hasattr(state, "event_streams"):
        state.event_streams = set()
    streams: set[Any] = state.event_streams
    return streams


class EventStream(Response):
    """The endless response."""

    def __init__(self, daemon: DaemonState, caller: Caller, position: int, streams: set[Any]) -> None:
        super().__init__(None, 200, UNBUFFERED, MEDIA_TYPE)
        del self.headers["content-length"]
        self.user = caller.user
        self._daemon = daemon
        self._caller = caller
        self._position = position
        self._streams = streams
        self._ended = False
        streams.add(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until either side ends."""
        disconnected = asyncio.ensure_future(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # An id without data: a client that loses the connection before the first event continues here.
            await _send_part(send, f"retry: {RETRY_MS}\nid: {self._position}\n\n".encode())
            while not (self._ended or disconnected.done()):
                async for part in self._new_parts():
                    await _send_part(send, part)
                if self._ended:
                    break
                if self._daemon.stopping.is_set() or self._daemon.leadership.superseded:
                    await _send_part(send, b": the daemon is shutting down; reconnect with Last-Event-ID\n\n")
                    break
                if not is_still_valid(self._caller, self._daemon):
                    await _send_part(send, TOKEN_INVALID)
                    break
                if not await self._wait(disconnected):
                    await _send_part(send, b": nothing new\n\n")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            disconnected.cancel()
            self._streams.discard(self)

    async def _new_parts(self) -> AsyncIterator[bytes]:
        """The events after the position, in parts; advances the position."""
        recent = self._daemon.writer.recent_events
        while self._position < recent.last_seq and not self._daemon.stopping.is_set():
            await fair_share.resume()
            last_seq = recent.last_seq
            batch = recent.after(self._position, MAX_BATCH)
            if batch is None:
                try:
                    batch, pruned_seq = await asyncio.to_thread(self._daemon.store.history, self._position, MAX_BATCH)
                except (OperationalError, InterfaceError, PoolTimeout):
                    self._ended = True
                    yield b": the database cannot be read; reconnect with Last-Event-ID\n\n"
                    return
                if 0 < self._position < pruned_seq:
                    self._ended = True
                    problem = json.dumps(events_pruned(self._position, pruned_seq).problem())
                    yield f"event: events_pruned\ndata: {problem}\n\n".encode()
                    return
            self._position = batch[-1].seq if batch else last_seq  # empty: all of them have been pruned
            ledger = self._daemon.ledger
            if not is_still_valid(self._caller, self._daemon):
                self._ended = True
                yield TOKEN_INVALID
                return
            hidden = hidden_kinds(self._caller)
            visible = [event for event in batch or () if not event.kind.startswith(hidden)]
            if visible:
                yield b"".join(_frame(redact_event(self._caller, event, ledger)) for event in visible)

    async def _wait(self, disconnected: asyncio.Future[None]) -> bool:
        """True if there may be new events, False after `KEEP_ALIVE_S`."""
        recorded = asyncio.ensure_future(self._recorded())
        waits = {recorded, disconnected}
        try:
            async with fair_share.waiting():
                done, _ = await asyncio.wait(waits, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            recorded.cancel()
        return bool(done)

    async def _recorded(self) -> None:
        daemon = self._daemon
        # Checked here, in the task that waits, so that no event is missed between check and wait.
        if daemon.writer.recent_events.last_seq <= self._position and not daemon.stopping.is_set():
            await daemon.writer.wakeups.wait(EVENTS_KEY, 2 * KEEP_ALIVE_S)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


@lru_cache(maxsize=4096)
def _frame(event: Event) -> bytes:
    """An event as it is sent; cached for all streams."""
    kind = event.kind.replace("\r", " ").replace("\n", " ")
    return f"id: {event.seq}\nevent: {kind}\ndata: ".encode() + EVENT.dump_json(event) + b"\n\n"
