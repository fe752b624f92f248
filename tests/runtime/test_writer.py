"""Nobody is told what is not committed, and a commit that fails harms nobody for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gpulease.errors import GpuleaseError, Unavailable
from gpulease.exchange import NodeReport
from gpulease.model import Demand, Holder, Lease
from gpulease_server.core.happenings import LeaseAsked, LeaseReleased, NodeReported
from gpulease_server.runtime import clock, ids
from gpulease_server.runtime.writer import Writer
from tests.core.build import gpu
from tests.runtime.faulty import Fate, FaultyStore, recovered, writing


def run(url: str, body: Callable[[Writer, FaultyStore], Coroutine[Any, Any, None]]) -> None:
    """Run a test body beside a writer."""

    async def main() -> None:
        async with asyncio.timeout(30), writing(url) as (made, store):
            await body(made, store)

    asyncio.run(main())


def ask(**what: Any) -> LeaseAsked:
    return LeaseAsked(
        cause=ids.make("request"),
        lease_id=ids.make("lease"),
        demand=Demand(),
        holder=Holder(),
        queue=True,
        **{"ttl_s": 60.0, **what},
    )


async def report(writer: Writer, gpus: int = 4) -> None:
    view = NodeReport(worker_id="w", host="a", gpus=tuple(gpu(index) for index in range(gpus)))
    now_s = clock.now().mono_s
    await writer.submit(NodeReported(cause=ids.make("report"), node="a", report=view, observed_at_s=now_s))


def test_nobody_is_told_before_the_commit(database_url: str) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        store.gate.clear()
        store.entered.clear()
        asked = ask()
        call = asyncio.create_task(writer.submit(asked))
        await asyncio.to_thread(store.entered.wait, 20)
        assert not call.done()
        assert asked.lease_id not in writer.committed.leases, "readers see what a crash could undo"
        store.gate.set()
        answer = await call
        assert isinstance(answer, Lease)
        assert writer.committed.leases[answer.id].lease.token == answer.token
        assert store.lease(answer.id) is not None

    run(database_url, body)


def test_requests_that_arrive_together_share_a_commit(database_url: str) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        before = store.writes
        await asyncio.gather(*(writer.submit(ask()) for _ in range(100)))
        assert store.writes - before <= 3

    run(database_url, body)


def test_a_failed_commit_refuses_its_callers_and_loses_nothing(database_url: str) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer, gpus=2)
        kept = await writer.submit(ask())
        assert isinstance(kept, Lease)
        store.fates = [Fate.FAILED]
        with pytest.raises(Unavailable, match="disk is full"):
            await writer.submit(ask())
        await recovered(writer)
        assert set(writer.committed.leases) == {kept.id}
        await report(writer, gpus=2)
        second = await writer.submit(ask())
        assert isinstance(second, Lease)
        assert second.gpus[0].uuid != kept.gpus[0].uuid
        assert (second.token or 0) > (kept.token or 0)
        released = await writer.submit(LeaseReleased(cause=ids.make("request"), lease_id=kept.id, token=kept.token))
        assert isinstance(released, Lease)

    run(database_url, body)


def test_a_fault_in_the_core_reaches_nobody_as_a_grant(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        kept = await writer.submit(ask())
        assert isinstance(kept, Lease)
        with monkeypatch.context() as broken:
            broken.setattr("gpulease_server.core.decide.on_asked", lambda *_: 1 / 0)
            poison, other = ask(), LeaseReleased(cause=ids.make("request"), lease_id=kept.id, token=kept.token)
            outcomes = await asyncio.gather(writer.submit(poison), writer.submit(other), return_exceptions=True)
        assert isinstance(outcomes[0], GpuleaseError)
        assert outcomes[0].status == 500
        assert isinstance(outcomes[1], Lease), "one request made another one fail"
        await recovered(writer)
        assert set(writer.committed.leases) == {kept.id}
        await report(writer)
        assert isinstance(await writer.submit(ask()), Lease)

    run(database_url, body)


def test_a_lease_expires_by_itself(database_url: str) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        begun_s = clock.now().mono_s
        lease = await writer.submit(ask(ttl_s=0.5))
        assert isinstance(lease, Lease)
        while writer.committed.leases[lease.id].lease.state == "active":
            await writer.topics.wait(f"lease:{lease.id}", 5)
        took_s = clock.now().mono_s - begun_s
        assert 0.5 <= took_s < 1.5, "early, or more than a second late"

    run(database_url, body)
