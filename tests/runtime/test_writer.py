"""Nobody is told what is not committed, and a commit that fails harms no one for long."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.errors import GpuleaseError, Unavailable
from gpulease_protocol.model import Demand, Event, Holder, Lease, LeaseState
from gpulease_protocol.node_protocol import NodeReport
from gpulease_server.core.happenings import LeaseRequested, NodeReported, ReleaseRequested
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Deadline, Instant
from gpulease_server.core.turn import Turn
from gpulease_server.runtime import clock, event_log, ids
from gpulease_server.runtime.recent_events import EVENTS_KEY
from gpulease_server.runtime.writer import Submission, Writer, _count_from_answer
from gpulease_server.store import file_guard
from gpulease_server.store.backup import backup
from tests.core.build import gpu
from tests.runtime.faults import Fate, FaultyStore, recovered, release, renew, writing


def run(url: str, body: Callable[[Writer, FaultyStore], Coroutine[Any, Any, None]]) -> None:
    """Run a test body beside a writer."""

    async def main() -> None:
        async with asyncio.timeout(30), writing(url) as (made, store):
            await body(made, store)

    asyncio.run(main())


def ask(**what: Any) -> LeaseRequested:
    return LeaseRequested(
        cause=ids.new_id("request"),
        lease_id=ids.new_id("lease"),
        demand=Demand(),
        holder=Holder(),
        queue=True,
        **{"ttl_s": 60.0, **what},
    )


async def report(writer: Writer, gpus: int = 4) -> None:
    view = NodeReport(worker_id="w", host="a", gpus=tuple(gpu(index) for index in range(gpus)))
    now_s = clock.now().mono_s
    await writer.submit(NodeReported(cause=ids.new_id("report"), node="a", report=view, observed_at_s=now_s))


def test_no_one_is_told_before_the_commit(database_url: str) -> None:
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
        assert writer.committed.leases[answer.id].lease.fencing_token == answer.fencing_token
        assert store.lease(answer.id) is not None

    run(database_url, body)


def test_requests_that_arrive_together_share_a_commit(database_url: str) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        before = store.writes
        await asyncio.gather(*(writer.submit(ask()) for _ in range(100)))
        assert store.writes - before <= 3

    run(database_url, body)


def test_a_caller_goes_on_before_what_was_decided_is_logged(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        event_log, "log_turn", lambda changes, _: lines.extend(one.kind for one in changes if isinstance(one, Event))
    )

    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        await asyncio.sleep(0)
        lines.clear()
        await writer.submit(ask())
        assert lines == []
        await asyncio.sleep(0)
        assert "lease.granted" in lines

    run(sqlite_url, body)


def test_who_has_waited_for_a_grant_is_told_before_the_node_whose_report_has_led_to_it(sqlite_url: str) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer, gpus=1)
        await writer.submit(ask())
        waiting = await writer.submit(ask())
        assert isinstance(waiting, Lease)
        assert waiting.state is LeaseState.QUEUED
        told: list[str] = []

        async def poll() -> None:
            assert await writer.wakeups.wait(f"lease:{waiting.id}", 20)
            told.append(writer.committed.leases[waiting.id].lease.state)

        async def exchange() -> None:
            await report(writer, gpus=2)
            told.append("node")

        await asyncio.gather(poll(), exchange())
        assert told == [LeaseState.ACTIVE, "node"]

    run(sqlite_url, body)


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
        assert (second.fencing_token or 0) > (kept.fencing_token or 0)
        released = await writer.submit(
            ReleaseRequested(cause=ids.new_id("request"), lease_id=kept.id, fencing_token=kept.fencing_token)
        )
        assert isinstance(released, Lease)

    run(database_url, body)


async def refuses_what_is_older(writer: Writer) -> None:
    """The next commit finds an older database, and the writer does not go on with it."""
    with pytest.raises(Unavailable, match="lacks what was written"):
        await writer.submit(ask())
    while "older than this daemon's answers" not in (writer.problem or ""):
        assert writer.problem is not None, "it goes on without the lease"
        await asyncio.sleep(0.01)


def test_an_older_copy_is_not_taken_for_the_database_where_a_commit_has_reached_it(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is put there between the check and a new connection."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    copy = path.with_name("copy.db")

    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer, gpus=2)
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as to:
            source.backup(to)
        kept = await writer.submit(ask())
        assert isinstance(kept, Lease)
        check, calls = writer._file_guard.check, itertools.count()
        monkeypatch.setattr(writer._file_guard, "check", lambda: None if next(calls) == 0 else check())
        store.engine.dispose()
        for end in ("-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        copy.replace(path)
        await refuses_what_is_older(writer)
        assert kept.id in writer.committed.leases

    run(sqlite_url, body)


def test_a_database_that_is_overwritten_is_not_written_on(sqlite_url: str) -> None:
    """`cp FILE gpulease.db` under a running daemon: its log no longer fits to it, and no restart could read it."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    copy = path.with_name("copy.db")

    async def body(writer: Writer, _: FaultyStore) -> None:
        await report(writer, gpus=2)
        backup(sqlite_url, copy)
        kept = await writer.submit(ask())
        assert isinstance(kept, Lease)
        shutil.copyfile(copy, path)
        with pytest.raises(Unavailable, match="has been overwritten"):
            await writer.submit(ask())
        assert "stop the daemon" in (writer.problem or "")
        assert kept.id in writer.committed.leases

    run(sqlite_url, body)


def test_a_file_system_that_has_failed_is_told_at_once_and_holders_keep_their_leases(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an error of its disk: no file of it can be read any more."""

    def fails(_: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def body(writer: Writer, _: FaultyStore) -> None:
        await report(writer, gpus=2)
        kept = await writer.submit(ask())
        assert isinstance(kept, Lease)
        with monkeypatch.context() as broken:
            broken.setattr(file_guard, "_stamp_in", fails)
            with pytest.raises(Unavailable, match="cannot be read: Input/output error"):
                await writer.submit(ask())
            assert isinstance(await writer.submit(renew(kept.id, kept.fencing_token)), Lease)
        await recovered(writer)
        assert isinstance(await writer.submit(renew(kept.id, kept.fencing_token)), Lease)

    run(sqlite_url, body)


def test_an_older_content_is_not_taken_for_the_ledger_although_the_file_and_every_connection_stay(
    sqlite_url: str,
) -> None:
    """As after `.restore` of sqlite3, or after a failover of PostgreSQL to a replica that lagged behind."""
    path = sqlite_url.removeprefix("sqlite:///")

    async def body(writer: Writer, _: FaultyStore) -> None:
        await report(writer, gpus=2)
        with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(":memory:")) as old:
            live.backup(old)
            kept = await writer.submit(ask())
            assert isinstance(kept, Lease)
            old.backup(live)
        await refuses_what_is_older(writer)
        assert kept.id in writer.committed.leases

    run(sqlite_url, body)


def test_a_fault_in_the_core_reaches_no_one_as_a_grant(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        kept = await writer.submit(ask())
        assert isinstance(kept, Lease)
        with monkeypatch.context() as broken:
            broken.setattr("gpulease_server.core.decide.on_lease_requested", lambda *_: 1 / 0)
            poison, other = (
                ask(),
                ReleaseRequested(cause=ids.new_id("request"), lease_id=kept.id, fencing_token=kept.fencing_token),
            )
            outcomes = await asyncio.gather(writer.submit(poison), writer.submit(other), return_exceptions=True)
        assert isinstance(outcomes[0], GpuleaseError)
        assert outcomes[0].status == 500
        assert isinstance(outcomes[1], Lease), "one request made another one fail"
        await recovered(writer)
        assert set(writer.committed.leases) == {kept.id}
        await report(writer)
        assert isinstance(await writer.submit(ask()), Lease)

    run(database_url, body)


@pytest.mark.alone
def test_a_lease_expires_by_itself(database_url: str) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        took_s: list[float] = []
        while not took_s or (took_s[-1] >= 1.5 and len(took_s) < 3):  # the machine may keep the writer from running
            await report(writer)
            begun_s = clock.now().mono_s
            lease = await writer.submit(ask(ttl_s=0.5))
            assert isinstance(lease, Lease)
            while writer.committed.leases[lease.id].lease.state == "active":
                await writer.wakeups.wait(f"lease:{lease.id}", 5)
            took_s.append(clock.now().mono_s - begun_s)
            assert took_s[-1] >= 0.5, "early"
        assert took_s[-1] < 1.5, f"more than a second late: {took_s}"

    run(database_url, body)


def test_a_renewal_wakes_neither_a_worker_nor_who_waits_for_its_lease(sqlite_url: str) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        lease = await writer.submit(ask())
        assert isinstance(lease, Lease)
        waits = [asyncio.create_task(writer.wakeups.wait(key, 20)) for key in ("node:a", f"lease:{lease.id}")]
        for _ in range(2):
            await writer.submit(renew(lease.id, lease.fencing_token))
        await asyncio.sleep(0)  # what is woken ends in this round
        assert not any(wait.done() for wait in waits), "a turn of renewals costs as much as a report of the node"
        await writer.submit(release(lease.id, lease.fencing_token))
        assert await asyncio.gather(*waits) == [True, True], "its end wakes both"

    run(sqlite_url, body)


def test_a_writer_takes_no_turn_before_something_may_be_due(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    taking = Writer._take_turn

    async def noted(self: Writer, submissions: list[Submission]) -> bool:
        taken.append(clock.now().mono_s)
        return await taking(self, submissions)

    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        reported_s = writer.committed.node_observations["a"].reported_at_s
        monkeypatch.setattr(Writer, "_take_turn", noted)
        while not writer.committed.node_observations["a"].problem:  # nothing wakes it but time
            await writer.wakeups.wait(EVENTS_KEY, 10)
        assert taken[0] >= reported_s + writer.policy.silence_s

    run(sqlite_url, body)


def test_a_slow_commit_gives_no_deadline_back_to_a_lease_that_ended_in_the_same_turn() -> None:
    """It would end a second time when that passed, as expired, and could revive."""
    now = Instant(at=datetime(2026, 1, 1, tzinfo=UTC), mono_s=1000.0)
    turn = Turn(Ledger(), now, Policy())
    for change in (Deadline("heard", 1010.0), Deadline("ended", 1010.0), Deadline("ended", None)):
        turn.put(change)
    _count_from_answer(turn, 5.0)
    assert turn.ledger.deadlines == {"heard": 1015.0}
