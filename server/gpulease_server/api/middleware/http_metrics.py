"""HTTP metrics by route, for Prometheus. A route is its template, so that callers cannot create new time series."""

from __future__ import annotations

from http import HTTPMethod

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease_server.runtime import clock

UNMATCHED = "unmatched"
"""In place of the route: there is none for the path, or the request was refused before routing."""
OTHER_METHOD = "other"
METHODS = frozenset(HTTPMethod)
BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 60.0)


class HttpMetrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "gpulease_http_requests_total",
            "Requests that were answered, by route; status is 499 if the client had disconnected.",
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
        self.in_flight = Gauge(
            "gpulease_http_requests_in_flight", "Requests that are being answered.", registry=self.registry
        )
        self._series: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        """What a method, a route and a status are counted in: to find it by its labels takes as long as to count."""

    def count(self, method: str, route: str, status: int, took_s: float) -> None:
        """Count one request that has been answered. `route` is a template, of which there are few."""
        series = self._series.get((method, route, status))
        if series is None:
            known = method if method in METHODS else OTHER_METHOD
            series = self.requests.labels(known, route, str(status)), self.duration.labels(known, route)
            if known == method:
                self._series[method, route, status] = series
        series[0].inc()
        series[1].observe(took_s)


class HttpMetricsMiddleware:
    """Counts and times each request. The outermost middleware, so that refusals count, too."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count it when it has been answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, started_s = 499, clock.mono_s()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.metrics.in_flight.inc()
        try:
            await self.app(scope, receive, send_and_note)
        except Exception:
            status = 500
            raise
        finally:
            self.metrics.in_flight.dec()
            route = getattr(scope.get("route"), "path", UNMATCHED)
            self.metrics.count(scope["method"], route, status, clock.mono_s() - started_s)
