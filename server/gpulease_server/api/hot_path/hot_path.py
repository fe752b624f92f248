"""The hot path in front of the application, see the package."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gpulease_protocol.errors import Unavailable
from gpulease_server.api.auth.access_rules import authorized_caller
from gpulease_server.api.auth.callers import trusted_peer
from gpulease_server.api.auth.peer_credentials import PeerCredentials
from gpulease_server.api.direct_connection import direct_connection
from gpulease_server.api.fair_share import TURN, FairShare, Turn
from gpulease_server.api.headers import AS_OF, NO_SNIFFING, REQUEST_ID_HEADER
from gpulease_server.api.hot_path.hot_requests import HotRequest, recognize
from gpulease_server.api.hot_path.operations import Answer, Call
from gpulease_server.api.middleware.compression import MIN_BYTES, CompressionMiddleware
from gpulease_server.api.middleware.etag import CACHE_CONTROL, tag_of
from gpulease_server.api.middleware.fair_turns import turn_of
from gpulease_server.api.middleware.http_metrics import HttpMetrics
from gpulease_server.api.middleware.loopback_origin import may_come_from
from gpulease_server.api.middleware.request_id import assign_id, fault_response, log_disconnect
from gpulease_server.api.middleware.request_log import log, log_request
from gpulease_server.api.middleware.stale_reads import shown, stale_since
from gpulease_server.api.problems import expected_error, problem_response
from gpulease_server.runtime import clock
from gpulease_server.runtime.leadership.status import Leadership, LeadershipStatus

REQUEST_ID_FIELD = REQUEST_ID_HEADER.encode()
NO_SNIFFING_FIELDS = [(name.encode(), value.encode()) for name, value in NO_SNIFFING.items()]


class HotPath:
    """Answers the requests that it recognizes, as the application would.

    Args:
        app: The application, for its state.
        leadership: Of its daemon.
        share: The turns of its users.
        metrics: Its metrics by route.
    """

    def __init__(self, app: FastAPI, leadership: LeadershipStatus, share: FairShare, metrics: HttpMetrics) -> None:
        self.app = app
        self.leadership = leadership
        self.share = share
        self.metrics = metrics

    async def answers(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer a request. False if it is not one for the hot path: then nothing was done."""
        hot = recognize(scope)
        if hot is None:
            return False
        daemon = self.app.state.daemon
        peer = trusted_peer(scope.get("state", {}).get("peer") or PeerCredentials(), daemon.access)
        host = hot.headers.get(b"host")
        hosts = [] if host is None else [host.decode("latin-1")]
        if b"authorization" not in hot.headers and not may_come_from(peer, hosts, []):
            return False
        if self.leadership.standby_copy is not None or not daemon.writer.has_loaded:
            return False
        status, started_s = 499, clock.mono_s()
        self.metrics.in_flight += 1
        try:
            turn = turn_of(self.share, peer, scope)
            TURN.set(turn)
            if turn is None:
                status = await self._answer(hot, peer, None, scope, receive, send)
            else:
                await turn.begin()
                try:
                    status = await self._answer(hot, peer, turn, scope, receive, send)
                finally:
                    turn.exempt()
        except Exception:
            status = 500
            raise
        finally:
            self.metrics.in_flight -= 1
            self.metrics.count(hot.route.method, hot.route.path, status, clock.mono_s() - started_s)
        return True

    async def _answer(
        self, hot: HotRequest, peer: PeerCredentials, turn: Turn | None, scope: Scope, receive: Receive, send: Send
    ) -> int:
        """Carry out a request whose turn it is, and answer it. Returns the status; 499 if the client has gone."""
        request_id = assign_id(hot.headers.get(REQUEST_ID_FIELD, b"").decode("latin-1"))
        received_s = answered_s = clock.mono_s()
        status, direct = None, direct_connection(scope)
        try:
            call = None
            try:
                header = hot.headers.get(b"authorization")
                daemon = self.app.state.daemon
                caller = await authorized_caller(
                    hot.route.operation,
                    None if header is None else header.decode("latin-1"),
                    peer,
                    {hot.route.parameter: hot.name},
                    daemon,
                    self.app.state.rate_limiter,
                )
                call = Call(hot.name, hot.query, hot.headers, daemon, caller, peer, scope, receive, direct, received_s)
                answer = await hot.route.answer(call)
            except ClientDisconnect:
                log_disconnect(request_id)
                return 499
            except Exception as error:
                expected = expected_error(error)
                fault = fault_response(scope, request_id, error) if expected is None else problem_response(expected)
                answer = _of(fault)
                expected = None  # its traceback has this frame: only the garbage collector would free both
            if call is not None:
                received_s = call.received_s
            answer = await self._current(answer, scope)
            answered_s, status = clock.mono_s(), answer.status
            own = [(REQUEST_ID_FIELD, request_id.encode()), *NO_SNIFFING_FIELDS]
            if direct is not None and len(answer.body) < MIN_BYTES:
                if turn is not None:
                    turn.end()
                if direct.answer(status, answer.headers + own, answer.body):
                    return status
            await _send(answer, own, turn, scope, receive, send)
            return status
        finally:
            if log.isEnabledFor(logging.WARNING):
                log_request(scope, status, None if status is None else request_id, answered_s - received_s)

    async def _current(self, answer: Answer, scope: Scope) -> Answer:
        """The answer, marked or refused if it may be stale, and tagged."""
        as_of = None
        if answer.status < 500 and self.leadership.state() is not Leadership.CONFIRMED:
            try:
                as_of = await stale_since(self.leadership, scope["method"])
            except Unavailable as error:
                return _of(problem_response(error))
        if answer.status == 200 and scope["method"] == "GET":
            tag = f"W/{tag_of(answer.body)}"
            answer.headers += [(b"etag", tag.encode()), (b"cache-control", CACHE_CONTROL.encode())]
        if as_of is not None:
            answer.headers.append((AS_OF.lower().encode(), shown(as_of).encode()))
        return answer


def _of(response: Response) -> Answer:
    return Answer(response.status_code, response.raw_headers, bytes(response.body))


async def _send(
    answer: Answer, own: list[tuple[bytes, bytes]], turn: Turn | None, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send an answer with the daemon's `own` fields, compressed if it is long."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *own]
        elif turn is not None:
            turn.end()  # a client may take its time to read
        await send(message)

    async def send_answer(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await send({"type": "http.response.body", "body": answer.body})

    if len(answer.body) < MIN_BYTES:
        await send_answer(scope, receive, send_last)
    else:
        await CompressionMiddleware(send_answer)(scope, receive, send_last)
