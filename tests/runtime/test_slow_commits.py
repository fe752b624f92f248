"""A commit that takes long gives time to those who waited for its answer, and to no one else. In played time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from gpulease_protocol.model import EndReason, Lease, LeaseState
from gpulease_server.core.policy import Policy
from gpulease_server.runtime import clock
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.database import upgrade
from gpulease_server.store.ledger_store import Store
from tests.runtime.faults import ask, recovered, renew, report
from tests.simulation.loop import PlayedLoop

COMMIT_S = 1.3
Body = Callable[[Writer, PlayedLoop], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[Body], None]]:
    """Runs a body beside a writer whose commits take `COMMIT_S`."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    upgrade(url)
    loop = PlayedLoop(lambda: (COMMIT_S, 0.0))

    async def main(body: Body) -> None:
        store = Store(url)
        writer = Writer(store, Policy(max_observation_age_s=3600))
        task = asyncio.create_task(writer.run())
        try:
            await recovered(writer)
            await report(writer)
            await body(writer, loop)
        finally:
            task.cancel()
            await asyncio.wait({task})
            store.close()

    played = mock.patch.object(clock, "time", SimpleNamespace(monotonic=loop.time, thread_time=lambda: 0.0))
    with played, mock.patch.object(clock, "now", clock._Clocks().now):
        yield lambda body: loop.run_until_complete(main(body))
    loop.close()


async def granted(writer: Writer, ttl_s: float) -> Lease:
    lease = await writer.submit(ask(ttl_s=ttl_s))
    assert isinstance(lease, Lease)
    assert lease.state is LeaseState.ACTIVE
    return lease


def now_of(writer: Writer, lease: Lease) -> Lease:
    return writer.committed.leases[lease.id].lease


def test_slow_commits_keep_no_dead_holder_alive(play: Callable[[Body], None]) -> None:
    async def body(writer: Writer, loop: PlayedLoop) -> None:
        dead, living = await granted(writer, 2.0), await granted(writer, 2.0)
        begun_s = loop.time()
        while now_of(writer, dead).state is LeaseState.ACTIVE:
            assert loop.time() - begun_s < 2.0 + 3 * COMMIT_S, "the commits of others keep it"
            await writer.submit(renew(living.id, living.fencing_token))
        assert now_of(writer, dead).end_reason is EndReason.EXPIRED
        assert loop.time() - begun_s >= 2.0

    play(body)


def test_a_holder_that_waits_for_a_slow_commit_has_its_time_from_the_answer_on(play: Callable[[Body], None]) -> None:
    async def body(writer: Writer, loop: PlayedLoop) -> None:
        lease = await granted(writer, 1.0)
        for _ in range(10):
            await asyncio.sleep(0.5)
            await writer.submit(renew(lease.id, lease.fencing_token))
            assert now_of(writer, lease).state is LeaseState.ACTIVE
        kinds = [event.kind for event in writer.recent_events.after(0, 1000) or ()]
        assert "lease.revived" not in kinds, "it could say nothing while it waited"
        await asyncio.sleep(1.0 + 0.5 + 2 * COMMIT_S)
        assert now_of(writer, lease).end_reason is EndReason.EXPIRED

    play(body)


@pytest.mark.parametrize("commits", [False, True])
def test_time_in_which_the_event_loop_stood_is_given_back(play: Callable[[Body], None], commits: bool) -> None:
    async def body(writer: Writer, loop: PlayedLoop) -> None:
        lease = await granted(writer, 10.0)
        under_way = asyncio.create_task(writer.submit(ask(ttl_s=60.0))) if commits else None
        await asyncio.sleep(0.3)
        loop._leap.now_s += 600  # SIGSTOP, and SIGCONT
        await asyncio.sleep(5.0)
        assert now_of(writer, lease).state is LeaseState.ACTIVE
        await asyncio.sleep(6.0 + 2 * COMMIT_S)
        assert now_of(writer, lease).end_reason is EndReason.EXPIRED
        if under_way is not None:
            await under_way

    play(body)
