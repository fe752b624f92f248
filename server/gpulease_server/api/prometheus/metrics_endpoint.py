"""`GET /metrics`: all metrics, in the format that Prometheus asks for.

The event loop only copies what changes; the text is made from the copies in a thread, one scrape at a time. Nothing
here calls NVML or waits for a node. A standby exports only metrics about itself: those of the ledger are the writer's
to export, and would otherwise count twice in every sum.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Annotated

from fastapi import Header, Request, Response
from prometheus_client import ProcessCollector, exposition
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.daemon_state import DaemonDep, DaemonState
from gpulease_server.api.middleware.http_metrics import HttpMetrics
from gpulease_server.api.prometheus.gauges import LedgerSnapshot, metric_families
from gpulease_server.core.ledger import Ledger
from gpulease_server.runtime.leadership.status import Leadership

router = new_router()

OPENMETRICS, TEXT = "application/openmetrics-text", "text/plain"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
TEXT_TYPE = f"{TEXT}; version=0.0.4; charset=utf-8"
MIN_GZIP_BYTES = 4096
VERSION = version("gpulease")
"""Read once: it is in a file, and a daemon that is out of file descriptors still shows its metrics."""
STANDINGS = {Leadership.CONFIRMED: "writer", Leadership.UNCONFIRMED: "doubtful", Leadership.SUPERSEDED: "superseded"}
STANDBY = "standby"


class DaemonCollector(Collector):
    """The metrics of one scrape."""

    def __init__(self, daemon: DaemonState, http_metrics: HttpMetrics, process: Collector) -> None:
        now, writer, copy = daemon.now(), daemon.writer, daemon.leadership.standby_copy
        self.standing = STANDBY if copy is not None else STANDINGS[daemon.leadership.state()]
        self.ready = daemon.not_ready() is None
        self.copy_age_s = None if copy is None or copy.as_of is None else (now.at - copy.as_of).total_seconds()
        since_s = writer.metrics.recording_since_s
        self.unrecorded_s = 0.0 if since_s is None else now.mono_s - since_s
        self.snapshot = None if copy is not None else _snapshot(daemon)
        self.collectors = [process, http_metrics.registry, *([] if copy is not None else [writer.metrics.registry])]

    def collect(self) -> Iterator[Metric]:
        """All metrics; in any thread."""
        yield InfoMetricFamily("gpulease_build", "This daemon.", {"version": VERSION})
        standing = GaugeMetricFamily(
            "gpulease_standing",
            "1 for the role of the daemon: writer, standby, doubtful (it cannot confirm its lock), "
            "superseded (another daemon has taken over).",
            labels=("standing",),
        )
        for name in (*STANDINGS.values(), STANDBY):
            standing.add_metric((name,), name == self.standing)
        yield standing
        yield GaugeMetricFamily("gpulease_ready", "1 when the daemon can grant, as /readyz says.", self.ready)
        if self.copy_age_s is not None:
            text = "Age of the copy of the ledger that a standby shows."
            yield GaugeMetricFamily("gpulease_copy_age_seconds", text, max(0.0, self.copy_age_s))
        if self.snapshot is not None:
            text = "How long the oldest uncommitted change has waited for a successful commit; 0 if there is none."
            yield GaugeMetricFamily("gpulease_commit_pending_seconds", text, self.unrecorded_s)
            yield from metric_families(self.snapshot)
        for collector in self.collectors:
            yield from collector.collect()


class MetricsRenderer:
    """Renders the metrics of one application."""

    def __init__(self, http_metrics: HttpMetrics) -> None:
        self._http_metrics = http_metrics
        self._process = ProcessCollector(registry=None)
        self._lock = asyncio.Lock()

    async def render(self, daemon: DaemonState, *, as_openmetrics: bool, accepts_gzip: bool) -> bytes:
        """The current metrics as text; compressed if that is accepted and worthwhile."""
        async with self._lock:
            collector = DaemonCollector(daemon, self._http_metrics, self._process)
            return await asyncio.to_thread(_render, collector, as_openmetrics, accepts_gzip)


@router.get(
    "/metrics",
    operation_id="getMetrics",
    tags=["service"],
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus text format, or OpenMetrics if `Accept` names it.",
            "content": {TEXT: {"schema": {"type": "string"}}, OPENMETRICS: {"schema": {"type": "string"}}},
        }
    },
)
async def metrics(
    daemon: DaemonDep,
    request: Request,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    accept_encoding: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Metrics for Prometheus: GPUs, leases, queue, jobs, nodes, turns and requests. docs/monitoring.md lists them."""
    renderer: MetricsRenderer = request.app.state.metrics_renderer
    as_openmetrics = prefers_openmetrics(accept)
    accepts_gzip = _quality(accept_encoding, "gzip") > 0
    text = await renderer.render(daemon, as_openmetrics=as_openmetrics, accepts_gzip=accepts_gzip)
    headers = {"Content-Type": OPENMETRICS_TYPE if as_openmetrics else TEXT_TYPE, "Vary": "Accept, Accept-Encoding"}
    if text.startswith(b"\x1f\x8b"):
        headers["Content-Encoding"] = "gzip"
    return Response(text, headers=headers)


def prefers_openmetrics(accept: str) -> bool:
    """True if an `Accept` header ranks OpenMetrics at least as high as plain text."""
    quality = _quality(accept, OPENMETRICS)
    return quality > 0 and quality >= _quality(accept, TEXT)


def _quality(header: str, name: str) -> float:
    """The quality value (RFC 9110, 12.4.2) of a name in a header, 0 to 1; 0 if the header does not list it."""
    for item in header.lower().split(","):
        listed, *parameters = (part.strip() for part in item.split(";"))
        if listed == name:
            qualities = [part[2:] for part in parameters if part.startswith("q=")]
            try:
                return float(qualities[0]) if qualities else 1.0
            except ValueError:
                return 0.0
    return 0.0


def _snapshot(daemon: DaemonState) -> LedgerSnapshot:
    ledger, meters, now = daemon.ledger, daemon.writer.metrics, daemon.now()
    copy = Ledger(
        leases=ledger.leases.copy(),
        gpus=ledger.gpus.copy(),
        nodes=ledger.nodes.copy(),
        node_observations=ledger.node_observations.copy(),
        queue=ledger.queue.copy(),
        live_jobs=ledger.live_jobs.copy(),
    )
    return LedgerSnapshot(
        ledger=copy,
        policy=daemon.policy,
        now=now,
        totals=meters.usage.totals_at(now.mono_s),
        quiet_s=meters.usage.idle_s(now.mono_s),
        probe_s=meters.probe_s.copy(),
    )


def _render(collector: Collector, as_openmetrics: bool, accepts_gzip: bool) -> bytes:
    generate: Callable[[Collector], bytes] = (
        openmetrics.generate_latest if as_openmetrics else exposition.generate_latest
    )
    text = generate(collector)
    return gzip.compress(text, 1) if accepts_gzip and len(text) >= MIN_GZIP_BYTES else text
