"""Every error as RFC 9457 `application/problem+json` with a stable `code`."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import is_dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gpulease.errors import BY_CODE, GpuleaseError, InvalidRequest, MethodNotAllowed, NotFound, OverQuota, Unavailable
from gpulease.wire import to_json

log = logging.getLogger("gpulease.api")

SEE_OPENAPI = "/openapi.json describes every field."
PERHAPS_PRUNED = "It may have ended long ago: what is old is pruned. gpulease {} shows those there are."
"""What to say of an id that is not known; whether there ever was such a one, nobody knows any more."""
MEDIA_TYPE = "application/problem+json"


class NotJson(InvalidRequest):
    """The body is not JSON."""

    status = 400


def problem_response(error: GpuleaseError, headers: dict[str, str] | None = None) -> Response:
    """The answer for an error."""
    body = {key: to_json(value) if is_dataclass(value) else value for key, value in error.problem().items()}
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
    app.add_exception_handler(Exception, _unknown)


async def _known(_: Request, error: Exception) -> Response:
    assert isinstance(error, GpuleaseError)
    return problem_response(error)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem_response(InvalidRequest(sentence(error.errors()), remedy=SEE_OPENAPI))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        detail = f"There is nothing at {request.url.path}."
        return problem_response(NotFound(detail, remedy="/openapi.json lists every address."), headers)
    if error.status_code == 405:
        detail = f"{request.url.path} does not take {request.method}."
        return problem_response(
            MethodNotAllowed(detail, remedy=f"Use {headers.get('allow', 'another method')}."), headers
        )
    return problem_response(InvalidRequest(str(error.detail)), headers)


async def _no_database(_: Request, error: Exception) -> Response:
    """Somebody reads what is in the database alone, and it is away. The writer logs that, once."""
    reason = getattr(error, "orig", None) or error
    return problem_response(Unavailable(f"The database cannot be read now: {reason}.", remedy="Ask again."))


async def _unknown(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem_response(
        GpuleaseError("The daemon has a fault.", remedy="Its log has the details; please report it.")
    )


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
    entries: dict[int | str, dict[str, Any]] = {}
    for code in codes:
        kind = BY_CODE.get(code, GpuleaseError)
        text = f"`{code}`: {(kind.__doc__ or '').strip().splitlines()[0]}"
        entry = entries.setdefault(
            kind.status,
            {"description": "", "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}},
        )
        entry["description"] = f"{entry['description']} {text}".strip()
    return entries


PROBLEM_SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "type": "object",
    "required": ["type", "title", "status", "code", "detail"],
    "properties": {
        "type": {"type": "string", "description": "Always `about:blank`; `code` tells errors apart."},
        "title": {"type": "string", "description": "The kind of error in words."},
        "status": {"type": "integer", "description": "The HTTP status."},
        "code": {"type": "string", "description": "Stable name of the error.", "enum": [*sorted(BY_CODE), "internal"]},
        "detail": {"type": "string", "description": "What is wrong and why."},
        "remedy": {"type": "string", "description": "What to do."},
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
