"""Cross-origin requests (CORS): allowed only for origins that an administrator has listed.

A listed origin only lets its pages *read* answers. Callers are identified as always: over loopback a page needs a
token, because the connection would identify the user of the browser (`LoopbackOriginMiddleware`). So credentials that
the browser adds by itself are not allowed, and there is no `*`.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gpulease_server.api.headers import AS_OF, LOG_BYTES, LOG_KEPT_BYTES, LOG_OFFSET, REQUEST_ID_HEADER, STANDBY

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
REQUEST_HEADERS = (
    "Authorization",
    "Content-Type",
    "Idempotency-Key",
    "If-None-Match",
    "Last-Event-ID",
    REQUEST_ID_HEADER,
)
"""Headers that a page may send."""
RESPONSE_HEADERS = (
    "ETag",
    "Retry-After",
    "Location",
    "Link",
    REQUEST_ID_HEADER,
    AS_OF,
    STANDBY,
    LOG_OFFSET,
    LOG_BYTES,
    LOG_KEPT_BYTES,
)
"""Headers of a response that it may read."""


class AllowedOriginsCORSMiddleware(CORSMiddleware):
    """Answers the preflight of a listed origin and lets its pages read answers. Does nothing for other requests."""

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        super().__init__(
            app,
            allow_origins=sorted(origins),
            allow_methods=METHODS,
            allow_headers=REQUEST_HEADERS,
            expose_headers=RESPONSE_HEADERS,
            allow_private_network=True,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] == "http" and Headers(scope=scope).get("origin") in self.allow_origins:
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)
