"""HTTP metrics by route, for Prometheus. A route is its template, so that callers cannot create new time series."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import field
from http import HTTPMethod
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.runtime import clock

UNMATCHED = "unmatched"
"""In place of the route: there is none for the path, or the request was refused before routing."""
OTHER_METHOD = "other"
METHODS = frozenset(HTTPMethod)
BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 60.0)
BUCKET_NAMES = tuple(map(floatToGoString, (*BUCKETS_S, float("inf"))))


@dataclass(slots=True)
class _Durations:
    """How long the requests of one method and route took."""

    counts: list[int] = field(default_factory=lambda: [0] * len(BUCKET_NAMES))
    """By bucket; not those of the buckets below it."""
    sum_s: float = 0.0


@dataclass(slots=True)
class _Answered:
    """The requests of one method and route that were answered with one status."""

    durations: _Durations
    """With those of the other statuses."""
    number: int = 0


class HttpMetrics(Collector):
    """The metrics of one application. Used from the event loop; `registry` may be read in any thread.

    Plain numbers: to count a request in the library's own counters, each with a lock, takes ten times as long.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.in_flight = 0
        """Requests that are being answered."""
        self._answered: dict[tuple[str, str, int], _Answered] = {}
        self._durations: dict[tuple[str, str], _Durations] = {}

    def count(self, method: str, route: str, status: int, took_s: float) -> None:
        """Count one request that has been answered. `route` is a template, of which there are few."""
        answered = self._answered.get((method, route, status))
        if answered is None:
            answered = self._series(method if method in METHODS else OTHER_METHOD, route, status)
        answered.number += 1
        durations = answered.durations
        durations.counts[bisect_left(BUCKETS_S, took_s)] += 1
        durations.sum_s += took_s

    def _series(self, method: str, route: str, status: int) -> _Answered:
        durations = self._durations.setdefault((method, route), _Durations())
        return self._answered.setdefault((method, route, status), _Answered(durations))

    def collect(self) -> Iterator[Metric]:
        """All of them; in any thread."""
        requests = CounterMetricFamily(
            "gpulease_http_requests_total",
            "Requests that were answered, by route; status is 499 if the client had disconnected.",
            labels=("method", "route", "status"),
        )
        for (method, route, status), answered in list(self._answered.items()):
            requests.add_metric((method, route, str(status)), answered.number)
        yield requests
        duration = HistogramMetricFamily(
            "gpulease_http_request_duration_seconds",
            "Time from a request to the end of its answer, long polls and streams included.",
            labels=("method", "route"),
        )
        for labels, durations in list(self._durations.items()):
            buckets = tuple(zip(BUCKET_NAMES, accumulate(durations.counts), strict=True))
            duration.add_metric(labels, buckets, durations.sum_s)
        yield duration
        text = "Requests that are being answered."
        yield GaugeMetricFamily("gpulease_http_requests_in_flight", text, self.in_flight)


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

        self.metrics.in_flight += 1
        try:
            await self.app(scope, receive, send_and_note)
        except Exception:
            status = 500
            raise
        finally:
            self.metrics.in_flight -= 1
            route = getattr(scope.get("route"), "path", UNMATCHED)
            self.metrics.count(scope["method"], route, status, clock.mono_s() - started_s)
