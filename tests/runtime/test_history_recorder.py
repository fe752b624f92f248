"""The history of GPUs is kept over restarts and takeovers, is bounded, and a write that fails loses nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, text, update

from gpulease_protocol.model import GpuReading
from gpulease_protocol.node_protocol import NodeReport
from gpulease_server.core.records import Instant
from gpulease_server.runtime.gpu_metrics.history import MAX_BLOCKS, Block, Curve, Window, curve
from gpulease_server.runtime.gpu_metrics.history_recorder import HistoryRecorder, read_blocks
from gpulease_server.store import gpu_metrics_table, tables
from gpulease_server.store.database import upgrade
from gpulease_server.store.gpu_metrics_table import HOURS, MINUTES, QUARTERS, RESOLUTIONS, SECONDS, BlockRow, Resolution
from gpulease_server.store.ledger_store import Store
from gpulease_server.store.retention import RetentionLimits
from tests.core.build import World, gpu, uuid
from tests.store.old_records import prune

NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)
NOON_S = int(NOON.timestamp())


class Daemon:
    """A node of two GPUs whose reports are recorded on a real database. `restart` loses what is in memory."""

    def __init__(self, url: str) -> None:
        upgrade(url)
        self.url, self.store, self.world = url, Store(url), World().node(gpus=2)
        self.at_s = 0.0
        self.restart()

    @property
    def now(self) -> Instant:
        return Instant(at=NOON + timedelta(seconds=self.at_s), mono_s=self.at_s)

    def restart(self) -> None:
        self.recorder = HistoryRecorder(self.store)

    def show(self, *gpus: GpuReading, seconds: int = 1, node: str = "a") -> None:
        """The node shows this, once a second, for so long."""
        report = NodeReport(worker_id="w", host="a", gpus=gpus)
        for _ in range(seconds):
            self.recorder.record(node, report, self.world.ledger, self.now)
            self.at_s += 1

    def save(self, **what: bool) -> None:
        asyncio.run(self.recorder.save(self.now, **what))

    def read(self, resolution: Resolution, buckets: int, index: int = 0, from_s: int = 0) -> Curve:
        """The utilization of a GPU since noon."""
        begin = NOON_S + from_s
        span = Window(begin, begin + buckets * resolution.width_s, resolution.width_s, resolution)
        uuids = [uuid(0), uuid(1)]
        return curve(0, span, read_blocks(self.store, uuids, span, self.recorder.copy(uuids, span))[uuid(index)])

    def rows(self) -> int:
        with self.store.engine.connect() as connection:
            return connection.execute(select(func.count()).select_from(tables.gpu_metrics)).scalar_one()


@pytest.fixture
def daemon(database_url: str) -> Iterator[Daemon]:
    made = Daemon(database_url)
    yield made
    made.store.close()


def busy(index: int, ratio: float | None = 0.5) -> GpuReading:
    return gpu(index, utilization_ratio=ratio)


def test_gpus_that_are_not_leased_have_a_history(daemon: Daemon) -> None:
    daemon.show(busy(0, 0.25), busy(1, None), seconds=120)
    assert daemon.read(MINUTES, 3).mean == (0.25, 0.25, None)
    assert daemon.read(MINUTES, 3, index=1).mean == (None, None, None)


def test_a_report_of_another_node_for_a_gpu_does_not_count(daemon: Daemon) -> None:
    daemon.show(busy(0), seconds=3, node="b")
    daemon.show(replace(busy(0), uuid="GPU-of-no-one"), seconds=3)
    daemon.save(everything=True)
    assert daemon.rows() == 0


def test_a_daemon_that_is_stopped_loses_nothing_and_goes_on_in_the_same_blocks(daemon: Daemon) -> None:
    daemon.show(busy(0, 1.0), seconds=90)
    daemon.save(everything=True)
    daemon.restart()
    daemon.at_s += 20
    daemon.show(busy(0, 0.5), seconds=70)
    before = [daemon.read(resolution, 1) for resolution in (QUARTERS, HOURS)]
    daemon.save(everything=True)
    for _ in range(2):
        assert daemon.read(SECONDS, 180).mean == (*(1.0,) * 90, *(None,) * 20, *(0.5,) * 70)
        assert daemon.read(MINUTES, 3).known_s == (60, 40, 60)
        hour = daemon.read(HOURS, 1)
        assert hour.mean[0] == pytest.approx((90 + 35) / 160, abs=1e-3)
        assert (hour.known_s, hour.high) == ((160,), (1.0,))
        daemon.restart()
    assert 90 <= before[1].known_s[0] <= 160, "counted twice, before memory and database were merged"


def test_a_daemon_that_is_killed_loses_a_minute_of_minutes_at_most(daemon: Daemon) -> None:
    daemon.show(busy(0, 1.0), seconds=700)
    daemon.save()
    for _ in range(3):
        daemon.show(busy(0, 1.0), seconds=60)
        daemon.save()
    daemon.show(busy(0, 1.0), seconds=59)
    daemon.restart()
    daemon.show(busy(0, 1.0), seconds=10)
    daemon.save(everything=True)
    daemon.restart()
    assert sum(daemon.read(MINUTES, 20).known_s) == 880 + 10
    assert daemon.read(HOURS, 1).known_s[0] >= 880, "hours are made of the minutes that are written"


def test_a_successor_goes_on_and_the_former_writer_writes_no_more(daemon: Daemon) -> None:
    daemon.show(busy(0, 1.0), seconds=60)
    daemon.save(everything=True)
    other = Store(daemon.url)
    other.fence.take_over("another daemon")
    successor = HistoryRecorder(other)
    former, daemon.recorder = daemon.recorder, successor
    daemon.show(busy(0, 0.0), seconds=60)
    daemon.save(everything=True)
    former.record("a", NodeReport(worker_id="w", host="a", gpus=(busy(0, 1.0),)), daemon.world.ledger, daemon.now)
    asyncio.run(former.save(daemon.now, everything=True))
    daemon.restart()
    assert daemon.read(MINUTES, 3).mean == (1.0, 0.0, None)
    other.close()


def test_what_is_written_is_not_written_again(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    save = "gpulease_server.store.gpu_metrics_table.save_blocks"
    monkeypatch.setattr(save, lambda store, rows: written.append(len(rows)))
    for _ in range(20):
        daemon.show(busy(0), busy(1), seconds=60)
        daemon.save()
    assert sum(written) <= 2 * (20 + 3 * 3 + 4), "more than the minutes each minute, the others each ten minutes"
    written.clear()
    daemon.save()
    assert written == []


def test_a_block_that_arises_while_others_are_read_is_not_written_over_what_is_stored(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.at_s = 600
    daemon.show(busy(0, 1.0), seconds=60)
    daemon.save(everything=True)
    daemon.restart()
    daemon.at_s = 599
    daemon.show(busy(0, 1.0))
    load = gpu_metrics_table.load_blocks

    def load_late(*what: Any) -> list[BlockRow]:
        daemon.at_s = 660
        daemon.show(busy(0, 1.0))
        return load(*what)

    monkeypatch.setattr("gpulease_server.store.gpu_metrics_table.load_blocks", load_late)
    daemon.save(everything=True)
    monkeypatch.undo()
    daemon.save(everything=True)
    daemon.restart()
    assert daemon.read(SECONDS, 62, from_s=599).known_s == (1.0,) * 62


def test_a_write_that_fails_loses_nothing_and_is_said_once(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with daemon.store.engine.begin() as connection:
        connection.execute(text("ALTER TABLE gpu_metrics RENAME TO away"))
    for _ in range(15):
        daemon.show(busy(0, 1.0), seconds=60)
        daemon.save()
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
    with daemon.store.engine.begin() as connection:
        connection.execute(text("ALTER TABLE away RENAME TO gpu_metrics"))
    daemon.save()
    assert "written again" in caplog.text
    daemon.save(everything=True)
    daemon.restart()
    assert daemon.read(SECONDS, 900).known_s == (1.0,) * 900


def test_memory_is_bounded_while_nothing_can_be_written(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    with daemon.store.engine.begin() as connection:
        connection.execute(text("ALTER TABLE gpu_metrics RENAME TO away"))
    for _ in range(60):
        daemon.at_s += 600
        daemon.show(busy(0))
        daemon.save()
    (history,) = daemon.recorder._histories.values()
    assert len(history.blocks) <= MAX_BLOCKS
    assert "are lost" in caplog.text
    assert history.last_s is not None
    assert (SECONDS.width_s, history.last_s - history.last_s % SECONDS.block_s) in history.blocks


def test_a_gpu_that_is_gone_leaves_memory_and_stays_in_the_database(daemon: Daemon) -> None:
    daemon.show(busy(0), busy(1), seconds=60)
    daemon.save()
    daemon.show(busy(0), seconds=1000)
    daemon.save(everything=True)
    assert list(daemon.recorder._histories) == [uuid(0)]
    assert daemon.read(MINUTES, 2, index=1).mean == (0.5, None)


def test_the_last_minute_of_a_gpu_that_went_is_in_its_hour(daemon: Daemon) -> None:
    daemon.show(busy(0), busy(1), seconds=80)
    daemon.save()
    daemon.show(busy(0), busy(1), seconds=20)
    for _ in range(17):
        daemon.save()  # quarters and hours are written more seldom, and the unfinished minute is in them by then
        assert daemon.read(MINUTES, 2, index=1).known_s == (60, 40), "once"
        assert daemon.read(HOURS, 1, index=1).known_s == (100,), "once"
        daemon.show(busy(0), seconds=60)
    assert list(daemon.recorder._histories) == [uuid(0)], "as it has been away for long"


def test_a_gpu_that_was_seen_for_less_than_a_minute_is_in_its_hour(daemon: Daemon) -> None:
    daemon.show(busy(1), seconds=20)
    daemon.save()
    daemon.restart()
    assert daemon.read(HOURS, 1, index=1).known_s == (20,)


def test_a_damaged_row_is_a_gap_and_is_replaced(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    daemon.show(busy(0, 1.0), seconds=60)
    daemon.save(everything=True)
    with daemon.store.engine.begin() as connection:
        connection.execute(update(tables.gpu_metrics).values(series=b"\x00\xff"))
    daemon.restart()
    assert daemon.read(MINUTES, 1).mean == (None,)
    daemon.show(busy(0, 0.5), seconds=60)
    daemon.save(everything=True)
    daemon.restart()
    assert daemon.read(MINUTES, 2).mean == (None, 0.5)
    assert "cannot be read" in caplog.text


def test_each_resolution_is_kept_for_its_time_and_hours_as_long_as_ended_leases(daemon: Daemon) -> None:
    keep = RetentionLimits(age_s=30 * 86400.0)
    daemon.show(busy(0, 1.0), seconds=60)
    daemon.save(everything=True)
    left = []
    for days in (0.5 / 24, 0.9, 6.5, 29.0, 40.0):
        prune(daemon.store, keep, NOON + timedelta(days=days))
        with daemon.store.engine.connect() as connection:
            left.append(sorted(connection.scalars(select(tables.gpu_metrics.c.width_s))))
    assert left == [[1, 60, 900, 3600], [60, 900, 3600], [900, 3600], [3600], []]
    assert prune(daemon.store, keep, None) == {}


def test_what_a_clock_that_was_wrong_recorded_in_the_future_goes(daemon: Daemon) -> None:
    daemon.at_s += 400 * 86400
    daemon.show(busy(0), seconds=2)
    daemon.save(everything=True)
    assert daemon.rows() == len(RESOLUTIONS)
    prune(daemon.store, RetentionLimits(), NOON)
    assert daemon.rows() == 0


def test_the_history_of_64_gpus_for_a_year_fits_into_50_mb_even_if_it_cannot_be_compressed() -> None:
    year_s, rows_bytes = 366 * 86400.0, 0
    for one in RESOLUTIONS:
        blocks = (one.keep_s or year_s) / one.block_s + 2
        rows_bytes += int(blocks) * (len(Block(one, 0).to_bytes()) + 400)  # key, indexes and the page around them
    assert 64 * rows_bytes < 50e6
