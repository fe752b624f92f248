"""Slow reads, as of the usage of months, never keep the writer from a connection."""

from __future__ import annotations

import threading
from contextlib import closing
from datetime import UTC, datetime

import pytest

from gpulease_protocol.model import Event
from gpulease_server.serving import reading_threads
from gpulease_server.store.dialects import READ_THREADS, snapshot
from gpulease_server.store.ledger_store import Store


def test_the_writer_commits_while_as_many_read_as_may(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    reading, ending = threading.Semaphore(0), threading.Event()
    with closing(Store(database_url)) as store:

        def read() -> None:
            with snapshot(store.engine) as connection:
                connection.exec_driver_sql("SELECT 1")
                reading.release()
                ending.wait(30)

        threads = reading_threads()
        try:
            for _ in range(40):
                threads.submit(read)
            for _ in range(READ_THREADS):
                assert reading.acquire(timeout=10)
            assert not reading.acquire(timeout=0.1)
            ledger = store.load()
            event = Event(seq=ledger.next_seq, at=datetime.now(UTC), kind="x", cause="x")
            ledger.apply(event)
            store.write([event], ledger)
        finally:
            ending.set()
            threads.shutdown()
