"""The OpenAPI document without a daemon: whole, and as `GET /openapi.json` has it."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from gpulease_server.api.app import create_app
from gpulease_server.api.openapi import document


@cache
def whole_document() -> dict[str, Any]:
    """Every route, those between daemon and worker included."""
    return create_app(SimpleNamespace(leadership=None)).openapi()  # type: ignore[arg-type]


def public_document() -> dict[str, Any]:
    """The routes for everyone."""
    return document.public_document(whole_document())


def endpoints() -> list[str]:
    """`METHOD /path` of every route."""
    return [f"{method.upper()} {path}" for path, methods in whole_document()["paths"].items() for method in methods]
