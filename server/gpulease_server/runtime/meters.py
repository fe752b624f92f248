"""What the daemon counts and measures of itself, for Prometheus: turns, commits, grants, ends, usage, probes.

Kept in memory only, from the start of the process; the ledger's own figures are read from it at each scrape (see
`api.figures`). Nothing is decided on any of it, and no fault here is a fault of the turn that is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from gpulease.exchange import NodeReport
from gpulease.model import EndReason, Event, JobState, Lease, LeaseState

from ..core.happenings import Happening, LeaseAsked
from ..core.ledger import Change, GpuGone, GpuRecord, Instant, Ledger, NodeGone
from . import clock
from .usage import Usage

log = logging.getLogger("gpulease.meters")

FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
WAIT_S = (0.1, 1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 3 * 86400.0, 7 * 86400.0)
TURN_SIZES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)

# Without this each one has a second series that says when it began, which is when the process did.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Meters:
    """Every meter of one writer. Used from the event loop; `registry` may be read in any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.usage = Usage()
        self.probe_s: dict[str, float] = {}
        """By node: how long its last reading took."""
        self.recording_since_s: float | None = None
        """Since when something to be recorded waits for a commit that succeeds; None while nothing does."""
        self._wait = Histogram(
            "gpulease_lease_wait_seconds",
            "Time from a request to the grant of its GPUs, of each grant.",
            buckets=WAIT_S,
            registry=self.registry,
        )
        self._latency = Histogram(
            "gpulease_grant_latency_seconds",
            "Time in which requests were answered that were granted without waiting in the queue.",
            buckets=FAST_S,
            registry=self.registry,
        )
        self._commit = Histogram(
            "gpulease_commit_seconds",
            "Time that a transaction of a turn took, with fsync.",
            buckets=FAST_S,
            registry=self.registry,
        )
        self._turn = Histogram(
            "gpulease_turn_happenings",
            "Happenings in a turn that was committed.",
            buckets=TURN_SIZES,
            registry=self.registry,
        )
        self._failed = Counter(
            "gpulease_commits_failed_total",
            "Transactions of turns that failed, or whose outcome is not known.",
            registry=self.registry,
        )
        self._last_commit = Gauge(
            "gpulease_last_commit_timestamp_seconds",
            "When a turn was last committed, 0 before the first. A daemon that has nothing to record commits nothing.",
            registry=self.registry,
        )
        self._granted = Counter("gpulease_leases_granted_total", "Grants.", registry=self.registry)
        self._ended = Counter(
            "gpulease_leases_ended_total", "Leases that ended, by end_reason.", ["reason"], registry=self.registry
        )
        self._jobs = Counter(
            "gpulease_jobs_ended_total", "Jobs that ended, by their final state.", ["state"], registry=self.registry
        )
        for reason in EndReason:
            self._ended.labels(reason.value)
        for state in JobState:
            if state.final:
                self._jobs.labels(state.value)

    @contextmanager
    def committing(self, happenings: int) -> Iterator[None]:
        """Around the commit of a turn."""
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

    def answered(self, happening: Happening, answer: Lease | object, begun_s: float) -> None:
        """A caller, who has waited since `begun_s`, has an answer."""
        if not isinstance(happening, LeaseAsked) or not isinstance(answer, Lease):
            return
        if answer.id == happening.lease_id and answer.state is LeaseState.ACTIVE:
            self._latency.observe(clock.now().mono_s - begun_s)

    def take(self, changes: list[Change], ledger: Ledger, now: Instant) -> None:
        """Count what a committed turn has changed. `ledger` is as it was after it. Never raises."""
        try:
            for change in changes:
                match change:
                    case GpuRecord():
                        self._take_gpu(change, ledger, now.mono_s)
                    case Event():
                        self._take_event(change, ledger)
                    case GpuGone():
                        self.usage.drop(change.uuid, now.mono_s)
                    case NodeGone():
                        self.probe_s.pop(change.name, None)
        except Exception:
            log.exception("the figures of a turn are not counted")

    def take_up(self, ledger: Ledger, now: Instant) -> None:
        """Go on with a ledger that was read: who holds what is as it says."""
        self.recording_since_s = None
        for uuid in [uuid for uuid in self.usage.held if uuid not in ledger.gpus]:
            self.usage.drop(uuid, now.mono_s)
        for gpu in ledger.gpus.values():
            self._take_gpu(gpu, ledger, now.mono_s)

    def reported(self, node: str, report: NodeReport, now: Instant) -> None:
        """A node's report was accepted."""
        if report.problem is not None:
            self.probe_s.pop(node, None)
            return
        if report.read_s is not None:
            self.probe_s[node] = report.read_s
        for reading in report.gpus:
            ratio = reading.utilization_ratio
            self.usage.read(reading.uuid, None if ratio is None else min(max(ratio, 0.0), 1.0), now.mono_s)

    def _take_gpu(self, gpu: GpuRecord, ledger: Ledger, now_s: float) -> None:
        if gpu.lease_id is None or gpu.draining:
            self.usage.drop(gpu.device.uuid, now_s)
            return
        record = ledger.leases.get(gpu.lease_id)
        self.usage.hold(gpu.device.uuid, gpu.lease_id, record.lease.holder.user if record else None, now_s)

    def _take_event(self, event: Event, ledger: Ledger) -> None:
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
