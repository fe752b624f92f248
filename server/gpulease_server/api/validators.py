"""ETag for what is read, so that who looks again and again is sent only what has changed; and gzip for long answers.

The tag is a digest of the answer. Nothing cheaper is right: a GPU's state depends on the time as well as on the ledger.
What is saved is the sending and the reading, not the making. It is weak, because the same answer may come compressed.
"""

from __future__ import annotations

import hashlib
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ETAG = re.compile(r'(?:W/)?("[^"]*")')
COMPRESSED_BYTES = 2048
LEVEL = 4
"""Of zlib: 3 times as fast as the default for a tenth more bytes."""
LOGS = re.compile(r"/v1/jobs/[^/]+/logs/?")


class Tagged:
    """Answers 304 to a GET under /v1/ whose `If-None-Match` names what would be sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; tag a whole JSON answer."""
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        held: Message | None = None

        async def tagged(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and _may_be_tagged(message):
                held = message
                return
            if held is not None:
                start, held = held, None
                if not message.get("more_body", False):
                    message = _tag(scope, start, message)
                await send(start)
            await send(message)

        await self.app(scope, receive, tagged)


class Compressed(GZipMiddleware):
    """gzip for long answers, never for a log: who follows one wants each line when it is written."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, COMPRESSED_BYTES, LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and LOGS.fullmatch(scope["path"]):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _may_be_tagged(start: Message) -> bool:
    return start["status"] == 200 and Headers(raw=start["headers"]).get("content-type") == "application/json"


def _tag(scope: Scope, start: Message, body: Message) -> Message:
    """Put the tag into the head; make the whole a 304 where the caller has it already."""
    tag = f'"{hashlib.blake2b(body.get("body", b""), digest_size=12).hexdigest()}"'
    headers = MutableHeaders(raw=start["headers"])
    headers["ETag"], headers["Cache-Control"] = f"W/{tag}", "no-cache"
    asked = Headers(scope=scope).get("if-none-match", "")
    if asked.strip() != "*" and tag not in ETAG.findall(asked):
        return body
    start["status"] = 304
    for name in ("content-length", "content-type"):
        del headers[name]
    start["headers"] = headers.raw
    return {**body, "body": b""}
