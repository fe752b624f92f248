"""Every error as RFC 9457 `application/problem+json` with a stable `code`."""

from __future__ import annotations

import json
import math
from contextvars import ContextVar
from dataclasses import is_dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from gpulease.errors import (
    BY_CODE,
    GpuleaseError,
    InvalidRequest,
    MethodNotAllowed,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    OverQuota,
    TooLarge,
    TooSlow,
    Unavailable,
)
from gpulease.wire import to_json

SEE_OPENAPI = "/openapi.json describes every field."
PERHAPS_PRUNED = "It may have ended long ago: what is old is pruned. gpulease {} shows those there are."
"""What to say of an id that is not known; whether there ever was such a one, nobody knows any more."""
MEDIA_TYPE = "application/problem+json"
REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Name of the request that is answered; `boundary` sets it."""
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


class NotJson(InvalidRequest):
    """The body is not JSON."""

    status = 400


class NotHttp(InvalidRequest):
    """What came is not a request of HTTP/1.1."""

    status, title = 400, "Bad request"


class UrlTooLong(TooLarge):
    """The address is too long."""

    status, title = 414, "Address too long"


class HeadTooLarge(TooLarge):
    """The head of the request is too large."""

    status, title = 431, "Request head too large"


ANYWHERE: tuple[type[GpuleaseError], ...] = (
    NotHttp,
    NotAuthenticated,
    NotAllowed,
    TooSlow,
    UrlTooLong,
    OverQuota,
    HeadTooLarge,
    GpuleaseError,
    Unavailable,
)
"""What any address may answer, whatever its route. OpenAPI lists these for each."""


def problem_response(error: GpuleaseError, headers: dict[str, str] | None = None) -> Response:
    """The answer for an error."""
    body = {key: to_json(value) if is_dataclass(value) else value for key, value in error.problem().items()}
    body["request_id"] = REQUEST_ID.get()
    headers = dict(headers or {})
    if error.status in (429, 503):
        wanted_s = error.retry_after_s if isinstance(error, (Unavailable, OverQuota)) else None
        headers.setdefault("Retry-After", "1" if wanted_s is None else str(math.ceil(wanted_s)))
    if error.status == 401:
        headers.setdefault("WWW-Authenticate", 'Bearer realm="gpulease"')
    return Response(json.dumps(body), error.status, headers, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Make every error of the application a problem document."""
    app.add_exception_handler(GpuleaseError, _known)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    for kind in (OperationalError, InterfaceError, PoolTimeout):
        app.add_exception_handler(kind, _no_database)


async def _known(_: Request, error: Exception) -> Response:
    assert isinstance(error, GpuleaseError)
    return problem_response(error)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem_response(InvalidRequest(sentence(error.errors()), remedy=SEE_OPENAPI))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 404:
        detail = f"There is nothing at {request.url.path}."
        return problem_response(NotFound(detail, remedy="/openapi.json lists every address."), headers)
    if error.status_code == 405:
        allowed = ", ".join(_methods(request))
        detail = f"{request.url.path} does not take {request.method}."
        return problem_response(MethodNotAllowed(detail, remedy=f"Use {allowed}."), headers | {"allow": allowed})
    return problem_response(InvalidRequest(str(error.detail)), headers)


def _methods(request: Request) -> list[str]:
    """What this address takes; it may have a route for each method. HEAD is taken wherever GET is."""
    routes = request.app.router.routes
    return [
        method
        for method in METHODS
        if any(
            route.matches({**request.scope, "method": "GET" if method == "HEAD" else method})[0] is Match.FULL
            for route in routes
        )
    ]


async def _no_database(_: Request, error: Exception) -> Response:
    """Somebody reads what is in the database alone, and it is away. The writer logs that, once."""
    reason = getattr(error, "orig", None) or error
    return problem_response(Unavailable(f"The database cannot be read now: {reason}.", remedy="Ask again."))


def sentence(errors: Any) -> str:
    """What is wrong with a request, field by field."""
    found = []
    for item in list(errors)[:5]:
        place = ".".join(str(part) for part in item["loc"] if part not in ("body", "query", "path"))
        text = str(item["msg"]).removeprefix("Value error, ")
        if item["type"] == "unexpected_keyword_argument":
            text = "is not a field of this request"
        found.append(f"{place}: {text}" if place else text)
    return "; ".join(found) + "."


def documented(*codes: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for the errors that a route answers, by code."""
    return described(*(BY_CODE.get(code, GpuleaseError) for code in codes))


def described(*kinds: type[GpuleaseError]) -> dict[int | str, dict[str, Any]]:
    """The same, by class."""
    entries: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        text = f"`{kind.code}`: {(kind.__doc__ or '').strip().splitlines()[0]}"
        entry = entries.setdefault(
            kind.status,
            {"description": "", "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}},
        )
        entry["description"] = f"{entry['description']} {text}".strip()
    return entries


PROBLEM_SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "type": "object",
    "required": ["type", "title", "status", "code", "detail", "request_id"],
    "properties": {
        "type": {"type": "string", "description": "Always `about:blank`; `code` tells errors apart."},
        "title": {"type": "string", "description": "The kind of error in words."},
        "status": {"type": "integer", "description": "The HTTP status."},
        "code": {"type": "string", "description": "Stable name of the error.", "enum": [*sorted(BY_CODE), "internal"]},
        "detail": {"type": "string", "description": "What is wrong and why."},
        "remedy": {"type": "string", "description": "What to do."},
        "request_id": {"type": "string", "description": "Name of the request, as in the header `X-Request-Id`."},
        "outcome": {
            "type": "string",
            "enum": ["unknown"],
            "description": "With `unavailable`: what was asked may have been recorded. Without it, nothing was done.",
        },
        "pruned_seq": {"type": "integer", "description": "With `events_pruned`: the last `seq` that is gone."},
        "writer": {"type": "string", "description": "With `unavailable`: this daemon stands by for that one."},
        "explanation": {"$ref": "#/components/schemas/Explanation", "description": "Why there are no GPUs."},
    },
}
