"""Counters and histograms of the daemon for Prometheus: commits, grants, ended leases and jobs, GPU time, probes.

In memory only, from the start of the process; gauges of the ledger are computed at each scrape (see
`api.prometheus.gauges`). No decision rests on these, and an error here does not fail the turn that is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from gpulease_protocol.model import EndReason, Event, JobState, Lease, LeaseState
from gpulease_protocol.node_protocol import NodeReport
from gpulease_server.core.gpu import activity_of, reading_of
from gpulease_server.core.happenings import Happening, LeaseRequested
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import Change, GpuRecord, GpuRemoved, Instant, NodeRemoved
from gpulease_server.runtime import clock
from gpulease_server.runtime.gpu_hours import GpuUsage

log = logging.getLogger("gpulease.meters")

FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
WAIT_S = (0.1, 1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 3 * 86400.0, 7 * 86400.0)
TURN_SIZES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)

# Otherwise each metric has a second series with its creation time, which is the start of the process.
disable_created_metrics()  # type: ignore[no-untyped-call]


class DaemonMetrics:
    """The metrics of one writer. Used from the event loop; `registry` may be read in any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.usage = GpuUsage()
        self.probe_s: dict[str, float] = {}
        """By node: how long its last reading took."""
        self.recording_since_s: float | None = None
        """Since when changes have waited for a successful commit; None while none do."""
        self._wait = Histogram(
            "gpulease_lease_wait_seconds",
            "Time from a request to the grant of its GPUs.",
            buckets=WAIT_S,
            registry=self.registry,
        )
        self._latency = Histogram(
            "gpulease_grant_latency_seconds",
            "Time to answer requests that were granted without queueing.",
            buckets=FAST_S,
            registry=self.registry,
        )
        self._commit = Histogram(
            "gpulease_commit_seconds",
            "Duration of the transaction of a turn, including fsync.",
            buckets=FAST_S,
            registry=self.registry,
        )
        self._turn = Histogram(
            "gpulease_turn_happenings",
            "Happenings in a committed turn.",
            buckets=TURN_SIZES,
            registry=self.registry,
        )
        self._failed = Counter(
            "gpulease_commits_failed_total",
            "Transactions of turns that failed or have an unknown outcome.",
            registry=self.registry,
        )
        self._last_commit = Gauge(
            "gpulease_last_commit_timestamp_seconds",
            "Time of the last commit; 0 before the first. A daemon that has nothing to record commits nothing.",
            registry=self.registry,
        )
        self._granted = Counter("gpulease_leases_granted_total", "Granted leases.", registry=self.registry)
        self._ended = Counter(
            "gpulease_leases_ended_total", "Ended leases, by end_reason.", ["reason"], registry=self.registry
        )
        self._jobs = Counter(
            "gpulease_jobs_ended_total", "Ended jobs, by final state.", ["state"], registry=self.registry
        )
        for reason in EndReason:
            self._ended.labels(reason.value)
        for state in JobState:
            if state.final:
                self._jobs.labels(state.value)

    @contextmanager
    def time_commit(self, happenings: int) -> Iterator[None]:
        """Measure the commit of a turn."""
        begun_s = clock.now().mono_s
        if self.recording_since_s is None:
            self.recording_since_s = begun_s
        try:
            yield
        except BaseException:
            self._failed.inc()
            raise
        now = clock.now()
        self.recording_since_s = None
        self._commit.observe(now.mono_s - begun_s)
        self._turn.observe(happenings)
        self._last_commit.set(now.at.timestamp())

    def observe_answer(self, happening: Happening, answer: Lease | object, begun_s: float) -> None:
        """Measure the grant latency of an answer to a request made at `begun_s`."""
        if not isinstance(happening, LeaseRequested) or not isinstance(answer, Lease):
            return
        if answer.id == happening.lease_id and answer.state is LeaseState.ACTIVE:
            self._latency.observe(clock.now().mono_s - begun_s)

    def count_turn(self, changes: list[Change], ledger: Ledger, now: Instant) -> None:
        """Count the changes of a committed turn. `ledger`: after the turn. Never raises."""
        try:
            for change in changes:
                if isinstance(change, GpuRecord):
                    self._update_gpu(change, ledger, now.mono_s)
                elif isinstance(change, Event):
                    self._count_event(change, ledger)
                elif isinstance(change, GpuRemoved):
                    self.usage.drop(change.uuid, now.mono_s)
                elif isinstance(change, NodeRemoved):
                    self.probe_s.pop(change.name, None)
        except Exception:
            log.exception("a turn is missing in the metrics")

    def reset_usage(self, ledger: Ledger, now: Instant) -> None:
        """Take over who holds which GPU from a ledger that was loaded."""
        self.recording_since_s = None
        for uuid in [uuid for uuid in self.usage.held if uuid not in ledger.gpus]:
            self.usage.drop(uuid, now.mono_s)
        for gpu in ledger.gpus.values():
            self._update_gpu(gpu, ledger, now.mono_s, from_grant=False)

    def count_report(self, node: str, report: NodeReport, now: Instant, ledger: Ledger) -> None:
        """Count the readings of a node's report that was accepted. `ledger`: with that report."""
        if report.problem is not None:
            self.probe_s.pop(node, None)
            return
        if report.read_s is not None:
            self.probe_s[node] = report.read_s
        for reading in report.gpus:
            if reading.uuid not in self.usage.held:
                continue
            ratio = reading.utilization_ratio
            self.usage.read(reading.uuid, None if ratio is None else min(max(ratio, 0.0), 1.0), now.mono_s)
            gpu = ledger.gpus.get(reading.uuid)
            if gpu is not None:
                self.usage.observe(reading.uuid, activity_of(ledger, gpu, reading_of(ledger, gpu)), now.mono_s)

    def _update_gpu(self, gpu: GpuRecord, ledger: Ledger, now_s: float, *, from_grant: bool = True) -> None:
        if gpu.lease_id is None or gpu.draining:
            self.usage.drop(gpu.device.uuid, now_s)
            return
        record = ledger.leases.get(gpu.lease_id)
        user = record.lease.holder.user if record else None
        self.usage.hold(gpu.device.uuid, gpu.lease_id, user, now_s, from_grant=from_grant)

    def _count_event(self, event: Event, ledger: Ledger) -> None:
        match event.kind:
            case "lease.granted":
                self._granted.inc()
                record = ledger.leases.get(event.lease_id or "")
                if record is not None and record.lease.granted_at is not None:
                    waited = record.lease.granted_at - record.lease.created_at
                    self._wait.observe(max(0.0, waited.total_seconds()))
            case "lease.ended":
                self._ended.labels(event.reason or "").inc()
            case "job.ended":
                job = ledger.jobs.get(event.job_id or "")
                if job is not None and job.job.state.final:
                    self._jobs.labels(job.job.state.value).inc()
