"""The ledger's reserve of disk: what it allows on a full disk, and what happens once it is used up."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.model import Lease, LeaseState
from gpulease_server.core.happenings import ReleaseRequested
from gpulease_server.runtime import ids
from gpulease_server.store import disk_reserve
from gpulease_server.store.database import upgrade
from gpulease_server.store.disk_reserve import DATABASE_RESERVE_BYTES, LOG_RESERVE_BYTES, DiskReserve
from gpulease_server.store.ledger_store import Store
from tests.runtime.faults import ask, report, writing
from tests.small_disk import fill, mounted

SIZE_BYTES = 32 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", SIZE_BYTES) as place:
        yield place


def prepared(disk: Path) -> str:
    url = f"sqlite:///{disk / 'ledger.db'}"
    upgrade(url)
    return url


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_it_is_behind_the_files_and_makes_them_no_longer(disk: Path) -> None:
    store = Store(prepared(disk))
    store.fence.take_over("test")
    file, wal = disk / "ledger.db", disk / "ledger.db-wal"
    before = file.stat().st_size, wal.stat().st_size
    reserve = DiskReserve(store.engine)
    reserve.top_up()
    reserve.top_up()
    assert (file.stat().st_size, wal.stat().st_size) == before
    assert allocated(file) >= before[0] + DATABASE_RESERVE_BYTES
    assert allocated(wal) >= before[1] + LOG_RESERVE_BYTES
    assert not reserve.is_short
    with store.engine.connect() as connection:
        assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"
    store.close()


def test_a_full_disk_refuses_new_requests_and_still_records_a_release(disk: Path) -> None:
    url = prepared(disk)

    async def main() -> None:
        async with asyncio.timeout(60), writing(url) as (writer, _):
            leases: list[Any] = []
            for _ in range(4):
                await report(writer)
                leases.append(await writer.submit(ask()))
            assert all(lease.state is LeaseState.ACTIVE for lease in leases)
            await writer.between_turns(writer.disk_reserve.top_up)
            fill(disk)
            for lease in leases[:3]:
                released = ReleaseRequested(
                    cause=ids.new_id("request"), lease_id=lease.id, fencing_token=lease.fencing_token
                )
                answer = await writer.submit(released)
                assert isinstance(answer, Lease)
                assert answer.state is LeaseState.ENDED
            await writer.between_turns(writer.disk_reserve.top_up)
            assert writer.disk_reserve.is_short
            with pytest.raises(Unavailable, match="kept for releases"):
                await writer.submit(ask())
            last = ReleaseRequested(
                cause=ids.new_id("request"), lease_id=leases[3].id, fencing_token=leases[3].fencing_token
            )
            assert isinstance(await writer.submit(last), Lease)
            (disk / "ballast").unlink()
            await writer.between_turns(writer.disk_reserve.top_up)
            assert not writer.disk_reserve.is_short
            assert isinstance(await writer.submit(ask()), Lease)

    asyncio.run(main())


def test_without_it_a_full_disk_records_nothing(disk: Path) -> None:
    url = prepared(disk)

    async def main() -> None:
        async with asyncio.timeout(60), writing(url) as (writer, _):
            await report(writer)
            lease: Any = await writer.submit(ask())
            fill(disk)
            asked = [writer.submit(ask()) for _ in range(100)]
            with pytest.raises(Unavailable, match="full"):
                await asyncio.gather(*asked)
            assert lease.state is LeaseState.ACTIVE

    asyncio.run(main())


@pytest.mark.parametrize(
    ("number", "short", "said"),
    [
        (errno.EOPNOTSUPP, False, "does not allocate in advance"),
        (errno.EDQUOT, True, "is full"),
        (errno.EIO, False, "no disk can be reserved"),
    ],
)
def test_a_file_system_that_does_not_reserve_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    short: bool,
    said: str,
) -> None:
    def fallocate(*_: object) -> int:
        disk_reserve.ctypes.set_errno(number)
        return -1

    class Libc:
        pass

    libc: Any = Libc()
    libc.fallocate = fallocate
    monkeypatch.setattr(disk_reserve, "_libc", libc)
    store = Store(prepared(tmp_path))
    reserve = DiskReserve(store.engine)
    reserve.top_up()
    assert reserve.is_short is short
    assert said in caplog.text
    store.close()
