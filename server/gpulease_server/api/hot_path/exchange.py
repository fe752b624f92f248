"""One request of the hot path and its answer.

A renewal or release that has arrived as a whole needs no task: plain functions go from each state to the next,
and the writer calls the one that answers. Where one has to wait, a task goes on from there.

    begin: turn -> caller -> body -> writer          _on_decided: turn -> answer -> written -> end
             |       |                                              |        |
             +-------+--> task: run, from its begin                 +--------+--> task: the rest

| what happens | what is done |
|---|---|
| it is another request, or its body is not complete | a task from its begin, see `run` |
| its turn comes later; the caller is not in memory; the lease is not; nothing can be recorded | the same |
| an error that is to be answered, or a bug that is met before the answer | answered with a problem |
| a bug while the answer is written | a task raises it: uvicorn logs it, and answers or closes the connection |
| after the decision its turn comes later; it is not sure that the answer is current; the client reads slowly, or has \
gone | a task does the rest |
| the daemon stops | uvicorn waits for it as for a task, see `LimitedHttpProtocol.tasks` |
| the writer ends before the decision | it refuses the request, which is answered |
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gpulease_protocol.errors import GpuleaseError, Unavailable
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Lease
from gpulease_server.api.auth.access_rules import authorized_caller
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.auth.peer_credentials import PeerCredentials
from gpulease_server.api.direct_connection import direct_connection
from gpulease_server.api.fair_share import TURN, FairShare
from gpulease_server.api.headers import AS_OF, NO_SNIFFING, REQUEST_ID_HEADER
from gpulease_server.api.hot_path.hot_requests import HotRequest
from gpulease_server.api.hot_path.operations import Answer, Call, LeaseChange
from gpulease_server.api.http_limits import LimitedHttpProtocol
from gpulease_server.api.middleware.compression import MIN_BYTES, CompressionMiddleware
from gpulease_server.api.middleware.etag import CACHE_CONTROL, tag_of
from gpulease_server.api.middleware.fair_turns import turn_of
from gpulease_server.api.middleware.http_metrics import HttpMetrics
from gpulease_server.api.middleware.request_id import assign_id, fault_response, log_disconnect
from gpulease_server.api.middleware.request_log import log, log_request
from gpulease_server.api.middleware.stale_reads import shown, stale_since
from gpulease_server.api.problems import REQUEST_ID, expected_error, problem_response
from gpulease_server.core.turn import Answer as Decided
from gpulease_server.runtime import clock
from gpulease_server.runtime.leadership.status import Leadership, LeadershipStatus

REQUEST_ID_FIELD = REQUEST_ID_HEADER.encode()
NO_SNIFFING_FIELDS = [(name.encode(), value.encode()) for name, value in NO_SNIFFING.items()]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shared:
    """What all requests of an application share."""

    app: FastAPI
    """For its state."""
    leadership: LeadershipStatus
    """Of its daemon."""
    share: FairShare
    """The turns of its users."""
    metrics: HttpMetrics
    """By route."""


class MustWait(Exception):
    """What is not available at once has to be waited for."""


class Exchange:
    """A request that takes the hot path, from when it is counted."""

    __slots__ = (
        "_answered_s", "_call", "_counted", "_cycle", "_direct", "_has_ended", "_hot", "_peer", "_protocol",
        "_received_s", "_record", "_request_id", "_scope", "_shared", "_started_s", "_status",
        "_tasks", "_turn",
    )  # fmt: skip

    def __init__(self, shared: Shared, hot: HotRequest, peer: PeerCredentials, scope: Scope) -> None:
        self._shared, self._hot, self._peer, self._scope = shared, hot, peer, scope
        self._direct = direct_connection(scope)
        self._turn = turn_of(shared.share, peer, shared.app.state.daemon.bearer_tokens, scope)
        self._request_id = ""
        self._tasks: set[Any] | None = None
        """What uvicorn waits for when it stops; None if this runs in a task from its begin."""
        self._call: Call | None = None
        self._status: int | None = None
        self._counted = 499
        """The status for the metrics."""
        self._has_ended = False
        self._started_s = self._received_s = self._answered_s = clock.mono_s()
        shared.metrics.in_flight += 1

    # In a task.

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry it out and answer it."""
        with self._to_its_end():
            TURN.set(self._turn)
            try:
                if self._turn is not None:
                    await self._turn.begin()
            except ClientDisconnect:
                return
            self._identify()
            try:
                self._call = self._called(await self._authorized(), receive)
                answer = await self._hot.route.answer(self._call)
            except ClientDisconnect:
                log_disconnect(self._request_id)
                return
            except Exception as error:
                answer = self._failed(error)
            await self._answer(answer, receive, send)

    @contextmanager
    def _to_its_end(self) -> Iterator[None]:
        """For what a task does last: however that ends, the request has ended with it."""
        try:
            yield
        except Exception:
            self._counted = 500
            raise
        finally:
            self._end()

    async def _answer(self, answer: Answer, receive: Receive, send: Send) -> None:
        answer = await self._current(answer)
        if not self._is_written(answer):
            await self._send(answer, receive, send)
        self._counted = answer.status

    async def _current(self, answer: Answer) -> Answer:
        """The answer, marked or refused if it may be stale, and tagged."""
        as_of, method = None, self._scope["method"]
        if not self._is_current(answer):
            try:
                as_of = await stale_since(self._shared.leadership, method)
            except Unavailable as error:
                return self._failed(error)
        if answer.status == 200 and method == "GET":
            tag = f"W/{tag_of(answer.body)}"
            answer.headers += [(b"etag", tag.encode()), (b"cache-control", CACHE_CONTROL.encode())]
        if as_of is not None:
            answer.headers.append((AS_OF.lower().encode(), shown(as_of).encode()))
        return answer

    async def _send(self, answer: Answer, receive: Receive, send: Send) -> None:
        """Send an answer, compressed if it is long."""
        own = self._own_fields()

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *own]
            elif self._turn is not None:
                self._turn.end()  # a client may take its time to read
            await send(message)

        async def send_answer(_: Scope, __: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
            await send({"type": "http.response.body", "body": answer.body})

        if len(answer.body) < MIN_BYTES:
            await send_answer(self._scope, receive, send_last)
        else:
            await CompressionMiddleware(send_answer)(self._scope, receive, send_last)

    # Without a task.

    def begin(self, cycle: RequestResponseCycle, protocol: LimitedHttpProtocol) -> None:
        """Carry it out as far as that needs no task. The whole request has arrived."""
        self._cycle, self._protocol, self._tasks = cycle, protocol, protocol.tasks
        try:
            if not self._begins_at_once():
                protocol.start_task(cycle, self.run)
        except Exception as error:
            self._break(error)

    def _begins_at_once(self) -> bool:
        operation, daemon = self._hot.route.answer, self._shared.app.state.daemon
        record = daemon.ledger.leases.get(self._hot.name)
        if not isinstance(operation, LeaseChange) or b"authorization" in self._hot.headers or record is None:
            return False
        if daemon.writer.problem is not None or (self._turn is not None and not self._turn.begins_at_once()):
            return False
        self._identify()
        try:
            caller = _at_once(self._authorized())
            if self._direct is None or (body := self._direct.take_body()) is None:
                return False
            self._call, self._record = self._called(caller, self._cycle.receive), record  # type: ignore[arg-type]
            happening = operation.happening(self._call, record, operation.token(self._call, body))
            daemon.writer.begin(happening, self._on_decided)
        except MustWait:
            return False
        except Exception as error:
            self._conclude(self._failed(error))
            return True
        self._protocol.tasks.add(self)  # type: ignore[arg-type] # uvicorn asks whether there are any, and cancels them
        if self._turn is not None:
            self._turn.end_for_writer()
        return True

    def _on_decided(self, decided: Decided) -> None:
        if self._has_ended:
            return  # a bug was answered
        try:
            if self._turn is None or self._turn.begins_at_once(resumes=True):
                self._conclude(self._answer_to(decided))
            else:
                self._protocol.start_task(self._cycle, partial(self._resume, decided))
        except Exception as error:
            self._break(error)

    def _answer_to(self, decided: Decided) -> Answer:
        if isinstance(decided, GpuleaseError):
            return self._failed(decided)
        operation = self._hot.route.answer
        try:
            assert isinstance(operation, LeaseChange)
            assert isinstance(decided, Lease)
            assert self._call is not None
            return operation.answer(self._call, self._record, decided)
        except Exception as error:
            return self._failed(error)

    def _conclude(self, answer: Answer) -> None:
        """Write the answer, if that need not wait."""
        if self._is_current(answer) and self._is_written(answer):
            self._counted = answer.status
            self._end()
            self._cycle.on_response = _nothing  # as uvicorn does: it refers to the connection, and that to it
        else:
            self._protocol.start_task(self._cycle, partial(self._answer_in_task, answer))

    async def _resume(self, decided: Decided, _: Scope, receive: Receive, send: Send) -> None:
        """Answer it when its turn has come."""
        assert self._turn is not None
        with self._to_its_end():
            await self._turn.begin(resumes=True)
            await self._answer(self._answer_to(decided), receive, send)

    async def _answer_in_task(self, answer: Answer, _: Scope, receive: Receive, send: Send) -> None:
        with self._to_its_end():
            await self._answer(answer, receive, send)

    def _break(self, error: Exception) -> None:
        """After a bug: let uvicorn log it, and answer or close the connection."""
        self._counted = 500
        self._end()
        self._protocol.start_task(self._cycle, partial(_raise, error))

    def cancel(self, msg: str | None = None) -> None:
        """What uvicorn does to tasks that take too long to end. The writer, which ends next, refuses this."""

    # In both.

    def _identify(self) -> None:
        """It works from now on."""
        if not self._request_id:
            self._request_id = assign_id(self._hot.headers.get(REQUEST_ID_FIELD, b"").decode("latin-1"))
            self._received_s = self._answered_s = clock.mono_s()

    async def _authorized(self) -> Caller:
        header, hot = self._hot.headers.get(b"authorization"), self._hot
        return await authorized_caller(
            hot.route.operation,
            None if header is None else header.decode("latin-1"),
            self._peer,
            {hot.route.parameter: hot.name},
            self._shared.app.state.daemon,
            self._shared.app.state.rate_limiter,
        )

    def _called(self, caller: Caller, receive: Receive) -> Call:
        hot, daemon = self._hot, self._shared.app.state.daemon
        return Call(
            hot.name, hot.query, hot.headers, daemon, caller, self._peer, self._scope, receive, self._direct,
            self._received_s,
        )  # fmt: skip

    def _failed(self, error: Exception) -> Answer:
        """The answer to a request that met this."""
        REQUEST_ID.set(self._request_id)
        expected = expected_error(error)
        if expected is None:
            return _of(fault_response(self._scope, self._request_id, error))
        return _of(problem_response(expected))

    def _is_current(self, answer: Answer) -> bool:
        return answer.status >= 500 or self._shared.leadership.state() is Leadership.CONFIRMED

    def _is_written(self, answer: Answer) -> bool:
        """True if the answer could be written at once."""
        self._answered_s, self._status = clock.mono_s(), answer.status
        if self._direct is None or len(answer.body) >= MIN_BYTES:
            return False
        if self._turn is not None:
            self._turn.end()
        return self._direct.answer(answer.status, answer.headers + self._own_fields(), answer.body)

    def _own_fields(self) -> list[tuple[bytes, bytes]]:
        """The daemon's own, of every answer."""
        return [(REQUEST_ID_FIELD, self._request_id.encode()), *NO_SNIFFING_FIELDS]

    def _end(self) -> None:
        """It is answered, or never will be: count and log it, once."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._request_id and log.isEnabledFor(logging.WARNING):
            received_s = self._received_s if self._call is None else self._call.received_s
            request_id = None if self._status is None else self._request_id
            log_request(self._scope, self._status, request_id, self._answered_s - received_s)
        if self._turn is not None:
            self._turn.exempt()
        metrics, route = self._shared.metrics, self._hot.route
        metrics.in_flight -= 1
        metrics.count(route.method, route.path, self._counted, clock.mono_s() - self._started_s)
        if self._tasks is not None:
            self._tasks.discard(self)


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of what need not wait. Raises `MustWait` if it must."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise MustWait


async def _raise(error: Exception, *_: object) -> None:
    raise error


def _nothing() -> None:
    """In place of what was to be done once."""


def _of(response: Response) -> Answer:
    return Answer(response.status_code, response.raw_headers, bytes(response.body))
