"""Cross-origin requests: none, but for the origins that an administrator has listed.

A listed origin only lets a page *read* what it is answered. Who asks is found out as ever: over loopback a page needs a
token, because the connection would name whoever's browser it is (`app.OnlyFromHere`). So no credentials of the
browser's own are allowed, and there is no `*`.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from . import logs
from .current import AS_OF, STANDBY
from .problems import REQUEST_ID_HEADER

METHODS = ("GET", "HEAD", "POST", "DELETE")
SENT = ("Authorization", "Content-Type", "Idempotency-Key", "If-None-Match", "Last-Event-ID", REQUEST_ID_HEADER)
"""Headers that a page may send."""
SHOWN = ("ETag", "Retry-After", "Location", REQUEST_ID_HEADER, AS_OF, STANDBY, logs.OFFSET, logs.LENGTH, logs.KEPT)
"""Headers of an answer that it may read."""


class ListedOrigins(CORSMiddleware):
    """Answers a listed origin's preflight, and lets its pages read answers. Others meet what they met without it."""

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        super().__init__(
            app,
            allow_origins=sorted(origins),
            allow_methods=METHODS,
            allow_headers=SENT,
            expose_headers=SHOWN,
            allow_private_network=True,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] == "http" and Headers(scope=scope).get("origin") in self.allow_origins:
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)
