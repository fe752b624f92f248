"""Request log: every request at level debug, those that failed or were slow at level warning."""

from __future__ import annotations

import logging
import time
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease_protocol.host.logging import fields

log = logging.getLogger("gpulease.requests")

SLOW_S = 1.0
"""An answer is slow if it takes longer than this to begin, beyond the time that the caller asked to wait."""
UNBOUNDED_PATHS = ("/exchange", "/logs")
"""Answers to paths that end so may take any time: a long poll with its wait in the body, and a stream."""


class RequestLogMiddleware:
    """Logs each request when its answer has been sent: the path, but nothing of its query, headers or body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or not log.isEnabledFor(logging.WARNING):
            await self.app(scope, receive, send)
            return
        received_s = answered_s = time.monotonic()
        start: Message = {"status": None, "headers": []}

        async def receive_and_note() -> Message:
            nonlocal received_s
            message = await receive()
            if message["type"] == "http.request":
                received_s = time.monotonic()
            return message

        async def send_and_note(message: Message) -> None:
            nonlocal start, answered_s
            if message["type"] == "http.response.start":
                start, answered_s = message, time.monotonic()
            await send(message)

        try:
            await self.app(scope, receive_and_note, send_and_note)
        finally:
            request_id = Headers(raw=start["headers"]).get("x-request-id")
            log_request(scope, start["status"], request_id, answered_s - received_s)


def log_request(scope: Scope, status: int | None, request_id: str | None, took_s: float) -> None:
    """Log a request whose answer has been sent; `status` None if it has none.

    `took_s` is from the end of the request to the beginning of the answer: a slow client does not count.
    """
    # The part that causes a 503 logs it, once for all requests.
    failed = status is not None and status >= 500 and status != 503
    slow = took_s > SLOW_S and took_s - _requested_wait_s(scope) > SLOW_S
    level = logging.WARNING if failed or slow else logging.DEBUG
    if log.isEnabledFor(level):
        line = fields(
            event="request",
            method=scope["method"],
            path=scope["path"],
            status=status,
            took_s=round(max(took_s, 0.0), 4),
            request_id=request_id,
        )
        log.log(level, "request failed" if failed else "request slow" if slow else "request", extra=line)


def _requested_wait_s(scope: Scope) -> float:
    if scope["path"].endswith(UNBOUNDED_PATHS):
        return float("inf")
    try:
        return float(parse_qs(scope["query_string"].decode("ascii", "replace")).get("wait_s", ["0"])[-1])
    except ValueError:
        return 0.0
