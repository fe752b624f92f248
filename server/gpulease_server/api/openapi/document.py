"""Makes the OpenAPI document of what FastAPI finds in the routes.

There are two: `app.openapi()` describes every route, and `GET /openapi.json` all but those of the worker protocol,
which is no interface for anyone else and changes with the program.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from gpulease_protocol.explanation import Explanation
from gpulease_server.api.openapi import field_descriptions, links, schemas
from gpulease_server.api.openapi.static_document import StaticDocument
from gpulease_server.api.problems import MEDIA_TYPE, OTHER_ERRORS, PROBLEM_SCHEMA, SHARED_STATUSES, error_responses
from gpulease_server.api.query_parameters import STRICT_PREFIX
from gpulease_server.api.request_body import JsonBody

INTERNAL = "x-internal"
"""Marks an operation of the worker protocol."""
TAGS = {
    "leases": "GPUs held or waited for: request, renew, release, explain.",
    "jobs": "Commands that a worker launches under a lease of their own, their logs and metrics.",
    "gpus": "What each GPU is doing and who holds it; cordoning it.",
    "nodes": "The hosts with GPUs; taking one out of use.",
    "timeline": "What happened to each GPU in a period.",
    "usage": "GPU-hours held and used, by user, label, node or day.",
    "events": "The history of every change, as pages or as a stream.",
    "me": "How the daemon identifies the caller.",
    "limits": "What a user, a group or a token may have, and has.",
    "reservations": "GPUs that are kept for someone in a window of time.",
    "tokens": "Bearer tokens, for administrators. The fencing token of a lease is something else.",
    "service": "Entrance, health checks and metrics.",
}
"""The sections of the document, in order."""
BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "A bearer token, as `POST /v1/tokens` creates it. A caller on the daemon's host needs none: its user"
    " is known from the Unix socket or the loopback connection.",
}
SERVERS = [
    {"url": "http://127.0.0.1:8750", "description": "The daemon of this host, where it has its default address."},
    {"url": "/", "description": "The daemon that serves this document."},
]


def install_openapi(app: FastAPI, bodies: Sequence[JsonBody[Any]]) -> None:
    """Have `app.openapi()` make the whole document, and serve the public part of it.

    Each is made at the first request for it; the public one in a thread, as it takes 0.3 s. Later requests need none of
    the threads, which may all wait for the database.
    """
    generate = app.openapi
    made, making = list[StaticDocument](), asyncio.Lock()

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(schemas.with_named_pages(generate()), bodies)
        return app.openapi_schema

    def encoded() -> StaticDocument:
        return StaticDocument(json.dumps(public_document(openapi()), ensure_ascii=False).encode(), "application/json")

    async def serve(request: Request) -> Response:
        if not made:
            async with making:
                if not made:
                    made.append(await asyncio.to_thread(encoded))
        return made[0].respond(request)

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_route("/openapi.json", serve, include_in_schema=False)


def _complete(document: dict[str, Any], bodies: Sequence[JsonBody[Any]]) -> dict[str, Any]:
    """Add what FastAPI does not find: request bodies, problems, descriptions, errors, links, security."""
    answers = document["components"]["schemas"]
    explanation = TypeAdapter(Explanation).json_schema(ref_template=f"{schemas.PREFIX}{{model}}", mode="serialization")
    answers |= {**explanation.pop("$defs", {}), "Explanation": explanation}
    for name in ("HTTPValidationError", "ValidationError"):
        answers.pop(name, None)
    requests = schemas.body_schemas(bodies, answers)
    field_descriptions.add_field_descriptions(answers | requests)
    schemas.shape_answers(answers)
    schemas.shape_requests(requests)
    document["components"] = {
        "schemas": dict(sorted({**answers, **requests, "Problem": PROBLEM_SCHEMA}.items())),
        "responses": {"Error": OTHER_ERRORS},
        "securitySchemes": {"bearer": BEARER},
    }
    schemas.drop_null_parameters(document["paths"])
    schemas.drop_titles(document)
    _add_error_responses(document)
    links.add_links(document)
    return document | {
        "servers": SERVERS,
        "security": [{}, {"bearer": []}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
    }


def public_document(document: dict[str, Any]) -> dict[str, Any]:
    """The document without the worker protocol, and without the schemas that only it uses."""
    paths = {
        path: public
        for path, methods in document["paths"].items()
        if (public := {method: operation for method, operation in methods.items() if INTERNAL not in operation})
    }
    public = document | {"paths": paths}
    return public | {"components": document["components"] | {"schemas": schemas.used_schemas(public)}}


def _add_error_responses(document: dict[str, Any]) -> None:
    """Replace the errors that FastAPI assumes by those that each route may answer: one by one where the status says
    something about this request, and one `default` for what may happen to any."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["summary"] = operation["description"].split(". ")[0].split("\n")[0].rstrip(".")
            responses = operation["responses"]
            if MEDIA_TYPE not in responses.get("422", {}).get("content", ()):
                responses.pop("422", None)
                if path.startswith(STRICT_PREFIX):
                    responses |= {str(status): entry for status, entry in error_responses("invalid_request").items()}
            for status in SHARED_STATUSES:
                responses.pop(str(status), None)
            responses["default"] = {"$ref": "#/components/responses/Error"}
