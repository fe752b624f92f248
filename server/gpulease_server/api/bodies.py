"""Reading request bodies: bounded, strict, with an error that names the field.

FastAPI's own body parameters would turn "2" and true into numbers; pydantic's strict mode for JSON does not.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from gpulease.errors import InvalidRequest, TooLarge

from ..core.happenings import Key
from .callers import NOBODY, Caller
from .problems import SEE_OPENAPI, NotJson, sentence

MAX_BODY_BYTES = 2**20
MAX_JOB_BYTES = 4 * 2**20
"""For a job, whose environment alone may have 1 MiB, and more as JSON."""
MAX_PASSED_OVER = 16 * 2**20
"""How much of a body that is too large is read all the same."""
MAX_KEY = 200
"""Characters in an Idempotency-Key, at most."""
KEYED: dict[str, Any] = {
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
            "description": "Any text of your own. The same key and body again get the same answer and do nothing more.",
        }
    ]
}
"""For `openapi_extra` of a route that takes an Idempotency-Key."""
SUSPECT = re.compile(rb"\\u0000|[0-9]{19}")
"""What a body must have in it for `require_storable` to look."""
T = TypeVar("T")


class JsonBody(Generic[T]):
    """A dependency that reads a body of one kind. `empty` is what an empty body means; None: a body is required."""

    def __init__(self, kind: type[T], empty: T | None = None) -> None:
        self.kind = kind
        self.empty = empty
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)

    async def __call__(self, request: Request) -> T:
        """The body, checked."""
        raw = await read(request)
        if not raw and self.empty is not None:
            return self.empty
        try:
            body = self._adapter.validate_json(raw, strict=True)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False)
            if errors[0]["type"] == "json_invalid":
                raise NotJson(f"The body is not JSON: {errors[0]['msg']}.", remedy="Send a JSON object.") from None
            raise InvalidRequest(sentence(errors), remedy=SEE_OPENAPI) from None
        if SUSPECT.search(raw):
            require_storable(asdict(body))  # type: ignore[call-overload]
        return body

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


def require_storable(value: Any, place: str = "") -> None:
    """Raise `InvalidRequest` for what a database cannot keep: NUL in a text, an integer of more than 64 bits."""
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
        raise InvalidRequest(f"{place}: must be an integer of 64 bits.", remedy=SEE_OPENAPI)


async def read(request: Request) -> bytes:
    """The whole body. Raises `TooLarge` when it is over 1 MiB, a job's over 4 MiB.

    What is too much is passed over and not kept, up to a bound: who is hung up on while he sends never sees an answer.
    """
    most = MAX_JOB_BYTES if request.url.path == "/v1/jobs" else MAX_BODY_BYTES
    kept: bytes | None = getattr(request.state, "body", None)
    if kept is not None:
        return kept
    parts, size = [], 0
    said = request.headers.get("content-length", "0")
    told = int(said) if said.isdigit() else 0
    waits = told > MAX_PASSED_OVER or "expect" in request.headers
    if told <= most or not waits:
        async for part in request.stream():
            size += len(part)
            if size <= most:
                parts.append(part)
            elif waits or size > MAX_PASSED_OVER:
                break
    if max(size, told) > most:
        raise TooLarge(f"The body is over {most} bytes.", remedy="Send less.")
    request.state.body = b"".join(parts)
    return b"".join(parts)


async def idempotency_key(request: Request) -> Key | None:
    """The Idempotency-Key header with the fingerprint of the request; None without one.

    A key is its user's own: two users who choose the same one do not share a lease.
    """
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY:
        raise InvalidRequest(f"Idempotency-Key: must have 1 to {MAX_KEY} characters.")
    what = f"{request.method} {request.url.path}\n".encode() + await read(request)
    caller: Caller = getattr(request.state, "caller", NOBODY)
    whose = f"@{caller.user}" if caller.uid is None else str(caller.uid)
    return Key(key=f"{whose}:{key}", fingerprint=hashlib.sha256(what).hexdigest())
