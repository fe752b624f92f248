"""Outermost middleware but one: assigns the request id, and turns unhandled exceptions into a 500 problem.

The id is the caller's `X-Request-Id` if that is one word of at most 64 letters, digits and `._-`, otherwise one made
here. It is in the same header of every answer, in every problem document, and beside every fault in the log.
"""

from __future__ import annotations

import logging
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease_protocol.errors import GpuleaseError
from gpulease_server.api.headers import REQUEST_ID_HEADER
from gpulease_server.api.problems import REQUEST_ID, problem_response
from gpulease_server.runtime import ids

log = logging.getLogger("gpulease.api")

VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""A caller's id that is used; anything else might break a line of the log."""


class RequestIdMiddleware:
    """Assigns the request id and answers 500 for a fault."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Assign an id, pass the request on, and answer for a fault."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = assign_id(Headers(scope=scope).get(REQUEST_ID_HEADER, ""))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            log_disconnect(request_id)
        except Exception as error:
            if started:
                raise  # it is logged where the connection is closed
            await fault_response(scope, request_id, error)(scope, receive, send_with_id)


def assign_id(header: str) -> str:
    """The id of the current request, for what the caller sent as `X-Request-Id`; it is in `REQUEST_ID` from now on."""
    request_id = header if VALID_ID.fullmatch(header) else ids.new_id("request")
    REQUEST_ID.set(request_id)
    return request_id


def log_disconnect(request_id: str) -> None:
    """Note that there is no one to answer."""
    log.debug("%s: the client disconnected before it had sent the whole request", request_id)


def fault_response(scope: Scope, request_id: str, error: Exception) -> Response:
    """The answer to a request that met a bug, which is logged."""
    log.error("%s %s failed (%s)", scope["method"], ascii(scope["path"])[1:-1], request_id, exc_info=error)
    return problem_response(GpuleaseError("The daemon has a bug.", remedy="Its log has the details; please report it."))
