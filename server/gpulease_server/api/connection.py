"""What every connection is held to before the application sees a request.

uvicorn waits for ever for the rest of a request, takes heads of any size, and answers what is not HTTP with plain text.
A connection here is in one of three states, each with its bound:

    waiting --first byte--> HEAD --head complete--> BODY --message complete--> QUIET --next byte--> HEAD ...

| what comes | what follows |
|---|---|
| nothing, after the connection was made | closed after `head_s` |
| part of a head, then nothing, or a byte now and then | 408 after `head_s`, closed |
| part of a body | 408 after `body_s`, closed; the time counts only while the application wants to read on |
| a head over `max_head_bytes` or of over `max_headers` fields; an address over `MAX_URL_BYTES` | 431 or 414, closed |
| no HTTP at all, half chunks, two lengths | 400, closed; an answer that is under way is finished first |
| over `max_pipelined` requests ahead of their answers | closed |
| nobody takes the answer | closed when not one byte of it was taken in `stalled_s` |
| over `max_connections` connections, or over a `SHARE` of them by one user | 503, closed |

A daemon that was stopped and continued, or is late, finds its timers due before what has arrived meanwhile is read. So
a bound is looked at twice, `SECOND_LOOK_S` apart, and what is read in between counts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import Counter
from enum import Enum, auto
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gpulease.errors import GpuleaseError, TooSlow, Unavailable

from ..runtime import ids
from .problems import REQUEST_ID, REQUEST_ID_HEADER, HeadTooLarge, NotHttp, UrlTooLong, problem_response

SECOND_LOOK_S = 1.0
MAX_URL_BYTES = 60_000
"""The parser's own limit is a little higher, and it says only that something is wrong."""
MAX_CONNECTIONS = 10_000
SHARE = 4
"""The part of everything that one user may take: one in so many. Root and the daemon's own user may take all, and
half of it those who are known by token alone, whose connections nobody can tell apart."""
OWN_DESCRIPTORS = 512
"""File descriptors that are kept back for the database, logs and the worker."""

strangers = logging.getLogger("uvicorn.error.connection")
strangers.setLevel(logging.ERROR)  # whoever sends nonsense has an answer; a line of the log for each would be his, too


def connections_allowed() -> int:
    """How many connections this process can have open, by its limit of file descriptors (`ulimit -n`).

    The soft limit is raised as far as is of use: it is 1024 on most systems, for programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + OWN_DESCRIPTORS
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(64, min(MAX_CONNECTIONS, soft - OWN_DESCRIPTORS))


class Part(Enum):
    """What of a request is to come next."""

    HEAD = auto()
    BODY = auto()
    QUIET = auto()


class Refused(Exception):
    """Ends the parsing of a request that was answered already."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds. See the module."""

    head_s: ClassVar[float] = 10.0
    body_s: ClassVar[float] = 60.0
    stalled_s: ClassVar[float] = 300.0
    max_head_bytes: ClassVar[int] = 2**17
    max_headers: ClassVar[int] = 200
    open_by: ClassVar[Counter[int | None]] = Counter()
    """Connections by user id; None for those of whom it is not known."""
    whose: int | None = None
    """Whose this one is; set before it is made."""
    max_pipelined: ClassVar[int] = 32
    max_connections: ClassVar[int] = MAX_CONNECTIONS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = strangers
        self._part = Part.HEAD
        self._watched: tuple[int, Part] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._requests = 0
        self._head_bytes = 0
        self._fields = 0
        self._over = False
        """True once it was answered for the last time; what still comes is passed over."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or refuse what is too much."""
        super().connection_made(transport)
        self.open_by[self.whose] += 1
        most = self._most_of_one_user()
        if len(self.connections) > self.max_connections:
            error = Unavailable(f"{self.max_connections} connections are open already.", remedy="Ask again.")
            self._answer(error)
        elif self.open_by[self.whose] > most:
            detail = f"{most} connections of one user, or of callers without a name, are open already."
            self._answer(Unavailable(detail, remedy="Close some."))
        else:
            self._watch()

    def _most_of_one_user(self) -> int:
        """How many connections whoever has made this one may have open."""
        if self.whose in (0, os.geteuid()):
            return self.max_connections
        return self.max_connections // (2 if self.whose is None else SHARE)

    def connection_lost(self, exc: Exception | None) -> None:
        """End every watch."""
        self._over = True
        self.open_by[self.whose] -= 1
        if not self.open_by[self.whose]:
            del self.open_by[self.whose]
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what has arrived, unless it is too much."""
        if self._over:
            return
        if self._part is Part.QUIET:
            self._part, self._head_bytes = Part.HEAD, 0
        if self._part is Part.HEAD:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._over:
            return
        if self._part is Part.HEAD and self._head_bytes > self.max_head_bytes:
            self._refuse(HeadTooLarge(f"The head of the request is over {self.max_head_bytes} bytes."))
        self._watch()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._part = Part.HEAD
        self._requests += 1
        self._fields = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """One field of the head."""
        self._fields += 1
        if self._fields > self.max_headers:
            self._refuse(HeadTooLarge(f"The request has over {self.max_headers} header fields."))
            raise Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(UrlTooLong(f"The address is over {MAX_URL_BYTES} bytes."))
            raise Refused
        if size > self.max_head_bytes:
            self._refuse(HeadTooLarge(f"The head of the request is over {self.max_head_bytes} bytes."))
            raise Refused
        if len(self.pipeline) >= self.max_pipelined:
            self._over = True
            self.transport.abort()
            raise Refused
        super().on_headers_complete()
        self._part = Part.BODY

    def on_message_complete(self) -> None:
        """The request is whole."""
        super().on_message_complete()
        self._part = Part.QUIET

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or what was answered already."""
        if not self._over:
            self._refuse(NotHttp("This is not a request of HTTP/1.1.", remedy="Use curl or a library of HTTP."))

    def pause_writing(self) -> None:
        """The caller takes nothing for the moment."""
        super().pause_writing()
        if self._stall_timer is None:
            self._unsent = self.transport.get_write_buffer_size()
            self._stall_timer = self.loop.call_later(self.stalled_s, self._look_at_reader)

    def resume_writing(self) -> None:
        """He takes it."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _look_at_reader(self) -> None:
        self._stall_timer = None
        left = self.transport.get_write_buffer_size()
        if left >= self._unsent:
            self.transport.abort()
            return
        self._unsent = left
        self._stall_timer = self.loop.call_later(self.stalled_s, self._look_at_reader)

    def _watch(self) -> None:
        """Have the present part bounded in time; each part once."""
        if self._part is Part.QUIET:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._watched = None
        elif self._watched != (watched := (self._requests, self._part)):
            if self._timer is not None:
                self._timer.cancel()
            self._watched = watched
            limit_s = self.head_s if self._part is Part.HEAD else self.body_s
            self._timer = self.loop.call_later(limit_s, self._due)

    def _due(self) -> None:
        self._timer = self.loop.call_later(SECOND_LOOK_S, self._late)

    def _late(self) -> None:
        if self._part is Part.BODY and self.flow.read_paused:
            self._timer = self.loop.call_later(self.body_s, self._due)  # it is the application that does not read on
        elif self._part is Part.HEAD and self._head_bytes == 0:
            self._over = True
            self.transport.close()
        else:
            limit_s = self.head_s if self._part is Part.HEAD else self.body_s
            self._refuse(TooSlow(f"The request was not whole within {limit_s:.0f} s.", remedy="Send it faster."))

    def _refuse(self, error: GpuleaseError) -> None:
        """End the connection with this error; an answer that is under way is finished first."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._answer(error)
        elif self._part is Part.BODY and cycle.more_body:
            if cycle.response_started or self.pipeline:
                self._over = True
                self.transport.abort()
            else:
                self._answer(error)
        else:
            self._over = True
            cycle.keep_alive = False

    def _answer(self, error: GpuleaseError) -> None:
        """The last answer of this connection."""
        self._over = True
        name = ids.make("request")
        REQUEST_ID.set(name)
        response = problem_response(error)
        fields = [*self.server_state.default_headers, *response.raw_headers]
        fields += [(REQUEST_ID_HEADER.encode(), name.encode()), (b"connection", b"close")]
        head = b"".join(b"%b: %b\r\n" % field for field in fields)
        self.transport.write(STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body))
        self.transport.close()
