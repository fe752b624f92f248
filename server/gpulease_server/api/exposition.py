"""`GET /metrics`: everything that Prometheus is told, in the format that it asks for.

The event loop only takes copies of what changes; the text is made of them in a thread, one at a time however many ask.
Nothing here calls NVML or asks a node. A daemon that stands by tells of itself alone: what its copy of the ledger says
is the writer's to tell, and would count twice in every sum.
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

from ..core.ledger import Ledger
from ..runtime.standing import Verdict
from .daemon import Daemon, TheDaemon
from .figures import Moment, families
from .routers import new_router
from .traffic import Traffic

router = new_router()

OPENMETRICS, TEXT = "application/openmetrics-text", "text/plain"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
TEXT_TYPE = f"{TEXT}; version=0.0.4; charset=utf-8"
COMPRESSED_FROM_BYTES = 4096
STANDINGS = {Verdict.CURRENT: "writer", Verdict.DOUBTFUL: "doubtful", Verdict.SUPERSEDED: "superseded"}
STANDBY = "standby"


class Scrape(Collector):
    """What one answer says."""

    def __init__(self, daemon: Daemon, traffic: Traffic, process: Collector) -> None:
        now, writer, copy = daemon.now(), daemon.writer, daemon.standing.copy
        self.standing = STANDBY if copy is not None else STANDINGS[daemon.standing.verdict()]
        self.ready = daemon.not_ready() is None
        self.copy_age_s = None if copy is None or copy.as_of is None else (now.at - copy.as_of).total_seconds()
        since_s = writer.meters.recording_since_s
        self.unrecorded_s = 0.0 if since_s is None else now.mono_s - since_s
        self.moment = None if copy is not None else _moment(daemon)
        self.collectors = [process, traffic.registry, *([] if copy is not None else [writer.meters.registry])]

    def collect(self) -> Iterator[Metric]:
        """Everything; in any thread."""
        yield InfoMetricFamily("gpulease_build", "This daemon.", {"version": version("gpulease")})
        standing = GaugeMetricFamily(
            "gpulease_standing",
            "1 for what the daemon is: the writer, one that stands by, one that cannot confirm its lock (doubtful), "
            "one of which another has taken over (superseded).",
            labels=("standing",),
        )
        for name in (*STANDINGS.values(), STANDBY):
            standing.add_metric((name,), name == self.standing)
        yield standing
        yield GaugeMetricFamily("gpulease_ready", "1 when the daemon can grant, as /readyz says.", self.ready)
        if self.copy_age_s is not None:
            text = "Age of the copy of the ledger that a daemon shows while it stands by."
            yield GaugeMetricFamily("gpulease_copy_age_seconds", text, max(0.0, self.copy_age_s))
        if self.moment is not None:
            text = "How long something to be recorded has waited for a commit that succeeds; 0 while nothing does."
            yield GaugeMetricFamily("gpulease_commit_pending_seconds", text, self.unrecorded_s)
            yield from families(self.moment)
        for collector in self.collectors:
            yield from collector.collect()


class Exposition:
    """Makes the answers of one application."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._process = ProcessCollector(registry=None)
        self._one = asyncio.Lock()

    async def text(self, daemon: Daemon, *, as_openmetrics: bool, compressed: bool) -> bytes:
        """All metrics of this moment, with gzip where that is wanted and pays."""
        async with self._one:
            scrape = Scrape(daemon, self._traffic, self._process)
            return await asyncio.to_thread(_written, scrape, as_openmetrics, compressed)


@router.get(
    "/metrics",
    tags=["service"],
    response_class=Response,
    responses={
        200: {
            "description": "Text of Prometheus, or OpenMetrics if `Accept` names it.",
            "content": {TEXT: {"schema": {"type": "string"}}, OPENMETRICS: {"schema": {"type": "string"}}},
        }
    },
)
async def metrics(
    daemon: TheDaemon,
    request: Request,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    accept_encoding: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """For Prometheus: GPUs, leases, queue, jobs, nodes, turns and requests. docs/monitoring.md has each metric."""
    made: Exposition = request.app.state.exposition
    as_openmetrics = preferred(accept)
    wanted = _weight(accept_encoding, "gzip") > 0
    text = await made.text(daemon, as_openmetrics=as_openmetrics, compressed=wanted)
    headers = {"Content-Type": OPENMETRICS_TYPE if as_openmetrics else TEXT_TYPE, "Vary": "Accept, Accept-Encoding"}
    if text.startswith(b"\x1f\x8b"):
        headers["Content-Encoding"] = "gzip"
    return Response(text, headers=headers)


def preferred(accept: str) -> bool:
    """True when OpenMetrics is wanted, and at least as much as plain text."""
    weight = _weight(accept, OPENMETRICS)
    return weight > 0 and weight >= _weight(accept, TEXT)


def _weight(header: str, name: str) -> float:
    """How much a header of content negotiation wants something, 0 to 1."""
    for item in header.lower().split(","):
        what, *parameters = (part.strip() for part in item.split(";"))
        if what == name:
            weights = [part[2:] for part in parameters if part.startswith("q=")]
            try:
                return float(weights[0]) if weights else 1.0
            except ValueError:
                return 0.0
    return 0.0


def _moment(daemon: Daemon) -> Moment:
    ledger, meters, now = daemon.ledger, daemon.writer.meters, daemon.now()
    copy = Ledger(
        leases=ledger.leases.copy(),
        gpus=ledger.gpus.copy(),
        nodes=ledger.nodes.copy(),
        sightings=ledger.sightings.copy(),
        queue=ledger.queue.copy(),
        live_jobs=ledger.live_jobs.copy(),
    )
    return Moment(
        ledger=copy,
        policy=daemon.policy,
        now=now,
        totals=meters.usage.until(now.mono_s),
        quiet_s=meters.usage.quiet_s(now.mono_s),
        probe_s=meters.probe_s.copy(),
    )


def _written(scrape: Scrape, as_openmetrics: bool, compressed: bool) -> bytes:
    made: Callable[[Collector], bytes] = openmetrics.generate_latest if as_openmetrics else exposition.generate_latest
    text = made(scrape)
    return gzip.compress(text, 1) if compressed and len(text) >= COMPRESSED_FROM_BYTES else text
