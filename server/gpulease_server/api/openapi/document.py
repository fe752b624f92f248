"""Completes the OpenAPI document: adds what FastAPI does not find by itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from gpulease_protocol.explanation import Explanation
from gpulease_server.api.openapi import field_descriptions, links
from gpulease_server.api.openapi.static_document import StaticDocument
from gpulease_server.api.problems import ERRORS_OF_EVERY_ROUTE, PROBLEM_SCHEMA, error_responses, responses_of
from gpulease_server.api.query_parameters import STRICT_PREFIX
from gpulease_server.api.request_body import JsonBody


def install_openapi(app: FastAPI, bodies: Sequence[JsonBody[Any]]) -> None:
    """Have `app.openapi()` add the schemas of request bodies and problems, descriptions, error responses and links,
    and serve it.

    The document is made at the first request for it.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for body in bodies:
                schemas |= {name: schema for name, schema in body.schemas().items() if name not in schemas}
            explanation = TypeAdapter(Explanation).json_schema(ref_template="#/components/schemas/{model}")
            schemas |= explanation.pop("$defs", {})
            schemas |= {"Explanation": explanation, "Problem": PROBLEM_SCHEMA}
            field_descriptions.add_field_descriptions(schemas)
            _add_error_responses(document)
            links.add_links(document)
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            app.openapi_schema = document
        return app.openapi_schema

    @cache
    def encoded() -> StaticDocument:
        return StaticDocument(json.dumps(app.openapi(), ensure_ascii=False).encode(), "application/json")

    async def serve(request: Request) -> Response:
        return encoded().respond(request)

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_route("/openapi.json", serve, include_in_schema=False)


def _add_error_responses(document: dict[str, Any]) -> None:
    """Replace the errors that FastAPI assumes by those that each route may answer."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["summary"] = operation["description"].split(". ")[0].split("\n")[0].rstrip(".")
            responses = operation["responses"]
            if "HTTPValidationError" in str(responses.get("422")) or (
                path.startswith(STRICT_PREFIX) and "422" not in responses
            ):
                responses |= {str(status): entry for status, entry in error_responses("invalid_request").items()}
            for status, entry in responses_of(*ERRORS_OF_EVERY_ROUTE).items():
                own = responses.get(str(status), {"description": ""})["description"]
                shared = entry["description"] if entry["description"] not in own else ""
                responses[str(status)] = entry | {"description": f"{own} {shared}".strip()}
            if "requestBody" in operation:
                responses["400"]["description"] += " Or the body is not JSON."
