"""The write-ahead log of an SQLite database is deleted under a daemon."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.model import Lease
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.database import upgrade
from gpulease_server.store.ledger_store import Store
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
