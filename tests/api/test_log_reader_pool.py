"""Log files that do not answer hold a few threads, and delay no one's logs but those of their own user."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from gpulease_protocol.host import log_reader
from gpulease_protocol.host.log_reader import LogReader
from gpulease_server.api.streams.log_reader_pool import THREADS, THREADS_PER_USER, LogReaderPool, LogsHang
from tests.daemon import eventually
from tests.hanging_filesystem import hanging, in_time

WITHIN_S = 60.0


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """Set when the file system is to answer."""
    event = threading.Event()
    yield event
    event.set()


def play(story: Callable[[LogReaderPool], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(story(LogReaderPool()), WITHIN_S)

    asyncio.run(main())


def test_reads_that_hang_delay_no_one_but_readers_of_their_own_user(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogReaderPool, "patience_s", 0.3)

    async def story(pool: LogReaderPool) -> None:
        hung = [asyncio.ensure_future(pool.run("eve", answers.wait)) for _ in range(THREADS)]
        for error in await asyncio.gather(*hung, return_exceptions=True):
            assert isinstance(error, LogsHang)
            assert error.status == 503
            assert "The log files of eve do not answer" in error.detail
        monkeypatch.setattr(LogReaderPool, "patience_s", WITHIN_S)
        assert await pool.run("ada", lambda: "read") == "read"
        assert await pool.run(None, lambda: "read") == "read"
        answers.set()
        for _ in range(THREADS_PER_USER + 1):
            assert await pool.run("eve", lambda: "read") == "read"

    play(story)


def test_a_client_that_gives_up_frees_no_thread_that_is_still_held(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogReaderPool, "patience_s", 0.3)
    begun = threading.Semaphore(0)

    def hang() -> None:
        begun.release()
        answers.wait()

    async def story(pool: LogReaderPool) -> None:
        for _ in range(THREADS_PER_USER):
            client = asyncio.ensure_future(pool.run("eve", hang))
            await asyncio.to_thread(begun.acquire)
            client.cancel()
        with pytest.raises(LogsHang):
            await pool.run("eve", hang)
        assert not begun.acquire(blocking=False)

    play(story)


def test_a_log_is_closed_without_waiting_for_a_read_that_hangs(
    answers: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launcher.log").write_text("said\n")
    reader, hangs = LogReader(tmp_path, "launcher.log", {}), threading.Event()
    reader.open()

    def kept_from(_: int, offset: int) -> int:
        hangs.set()
        answers.wait()
        return offset

    monkeypatch.setattr(log_reader, "kept_from", kept_from)
    reading = threading.Thread(target=reader.take, args=(False,))
    reading.start()
    assert hangs.wait(WITHIN_S)
    descriptors = reader.descriptors
    in_time(reader.close)
    assert reader.descriptors == descriptors, "closed under a read, another file could get its number"
    answers.set()
    reading.join(WITHIN_S)
    eventually(lambda: reader.descriptors == [], WITHIN_S)
    assert reader.take(True) == b""


@pytest.mark.parametrize("place", ["", "rank-0.log"], ids=["on the directory", "on a log"])
def test_a_file_system_that_a_user_mounts_in_a_log_directory_is_not_accessed(tmp_path: Path, place: str) -> None:
    logs = tmp_path / "logs"
    (logs / "rank-0.log").mkdir(parents=True)
    (logs / "launcher.log").write_text("said\n")
    followed = LogReader(logs, "launcher.log", {})
    followed.open()
    with hanging(logs / place, user=54321, mute=True):
        merged = LogReader(logs, None, {})
        said = in_time(lambda: merged.take(True))
        assert said == (b"[launcher] said\n" if place else b"")
        assert in_time(lambda: [followed.take(True), followed.take(True)]) == [b"said\n", b""]
        assert in_time(lambda: [os.fstat(one).st_size for one in followed.descriptors]) != []
        for reader in (merged, followed):
            in_time(reader.close)
