"""What every request passes first and last: it has a name, and whatever happens to it, it has an answer.

The name is the caller's `X-Request-Id` where that is one word of at most 64 letters, digits and `._-`, else one made
here. It comes back in the same header of every answer, in every problem document, and stands in the log beside a fault.
"""

from __future__ import annotations

import logging
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease.errors import GpuleaseError

from ..runtime import ids
from .problems import REQUEST_ID, REQUEST_ID_HEADER, problem_response

log = logging.getLogger("gpulease.api")

SANE = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""A name of a caller's own that is taken over; anything else might break a line of a log."""


class Boundary:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the request, pass it on, and answer for a fault."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        name = given if SANE.fullmatch(given) else ids.make("request")
        REQUEST_ID.set(name)
        begun = False

        async def named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = name
            await send(message)

        try:
            await self.app(scope, receive, named)
        except ClientDisconnect:
            log.debug("%s: the caller went away in the middle of his request", name)
        except Exception as error:
            if begun:
                raise  # it is logged where the connection is closed
            log.error("%s %s failed (%s)", scope["method"], ascii(scope["path"])[1:-1], name, exc_info=error)
            fault = GpuleaseError("The daemon has a fault.", remedy="Its log has the details; please report it.")
            await problem_response(fault)(scope, receive, named)
