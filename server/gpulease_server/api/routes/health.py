"""Health checks, for load balancers and service managers."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from gpulease_protocol.errors import Unavailable
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.api.problems import error_responses

router = new_router()


@router.get("/healthz", tags=["service"])
async def healthz() -> dict[str, str]:
    """Liveness: the process answers."""
    return {"status": "ok"}


@router.get("/readyz", tags=["service"], responses=error_responses("unavailable"))
async def readyz(daemon: DaemonDep) -> Any:
    """Readiness: the daemon takes requests. Its ledger is read, and the worker that it starts has reported.

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
