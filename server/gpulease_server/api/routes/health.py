"""The entrance of the API, and health checks for load balancers and service managers."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from gpulease_protocol.errors import Unavailable
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.daemon_state import DaemonDep

router = new_router()


@router.get("/v1", operation_id="getIndex", tags=["service"])
async def index(request: Request) -> dict[str, str]:
    """The version of the daemon, and where to find what: each collection by name, `openapi` and `docs`."""
    paths = (route.path for route in request.app.router.routes if isinstance(route, APIRoute))
    collections = {name: path for path in paths if (name := path.removeprefix("/v1/")).isalpha()}
    return {"version": request.app.version, "openapi": "/openapi.json", "docs": "/docs", **collections}


@router.get("/healthz", operation_id="getHealth", tags=["service"])
async def healthz() -> dict[str, str]:
    """Liveness: the process answers."""
    return {"status": "ok"}


@router.get("/readyz", operation_id="getReadiness", tags=["service"], response_model=dict[str, str])
async def readyz(daemon: DaemonDep) -> Any:
    """Readiness: the daemon takes requests, else 503. Its ledger is read, and the worker that it starts has reported.

    While no worker reports to it at all, it is ready all the same, because a proxy that sends workers only to ready
    daemons would otherwise keep them away: `detail` then says that nothing can be granted.
    """
    problem, copy = daemon.not_ready(), daemon.leadership.standby_copy
    if copy is not None:
        raise Unavailable(f"Not ready: {problem}", remedy="Use the writer.", extra={"writer": copy.writer})
    if problem is not None:
        raise Unavailable(f"Not ready: {problem}", remedy="Try again later.")
    detail = daemon.without_worker()
    return JSONResponse({"status": "ready"} if detail is None else {"status": "ready", "detail": detail})
