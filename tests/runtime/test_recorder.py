"""What the GPUs of leases showed is kept: over a restart, with gaps where nothing is known."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy import text

from gpulease_protocol.job_metrics import JobMetrics
from gpulease_protocol.model import GpuReading
from gpulease_protocol.node_protocol import JobReport, NodeReport, RunState
from gpulease_server.api.routes.job_metrics import MAX_ANSWER_POINTS, csv, job_metrics, lease_metrics
from gpulease_server.core.policy import Policy
from gpulease_server.runtime.gpu_metrics.recorder import SAVE_S, GpuMetricsRecorder
from gpulease_server.runtime.writer import Writer
from gpulease_server.store import gpu_metrics_table
from gpulease_server.store.database import upgrade
from gpulease_server.store.ledger_store import Store, is_stored
from tests.core.build import World, gpu, uuid


class Daemon:
    """A world whose reports are recorded, on a real database. `restart` loses what is in memory."""

    def __init__(self, place: Path) -> None:
        url = f"sqlite:///{place / 'ledger.db'}"
        upgrade(url)
        self.store = Store(url)
        self.writer = Writer(self.store, Policy())
        self.world = World().node(gpus=4)
        self.restart()

    def restart(self) -> None:
        self.commit()
        self.writer.committed, self.writer.problem = self.world.ledger, None
        self.recorder = GpuMetricsRecorder(self.store, self.writer)
        self.recorder.restore()

    def commit(self) -> None:
        self.store.write([change for change in self.world.changes if is_stored(change)], self.world.ledger)
        self.world.changes.clear()

    def show(self, *gpus: GpuReading, seconds: float = 1, problem: str | None = None) -> None:
        """The node shows this, once a second, for so long."""
        for _ in range(int(seconds)):
            self.world.at_s += 1 - 0.001
            self.world.nodes["a"] = list(gpus) or self.world.nodes["a"]
            self.world.report(problem=problem)
            report = NodeReport(
                worker_id="w", host="a", problem=problem, gpus=() if problem else tuple(self.world.nodes["a"])
            )
            self.recorder.record("a", report, self.world.ledger, self.world.now)

    def save(self, **what: bool) -> None:
        asyncio.run(self.recorder.save(self.world.now, **what))

    def end(self, job_id: str, attempt: int = 1, exit_code: int = 0) -> None:
        ended = JobReport(
            job_id=job_id,
            attempt=attempt,
            state=RunState.EXITED,
            exit_code=exit_code,
            started_at=self.world.now.at,
            ended_at=self.world.now.at,
        )
        self.world.jobs["a"] = [ended]
        self.world.report()
        self.world.jobs["a"] = []

    def metrics(self, job_id: str, points: int = 600) -> JobMetrics:
        self.commit()
        leases = [one for one in gpu_metrics_table.leases_of_job(self.store.engine, job_id) if one.lease.granted_at]
        saved = gpu_metrics_table.load(self.store.engine, [one.lease.id for one in leases])
        contents = {one.lease.id: self.recorder.encoded(one.lease.id) or saved.get(one.lease.id) for one in leases}
        return job_metrics(job_id, leases, contents, self.world.now.at, points, {})


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.store.close()


def busy(index: int, ratio: float | None = 0.5) -> GpuReading:
    return gpu(index, utilization_ratio=ratio, power_w=300.0, temperature_c=60.0)


def test_an_hour_at_half_load_is_half_a_gpu_hour(daemon: Daemon) -> None:
    job = daemon.world.submit(2)
    daemon.show(busy(0), busy(1, 1.0), busy(2), busy(3), seconds=3600)
    daemon.end(job)
    found = daemon.metrics(job)
    assert found.gpu_hours_held == pytest.approx(2, rel=0.01)
    assert found.gpu_hours_used == pytest.approx(1.5, rel=0.01)
    assert found.gpu_hours_unknown < 0.001
    (attempt,) = found.attempts
    assert attempt.held_until_at is not None
    held_s = (attempt.held_until_at - attempt.held_from_at).total_seconds()
    assert found.gpu_hours_held == pytest.approx(2 * held_s / 3600)
    first, second = attempt.gpus
    assert (first.uuid, second.uuid) == (uuid(0), uuid(1))
    assert first.bucket_s == 8.0
    assert first.start_at[0] == attempt.held_from_at
    assert {b - a for a, b in pairwise(first.start_at)} == {timedelta(seconds=8)}
    assert len(first.start_at) == len(first.power_w.max) == pytest.approx(3600 / 8, abs=1)
    assert set(first.power_w.mean) == {300.0}


def test_a_lease_without_a_job_is_recorded_as_well(daemon: Daemon) -> None:
    lease = daemon.world.lease(2, ttl_s=600)
    daemon.show(busy(0), busy(1, 1.0), busy(2), busy(3), seconds=10)
    daemon.save(everything=True)
    daemon.restart()
    daemon.show(busy(0), busy(1, 1.0), busy(2), busy(3), seconds=10)
    daemon.commit()
    record = daemon.store.lease(lease.id)
    assert record is not None
    found = lease_metrics(record, daemon.recorder.encoded(lease.id), daemon.world.now.at, 600, ())
    assert [gpu.uuid for gpu in found.gpus] == [uuid(0), uuid(1)]
    assert found.gpu_hours_used * 3600 == pytest.approx(20 * 1.5, abs=2)


def test_leases_that_end_at_once_are_written_at_once(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    save = gpu_metrics_table.save
    monkeypatch.setattr(
        "gpulease_server.store.gpu_metrics_table.save", lambda *what: (written.append(len(what[1])), save(*what))[1]
    )
    leases = [daemon.world.lease(1, ttl_s=600) for _ in range(4)]
    daemon.show(busy(0), busy(1), busy(2), busy(3), seconds=3)
    for lease in leases:
        daemon.world.release(lease)
    daemon.commit()
    daemon.save()
    assert written == [4], "a transaction for each of them"
    assert [daemon.recorder.encoded(lease.id) for lease in leases] == [None] * 4


def test_time_in_which_the_driver_hangs_is_a_gap_and_unknown(daemon: Daemon) -> None:
    job = daemon.world.submit(1)
    daemon.show(busy(0, 1.0), seconds=10)
    daemon.show(problem="the driver hangs", seconds=10)
    daemon.show(busy(0, 1.0), seconds=10)
    daemon.end(job)
    found = daemon.metrics(job)
    assert found.gpu_hours_held * 3600 == pytest.approx(30, abs=0.1)
    assert found.gpu_hours_used * 3600 == pytest.approx(20, abs=0.1)
    assert found.gpu_hours_unknown * 3600 == pytest.approx(10, abs=0.1)
    curve = found.attempts[0].gpus[0].utilization_ratio
    assert [one is None for one in curve.mean[11:18]] == [True] * 7
    assert curve.mean[5] == curve.mean[25] == 1.0


def test_what_the_driver_cannot_tell_is_unknown_and_not_zero(daemon: Daemon) -> None:
    job = daemon.world.submit(1)
    daemon.show(replace(busy(0, None), power_w=None), seconds=5)
    found = daemon.metrics(job)
    card = found.attempts[0].gpus[0]
    assert set(card.utilization_ratio.mean) == set(card.power_w.max) == {None}
    assert set(card.temperature_c.max) == {60.0}
    assert found.gpu_hours_used == 0
    assert found.gpu_hours_unknown == found.gpu_hours_held > 0


@pytest.mark.parametrize("absurd", [10**400, 2.0**61, -1.0])
def test_a_figure_that_no_driver_can_have_said_is_unknown(daemon: Daemon, absurd: float) -> None:
    job = daemon.world.submit(1)
    daemon.show(replace(busy(0), power_w=absurd), seconds=2)
    daemon.show(replace(busy(0), power_w=300.0), seconds=2)
    assert set(daemon.metrics(job).attempts[0].gpus[0].power_w.max) == {None, 300.0}


def test_a_daemon_that_is_killed_loses_at_most_what_it_had_not_written(daemon: Daemon) -> None:
    job = daemon.world.submit(1)
    daemon.show(busy(0, 1.0), seconds=100)
    daemon.save()
    daemon.show(busy(0, 1.0), seconds=SAVE_S)
    daemon.save()
    daemon.show(busy(0, 1.0), seconds=20)
    daemon.restart()
    daemon.show(busy(0, 1.0), seconds=20)
    daemon.end(job)
    found = daemon.metrics(job)
    assert found.gpu_hours_used * 3600 == pytest.approx(100 + SAVE_S + 20, abs=1.5)
    assert found.gpu_hours_unknown * 3600 == pytest.approx(20, abs=1.5)


def test_an_ended_lease_is_written_and_forgotten(daemon: Daemon) -> None:
    job = daemon.world.submit(1)
    daemon.show(busy(0, 1.0), seconds=3)
    daemon.end(job)
    lease = daemon.metrics(job).attempts[0].lease_id
    daemon.save()
    assert daemon.recorder.encoded(lease) is None
    daemon.restart()
    assert daemon.metrics(job).gpu_hours_used * 3600 == pytest.approx(3, abs=0.1)


def test_a_lease_is_written_once_a_minute_and_no_oftener(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    save = gpu_metrics_table.save
    monkeypatch.setattr(
        "gpulease_server.store.gpu_metrics_table.save", lambda *what: (written.extend(what[1]), save(*what))[1]
    )
    daemon.world.submit(1)
    for _ in range(600):
        daemon.show(busy(0))
        daemon.save()
    assert len(written) == 9, "a job of ten minutes is due nine times before it ends"


def test_every_attempt_of_a_job_has_its_own_series(daemon: Daemon) -> None:
    job = daemon.world.submit(1, retries=1)
    daemon.show(busy(0, 1.0), busy(1), seconds=5)
    daemon.end(job, exit_code=1)
    daemon.world.pass_time(5)
    daemon.show(busy(0, 0.0), busy(1, 0.0), seconds=5)
    daemon.end(job, attempt=2)
    found = daemon.metrics(job)
    assert [attempt.attempt for attempt in found.attempts] == [1, 2]
    assert len({attempt.lease_id for attempt in found.attempts}) == 2
    first, second = (attempt.gpu_hours_used * 3600 for attempt in found.attempts)
    assert first == pytest.approx(5, abs=0.1)
    assert second == 0
    assert found.gpu_hours_held == pytest.approx(sum(attempt.gpu_hours_held for attempt in found.attempts))


def test_a_disk_that_is_full_loses_nothing_in_the_meantime(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job = daemon.world.submit(1)
    daemon.show(busy(0, 1.0), seconds=5)
    daemon.end(job)
    with daemon.store.engine.begin() as connection:
        connection.execute(text("ALTER TABLE gpu_metrics RENAME TO away"))
    for _ in range(3):
        daemon.save(everything=True)
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
    with daemon.store.engine.begin() as connection:
        connection.execute(text("ALTER TABLE away RENAME TO gpu_metrics"))
    daemon.save(everything=True)
    assert "written again" in caplog.text
    daemon.restart()
    assert daemon.metrics(job).gpu_hours_used * 3600 == pytest.approx(5, abs=0.1)


def test_a_write_that_is_interrupted_when_the_daemon_stops_is_not_lost(daemon: Daemon) -> None:
    """The last job ended within the second in which the daemon stops; its write still waits for a thread."""
    job = daemon.world.submit(1)
    daemon.show(busy(0, 1.0), seconds=5)
    daemon.end(job)
    daemon.commit()

    async def stop() -> None:
        loop, gate = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
        loop.run_in_executor(None, gate.wait, 60)
        saving = asyncio.create_task(daemon.recorder.save(daemon.world.now))
        for _ in range(10):
            await asyncio.sleep(0)  # it has begun
        saving.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await saving
        await daemon.recorder.save(daemon.world.now, everything=True)

    asyncio.run(stop())
    daemon.restart()
    assert daemon.metrics(job).gpu_hours_used * 3600 == pytest.approx(5, abs=0.1)


def test_a_damaged_row_is_said_and_does_not_stop_the_daemon(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    job = daemon.world.submit(1)
    daemon.show(busy(0, 1.0), seconds=5)
    daemon.save(everything=True)
    with daemon.store.engine.begin() as connection:
        connection.execute(text("UPDATE gpu_metrics SET series = x'00ff'"))
    daemon.restart()
    assert "cannot be read" in caplog.text
    daemon.show(busy(0, 1.0), seconds=5)
    found = daemon.metrics(job)
    assert found.gpu_hours_used * 3600 == pytest.approx(5, abs=0.1)
    assert found.gpu_hours_unknown * 3600 == pytest.approx(5, abs=0.1)


def test_a_wall_clock_that_jumps_moves_no_reading(daemon: Daemon) -> None:
    job = daemon.world.submit(1)
    daemon.show(busy(0, 1.0), seconds=5)
    daemon.world.wall_jump_s = -3600
    daemon.show(busy(0, 0.0), seconds=5)
    daemon.save(everything=True)
    daemon.restart()
    daemon.show(busy(0, 1.0), seconds=5)
    card = daemon.metrics(job).attempts[0].gpus[0]
    assert [one for one in card.utilization_ratio.mean if one in (0.0, 1.0)] == [1.0] * 5 + [0.0] * 5 + [1.0] * 4
    assert list(card.start_at) == sorted(set(card.start_at))


def test_csv_loads_in_numpy_as_it_is(daemon: Daemon, tmp_path: Path) -> None:
    import numpy as np  # noqa: PLC0415 - 100 ms that the other tests need not pay

    job = daemon.world.submit(2)
    daemon.show(busy(0, 0.25), busy(1, None), seconds=4)
    daemon.show(problem="hangs", seconds=6)
    daemon.show(busy(0, 0.75), busy(1, None), seconds=4)
    path = tmp_path / "metrics.csv"
    path.write_text(csv(daemon.metrics(job)))
    table = np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")
    one, other = table[table["index"] == 0], table[table["index"] == 1]
    assert (np.diff(one["start_s"]) == 1).all()
    used = np.nansum(one["utilization_ratio_mean"] * one["known_s"])
    assert used == pytest.approx(4 * 0.25 + 4 * 0.75, abs=0.5)
    assert np.isnan(one["power_w_mean"]).sum() >= 4
    assert np.isnan(other["utilization_ratio_max"]).all()
    assert other["utilization_ratio_max"].dtype.kind == "f", "a column of which nothing is known is not of numbers"
    assert set(one["uuid"]) == {uuid(0)}


def test_an_answer_is_bounded_however_many_gpus_a_job_has() -> None:
    assert MAX_ANSWER_POINTS // 4096 >= 10, "the largest job has too few points to be plotted"
