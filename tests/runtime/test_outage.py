"""A database that fails, at whatever moment: everyone is answered, with the truth, and nothing is decided twice."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.errors import GpuleaseError, LeaseLost, StaleToken, Unavailable
from gpulease_protocol.model import Lease, LeaseState
from gpulease_server.core.happenings import KeepRequested, WaiterPolled
from gpulease_server.core.kept_leases import kept_now
from gpulease_server.core.records import Instant
from gpulease_server.runtime import clock, ids
from gpulease_server.runtime.submissions import SubmissionQueue
from gpulease_server.runtime.writer import MAX_TURN, Writer
from gpulease_server.store.database import upgrade
from gpulease_server.store.ledger_store import Store
from tests.runtime.faults import Body, Fate, FaultyStore, ask, recovered, release, renew, report, writing


async def granted(writer: Writer, key: str | None = None, **what: Any) -> Lease:
    answer = await writer.submit(ask(key, **what))
    assert isinstance(answer, Lease)
    assert answer.state is LeaseState.ACTIVE
    return answer


def outcomes(*calls: Coroutine[Any, Any, Any]) -> asyncio.Future[list[Any]]:
    return asyncio.gather(*calls, return_exceptions=True)


def test_a_commit_whose_answer_is_lost_is_found_again_under_its_key(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        store.fates = [Fate.LOST]
        with pytest.raises(Unavailable) as refusal:
            await writer.submit(ask("k"))
        assert refusal.value.problem()["outcome"] == "unknown"
        assert refusal.value.status == 503
        await recovered(writer)
        (there,) = writer.committed.leases.values()
        again = await granted(writer, "k")
        assert (again.id, again.fencing_token) == (there.lease.id, there.lease.fencing_token)
        assert len(writer.committed.leases) == 1

    run(body)


def test_a_commit_that_failed_leaves_nothing_and_its_key_is_free(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        store.fates = [Fate.FAILED]
        with pytest.raises(Unavailable):
            await writer.submit(ask("k"))
        await recovered(writer)
        assert not writer.committed.leases
        await report(writer)
        lease = await granted(writer, "k")
        assert set(writer.committed.leases) == {lease.id}

    run(body)


def test_who_was_not_in_the_failed_turn_hears_that_nothing_was_done(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        store.gate.clear()
        store.entered.clear()
        first = asyncio.create_task(writer.submit(ask()))
        await asyncio.to_thread(store.entered.wait, 20)
        later = [asyncio.create_task(writer.submit(ask())) for _ in range(3)]
        await asyncio.sleep(0)
        store.fates = [Fate.FAILED]
        store.gate.set()
        told = await outcomes(first, *later)
        assert [error.problem().get("outcome") for error in told] == ["unknown", None, None, None]
        await recovered(writer)
        await report(writer)
        assert not writer.committed.leases, "somebody was told that nothing was done, and it was done"

    run(body)


def test_a_step_of_the_wall_clock_in_an_outage_changes_nothing_of_what_is_kept(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        lease = await granted(writer)
        kept = KeepRequested(
            cause="keep", lease_id=lease.id, fencing_token=lease.fencing_token, reason="lunch", for_s=600.0
        )
        assert isinstance(await writer.submit(kept), Lease)
        honest = clock.now

        def put_forward() -> Instant:
            now = honest()
            return Instant(at=now.at + timedelta(hours=1), mono_s=now.mono_s)

        monkeypatch.setattr(clock, "now", put_forward)
        store.fates = [Fate.FAILED]
        with pytest.raises(Unavailable):
            await writer.submit(ask("k"))
        await recovered(writer)
        assert kept_now(writer.committed.leases[lease.id], clock.now()) is not None

    run(body)


def test_until_a_commit_succeeds_nothing_is_well(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        store.fates = [Fate.FAILED] * 4
        with pytest.raises(Unavailable):
            await writer.submit(ask())
        assert writer.problem is not None
        assert "the disk is full" in writer.problem
        while store.fates:
            with pytest.raises(Unavailable, match="the disk is full"):
                await writer.submit(ask())
            await asyncio.sleep(0.001)
        await recovered(writer)
        told = [event for event in store.history(0, 100)[0] if event.kind == "ledger.recovered"]
        assert len(told) == 1
        assert "the disk is full" in (told[0].reason or "")
        await report(writer)
        await granted(writer)

    run(body)


def test_a_lost_answer_at_the_end_of_an_outage_is_no_second_event(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        store.fates = [Fate.FAILED, Fate.LOST, Fate.LOST, Fate.FAILED]
        with pytest.raises(Unavailable):
            await writer.submit(ask())
        await recovered(writer)
        seqs = [event.seq for event in store.history(0, 100)[0]]
        assert seqs == list(range(1, len(seqs) + 1))
        await report(writer)
        await granted(writer)

    run(body)


def test_a_database_that_cannot_be_read_is_waited_for_without_haste(
    run: Callable[[Body], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        caplog.set_level(logging.INFO)
        caplog.clear()
        loads = store.loads
        store.fates, store.unreadable = [Fate.FAILED], 1000
        with pytest.raises(Unavailable):
            await writer.submit(ask())
        while store.loads < loads + 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert "the database is gone" in (writer.problem or "")
        assert len(caplog.records) <= 3, "the log is flooded"
        pauses_before = store.loads
        await asyncio.sleep(1.0)  # in a busy loop it would be read a thousand times
        assert store.loads - pauses_before <= 3
        store.unreadable = 0
        await recovered(writer)

    run(body)


def test_a_wait_for_a_lock_while_the_ledger_is_read_makes_an_outage_no_longer(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        load = store.load
        monkeypatch.setattr(store, "load", lambda: (time.sleep(1.5), load())[1])
        store.fates, begun_s = [Fate.FAILED] * 2, clock.now().mono_s
        with pytest.raises(Unavailable):
            await writer.submit(ask())
        await recovered(writer)
        assert clock.now().mono_s - begun_s < 7.0, "a pause of four times as long as it waited"

    run(body)


def test_holders_renew_while_nothing_can_be_recorded(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        ttl_s = 2.0  # less than the outage, and long enough for it to begin on a busy machine
        lease, other = await granted(writer, ttl_s=ttl_s), await granted(writer, ttl_s=ttl_s)
        before = store.lease(lease.id)
        store.fates = [Fate.FAILED] * 5
        with pytest.raises(Unavailable):
            await writer.submit(ask())
        renewals, begun_s = 0, asyncio.get_running_loop().time()
        while writer.problem is not None:
            with pytest.raises(StaleToken):
                await writer.submit(renew(lease.id, 99))
            with pytest.raises(Unavailable):
                await writer.submit(renew("lease-of-nobody", 1))
            with pytest.raises(Unavailable):
                await writer.submit(release(lease.id, lease.fencing_token))
            answer = await writer.submit(renew(lease.id, lease.fencing_token))
            assert isinstance(answer, Lease)
            assert answer.fencing_token == lease.fencing_token
            renewals += 1
            await asyncio.sleep(0.01)
        assert renewals > 5
        assert asyncio.get_running_loop().time() - begun_s > ttl_s
        # No tick has ended anything.
        assert {writer.committed.leases[one.id].lease.state for one in (lease, other)} == {LeaseState.ACTIVE}
        after = store.lease(lease.id)
        assert before is not None
        assert after is not None
        assert before.renewed_at < after.renewed_at, "the renewals are not recorded"  # type: ignore[operator]

    run(body)


@pytest.mark.parametrize("fate", [Fate.FAILED, Fate.LOST])
def test_a_lease_whose_end_is_in_doubt_is_not_renewed(run: Callable[[Body], None], fate: Fate) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        lease, other = await granted(writer), await granted(writer)
        store.fates = [fate, Fate.FAILED, Fate.FAILED]
        with pytest.raises(Unavailable):
            await writer.submit(release(lease.id, lease.fencing_token))
        with pytest.raises(Unavailable):
            await writer.submit(renew(lease.id, lease.fencing_token))
        assert isinstance(await writer.submit(renew(other.id, other.fencing_token)), Lease)
        await recovered(writer)
        if fate is Fate.FAILED:
            assert isinstance(await writer.submit(renew(lease.id, lease.fencing_token)), Lease)
        else:
            with pytest.raises(LeaseLost):
                await writer.submit(renew(lease.id, lease.fencing_token))

    run(body)


def test_no_holder_is_told_of_a_grant_while_that_cannot_be_recorded(run: Callable[[Body], None]) -> None:
    """After a restart its owner's life would not keep the lease, as if it had never been told."""

    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer, gpus=1)
        first = await granted(writer)
        waiting = await writer.submit(ask())
        await writer.submit(release(first.id, first.fencing_token))
        await report(writer, gpus=1)
        record = writer.committed.leases[waiting.id]
        assert record.lease.state is LeaseState.ACTIVE
        store.fates = [Fate.FAILED] * 3
        claim = renew(waiting.id, record.lease.fencing_token)
        for _ in range(2):  # the claim whose commit fails, and one during the outage
            with pytest.raises(Unavailable):
                await writer.submit(claim)
        await recovered(writer)
        assert store.lease(waiting.id).renewed_at is None  # type: ignore[union-attr]
        assert isinstance(await writer.submit(claim), Lease)
        assert store.lease(waiting.id).renewed_at is not None  # type: ignore[union-attr]

    run(body)


@pytest.mark.parametrize("fate", [Fate.STUMBLED, Fate.STUMBLED_AFTER])
def test_a_stumble_at_the_commit_decides_nothing_twice(run: Callable[[Body], None], fate: Fate) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        store.fates = [fate]
        told = await outcomes(*(writer.submit(ask()) for _ in range(3)))
        await report(writer)
        leases = [answer for answer in told if isinstance(answer, Lease)]
        assert {lease.id for lease in leases} <= set(writer.committed.leases)
        if fate is Fate.STUMBLED_AFTER:
            assert len(leases) == 3, "what is recorded was not told"
        assert len(writer.committed.leases) == 3, "decided twice, or not at all"
        kinds = [event.kind for event in store.history(0, 100)[0]]
        assert kinds.count("lease.granted") == 3

    run(body)


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("fate", [Fate.STUMBLED, Fate.STUMBLED_AFTER])
def test_no_one_waits_for_the_database_after_a_stumble(run: Callable[[Body], None], fate: Fate, requests: int) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        store.fates, store.unreadable = [fate], 10**6
        store.gate.clear()
        store.entered.clear()
        first = outcomes(*(writer.submit(ask(str(number))) for number in range(requests)))
        await asyncio.to_thread(store.entered.wait, 60)
        queued = outcomes(writer.submit(ask("queued")))
        await asyncio.sleep(0)
        store.gate.set()
        told = [*await asyncio.wait_for(first, 30), *await asyncio.wait_for(queued, 30)]
        assert {answer.problem().get("outcome") for answer in told} == {"unknown"}
        store.unreadable = 0
        await recovered(writer)
        await report(writer)
        done = requests if fate is Fate.STUMBLED_AFTER else 0
        assert len(writer.committed.leases) == done, "decided after it was refused"

    run(body)


def test_a_fault_while_a_committed_turn_is_shown_decides_nothing_twice(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        shown, calls = writer.committed, iter([1, 0])
        apply = shown.apply

        def stumble(change: Any) -> None:
            apply(change)
            1 / next(calls)

        monkeypatch.setattr(shown, "apply", stumble)
        lease = await granted(writer)
        assert set(writer.committed.leases) == {lease.id}
        assert [event.kind for event in store.history(0, 100)[0]].count("lease.granted") == 1
        released = await writer.submit(release(lease.id, lease.fencing_token))
        assert isinstance(released, Lease)

    run(body)


def test_one_poisoned_request_is_refused_alone(run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer, 8)
        poison = ask(ttl_s=13.0)
        real = Store.write

        def write(self: Store, changes: Any, ledger: Any) -> None:
            if any(getattr(getattr(change, "lease", None), "ttl_s", 0) == 13.0 for change in changes):
                raise TypeError("cannot be made a row")
            real(self, changes, ledger)

        monkeypatch.setattr(Store, "write", write)
        told = await outcomes(writer.submit(ask("a")), writer.submit(poison), writer.submit(ask("b")))
        assert isinstance(told[0], Lease)
        assert isinstance(told[1], GpuleaseError)
        assert told[1].status == 500
        assert isinstance(told[2], Lease)
        assert set(writer.committed.leases) == {told[0].id, told[2].id}

    run(body)


def test_waiters_look_again_after_an_outage(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        lease = await granted(writer)
        waiter = asyncio.create_task(writer.wakeups.wait(f"lease:{lease.id}", 50))
        await asyncio.sleep(0)
        store.fates = [Fate.LOST]
        with pytest.raises(Unavailable):
            await writer.submit(release(lease.id, lease.fencing_token))
        assert await waiter
        assert writer.committed.leases[lease.id].lease.state is LeaseState.ENDED

    run(body)


def test_a_writer_that_is_stopped_during_a_commit_tells_the_truth(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    upgrade(f"sqlite:///{file}")

    async def main() -> None:
        async with asyncio.timeout(60), writing(f"sqlite:///{file}") as (writer, store):
            await report(writer)
            store.gate.clear()
            store.entered.clear()
            writer_task = next(task for task in asyncio.all_tasks() if "Writer.run" in str(task.get_coro()))
            asked = asyncio.create_task(writer.submit(ask()))
            await asyncio.to_thread(store.entered.wait, 20)
            late = asyncio.create_task(writer.submit(ask()))
            await asyncio.sleep(0)
            writer_task.cancel()
            await asyncio.sleep(0)
            writer_task.cancel()
            store.gate.set()
            lease, refused = await outcomes(asked, late)
            assert isinstance(lease, Lease), "it is committed, and its caller was told something else"
            assert isinstance(refused, Unavailable)
            assert store.lease(lease.id) is not None
            with pytest.raises(Unavailable):
                await writer.submit(ask())

    asyncio.run(main())


def test_a_writer_that_is_stopped_in_an_outage_ends(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    upgrade(f"sqlite:///{file}")

    async def main() -> None:
        async with asyncio.timeout(60), writing(f"sqlite:///{file}") as (writer, store):
            await report(writer)
            store.fates, store.unreadable = [Fate.FAILED], 10**6
            with pytest.raises(Unavailable):
                await writer.submit(ask())

    asyncio.run(main())


def test_more_requests_than_may_wait_are_refused_and_the_rest_answered(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        monkeypatch.setattr(writer, "_queue", SubmissionQueue(50))
        await asyncio.sleep(0.3)  # `run` looks at the new queue from its next turn on
        told = await outcomes(*(writer.submit(ask()) for _ in range(200)))
        refused = [answer for answer in told if isinstance(answer, Unavailable)]
        assert len(refused) == 150
        assert all(isinstance(answer, Lease) for answer in told if answer not in refused)
        writer._queue = SubmissionQueue(1)
        for _ in range(5):
            writer.enqueue(WaiterPolled(cause=ids.new_id("poll"), lease_id="x"))

    run(body)


def test_a_renewal_that_has_arrived_is_decided_before_its_lease_expires(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        lease = await granted(writer, ttl_s=2.0)
        store.gate.clear()
        store.entered.clear()
        blocked = asyncio.create_task(writer.submit(ask()))
        await asyncio.to_thread(store.entered.wait, 20)
        crowd = [asyncio.create_task(writer.submit(renew("lease-of-nobody", 1))) for _ in range(MAX_TURN + 10)]
        renewed = asyncio.create_task(writer.submit(renew(lease.id, lease.fencing_token)))
        await asyncio.sleep(2.1)  # the deadline passes while the commit is held up
        store.gate.set()
        assert isinstance(await renewed, Lease)
        await outcomes(blocked, *crowd)
        assert "lease.ended" not in [event.kind for event in store.history(0, 100)[0]]

    run(body)
