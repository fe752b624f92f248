"""Every error as RFC 9457 `application/problem+json` with a stable `code`."""

from __future__ import annotations

import json
import math
from contextvars import ContextVar
from dataclasses import is_dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DatabaseError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from gpulease_protocol.codec import to_json
from gpulease_protocol.errors import (
    ERRORS_BY_CODE,
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
    shortened,
)
from gpulease_server.store.dialects import error_message, is_damaged

SEE_OPENAPI = "/openapi.json describes every field."
MAYBE_PRUNED = "It may have ended long ago and been pruned. `GET /v1/{}` lists those that are kept."
"""Remedy for an unknown id: whether it ever existed is no longer known."""
MAX_TEXT = 8192
"""Characters of a text in a problem document. Only the reasons of many GPUs are longer than a few hundred; what the
request had in it is shortened where the message is made."""
MEDIA_TYPE = "application/problem+json"
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current request; `RequestIdMiddleware` sets it."""
DATABASE_ERRORS = (OperationalError, InterfaceError, PoolTimeout)
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


class NotJson(InvalidRequest):
    """The body is not JSON."""

    status = 400


class NotHttp(InvalidRequest):
    """The input is not an HTTP/1.1 request."""

    status, title = 400, "Bad request"


class UrlTooLong(TooLarge):
    """The URL is too long."""

    status, title = 414, "URL too long"


class HeadTooLarge(TooLarge):
    """The head of the request is too large."""

    status, title = 431, "Request head too large"


ERRORS_OF_EVERY_ROUTE: tuple[type[GpuleaseError], ...] = (
    NotHttp,
    NotAuthenticated,
    NotAllowed,
    TooSlow,
    TooLarge,
    UrlTooLong,
    OverQuota,
    HeadTooLarge,
    GpuleaseError,
    Unavailable,
)
"""Errors that every route may answer, or every one that takes a body."""
SHARED_STATUSES = sorted({kind.status for kind in ERRORS_OF_EVERY_ROUTE})
"""Their statuses, which OpenAPI has as one `default` for each route."""


def problem_response(error: GpuleaseError, headers: dict[str, str] | None = None) -> Response:
    """The response for an error."""
    body = {
        key: to_json(value) if is_dataclass(value) else shortened(value, MAX_TEXT) if isinstance(value, str) else value
        for key, value in error.problem().items()
    }
    body["request_id"] = REQUEST_ID.get()
    headers = dict(headers or {})
    if error.status in (429, 503):
        retry_after_s = error.retry_after_s if isinstance(error, (Unavailable, OverQuota)) else None
        headers.setdefault("Retry-After", "1" if retry_after_s is None else str(math.ceil(retry_after_s)))
    if error.status == 401:
        headers.setdefault("WWW-Authenticate", 'Bearer realm="gpulease"')
    return Response(json.dumps(body), error.status, headers, MEDIA_TYPE)


def add_exception_handlers(app: FastAPI) -> None:
    """Make every error of the application a problem document."""
    app.add_exception_handler(GpuleaseError, _expected_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    for kind in (*DATABASE_ERRORS, DatabaseError):
        app.add_exception_handler(kind, _expected_error)


def expected_error(error: Exception) -> GpuleaseError | None:
    """What an exception of a route is answered with; None for a bug."""
    if isinstance(error, GpuleaseError):
        return error
    damaged = is_damaged(error)
    if not damaged and not isinstance(error, DATABASE_ERRORS):
        return None
    # The request needs the database, which is unavailable. The writer logs that, once.
    remedy = "This is for an administrator: restore a backup, see docs/databases.md." if damaged else "Try again later."
    return Unavailable(f"The database cannot be read: {error_message(error)}.", remedy=remedy)


async def _expected_error(_: Request, error: Exception) -> Response:
    expected = expected_error(error)
    if expected is None:
        raise error
    return problem_response(expected)


async def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem_response(InvalidRequest(describe_validation_errors(error.errors()), remedy=SEE_OPENAPI))


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 404:
        detail = f"There is no route {shortened(request.url.path)}."
        return problem_response(NotFound(detail, remedy="/openapi.json lists every route."), headers)
    if error.status_code == 405:
        allowed = ", ".join(_allowed_methods(request))
        detail = f"{shortened(request.url.path)} does not accept {request.method}."
        return problem_response(MethodNotAllowed(detail, remedy=f"Use {allowed}."), headers | {"allow": allowed})
    return problem_response(InvalidRequest(str(error.detail)), headers)


def _allowed_methods(request: Request) -> list[str]:
    """Methods that the path accepts, of all its routes. HEAD is accepted wherever GET is.

    A route with just this path comes before one with a parameter in it: `/v1/jobs/explain` is no job.
    """
    routes = request.app.router.routes
    routes = [route for route in routes if getattr(route, "path", "") == request.url.path] or routes
    return [
        method
        for method in METHODS
        if any(
            route.matches({**request.scope, "method": "GET" if method == "HEAD" else method})[0] is Match.FULL
            for route in routes
        )
    ]


def describe_validation_errors(errors: Any) -> str:
    """What is wrong with a request, field by field; at most 5 of them."""
    sentences = []
    for item in list(errors)[:5]:
        field = ".".join(shortened(str(part)) for part in item["loc"] if part not in ("body", "query", "path"))
        text = shortened(str(item["msg"]).removeprefix("Value error, "), 500)
        if item["type"] == "unexpected_keyword_argument":
            text = "is not a field of this request"
        sentences.append(f"{field}: {text}" if field else text)
    return "; ".join(sentences) + "."


def error_responses(*codes: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for the errors that a route may answer, by code."""
    return responses_of(*(ERRORS_BY_CODE.get(code, GpuleaseError) for code in codes))


def responses_of(*kinds: type[GpuleaseError]) -> dict[int | str, dict[str, Any]]:
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


LOCATION: dict[str, Any] = {
    "headers": {"Location": {"description": "Path of the new resource.", "schema": {"type": "string"}}}
}
"""OpenAPI entry of an answer that makes something."""
OTHER_ERRORS: dict[str, Any] = {
    "description": "Any other error; `code` says which.",
    "headers": {
        "Retry-After": {
            "description": "With 429 and 503: after how many seconds to ask again.",
            "schema": {"type": "integer"},
        }
    },
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
"""What any operation may answer besides the errors that it declares."""
PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "code", "detail", "request_id"],
    "properties": {
        "type": {
            "type": "string",
            "format": "uri-reference",
            "description": "Where the daemon describes this kind of error; `code` names it.",
        },
        "title": {"type": "string", "description": "The kind of error in words."},
        "status": {"type": "integer", "description": "The HTTP status."},
        "code": {
            "type": "string",
            "description": "Stable name of the error.",
            "enum": [*sorted(ERRORS_BY_CODE), "internal"],
        },
        "detail": {"type": "string", "description": "What is wrong and why."},
        "remedy": {"type": "string", "description": "What to do."},
        "request_id": {"type": "string", "description": "Id of the request, as in the header `X-Request-Id`."},
        "outcome": {
            "type": "string",
            "enum": ["unknown"],
            "description": "With `unavailable`: the request may have been carried out. If absent, it was not.",
        },
        "pruned_seq": {"type": "integer", "description": "With `events_pruned`: the last `seq` that was pruned."},
        "writer": {"type": "string", "description": "With `unavailable`: this daemon is a standby of that one."},
        "lease": {
            "$ref": "#/components/schemas/Lease",
            "description": "With `lease_lost` of a request: the lease that it had made, without `env`.",
        },
        "explanation": {"$ref": "#/components/schemas/Explanation", "description": "Why no GPUs were granted."},
    },
}
