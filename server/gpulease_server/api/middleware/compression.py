"""gzip for long answers."""

from __future__ import annotations

import re

from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gpulease_server.api.shared_answers import GZIP_LEVEL

MIN_BYTES = 2048
LOGS = re.compile(r"/v1/jobs/[^/]+/logs/?")


class CompressionMiddleware(GZipMiddleware):
    """Compresses long answers, but never a log: a follower wants each line as soon as it is written."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, MIN_BYTES, GZIP_LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and LOGS.fullmatch(scope["path"]):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
