"""Forbids browsers to guess a media type (`X-Content-Type-Options: nosniff`), on every answer.

Answers quote what users wrote: paths in errors, labels, commands, logs. A browser that took one for HTML would run the
script in it. `http_limits` adds the same field to what it answers before there is a request.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease_server.api.headers import NO_SNIFFING


class NoSniffingMiddleware:
    """Adds the field to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and add the field to its answer."""

        async def send_with_field(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(NO_SNIFFING)
            await send(message)

        await self.app(scope, receive, send_with_field)
