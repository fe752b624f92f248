"""The application: puts routers, middleware and error handlers together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from gpulease_server.api.auth.rate_limiter import RateLimiter
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.fair_share import FairShare
from gpulease_server.api.hot_path.hot_path import HotPath
from gpulease_server.api.middleware.compression import CompressionMiddleware
from gpulease_server.api.middleware.cors import AllowedOriginsCORSMiddleware
from gpulease_server.api.middleware.etag import ETagMiddleware
from gpulease_server.api.middleware.fair_turns import FairTurnsMiddleware
from gpulease_server.api.middleware.head import HeadMiddleware
from gpulease_server.api.middleware.http_metrics import HttpMetrics, HttpMetricsMiddleware
from gpulease_server.api.middleware.loopback_origin import LoopbackOriginMiddleware
from gpulease_server.api.middleware.no_sniffing import NoSniffingMiddleware
from gpulease_server.api.middleware.request_id import RequestIdMiddleware
from gpulease_server.api.middleware.request_log import RequestLogMiddleware
from gpulease_server.api.middleware.stale_reads import StaleReadMiddleware
from gpulease_server.api.openapi import docs_page
from gpulease_server.api.openapi.document import install_openapi
from gpulease_server.api.problems import add_exception_handlers
from gpulease_server.api.prometheus import metrics_endpoint
from gpulease_server.api.prometheus.metrics_endpoint import MetricsRenderer
from gpulease_server.api.routes import (
    events,
    front_page,
    gpu_history,
    gpus,
    health,
    job_logs,
    job_metrics,
    jobs,
    joining,
    lease_keep,
    lease_metrics,
    leases,
    limits,
    me,
    nodes,
    reservations,
    timeline,
    tokens,
    usage,
)

ROUTE_MODULES = (
    gpu_history,  # before `/v1/gpus/{uuid}`
    gpus,
    nodes,
    joining,
    leases,
    lease_keep,
    lease_metrics,
    jobs,
    job_logs,
    job_metrics,
    me,
    limits,
    reservations,
    tokens,
    events,
    timeline,
    usage,
    health,
    front_page,
    metrics_endpoint,
    docs_page,
)
REQUEST_BODIES = (
    leases.REQUEST_BODY,
    leases.PROOF_BODY,
    lease_keep.KEEP_BODY,
    jobs.SUBMIT_BODY,
    jobs.CANCEL_BODY,
    nodes.REPORT_BODY,
    nodes.PIECE_BODY,
    nodes.DRAIN_BODY,
    nodes.PAUSE_BODY,
    limits.SET_BODY,
    reservations.CREATE_BODY,
    tokens.CREATE_BODY,
)


class Application(FastAPI):
    """The REST application, which answers some requests by the hot path."""

    hot_path: HotPath

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or not await self.hot_path.answers(scope, receive, send):
            await super().__call__(scope, receive, send)


def create_app(
    daemon: DaemonState,
    lifespan: Any = None,
    origins: frozenset[str] = frozenset(),
    static_routes: Sequence[BaseRoute] = (),
) -> FastAPI:
    """The REST application of a daemon.

    Args:
        daemon: Its parts.
        lifespan: ASGI lifespan; None for nothing.
        origins: Pages of these origins may read answers (CORS).
        static_routes: Routes before those of the API that always answer the same: the dashboard.
    """
    app = Application(
        title="gpulease",
        version=version("gpulease"),
        description="GPU leases on shared machines: the one place where the ledger and the hardware agree. Callers on"
        " the daemon's host are identified by their user; others send `Authorization: Bearer TOKEN`."
        " A client sends bodies uncompressed, and gets no answer if it closes its side of the connection before.",
        lifespan=lifespan or _no_lifespan,
        openapi_url=None,  # `install_openapi` serves it
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )

    def is_stopping() -> bool:
        running: DaemonState = app.state.daemon
        return running.stopping.is_set()

    http_metrics, share = HttpMetrics(), FairShare(is_stopping)
    app.hot_path = HotPath(app, daemon.leadership, share, http_metrics)
    app.state.daemon = daemon
    app.state.rate_limiter = RateLimiter()
    app.state.metrics_renderer = MetricsRenderer(http_metrics)
    for module in ROUTE_MODULES:
        app.router.routes.extend(module.router.routes)
    app.router.routes[:0] = static_routes
    add_exception_handlers(app)
    # From the innermost to the outermost.
    app.add_middleware(ETagMiddleware)
    app.add_middleware(StaleReadMiddleware, leadership=daemon.leadership, static_routes=static_routes)
    app.add_middleware(LoopbackOriginMiddleware)
    if origins:
        app.add_middleware(AllowedOriginsCORSMiddleware, origins=origins)
    app.add_middleware(CompressionMiddleware)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(NoSniffingMiddleware)
    app.add_middleware(RequestLogMiddleware)
    app.add_middleware(FairTurnsMiddleware, share=share)
    app.add_middleware(HttpMetricsMiddleware, metrics=http_metrics)
    install_openapi(app, REQUEST_BODIES)
    return app


@asynccontextmanager
async def _no_lifespan(_: FastAPI) -> AsyncIterator[None]:
    yield
