"""The application: routers, errors, and what every request must pass."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.datastructures import Headers
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from gpulease.errors import NotAllowed
from gpulease.explanation import Explanation

from . import administration, exposition, gpus, jobs, leases, links, logs, meanings, metrics, reference, service, tokens
from .boundary import Boundary
from .current import OnlyCurrent
from .daemon import Daemon
from .exposition import Exposition
from .heads import Headed
from .origins import ListedOrigins
from .peer import Peer, Way
from .problems import ANYWHERE, PROBLEM_SCHEMA, described, documented, install, problem_response
from .query import VERSIONED
from .request_log import RequestLog
from .traffic import Measured, Traffic
from .validators import Compressed, Tagged

LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
BODIES = (leases.ASK, leases.PROOF, jobs.SUBMIT, jobs.CANCEL, gpus.REPORT, administration.PAUSE, tokens.ASK)


def create_app(
    daemon: Daemon,
    lifespan: Any = None,
    origins: frozenset[str] = frozenset(),
    constant: Sequence[BaseRoute] = (),
) -> FastAPI:
    """The REST application of a daemon.

    Pages of `origins` may read what they are answered. `constant` are routes that come before its own, and answer the
    same always.
    """
    app = FastAPI(
        title="gpulease",
        version=version("gpulease"),
        description="GPU leases on shared machines: the one place where the ledger and the hardware agree. Callers on"
        " the daemon's host are known by their user; others send `Authorization: Bearer TOKEN`.",
        lifespan=lifespan or _nothing,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    traffic = Traffic()
    app.state.daemon, app.state.exposition = daemon, Exposition(traffic)
    for part in (gpus, administration, leases, jobs, logs, metrics, tokens, service, exposition, reference):
        app.router.routes.extend(part.router.routes)
    app.router.routes[:0] = constant
    install(app)
    app.add_middleware(Tagged)
    app.add_middleware(OnlyCurrent, standing=daemon.standing, constant=constant)
    app.add_middleware(OnlyFromHere)
    if origins:
        app.add_middleware(ListedOrigins, origins=origins)
    app.add_middleware(Compressed)
    app.add_middleware(Headed)
    app.add_middleware(Boundary)
    app.add_middleware(RequestLog)
    app.add_middleware(Measured, traffic=traffic)
    _complete_openapi(app)
    return app


@asynccontextmanager
async def _nothing(_: FastAPI) -> AsyncIterator[None]:
    yield


class OnlyFromHere:
    """Refuses what a web page in a local browser might send in the name of its user: any request over loopback that
    names another host or comes from another origin. One with an Authorization header is not the browser's own doing,
    and over the network the browser's user is nobody here."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, daemon = Headers(scope=scope), scope["app"].state.daemon
        peer: Peer = daemon.access.believed(scope.get("state", {}).get("peer") or Peer())
        if peer.way is Way.LOOPBACK and peer.uid is not None and "authorization" not in headers:
            host, origin = headers.get("host", ""), headers.get("origin")
            if _name(f"//{host}") not in LOOPBACK_NAMES or (origin and not _is_of(origin, host)):
                detail = f"Over loopback this daemon answers for this host alone, not for {origin or host}."
                remedy = "Use http://127.0.0.1, or send a token."
                await problem_response(NotAllowed(detail, remedy=remedy))(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _is_of(origin: str, host: str) -> bool:
    """True for the origin of this daemon's own pages: another port of this host is somebody else's."""
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _complete_openapi(app: FastAPI) -> None:
    """Add the schemas that FastAPI does not find by itself: request bodies and problems."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generated()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for body in BODIES:
                schemas |= {name: schema for name, schema in body.schemas().items() if name not in schemas}
            explanation = TypeAdapter(Explanation).json_schema(ref_template="#/components/schemas/{model}")
            schemas |= explanation.pop("$defs", {})
            schemas |= {"Explanation": explanation, "Problem": PROBLEM_SCHEMA}
            meanings.describe(schemas)
            _document_refusals(document)
            links.add(document)
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document_refusals(document: dict[str, Any]) -> None:
    """The errors that any route may answer, in place of those that FastAPI supposes."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["summary"] = operation["description"].split(". ")[0].split("\n")[0].rstrip(".")
            answers = operation["responses"]
            if "HTTPValidationError" in str(answers.get("422")) or (
                path.startswith(VERSIONED) and "422" not in answers
            ):
                answers |= _refusals("invalid_request")
            for status, answer in described(*ANYWHERE).items():
                own = answers.get(str(status), {"description": ""})["description"]
                shared = answer["description"] if answer["description"] not in own else ""
                answers[str(status)] = answer | {"description": f"{own} {shared}".strip()}
            if "requestBody" in operation:
                answers["400"]["description"] += " Or the body is not JSON."


def _refusals(*codes: str) -> dict[str, Any]:
    return {str(status): answer for status, answer in documented(*codes).items()}
