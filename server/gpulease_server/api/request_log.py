"""The log of requests: all of them at debug, those that failed or were slow at warning."""

from __future__ import annotations

import logging
import time
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease.log_lines import fields

log = logging.getLogger("gpulease.requests")

SLOW_S = 1.0
"""An answer that takes longer than this to begin, beside what it was asked to wait, is slow."""
HELD = ("/exchange", "/logs")
"""Ends of paths whose answers take as long as they like: a long poll by its body, and a stream."""


class RequestLog:
    """Logs each request when its answer has been sent. Names its path, and nothing of its query, headers or body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or not log.isEnabledFor(logging.WARNING):
            await self.app(scope, receive, send)
            return
        asked_s = begun_s = time.monotonic()
        start: Message = {"status": None, "headers": []}

        async def heard() -> Message:
            nonlocal asked_s
            message = await receive()
            if message["type"] == "http.request":
                asked_s = time.monotonic()
            return message

        async def noting(message: Message) -> None:
            nonlocal start, begun_s
            if message["type"] == "http.response.start":
                start, begun_s = message, time.monotonic()
            await send(message)

        try:
            await self.app(scope, heard, noting)
        finally:
            _say(scope, start, begun_s - asked_s)


def _say(scope: Scope, start: Message, took_s: float) -> None:
    """`took_s` is from the end of the request to the beginning of the answer: what a slow caller takes is his own."""
    status = start["status"]
    # 503 is said by whom it concerns, once for all requests.
    failed = status is not None and status >= 500 and status != 503
    slow = took_s > SLOW_S and took_s - _asked_to_wait_s(scope) > SLOW_S
    level = logging.WARNING if failed or slow else logging.DEBUG
    if log.isEnabledFor(level):
        line = fields(
            event="request",
            method=scope["method"],
            path=scope["path"],
            status=status,
            took_s=round(max(took_s, 0.0), 4),
            request_id=Headers(raw=start["headers"]).get("x-request-id"),
        )
        log.log(level, "request failed" if failed else "request slow" if slow else "request", extra=line)


def _asked_to_wait_s(scope: Scope) -> float:
    if scope["path"].endswith(HELD):
        return float("inf")
    try:
        return float(parse_qs(scope["query_string"].decode("ascii", "replace")).get("wait_s", ["0"])[0])
    except ValueError:
        return 0.0
