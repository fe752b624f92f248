"""Being told that a log has grown."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gpulease_server.api.log_watch import Watching

WITHIN_S = 5.0


def run(test: Callable[[Watching], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        watching = Watching()
        try:
            await test(watching)
        finally:
            watching.close()

    asyncio.run(all_of_it())


def test_everybody_who_follows_a_file_is_told_until_he_leaves(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()

    async def test(watching: Watching) -> None:
        events = [asyncio.Event(), asyncio.Event()]
        told = [watching.told(event) for event in events]
        descriptor = os.open(log, os.O_RDONLY)
        assert [one.of([descriptor]) for one in told] == [True, True]
        assert not told[0].of([descriptor]), "it is not new"
        log.write_bytes(b"x")
        for event in events:
            await asyncio.wait_for(event.wait(), WITHIN_S)
            event.clear()
        told[0].close()
        log.write_bytes(b"xy")
        await asyncio.wait_for(events[1].wait(), WITHIN_S)
        assert not events[0].is_set()
        told[1].close()
        assert not watching._waiting
        os.close(descriptor)

    run(test)


def test_a_file_that_appears_in_a_directory_is_told(tmp_path: Path) -> None:
    async def test(watching: Watching) -> None:
        changed = asyncio.Event()
        descriptor = os.open(tmp_path, os.O_RDONLY)
        watching.told(changed).of([descriptor])
        (tmp_path / "rank-0.log").touch()
        await asyncio.wait_for(changed.wait(), WITHIN_S)
        os.close(descriptor)

    run(test)


def test_a_write_through_another_name_of_the_file_is_told(tmp_path: Path) -> None:
    """torchrun writes to the name it has given the file, in another directory."""
    (tmp_path / "torchrun").mkdir()
    theirs, ours = tmp_path / "torchrun" / "stdout.log", tmp_path / "rank-0.log"
    theirs.touch()
    os.link(theirs, ours)

    async def test(watching: Watching) -> None:
        changed = asyncio.Event()
        descriptor = os.open(ours, os.O_RDONLY)
        watching.told(changed).of([descriptor])
        theirs.write_bytes(b"x")
        await asyncio.wait_for(changed.wait(), WITHIN_S)
        os.close(descriptor)

    run(test)


def test_without_inotify_nobody_is_told_and_the_log_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(watching: Watching) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Watching, "_open", none_left)

    async def test(watching: Watching) -> None:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        told = watching.told(asyncio.Event())
        told.of([descriptor])
        watching.told(asyncio.Event()).of([descriptor])
        assert not told.everything
        told.close()
        os.close(descriptor)

    with caplog.at_level(logging.WARNING, "gpulease.api"):
        run(test)
    assert [record.message for record in caplog.records] == [
        "logs are looked at every 0.1 s instead of watched: [Errno 24] Too many open files"
    ]
