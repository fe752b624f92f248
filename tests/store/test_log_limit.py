"""The write-ahead log of SQLite stays short while others read."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpulease_protocol.model import Event
from gpulease_server.store import log_limit
from gpulease_server.store.dialects import snapshot
from gpulease_server.store.disk_reserve import DiskReserve
from gpulease_server.store.ledger_store import Store

LIMIT_BYTES = 2**20


@pytest.fixture
def store(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(log_limit, "LIMIT_BYTES", LIMIT_BYTES)
    monkeypatch.setattr(log_limit, "MAX_WAIT_S", 0.1)
    with closing(Store(sqlite_url)) as store:
        yield store


def write(store: Store, turns: int) -> None:
    """Turns of 64 KiB and more."""
    for _ in range(turns):
        ledger = store.load()
        event = Event(seq=ledger.next_seq, at=datetime.now(UTC), kind="x", cause="x", reason="x" * 2**16)
        ledger.apply(event)
        store.write([event], ledger)


@contextmanager
def overlapping_readers(store: Store) -> Iterator[None]:
    """At each moment someone reads: the next reader begins before the last one has ended."""
    stopping, reading = threading.Event(), threading.Event()

    def read() -> None:
        while not stopping.is_set():
            with snapshot(store.engine) as first:
                first.exec_driver_sql("SELECT count(*) FROM event").scalar()
                reading.set()
                second = snapshot(store.engine)
                second.__enter__().exec_driver_sql("SELECT count(*) FROM event").scalar()
            with snapshot(store.engine) as third:
                third.exec_driver_sql("SELECT count(*) FROM event").scalar()
                second.__exit__(None, None, None)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert reading.wait(10)
        yield
    finally:
        stopping.set()
        thread.join()


def log_of(store: Store) -> Path:
    return Path(f"{store.engine.url.database}-wal")


def test_readers_that_overlap_do_not_let_the_log_grow(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_limit, "MAX_WAIT_S", 5.0)
    reserve, longest = DiskReserve(store.engine), 0
    with overlapping_readers(store):
        for _ in range(10):
            write(store, 10)
            reserve.top_up()
            longest = max(longest, log_of(store).stat().st_size)
    assert longest < 3 * LIMIT_BYTES


def test_another_program_that_reads_for_long_is_waited_for_once_and_named(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, waits, cut_off = DiskReserve(store.engine), [], log_limit._cut_off
    monkeypatch.setattr(log_limit, "_cut_off", lambda *given: waits.append(given[1]) or cut_off(*given))
    with closing(sqlite3.connect(str(store.engine.url.database), isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM event").fetchall()
        write(store, 20)
        for _ in range(5):
            reserve.top_up()
        assert waits == [0.1, 0, 0, 0, 0]
        assert caplog.text.count("grows while another program reads the database") == 1
        assert log_of(store).stat().st_size > LIMIT_BYTES
        other.execute("ROLLBACK")
    reserve.top_up()
    assert log_of(store).stat().st_size == 0
    write(store, 1)
