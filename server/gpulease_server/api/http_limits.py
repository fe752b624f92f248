"""Limits on HTTP connections: protects the daemon against slowloris attacks, oversized heads and stalled readers.

uvicorn by itself waits forever for the rest of a request, accepts heads of any size, and answers input that is not HTTP
with plain text. A connection here is in one of three states, each with its limit:

    HEAD --head complete--> BODY --message complete--> IDLE --next byte--> HEAD ...

| input | result |
|---|---|
| nothing, after the connection was made | closed after `head_s` |
| part of a head, then nothing, or a byte now and then | 408 after `head_s`, closed |
| part of a body | 408 after `body_s`, closed; the time counts only while the application wants to read on |
| a head over `max_head_bytes` or with over `max_headers` fields; a URL over `MAX_URL_BYTES` | 431 or 414, closed |
| not HTTP, `CONNECT`, incomplete chunks, two content lengths | 400, closed; a response in progress is finished first |
| `Upgrade: h2c`, as some clients send with each request | answered as without it |
| over `max_pipelined` requests ahead of their responses | closed |
| a client that does not read its response | closed when it has taken no byte for `stalled_s` |
| over `max_connections` connections, or more than 1 / `USER_SHARE` of them from one user | 503, closed |
| over `max_request_bytes` of unanswered requests, or over 1 / `USER_SHARE` of it from one user | 503, closed |

A daemon that was stopped and continued, or is late, finds its timers due before it reads what arrived meanwhile. So a
time limit is checked twice, `RECHECK_S` apart, and what is read in between counts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from itertools import chain
from typing import Any, ClassVar

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gpulease_protocol.errors import GpuleaseError, TooSlow, Unavailable
from gpulease_server.api.direct_connection import EXTENSION, DirectConnection
from gpulease_server.api.headers import NO_SNIFFING, REQUEST_ID_HEADER
from gpulease_server.api.problems import REQUEST_ID, HeadTooLarge, NotHttp, UrlTooLong, problem_response
from gpulease_server.runtime import ids

RECHECK_S = 1.0
MAX_URL_BYTES = 60_000
"""The parser's own limit is a little higher, and its error does not say what is wrong."""
MAX_CONNECTIONS = 10_000
USER_SHARE = 4
"""One user may take 1 / `USER_SHARE` of every shared resource. Root and the daemon's own user may take all of it.
Callers who are identified by token only may take half together, because their connections cannot be told apart."""
ON_DISCONNECT = "gpulease.on_disconnect"
"""Key of a request's scope: a list of functions to call when its client disconnects before it is answered. ASGI itself
tells of that only to a task of its own that waits for it."""
RESERVED_DESCRIPTORS = 512
"""File descriptors reserved for the database, logs and the worker."""

connection_log = logging.getLogger("uvicorn.error.connection")
connection_log.setLevel(logging.ERROR)  # a client that sends garbage gets an answer, and must not fill the log


def _is_no_stop(record: logging.LogRecord) -> bool:
    """False for a request that uvicorn breaks off because the daemon stops: that is no bug of the daemon."""
    return record.exc_info is None or "graceful shutdown" not in str(record.exc_info[1])


connection_log.addFilter(_is_no_stop)


def raise_connection_limit() -> int:
    """Raise the soft limit of file descriptors as far as it is useful, and return how many connections it allows.

    The soft limit (`ulimit -n`) is 1024 on most systems, for programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    useful = MAX_CONNECTIONS + RESERVED_DESCRIPTORS
    limit = useful if hard == resource.RLIM_INFINITY else min(hard, useful)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(64, min(MAX_CONNECTIONS, soft - RESERVED_DESCRIPTORS))


class RequestPart(Enum):
    """The part of a request that comes next."""

    HEAD = auto()
    BODY = auto()
    IDLE = auto()


class RequestRefused(Exception):
    """Ends the parsing of a request that has been answered."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits. See the module."""

    head_s: ClassVar[float] = 10.0
    body_s: ClassVar[float] = 60.0
    stalled_s: ClassVar[float] = 300.0
    max_head_bytes: ClassVar[int] = 2**17
    max_headers: ClassVar[int] = 200
    open_by_uid: ClassVar[Counter[int | None]] = Counter()
    """Open connections by user id; None: unknown."""
    peer_uid: int | None = None
    """User id of the peer; a subclass sets it before `connection_made`."""
    max_pipelined: ClassVar[int] = 32
    max_connections: ClassVar[int] = MAX_CONNECTIONS
    max_request_bytes: ClassVar[int] = 256 * 2**20
    request_bytes_by_uid: ClassVar[Counter[int | None]] = Counter()
    """Bytes of unanswered requests, by user id: heads and bodies are in memory until the answer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = connection_log
        self._part = RequestPart.HEAD
        self._timed_part: tuple[int, RequestPart] | None = None
        """The request, by number, and its part that `_timer` is set for."""
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        self._request_count = 0
        self._head_bytes = 0
        self._user_request_bytes = 0
        """How many bytes the unanswered requests of the peer's user may have."""
        self._idle_since_s: float | None = None
        """When the last response was complete, if nothing has arrived since; by the clock of the loop."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._hot_path = getattr(self.app, "hot_path", None)
        self._is_parsing = False
        self._arrived: RequestResponseCycle | None = None
        """The request that is to be answered next, which is being parsed."""
        self._running: RequestResponseCycle | None = None
        """The request that is answered now. uvicorn's `cycle` is the newest, which may wait for its turn behind it."""
        self._unanswered: deque[int] = deque()
        """Bytes that have arrived of each unanswered request, oldest first."""
        self._closing = False
        """True after the last response; further input is ignored."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or refuse it if too many are open."""
        super().connection_made(transport)
        self.open_by_uid[self.peer_uid] += 1
        user_limit = self._user_share(self.max_connections)
        self._user_request_bytes = self._user_share(self.max_request_bytes)
        if len(self.connections) > self.max_connections:
            detail = f"{self.max_connections} connections are open already."
            self._send_last_response(Unavailable(detail, remedy="Try again later."))
        elif self.open_by_uid[self.peer_uid] > user_limit:
            detail = f"{user_limit} connections from {self._user_words} are open already."
            self._send_last_response(Unavailable(detail, remedy="Close some."))
        else:
            self._set_timer()

    def has_room(self, others: Counter[int | None]) -> bool:
        """True if the peer's user may open one more connection. `others`: those not counted here yet, by user id."""
        user_count = self.open_by_uid.get(self.peer_uid, 0) + others.get(self.peer_uid, 0)
        is_full = len(self.connections) + others.total() >= self.max_connections
        return not is_full and user_count < self._user_share(self.max_connections)

    def _user_share(self, whole: int) -> int:
        """How much of a shared resource the peer's user may take."""
        if self.peer_uid in (0, os.geteuid()):
            return whole
        return whole // (2 if self.peer_uid is None else USER_SHARE)

    @property
    def _user_words(self) -> str:
        return "callers without a user id" if self.peer_uid is None else "your user"

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._closing = True
        self.open_by_uid[self.peer_uid] -= 1
        if not self.open_by_uid[self.peer_uid]:
            del self.open_by_uid[self.peer_uid]
        self._remove_bytes(sum(self._unanswered))
        self._unanswered.clear()
        for timer in (self._timer, self._stall_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)
        if running is not None and running.disconnected:
            for callback in list(running.scope[ON_DISCONNECT]):  # type: ignore[literal-required]
                callback()

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, within the limits."""
        if self._closing:
            return
        self._idle_since_s = None
        if self._part is RequestPart.IDLE:
            self._part, self._head_bytes = RequestPart.HEAD, 0
        if self._part is RequestPart.HEAD:
            self._head_bytes += len(data)
        self._is_parsing = True
        try:
            self._parse(data)
        finally:
            self._is_parsing = False
            if self._arrived is not None:
                self._answer_arrived()
        if self._closing:
            return
        if self._part is RequestPart.HEAD and self._head_bytes > self.max_head_bytes:
            self._refuse(HeadTooLarge(f"The head of the request exceeds {self.max_head_bytes} bytes."))
        elif self._part is not RequestPart.IDLE and self.headers and len(self.headers) > self.max_headers:
            self._refuse_fields()  # of a head that goes on, or after a body in chunks
        self._set_timer()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                # After the head of a request that closes its connection, the former parser takes nothing more in.
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _head_without_upgrade(self) -> bytes:
        """The last head, without the field for which the parser takes the body that belongs to it for another
        protocol."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope[ON_DISCONNECT] = []  # type: ignore[literal-required]
        self._part = RequestPart.HEAD
        self._request_count += 1

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self.parser.get_method() == b"CONNECT":
            self.send_400_response("")
            raise RequestRefused
        if self.parser.should_upgrade():
            return  # it is parsed again
        if len(self.headers) > self.max_headers:
            self._refuse_fields()
            raise RequestRefused
        size = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(UrlTooLong(f"The URL exceeds {MAX_URL_BYTES} bytes."))
            raise RequestRefused
        if size > self.max_head_bytes:
            self._refuse(HeadTooLarge(f"The head of the request exceeds {self.max_head_bytes} bytes."))
            raise RequestRefused
        if len(self.pipeline) >= self.max_pipelined:
            self._closing = True
            self.transport.abort()
            raise RequestRefused
        self._add_bytes(size)
        self._unanswered.append(size)
        super().on_headers_complete()
        self.headers = []  # fields that come after the body are none of the head
        self._part = RequestPart.BODY

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Let the application answer a request."""
        self._running = cycle
        cycle.scope["extensions"] = {EXTENSION: DirectConnection(cycle)}  # type: ignore[dict-item]
        if self._is_parsing and app is self.app:
            self._arrived = cycle
        else:
            self.start_task(cycle, app)

    def _answer_arrived(self) -> None:
        """Answer the request of which the head was parsed just now; where all of it was, perhaps without a task."""
        cycle, self._arrived = self._arrived, None
        assert cycle is not None
        if self.transport.is_closing():
            return  # it was refused because of what follows its head
        if cycle.more_body or self._hot_path is None or not self._hot_path.begins(cycle, self):
            self.start_task(cycle, self.app)

    def start_task(self, cycle: RequestResponseCycle, app: Callable[..., Awaitable[None]]) -> None:
        """Let an application answer a request, or do the rest of what was begun, in a task."""
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        if not self.cycle.response_complete:  # else it is discarded
            self._add_bytes(len(body))
            self._unanswered[-1] += len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """A request is answered. As uvicorn's, which makes a timer for each response and cancels it for the next."""
        if self._unanswered:  # else the connection is lost
            self._remove_bytes(self._unanswered.popleft())
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since_s = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._check_idle)

    def _check_idle(self) -> None:
        """Close a connection on which nothing has arrived since the last response, for as long as one may stay."""
        self._idle_timer = None
        if self._idle_since_s is None:
            return
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0.0:
            self._idle_timer = self.loop.call_later(left_s, self._check_idle)
        else:
            self.timeout_keep_alive_handler()

    def _add_bytes(self, size_bytes: int) -> None:
        """Count so many bytes more of a request; refuse it if the unanswered ones would have too many."""
        counts = self.request_bytes_by_uid
        user_bytes = counts.get(self.peer_uid, 0) + size_bytes
        if user_bytes <= self._user_request_bytes and sum(counts.values()) + size_bytes <= self.max_request_bytes:
            counts[self.peer_uid] = user_bytes
        else:
            detail = f"Requests from {self._user_words} that are not answered yet have {user_bytes} bytes."
            self._refuse(Unavailable(detail, remedy="Send fewer large requests at once."))
            raise RequestRefused

    def _remove_bytes(self, size_bytes: int) -> None:
        self.request_bytes_by_uid[self.peer_uid] -= size_bytes
        if not self.request_bytes_by_uid[self.peer_uid]:
            del self.request_bytes_by_uid[self.peer_uid]

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._part = RequestPart.IDLE

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not HTTP, unless the connection is closing already."""
        if not self._closing:
            self._refuse(NotHttp("This is not an HTTP/1.1 request.", remedy="Use curl or an HTTP library."))

    def pause_writing(self) -> None:
        """The client has stopped reading for the moment."""
        super().pause_writing()
        if self._stall_timer is None:
            self._unsent_bytes = self.transport.get_write_buffer_size()
            self._stall_timer = self.loop.call_later(self.stalled_s, self._check_progress)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_progress(self) -> None:
        self._stall_timer = None
        left = self.transport.get_write_buffer_size()
        if left >= self._unsent_bytes:
            self.transport.abort()
            return
        self._unsent_bytes = left
        self._stall_timer = self.loop.call_later(self.stalled_s, self._check_progress)

    def _set_timer(self) -> None:
        """Start the timer for the current part, once for each part."""
        if self._part is RequestPart.IDLE:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._timed_part = None
        elif self._timed_part != (current := (self._request_count, self._part)):
            if self._timer is not None:
                self._timer.cancel()
            self._timed_part = current
            limit_s = self.head_s if self._part is RequestPart.HEAD else self.body_s
            self._timer = self.loop.call_later(limit_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self.loop.call_later(RECHECK_S, self._on_timeout)

    def _on_timeout(self) -> None:
        if self._part is RequestPart.BODY and self.flow.read_paused:
            # The application is not reading, so the client is not to blame.
            self._timer = self.loop.call_later(self.body_s, self._on_timer)
        elif self._part is RequestPart.HEAD and self._head_bytes == 0:
            self._closing = True
            self.transport.close()
        else:
            limit_s = self.head_s if self._part is RequestPart.HEAD else self.body_s
            self._refuse(TooSlow(f"The request was not complete after {limit_s:.0f} s.", remedy="Send it faster."))

    def _refuse_fields(self) -> None:
        self._refuse(HeadTooLarge(f"The request has over {self.max_headers} header fields."))

    def _refuse(self, error: GpuleaseError) -> None:
        """Close the connection with this error; a response in progress is finished first."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._send_last_response(error)
        elif self._part is RequestPart.BODY and cycle.more_body:
            if cycle.response_started or self.pipeline:
                self._closing = True
                self.transport.abort()
            else:
                self._send_last_response(error)
        else:
            self._closing = True
            cycle.keep_alive = False

    def _send_last_response(self, error: GpuleaseError) -> None:
        """Answer with this error and close the connection."""
        self._closing = True
        request_id = ids.new_id("request")
        REQUEST_ID.set(request_id)
        response = problem_response(error, NO_SNIFFING)
        fields = [*self.server_state.default_headers, *response.raw_headers]
        fields += [(REQUEST_ID_HEADER.encode(), request_id.encode()), (b"connection", b"close")]
        head = b"".join(b"%b: %b\r\n" % field for field in fields)
        self.transport.write(STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body))
        self.transport.close()
