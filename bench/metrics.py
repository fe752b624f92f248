"""What does it cost to keep what GPUs show?

The daemon's part of one exchange of a node of 8 GPUs, all held by a job, with and without it; the size of what is
kept, and of the history of 64 GPUs for a year; how long a write, an answer and a restart take. The limit beside it:
the core's own turn for the same report."""

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
from gpulease_server.runtime.gpu_metrics.history import Block, Window, curve, window
from gpulease_server.runtime.gpu_metrics.history_recorder import read_blocks
from gpulease_server.runtime.gpu_metrics.recorder import GpuMetricsRecorder, encode_series
from gpulease_server.runtime.gpu_metrics.time_series import MAX_BUCKETS, TimeSeries
from gpulease_server.runtime.writer import Writer
from gpulease_server.store import gpu_metrics_table
from gpulease_server.store.database import upgrade
from gpulease_server.store.gpu_metrics_table import RESOLUTIONS, BlockRow, Resolution
from gpulease_server.store.ledger_store import Store, is_stored

GPUS = 8
YEAR_GPUS = 64
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
        history_of_a_year(store)
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
    row("keeping the readings of one report, for the lease and for the history", timed(take, ROUNDS))
    upcoming = iter(reports)

    def remember() -> None:
        node.at_s += 1
        recorder.history.record("a", next(upcoming), node.ledger, node.now)

    row("of that, for the history", timed(remember, ROUNDS))
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


def history_of_a_year(store: Store) -> None:
    """Print what the history of 64 GPUs takes in the database after a year, and its cost."""
    chance, before = random.Random(7), _database_bytes(store)  # noqa: S311 - load
    uuids = [f"GPU-{place:08x}-0000-0000-0000-000000000001" for place in range(YEAR_GPUS)]
    for uuid in uuids:
        rows = []
        for one in RESOLUTIONS:
            for place in range(int((one.keep_s or 366 * 86400) / one.block_s) + 1):
                block = _busy_block(one, (int(NOON.timestamp()) // one.block_s - place) * one.block_s, chance)
                rows.append(BlockRow(uuid, one.width_s, block.start_s, block.to_bytes()))
        gpu_metrics_table.save_blocks(store, rows)
    grown = _database_bytes(store) - before
    print(f"\n{YEAR_GPUS} GPUs for a year: {grown / 1e6:.1f} MB in the database")
    print("\n| what | median us | p99 us |\n|---|---|---|")
    minute = [BlockRow(uuid, 60, 0, _busy_block(RESOLUTIONS[1], 0, chance).to_bytes()) for uuid in uuids]
    row("a minute's write of 64 GPUs", timed(lambda: gpu_metrics_table.save_blocks(store, minute), 100))
    for what, last_s in (("hour", 3600), ("week", 7 * 86400), ("90 days", 90 * 86400)):
        now_s = NOON.timestamp() + 1
        span = window(now_s - last_s, now_s, now_s, 61)

        def answer(span: Window = span) -> None:
            for blocks in read_blocks(store, uuids, span, {}).values():
                curve(0, span, blocks)

        row(f"utilization of 64 GPUs, the last {what}", timed(answer, 10))


def _busy_block(one: Resolution, start_s: int, chance: random.Random) -> Block:
    """A block of a GPU that is in use half of the time."""
    block, busy = Block(one, start_s), False
    for bucket in range(one.buckets):
        busy = busy if chance.random() < 0.9 else not busy
        most = (9900, 4500, 6900, 800) if busy else (1, 30, 730, 330)
        for measure, high in enumerate(most):
            value = chance.randint(high // 2, high)
            if one is RESOLUTIONS[0]:
                block.cells[measure * one.buckets + bucket] = value
            else:
                block.put(bucket, measure, one.width_s, value * one.width_s, high)
    return block


def _database_bytes(store: Store) -> int:
    with store.engine.connect() as connection:
        pages, size = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("page_count", "page_size")
        )
    return int(pages) * int(size)


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
