"""What does it cost to keep what the GPUs of jobs show?

The daemon's part of one exchange of a node of 8 GPUs, all held by a job, with and without it; the size of what is kept;
how long a write, an answer and a restart take. The limit beside it: the core's own turn for the same report.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpulease_protocol.model import Demand, GpuReading, Holder, JobSpec
from gpulease_protocol.node_protocol import NodeReport
from gpulease_server.api.routes.job_metrics import JSON, csv, job_metrics
from gpulease_server.core.decide import decide
from gpulease_server.core.happenings import JobSubmitted, NodeReported, SubmittedJob
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.pending import PendingRequests
from gpulease_server.core.policy import Policy
from gpulease_server.core.queue import settle
from gpulease_server.core.records import Instant
from gpulease_server.core.turn import Turn
from gpulease_server.runtime.gpu_metrics.recorder import GpuMetricsRecorder, encode_series
from gpulease_server.runtime.gpu_metrics.time_series import MAX_BUCKETS, TimeSeries
from gpulease_server.runtime.writer import Writer
from gpulease_server.store import gpu_metrics_table
from gpulease_server.store.database import upgrade
from gpulease_server.store.ledger_store import Store, is_stored

GPUS = 8
ROUNDS = 3000
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def timed(action: Callable[[], object], rounds: int) -> list[float]:
    """Microseconds that each call took, sorted."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        action()
        found.append((time.perf_counter() - begun) * 1e6)
    return sorted(found)


def row(what: str, microseconds: list[float]) -> None:
    """Print median and 99th percentile."""
    print(f"| {what} | {statistics.median(microseconds):.0f} | {microseconds[int(len(microseconds) * 0.99)]:.0f} |")


class Node:
    """A node of 8 GPUs, all held by one job, whose readings change from report to report."""

    def __init__(self, recorder: GpuMetricsRecorder, writer: Writer) -> None:
        self.recorder, self.ledger, self.at_s = recorder, writer.committed, 0.0
        self.policy, self.changes, self.chance = Policy(), list[object](), random.Random(5)  # noqa: S311 - load
        self.readings = [
            GpuReading(uuid=f"GPU-{place:08x}-0000-0000-0000-000000000000", node="a", index=place, opened_by=())
            for place in range(GPUS)
        ]
        self.core()
        spec = JobSpec(command=("train.py",), gpus=GPUS)
        jobs = (SubmittedJob(job_id="job", lease_id="lease", spec=spec),)
        self.turn(JobSubmitted(cause="c", jobs=jobs, name="", demand=Demand(count=GPUS), holder=Holder()))
        self.core()

    @property
    def now(self) -> Instant:
        return Instant(at=NOON + timedelta(seconds=self.at_s), mono_s=self.at_s)

    def report(self) -> NodeReport:
        """The next one, a second later."""
        self.at_s += 1.0
        gpus = [
            replace(
                one,
                utilization_ratio=self.chance.randint(0, 100) / 100,
                power_w=self.chance.randint(70_000, 700_000) / 1000,
                memory_used_bytes=self.chance.randint(0, 40_000) * 2**21,
                temperature_c=float(self.chance.randint(30, 80)),
            )
            for one in self.readings
        ]
        return NodeReport(worker_id="w", host="a", gpus=tuple(gpus))

    def turn(self, happening: JobSubmitted | NodeReported) -> None:
        turn = Turn(self.ledger, self.now, self.policy, PendingRequests(), {})
        decide(turn, happening)
        settle(turn)
        self.changes += turn.changes

    def core(self) -> None:
        """What the core does with a report."""
        report = self.report()
        self.turn(NodeReported(cause="r", node="a", report=report, observed_at_s=self.at_s))


def main() -> None:
    """Print the table of bench/README.md."""
    with tempfile.TemporaryDirectory() as place:
        url = f"sqlite:///{Path(place) / 'ledger.db'}"
        upgrade(url)
        store = Store(url)
        writer = Writer(store, Policy())
        writer.committed, writer.problem = Ledger(), None
        recorder = GpuMetricsRecorder(store, writer)
        node = Node(recorder, writer)
        print(f"\n{GPUS} GPUs held by a job\n\n| what | median us | p99 us |\n|---|---|---|")
        measure(store, recorder, node)
        store.close()
    memory()


def measure(store: Store, recorder: GpuMetricsRecorder, node: Node) -> None:
    """The rows of the table."""
    reports = [node.report() for _ in range(ROUNDS)]
    upcoming = iter(reports)

    def take() -> None:
        node.at_s += 1
        recorder.record("a", next(upcoming), node.ledger, node.now)

    row("the core's turn for one report (limit)", timed(node.core, 300))
    row("keeping the readings of one report", timed(take, ROUNDS))
    content = recorder.encoded("lease")
    assert content is not None
    row("copying the series for a write or an answer", timed(lambda: recorder.encoded("lease"), 300))
    row(
        "packing and committing the row, in a thread",
        timed(lambda: gpu_metrics_table.save(store, {"lease": content}), 100),
    )
    store.write([change for change in node.changes if is_stored(change)], node.ledger)  # type: ignore[arg-type]
    leases = gpu_metrics_table.leases_of_job(store.engine, "job")
    found = job_metrics("job", leases, {"lease": content}, node.now.at, MAX_BUCKETS)
    noun = lambda: job_metrics("job", leases, {"lease": content}, node.now.at, MAX_BUCKETS)  # noqa: E731
    row("answer as JSON, in a thread", timed(lambda: JSON.dump_json(noun()), 30))
    row("answer as CSV, in a thread", timed(lambda: csv(noun()), 30))
    asyncio.run(recorder.save(node.now, everything=True))
    row("restart: reading the row", timed(recorder.restore, 30))
    points, row_bytes = (
        len(found.attempts[0].gpus[0].start_at),
        len(zlib.compress(content, gpu_metrics_table.ZLIB_LEVEL)),
    )
    print(f"\n{points} buckets for each GPU; a row of {row_bytes} bytes for each attempt, written every minute")


def memory() -> None:
    """Print what full series take, and that they take no more after weeks."""
    full = TimeSeries.empty()
    while full.closed < MAX_BUCKETS - 1:
        full.add(full.until_s + full.width_s, full.width_s, (0.5, 2.0**36, 300.0, 60.0))
    content = encode_series({"GPU": full})
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = [TimeSeries.from_bytes(full.to_bytes()) for _ in range(400)]
    each = (tracemalloc.get_traced_memory()[0] - before) / len(kept)
    tracemalloc.stop()
    print(f"full: {each / 1000:.1f} kB in memory for each GPU, {len(content) / 1000:.1f} kB as bytes;", end=" ")
    print(f"{each * 4096 / 2**20:.0f} MiB for 4,096 GPUs")


if __name__ == "__main__":
    main()
