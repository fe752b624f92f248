"""A document that never changes: compressed once, and not again for everyone who asks for it."""

from __future__ import annotations

import gzip
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response


class StaticDocument:
    """The document, and its compressed form."""

    def __init__(self, content: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> None:
        self.content, self.compressed = content, gzip.compress(content)
        self.headers = {"Content-Type": media_type, **(headers or {})}

    def respond(self, request: Request) -> Response:
        """The document, as the caller accepts it. `CompressionMiddleware` leaves what is compressed as it is."""
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(
                self.compressed, headers=self.headers | {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
            )
        return Response(self.content, headers=self.headers)
