"""Reading request bodies: bounded, strict, with an error that names the field.

FastAPI's own body parameters would turn "2" and true into numbers; pydantic's strict mode for JSON does not.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec
from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from gpulease_protocol.codec import to_json
from gpulease_protocol.errors import InvalidRequest, TooLarge, shortened
from gpulease_server.api import fair_share
from gpulease_server.api.auth.callers import ANONYMOUS, Caller
from gpulease_server.api.problems import SEE_OPENAPI, NotJson, describe_validation_errors
from gpulease_server.core.happenings import IdempotencyKey

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_BODY_BYTES = 2**20
MAX_LONG_BYTES = 4 * 2**20
"""For a job: its environment may have 1 MiB, and more when encoded as JSON. And for the report of a node, which names
each process that an ended lease has left on a GPU."""
LONG_PATH = re.compile(r"/v1/jobs(/explain)?|/v1/nodes/[^/]+/exchange")
MAX_DISCARDED_BYTES = 16 * 2**20
"""How much of a body that is too large is read and discarded before the connection is closed."""
GZIP = b"\x1f\x8b"
"""What is compressed with gzip begins with this."""
MAX_KEY_CHARACTERS = 200
"""Characters in an Idempotency-Key, at most."""
IDEMPOTENCY_KEY_PARAMETER: dict[str, Any] = {
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARACTERS},
            "description": "Any text of your own. The same key and body again return the same answer and do nothing"
            " more.",
        }
    ]
}
"""For `openapi_extra` of a route that accepts an Idempotency-Key."""
LARGE_BYTES = 16 * 2**10
"""A body from this size on takes as long to write as to read."""
MAX_COMMAS = 2**14
"""A body with more is refused: to parse two million items keeps the event loop from everyone for a second."""
MAX_NAMED_ERRORS = 1000
"""So many errors of one body are named: to list more takes longer than to find them."""
TOP_LEVEL = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Reads the names of the fields of a body, and looks into none of them."""
DIGITS = bytes.maketrans(b"123456789", b"000000000")
T = TypeVar("T")


class JsonBody(Generic[T]):
    """A dependency that reads a body of one type. `empty` is what an empty body means; None: a body is required."""

    max_commas = MAX_COMMAS

    def __init__(self, kind: type[T], empty: T | None = None) -> None:
        self.kind = kind
        self.empty = empty
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)
        self._fields = frozenset(one.name for one in fields(cast("type[DataclassInstance]", kind)))

    async def __call__(self, request: Request) -> T:
        """The validated body."""
        return self.read(await read_body(request))

    def read(self, raw: bytes) -> T:
        """The body that this is. Raises `NotJson`, `TooLarge` or `InvalidRequest`, which names the field."""
        if not raw and self.empty is not None:
            return self.empty
        if len(raw) > self.max_commas and raw.count(b",") > self.max_commas:
            detail = f"The body has over {self.max_commas} commas."
            raise TooLarge(detail, remedy="Put a list of so many parts into a file.")
        try:
            body = self.parse(raw)
        except ValidationError as error:
            if error.error_count() > MAX_NAMED_ERRORS:
                detail = f"The body has {error.error_count()} errors, too many to list."
                raise InvalidRequest(detail, remedy=SEE_OPENAPI) from None
            errors = error.errors(include_url=False, include_context=False)
            if errors[0]["type"] == "json_invalid":
                if raw.startswith(GZIP):
                    raise NotJson("The body is compressed with gzip.", remedy="Send it as it is.") from None
                raise NotJson(f"The body is not JSON: {errors[0]['msg']}.", remedy="Send a JSON object.") from None
            raise InvalidRequest(describe_validation_errors(errors), remedy=SEE_OPENAPI) from None
        if _may_be_unstorable(raw):
            require_storable(to_json(body))
        return body

    def parse(self, raw: bytes) -> T:
        """The body that this is. Raises ValidationError, or `InvalidRequest` for too many errors to list."""
        if len(raw) > MAX_NAMED_ERRORS and raw.count(b",") > MAX_NAMED_ERRORS:
            self._require_few_unknown_fields(raw)
        return self._adapter.validate_json(raw, strict=True)

    def _require_few_unknown_fields(self, raw: bytes) -> None:
        """Raise `InvalidRequest` for more unknown fields than are named: pydantic takes ten times as long to find them,
        and no one else is answered meanwhile."""
        try:
            found = TOP_LEVEL.decode(raw)
        except (ValueError, RecursionError):
            return  # pydantic says what is wrong
        unknown = len(found.keys() - self._fields)
        if unknown > MAX_NAMED_ERRORS:
            first = ", ".join(itertools.islice((shortened(one) for one in found if one not in self._fields), 5))
            detail = f"The body has {unknown} fields that are not fields of this request: {first}, and so on."
            raise InvalidRequest(detail, remedy=SEE_OPENAPI)

    def openapi(self) -> dict[str, Any]:
        """For `openapi_extra` of the route."""
        schema = {"$ref": f"#/components/schemas/{self.kind.__name__}"}
        content = {"application/json": {"schema": schema}}
        return {"requestBody": {"content": content, "required": self.empty is None}}

    def schemas(self) -> dict[str, Any]:
        """The body's schema and those it refers to, by name."""
        schema = self._adapter.json_schema(ref_template="#/components/schemas/{model}")
        definitions: dict[str, Any] = schema.pop("$defs", {})
        return definitions | {self.kind.__name__: schema}


def _may_be_unstorable(raw: bytes) -> bool:
    """False for a body that needs no check by `require_storable`. A regular expression takes 30 times as long."""
    return b"\\u0000" in raw or (len(raw) >= 19 and b"0" * 19 in raw.translate(DIGITS))


def require_storable(value: Any, place: str = "") -> None:
    """Raise `InvalidRequest` for what a database cannot store: NUL in a string, an integer of more than 64 bits."""
    if isinstance(value, dict):
        for name, part in value.items():
            require_storable(name, place)
            require_storable(part, f"{place}.{name}" if place else str(name))
    elif isinstance(value, (list, tuple)):
        for part in value:
            require_storable(part, place)
    elif isinstance(value, str) and "\0" in value:
        raise InvalidRequest(f"{place}: must not contain NUL.", remedy=SEE_OPENAPI)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidRequest(f"{place}: must be a 64-bit integer.", remedy=SEE_OPENAPI)


async def read_body(request: Request) -> bytes:
    """The whole body. Raises `TooLarge` if it exceeds 1 MiB, for a job or a report 4 MiB.

    A body that is too large is read and discarded, up to `MAX_DISCARDED_BYTES`: a client that is disconnected while it
    sends never sees the error.
    """
    limit = MAX_LONG_BYTES if LONG_PATH.fullmatch(request.url.path) else MAX_BODY_BYTES
    cached: bytes | None = getattr(request.state, "body", None)
    if cached is not None:
        return cached
    parts, size = [], 0
    header = request.headers.get("content-length", "0")
    declared = int(header[-18:]) if header.isdigit() else 0  # more digits are leading zeros, or far over the limit
    refuse_early = declared > MAX_DISCARDED_BYTES or "expect" in request.headers
    if declared <= limit or not refuse_early:
        async with fair_share.waiting():
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                elif refuse_early or size > MAX_DISCARDED_BYTES:
                    break
    if max(size, declared) > limit:
        raise TooLarge(f"The body exceeds {limit} bytes.", remedy="Send less.")
    if size > LARGE_BYTES:
        fair_share.count_writing()
    request.state.body = b"".join(parts)
    return b"".join(parts)


async def idempotency_key(request: Request) -> IdempotencyKey | None:
    """The Idempotency-Key header with the fingerprint of the request; None without one.

    Keys are kept apart by user: two users who choose the same one do not share a lease.
    """
    keys = request.headers.getlist("idempotency-key")
    if not keys:
        return None
    if len(keys) > 1:  # a proxy may have added one: which of them a repetition has too is not known
        raise InvalidRequest(f"Idempotency-Key: is given {len(keys)} times.", remedy="Give it once.")
    caller: Caller = getattr(request.state, "caller", ANONYMOUS)
    return key_of(keys[0], caller, f"{request.method} {request.url.path}", await read_body(request))


def key_of(key: str, caller: Caller, operation: str, body: bytes) -> IdempotencyKey:
    """An Idempotency-Key with the fingerprint of the request that it came with. `operation`: its method and path."""
    if not 1 <= len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidRequest(f"Idempotency-Key: must have 1 to {MAX_KEY_CHARACTERS} characters.")
    content = f"{operation}\n".encode() + body
    user = f"@{caller.user}" if caller.uid is None else str(caller.uid)
    return IdempotencyKey(key=f"{user}:{key}", fingerprint=hashlib.sha256(content).hexdigest())
