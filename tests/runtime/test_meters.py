"""GPU time by user, and what a writer counts of its turns: nothing that grows ever falls, and no outage is missed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.errors import Unavailable
from gpulease.exchange import NodeReport
from gpulease.model import Lease
from gpulease_server.core.ledger import Instant, Ledger
from gpulease_server.runtime.meters import Meters
from gpulease_server.runtime.usage import ABSENT_S, OTHER, TOP_USERS, UNKNOWN, Usage
from gpulease_server.runtime.writer import Writer
from tests.core.build import World, gpu
from tests.runtime.faulty import Body, Fate, FaultyStore, ask, recovered, release, report


def test_held_time_is_that_of_every_gpu_and_needs_no_reading() -> None:
    usage = Usage()
    usage.hold("g0", "l1", "ann", 10.0)
    usage.hold("g1", "l1", "ann", 10.0)
    usage.hold("g2", "l2", None, 20.0)
    usage.hold("g0", "l1", "ann", 25.0)
    usage.drop("g1", 30.0)
    usage.drop("g7", 30.0)
    held = {user: totals.held_s for user, totals in usage.until(40.0).items()}
    assert held == {"ann": 30.0 + 20.0, UNKNOWN: 20.0}
    assert usage.until(50.0)["ann"].held_s == 60.0
    usage.hold("g3", "l3", "ann", 60.0)
    assert usage.until(61.0)["ann"].held_s == 72.0, "one GPU until 60, two from then on"


def test_used_and_idle_time_follow_from_readings_and_a_gap_is_neither() -> None:
    usage = Usage()
    usage.hold("g0", "l1", "ann", 0.0)
    for at_s, ratio in ((1.0, 0.5), (2.0, 1.0), (3.0, 0.0), (4.0, None), (5.0, 0.0)):
        usage.read("g0", ratio, at_s)
    ann = usage.until(5.0)["ann"]
    assert (ann.used_s, ann.idle_s, ann.held_s) == (1.5, 2.0, 5.0)
    assert usage.quiet_s(7.0) == {"g0": 5.0}
    usage.read("g0", 1.0, 1005.0)
    ann = usage.until(1005.0)["ann"]
    assert ann.used_s == 2.5, "a reading after a long silence stands for a second"
    assert usage.quiet_s(1006.0) == {"g0": 1.0}
    usage.read("g9", 1.0, 1006.0)
    assert usage.until(1006.0)["ann"].used_s == 2.5


def test_a_gpu_that_goes_from_one_lease_to_another_begins_anew() -> None:
    usage = Usage()
    usage.hold("g0", "l1", "ann", 0.0)
    usage.read("g0", 0.0, 1.0)
    usage.hold("g0", "l2", "bob", 100.0)
    assert usage.quiet_s(101.0) == {}, "no reading of it under this lease yet"
    usage.read("g0", 0.0, 101.0)
    assert usage.quiet_s(101.0) == {"g0": 1.0}
    assert {user: totals.held_s for user, totals in usage.until(101.0).items()} == {"ann": 100.0, "bob": 1.0}


def test_ten_thousand_users_have_a_hundred_series_and_what_was_counted_stays() -> None:
    usage = Usage()
    for number in range(10_000):
        usage.hold(f"g{number}", f"l{number}", f"user{number}", 0.0)
    totals = usage.until(1.0)
    assert len(totals) == TOP_USERS + 1
    assert totals[OTHER].held_s == 10_000 - TOP_USERS
    assert sum(one.gpus for one in totals.values()) == 10_000


def test_a_user_who_is_long_gone_leaves_his_place_and_one_who_is_not_keeps_it() -> None:
    usage = Usage()
    for number in range(TOP_USERS):
        usage.hold(f"g{number}", "l", f"user{number}", 0.0)
    usage.drop("g0", 10.0)
    usage.drop("g1", 20.0)
    usage.hold("x", "l", "ann", 20.0 + ABSENT_S - 11)
    assert "ann" not in usage.totals
    usage.hold("y", "l", "ann", 10.0 + ABSENT_S + 1)
    assert "ann" in usage.totals
    assert "user0" not in usage.totals
    assert "user1" in usage.totals
    usage.hold("z", "l", "bob", 10.0 + ABSENT_S + 2)
    assert "bob" not in usage.totals, "user1 has been away for less than an hour"
    totals = usage.until(10.0 + ABSENT_S + 2)
    assert totals[OTHER].gpus == 2


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 12), st.sampled_from([0.5, 1.0, 60.0, 4000.0])), max_size=100
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_nothing_that_is_shown_ever_falls(steps: list[tuple[int, int, float]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gpulease_server.runtime.usage.TOP_USERS", 3)
        _live(steps)


def _live(steps: list[tuple[int, int, float]]) -> None:
    usage, now_s, before = Usage(), 0.0, dict[str, Any]()
    for gpu_number, user, step_s in steps:
        now_s += step_s
        if user % 3 == 0:
            usage.drop(f"g{gpu_number}", now_s)
        else:
            usage.hold(f"g{gpu_number}", f"l{user}", f"user{user}", now_s)
        usage.read(f"g{gpu_number}", (user % 4) / 3, now_s)
        shown = usage.until(now_s)
        for name in before.keys() & shown.keys():
            assert shown[name].held_s >= before[name].held_s
            assert shown[name].used_s >= before[name].used_s
            assert shown[name].idle_s >= before[name].idle_s
            assert shown[name].used_s + shown[name].idle_s <= shown[name].held_s + len(steps)
        assert sum(one.gpus for one in shown.values()) == len(usage.held)
        assert len(shown) <= 4
        before = shown


def counted(writer: Writer, name: str, **labels: str) -> float:
    value = writer.meters.registry.get_sample_value(name, labels)
    assert value is not None, name
    return value


def test_a_commit_that_fails_waits_until_one_succeeds(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        assert writer.meters.recording_since_s is None
        committed = counted(writer, "gpulease_commit_seconds_count")
        store.fates = [Fate.FAILED, Fate.FAILED]
        with pytest.raises(Unavailable):
            await writer.submit(ask())
        assert writer.meters.recording_since_s is not None, "an outage does not look like a daemon without work"
        await recovered(writer)
        assert writer.meters.recording_since_s is None
        assert counted(writer, "gpulease_commits_failed_total") == 1
        await writer.submit(ask())
        assert counted(writer, "gpulease_commit_seconds_count") == committed + 1

    run(body)


def test_a_commit_that_hangs_is_seen_while_it_does(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        store.entered.clear()
        store.gate.clear()
        asked = asyncio.create_task(writer.submit(ask()))
        await asyncio.to_thread(store.entered.wait, 30)
        assert writer.meters.recording_since_s is not None
        store.gate.set()
        await asked
        assert writer.meters.recording_since_s is None

    run(body)


def test_grants_ends_and_usage_are_counted_once_whatever_fails(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        lease = await writer.submit(ask("k"))
        assert isinstance(lease, Lease)
        await writer.submit(ask("k"))
        assert counted(writer, "gpulease_leases_granted_total") == 1
        assert counted(writer, "gpulease_grant_latency_seconds_count") == 1, "a repetition is no grant"
        store.fates = [Fate.LOST]
        with pytest.raises(Unavailable):
            await writer.submit(release(lease.id, lease.token))
        await recovered(writer)
        assert writer.meters.usage.held == {}, "the ledger that was read says that it is released"
        again = await writer.submit(release(lease.id, lease.token))
        assert isinstance(again, Lease)
        assert counted(writer, "gpulease_turn_happenings_count") >= 1

    run(body)


def test_a_fault_of_a_meter_is_no_fault_of_the_turn(run: Callable[[Body], None], caplog: Any) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        writer.meters.usage.held = None  # type: ignore[assignment]
        lease = await writer.submit(ask())
        assert isinstance(lease, Lease)
        assert writer.problem is None

    run(body)
    assert "the figures of a turn are not counted" in caplog.text


def test_an_absurd_utilization_spoils_nothing() -> None:
    meters = Meters()
    meters.usage.hold(gpu(0).uuid, "l", "ann", 0.0)
    view = NodeReport(worker_id="w", host="a", gpus=(gpu(0, utilization_ratio=1e30),), read_s=0.25)
    meters.reported("a", view, _at(1.0))
    assert meters.usage.until(1.0)["ann"].used_s == 1.0
    assert meters.probe_s == {"a": 0.25}
    meters.reported("a", NodeReport(worker_id="w", host="a", problem="hangs"), _at(2.0))
    assert meters.probe_s == {}
    meters.take_up(Ledger(), _at(3.0))
    assert meters.usage.held == {}


def _at(mono_s: float) -> Instant:
    world = World()
    world.at_s = mono_s
    return world.now
