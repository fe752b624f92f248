"""A standby serves what it has read, and takes over no database that lacks it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest

from gpulease_protocol.model import Lease
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.runtime.leadership.standby import Standby
from gpulease_server.runtime.leadership.status import LeadershipStatus
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.database import SchemaNewer
from gpulease_server.store.ledger_store import Store
from tests.runtime.faults import writing
from tests.runtime.test_writer import ask, report


class HeldLock:
    """The lock of a writer, until `holder` is None."""

    what = option = "the database"
    holder: str | None = "pid 1 on a"

    def try_acquire(self) -> str | None:
        return self.holder

    def keep_alive(self, check: Callable[[], None]) -> None:
        pass

    def is_confirmed(self) -> bool:
        return True

    def close(self) -> None:
        pass


class CountingStore(Store):
    """A store that counts how often the ledger was read."""

    loads = 0

    def load(self) -> Ledger:
        ledger = super().load()
        self.loads += 1
        return ledger


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the writer has no event for this
        await asyncio.sleep(0.01)


def test_a_standby_does_not_take_over_a_database_that_is_older_than_its_copy(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a failover of PostgreSQL to a replica that lagged behind, where the lock is free for a while."""
    lock, path = HeldLock(), sqlite_url.removeprefix("sqlite:///")

    async def body(store: CountingStore) -> None:
        copy = Writer(store, Policy())
        standby = Standby(lock, store, copy, LeadershipStatus(lock), lambda: None)
        async with writing(sqlite_url) as (writer, _):
            await report(writer, gpus=2)
            with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(":memory:")) as old:
                live.backup(old)
                kept = await writer.submit(ask())
                assert isinstance(kept, Lease)
                standby.begin("pid 1 on a")
                standing_by = asyncio.create_task(standby.run())
                await until(lambda: kept.id in copy.committed.leases)
                old.backup(live)
        read = store.loads
        await until(lambda: store.loads >= read + 3)
        assert kept.id in copy.committed.leases, "readers are shown a lease that was granted"
        lock.holder = None
        await standing_by
        taking_over = asyncio.create_task(copy.run())
        await until(lambda: "older than this daemon's answers" in (copy.problem or "") or copy.problem is None)
        assert copy.problem is not None, "its GPUs would be granted again"
        assert kept.id in copy.committed.leases
        taking_over.cancel()
        await asyncio.wait({taking_over})
        copy.close()

    async def main() -> None:
        async with asyncio.timeout(30):
            with closing(CountingStore(sqlite_url)) as store:
                await body(store)

    with caplog.at_level(logging.ERROR, "gpulease.standby"):
        asyncio.run(main())
    assert caplog.text.count("the copy of the ledger stays as it is: The database is older") == 1


def test_a_standby_ends_when_a_newer_version_has_upgraded_the_database(sqlite_url: str) -> None:
    """Not only when the writer has ended, when no daemon would be left."""
    lock = HeldLock()

    async def main(store: CountingStore) -> None:
        standby = Standby(lock, store, Writer(store, Policy()), LeadershipStatus(lock), lambda: None)
        standby.begin("pid 1 on a")
        async with asyncio.timeout(30):
            standing_by = asyncio.create_task(standby.run())
            await until(lambda: store.loads > 0)
            with store.engine.begin() as connection:
                connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
            with pytest.raises(SchemaNewer, match="schema 9999"):
                await standing_by

    with closing(CountingStore(sqlite_url)) as store:
        asyncio.run(main(store))
