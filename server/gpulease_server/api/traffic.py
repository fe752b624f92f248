"""Requests and answers by route, for Prometheus. A route is its template, so that no caller can make new series."""

from __future__ import annotations

from http import HTTPMethod

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..runtime import clock

UNMATCHED = "unmatched"
"""In place of the route: the address is none of ours, or the request was refused before anybody looked."""
OTHER_METHOD = "other"
METHODS = frozenset(HTTPMethod)
BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 60.0)


class Traffic:
    """The meters of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "gpulease_http_requests_total",
            "Requests that were answered, by route; status is 499 where the caller had gone.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.duration = Histogram(
            "gpulease_http_request_duration_seconds",
            "Time from a request to the end of its answer, long polls and streams included.",
            ["method", "route"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.open = Gauge(
            "gpulease_http_requests_in_flight", "Requests that are being answered.", registry=self.registry
        )


class Measured:
    """Counts each request. Goes around everything else, so that refusals count, too."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self.app = app
        self.traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count it when it is over."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, begun_s = 499, clock.now().mono_s

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.traffic.open.inc()
        try:
            await self.app(scope, receive, noted)
        except Exception:
            status = 500
            raise
        finally:
            self.traffic.open.dec()
            route = getattr(scope.get("route"), "path", UNMATCHED)
            method = scope["method"] if scope["method"] in METHODS else OTHER_METHOD
            self.traffic.requests.labels(method, route, str(status)).inc()
            self.traffic.duration.labels(method, route).observe(clock.now().mono_s - begun_s)
