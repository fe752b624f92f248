"""ETags for JSON answers, so that a client that polls receives only what has changed.

The tag is a digest of the answer. Nothing cheaper would be right: a GPU's state depends on the time as well as on the
ledger. So an ETag saves sending and parsing, not making the answer. It is weak, because the answer may be compressed.
"""

from __future__ import annotations

import asyncio
import hashlib
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PIECE_BYTES = 2**20
"""Of an answer that are digested at once; about 1 ms."""
ETAG = re.compile(r'(?:W/)?("[^"]*")')
CACHE_CONTROL = "no-cache"
"""Of a tagged answer: it may be kept, but is asked for each time."""


class ETagMiddleware:
    """Answers 304 to a GET under /v1/ if its `If-None-Match` names the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; tag a JSON answer that is sent in one piece."""
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        pending: Message | None = None

        async def send_tagged(message: Message) -> None:
            nonlocal pending
            if message["type"] == "http.response.start" and _may_be_tagged(message):
                pending = message
                return
            if pending is not None:
                start, pending = pending, None
                if not message.get("more_body", False):
                    message = _tag(scope, start, message, await _tag_of_long(message.get("body", b"")))
                await send(start)
            await send(message)

        await self.app(scope, receive, send_tagged)


def _may_be_tagged(start: Message) -> bool:
    return start["status"] == 200 and Headers(raw=start["headers"]).get("content-type") == "application/json"


def tag_of(body: bytes) -> str:
    """The tag of an answer, quoted; the header `ETag` has it as a weak one."""
    return _quoted(hashlib.blake2b(body, digest_size=12))


async def _tag_of_long(body: bytes) -> str:
    """As `tag_of`, for an answer that may be long: it is read in pieces, between which the event loop runs."""
    digest = hashlib.blake2b(digest_size=12)
    for at in range(0, len(body), PIECE_BYTES):
        if at:
            await asyncio.sleep(0)
        digest.update(memoryview(body)[at : at + PIECE_BYTES])
    return _quoted(digest)


def _quoted(digest: hashlib.blake2b) -> str:
    return f'"{digest.hexdigest()}"'


def _tag(scope: Scope, start: Message, body: Message, tag: str) -> Message:
    """Add the tag to the head; make the answer a 304 if the caller has it already."""
    headers = MutableHeaders(raw=start["headers"])
    headers["ETag"], headers["Cache-Control"] = f"W/{tag}", CACHE_CONTROL
    if_none_match = Headers(scope=scope).get("if-none-match", "")
    if if_none_match.strip() != "*" and tag not in ETAG.findall(if_none_match):
        return body
    start["status"] = 304
    for name in ("content-length", "content-type"):
        del headers[name]
    start["headers"] = headers.raw
    return {**body, "body": b""}
