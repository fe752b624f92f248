"""The write-ahead log of an SQLite database is deleted under a daemon."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.model import Lease
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.database import connect, upgrade
from gpulease_server.store.dialects import snapshot
from gpulease_server.store.file_guard import FileGuard
from gpulease_server.store.ledger_store import Store, StoreFailed
from tests.runtime.faults import ask, recovered, report, writing


async def granted(writer: Writer) -> str:
    """The id of a new lease."""
    await report(writer)
    answer = await writer.submit(ask())
    assert isinstance(answer, Lease)
    return answer.id


@pytest.mark.parametrize("names", [("-wal",), ("-wal", "-shm")])
def test_a_log_that_is_deleted_loses_nothing(tmp_path: Path, names: tuple[str, ...]) -> None:
    file, left = tmp_path / "ledger.db", tmp_path / "left.db"
    upgrade(f"sqlite:///{file}")

    async def body() -> None:
        async with writing(f"sqlite:///{file}") as (writer, _):
            before = await granted(writer)
            for name in names:
                os.unlink(f"{file}{name}")
            with pytest.raises(Unavailable, match="has been deleted while it is in use"):
                await writer.submit(ask())
            await recovered(writer)
            after = await granted(writer)
            for name in ("", "-wal"):
                shutil.copyfile(f"{file}{name}", f"{left}{name}")  # what a restart after a crash would read
            with closing(Store(f"sqlite:///{left}")) as store:
                assert store.load().leases.keys() >= {before, after}

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Path, Engine, FileGuard]]:
    """A database behind a symbolic link, with a row in its log, and two connections to it."""
    file, link = tmp_path / "ledger.db", tmp_path / "link.db"
    file.touch()
    link.symlink_to(file)
    engine = connect(f"sqlite:///{link}")
    guard = FileGuard(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE one (number)")
    guard.open()
    with engine.begin() as connection, engine.connect() as other:
        other.exec_driver_sql("PRAGMA busy_timeout = 0")
        connection.exec_driver_sql("PRAGMA busy_timeout = 0")
        connection.exec_driver_sql("INSERT INTO one VALUES (1)")
    guard.check()
    yield file, engine, guard
    engine.dispose()


def test_a_log_that_is_deleted_while_someone_reads_is_saved_when_they_have_read(
    guarded: tuple[Path, Engine, FileGuard],
) -> None:
    """A connection that was made meanwhile copied an empty log into the database, which was lost."""
    file, engine, guard = guarded
    with snapshot(engine) as connection:
        assert connection.exec_driver_sql("SELECT number FROM one").all() == [(1,)]
        os.unlink(f"{file}-wal")
        with pytest.raises(StoreFailed, match="has been deleted while it is read"):
            guard.open()
    guard.open()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT number FROM one").all() == [(1,)]


def test_a_log_that_is_deleted_is_not_copied_into_another_database(guarded: tuple[Path, Engine, FileGuard]) -> None:
    """Whoever restores a backup over the file of a running daemon also deletes its log."""
    file, _, guard = guarded
    restored = sqlite3.connect(file.with_name("backup.db"))
    restored.execute("CREATE TABLE other (number)")
    restored.close()
    shutil.copyfile(file.with_name("backup.db"), file)
    os.unlink(f"{file}-wal")
    content = file.read_bytes()
    with pytest.raises(StoreFailed, match="has been overwritten"):
        guard.open()
    assert file.read_bytes() == content
