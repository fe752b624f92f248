"""Noticing that a followed log has grown."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from gpulease_protocol.host.file_poller import POLL_S, FilePoller

WITHIN_S = 30.0


def run(test: Callable[[FilePoller], Awaitable[None]]) -> None:
    async def with_poller() -> None:
        poller = FilePoller(asyncio.to_thread)
        await test(poller)
        async with asyncio.timeout(WITHIN_S):
            while poller._task is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # it ends at the next poll, because no one follows

    asyncio.run(with_poller())


async def change_seen(changed: asyncio.Event) -> None:
    await asyncio.wait_for(changed.wait(), WITHIN_S)
    changed.clear()


def test_every_follower_of_a_file_notices_a_change_until_it_is_closed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()

    async def test(poller: FilePoller) -> None:
        events = [asyncio.Event(), asyncio.Event()]
        followers = [poller.follow(event) for event in events]
        descriptor = os.open(log, os.O_RDONLY)
        for follower, event in zip(followers, events, strict=True):
            follower.set_files([descriptor])
            await change_seen(event)  # a new file counts as changed
        log.write_bytes(b"x")
        for event in events:
            await change_seen(event)
        followers[0].close()
        log.write_bytes(b"xy")
        await change_seen(events[1])
        assert not events[0].is_set()
        followers[1].close()
        os.close(descriptor)

    run(test)


def test_a_file_that_appears_in_a_directory_is_noticed(tmp_path: Path) -> None:
    async def test(poller: FilePoller) -> None:
        changed = asyncio.Event()
        descriptor = os.open(tmp_path, os.O_RDONLY)
        follower = poller.follow(changed)
        follower.set_files([descriptor])
        await change_seen(changed)
        (tmp_path / "rank-0.log").touch()
        await change_seen(changed)
        follower.close()
        os.close(descriptor)

    run(test)


def test_a_write_through_another_name_of_the_file_is_noticed(tmp_path: Path) -> None:
    """torchrun writes to the name it has given the file, in another directory."""
    (tmp_path / "torchrun").mkdir()
    theirs, ours = tmp_path / "torchrun" / "stdout.log", tmp_path / "rank-0.log"
    theirs.touch()
    os.link(theirs, ours)

    async def test(poller: FilePoller) -> None:
        changed = asyncio.Event()
        descriptor = os.open(ours, os.O_RDONLY)
        follower = poller.follow(changed)
        follower.set_files([descriptor])
        await change_seen(changed)
        theirs.write_bytes(b"x")
        await change_seen(changed)
        follower.close()
        os.close(descriptor)

    run(test)


def test_a_file_that_was_closed_and_one_that_does_not_change_wake_no_one(tmp_path: Path) -> None:
    (tmp_path / "log").touch()

    async def test(poller: FilePoller) -> None:
        changed = asyncio.Event()
        quiet, closed = (os.open(tmp_path / "log", os.O_RDONLY) for _ in range(2))
        follower = poller.follow(changed)
        follower.set_files([quiet, closed])
        await change_seen(changed)
        os.close(closed)
        await change_seen(changed)  # once
        await asyncio.sleep(5 * POLL_S)
        assert not changed.is_set()
        follower.close()
        os.close(quiet)

    run(test)


def test_idle_followers_cost_little(tmp_path: Path) -> None:
    """200 followers of 4 files each."""
    (tmp_path / "log").touch()

    async def test(poller: FilePoller) -> None:
        descriptors = [os.open(tmp_path / "log", os.O_RDONLY) for _ in range(800)]
        followers = [poller.follow(asyncio.Event()) for _ in range(200)]
        for number, follower in enumerate(followers):
            follower.set_files(descriptors[4 * number : 4 * number + 4])
        begun_s, begun_cpu_s = time.monotonic(), time.process_time()
        await asyncio.sleep(10 * POLL_S)
        share = (time.process_time() - begun_cpu_s) / (time.monotonic() - begun_s)
        print(f"{share:.1%} of a core")
        assert share < 0.1
        for follower in followers:
            follower.close()
        for descriptor in descriptors:
            os.close(descriptor)

    run(test)
