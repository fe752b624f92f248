"""GPU time by user, and what a writer counts of its turns: nothing that grows ever falls, and no outage is missed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.model import Activity, Lease
from gpulease_protocol.node_protocol import NodeReport
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import Instant
from gpulease_server.runtime.daemon_metrics import DaemonMetrics
from gpulease_server.runtime.gpu_hours import MAX_USERS, OTHER_USERS, UNKNOWN_USER, USER_EXPIRY_S, GpuUsage
from gpulease_server.runtime.writer import Writer
from tests.core.build import World, gpu
from tests.runtime.faults import Body, Fate, FaultyStore, ask, recovered, release, report


def test_held_time_is_that_of_every_gpu_and_needs_no_reading() -> None:
    usage = GpuUsage()
    usage.hold("g0", "l1", "ann", 10.0)
    usage.hold("g1", "l1", "ann", 10.0)
    usage.hold("g2", "l2", None, 20.0)
    usage.hold("g0", "l1", "ann", 25.0)
    usage.drop("g1", 30.0)
    usage.drop("g7", 30.0)
    held = {user: totals.held_s for user, totals in usage.totals_at(40.0).items()}
    assert held == {"ann": 30.0 + 20.0, UNKNOWN_USER: 20.0}
    assert usage.totals_at(50.0)["ann"].held_s == 60.0
    usage.hold("g3", "l3", "ann", 60.0)
    assert usage.totals_at(61.0)["ann"].held_s == 72.0, "one GPU until 60, two from then on"


def test_used_and_idle_time_follow_from_readings_and_a_gap_is_neither() -> None:
    usage = GpuUsage()
    usage.hold("g0", "l1", "ann", 0.0)
    for at_s, ratio in ((1.0, 0.5), (2.0, 1.0), (3.0, 0.0), (4.0, None), (5.0, 0.0)):
        usage.read("g0", ratio, at_s)
    ann = usage.totals_at(5.0)["ann"]
    assert (ann.used_s, ann.idle_s, ann.held_s) == (1.5, 2.0, 5.0)
    assert usage.idle_s(7.0) == {"g0": 5.0}
    usage.read("g0", 1.0, 1005.0)
    ann = usage.totals_at(1005.0)["ann"]
    assert ann.used_s == 2.5, "a reading after a long silence stands for a second"
    assert usage.idle_s(1006.0) == {"g0": 1.0}
    usage.read("g9", 1.0, 1006.0)
    assert usage.totals_at(1006.0)["ann"].used_s == 2.5


def test_since_when_a_gpu_does_what_it_does_is_known_from_its_grant_on() -> None:
    usage = GpuUsage()
    usage.hold("g0", "l1", "ann", 0.0)
    usage.hold("g1", "l2", "bob", 0.0, from_grant=False)
    seen = (
        (1.0, Activity.STARTING),
        (2.0, Activity.ACTIVE),
        (3.0, Activity.ACTIVE),
        (4.0, None),
        (9.0, Activity.ACTIVE),
    )
    for at_s, activity in seen:
        usage.observe("g0", activity, at_s)
    usage.observe("g1", Activity.IDLE, 1.0)
    usage.observe("g9", Activity.IDLE, 1.0)
    since = {uuid: held.activity_since_s for uuid, held in usage.held.items()}
    assert since == {"g0": 2.0, "g1": None}, "it may have been idle before the daemon started"
    usage.observe("g1", Activity.ACTIVE, 5.0)
    assert usage.held["g1"].activity_since_s == 5.0


def test_a_gpu_that_goes_from_one_lease_to_another_begins_again() -> None:
    usage = GpuUsage()
    usage.hold("g0", "l1", "ann", 0.0)
    usage.read("g0", 0.0, 1.0)
    usage.hold("g0", "l2", "bob", 100.0)
    assert usage.idle_s(101.0) == {}, "no reading of it under this lease yet"
    usage.read("g0", 0.0, 101.0)
    assert usage.idle_s(101.0) == {"g0": 1.0}
    assert {user: totals.held_s for user, totals in usage.totals_at(101.0).items()} == {"ann": 100.0, "bob": 1.0}


def test_ten_thousand_users_have_a_hundred_series_and_what_was_counted_stays() -> None:
    usage = GpuUsage()
    for number in range(10_000):
        usage.hold(f"g{number}", f"l{number}", f"user{number}", 0.0)
    totals = usage.totals_at(1.0)
    assert len(totals) == MAX_USERS + 1
    assert totals[OTHER_USERS].held_s == 10_000 - MAX_USERS
    assert sum(one.gpus for one in totals.values()) == 10_000


def test_a_user_that_is_long_gone_gives_up_its_series_and_an_active_one_keeps_it() -> None:
    usage = GpuUsage()
    for number in range(MAX_USERS):
        usage.hold(f"g{number}", "l", f"user{number}", 0.0)
    usage.drop("g0", 10.0)
    usage.drop("g1", 20.0)
    usage.hold("x", "l", "ann", 20.0 + USER_EXPIRY_S - 11)
    assert "ann" not in usage.totals
    usage.hold("y", "l", "ann", 10.0 + USER_EXPIRY_S + 1)
    assert "ann" in usage.totals
    assert "user0" not in usage.totals
    assert "user1" in usage.totals
    usage.hold("z", "l", "bob", 10.0 + USER_EXPIRY_S + 2)
    assert "bob" not in usage.totals, "user1 has been away for less than an hour"
    totals = usage.totals_at(10.0 + USER_EXPIRY_S + 2)
    assert totals[OTHER_USERS].gpus == 2


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 12), st.sampled_from([0.5, 1.0, 60.0, 4000.0])), max_size=100
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_nothing_that_is_shown_ever_falls(steps: list[tuple[int, int, float]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gpulease_server.runtime.gpu_hours.MAX_USERS", 3)
        _live(steps)


def _live(steps: list[tuple[int, int, float]]) -> None:
    usage, now_s, before = GpuUsage(), 0.0, dict[str, Any]()
    for gpu_number, user, step_s in steps:
        now_s += step_s
        if user % 3 == 0:
            usage.drop(f"g{gpu_number}", now_s)
        else:
            usage.hold(f"g{gpu_number}", f"l{user}", f"user{user}", now_s)
        usage.read(f"g{gpu_number}", (user % 4) / 3, now_s)
        shown = usage.totals_at(now_s)
        for name in before.keys() & shown.keys():
            assert shown[name].held_s >= before[name].held_s
            assert shown[name].used_s >= before[name].used_s
            assert shown[name].idle_s >= before[name].idle_s
            assert shown[name].used_s + shown[name].idle_s <= shown[name].held_s + len(steps)
        assert sum(one.gpus for one in shown.values()) == len(usage.held)
        assert len(shown) <= 4
        before = shown


def counted(writer: Writer, name: str, **labels: str) -> float:
    value = writer.metrics.registry.get_sample_value(name, labels)
    assert value is not None, name
    return value


def test_a_commit_that_fails_waits_until_one_succeeds(run: Callable[[Body], None]) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        assert writer.metrics.recording_since_s is None
        committed = counted(writer, "gpulease_commit_seconds_count")
        store.fates = [Fate.FAILED, Fate.FAILED]
        with pytest.raises(Unavailable):
            await writer.submit(ask())
        assert writer.metrics.recording_since_s is not None, "an outage does not look like a daemon without work"
        await recovered(writer)
        assert writer.metrics.recording_since_s is None
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
        assert writer.metrics.recording_since_s is not None
        store.gate.set()
        await asked
        assert writer.metrics.recording_since_s is None

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
            await writer.submit(release(lease.id, lease.fencing_token))
        await recovered(writer)
        assert writer.metrics.usage.held == {}, "the ledger that was read says that it is released"
        again = await writer.submit(release(lease.id, lease.fencing_token))
        assert isinstance(again, Lease)
        assert counted(writer, "gpulease_turn_happenings_count") >= 1

    run(body)


def test_a_fault_of_a_meter_is_no_fault_of_the_turn(run: Callable[[Body], None], caplog: Any) -> None:
    async def body(writer: Writer, store: FaultyStore) -> None:
        await report(writer)
        writer.metrics.usage.held = None  # type: ignore[assignment]
        lease = await writer.submit(ask())
        assert isinstance(lease, Lease)
        assert writer.problem is None

    run(body)
    assert "a turn is missing in the metrics" in caplog.text


def test_an_absurd_utilization_spoils_nothing() -> None:
    metrics = DaemonMetrics()
    metrics.usage.hold(gpu(0).uuid, "l", "ann", 0.0)
    view = NodeReport(worker_id="w", host="a", gpus=(gpu(0, utilization_ratio=1e30),), read_s=0.25)
    metrics.count_report("a", view, _at(1.0), Ledger())
    assert metrics.usage.totals_at(1.0)["ann"].used_s == 1.0
    assert metrics.probe_s == {"a": 0.25}
    metrics.count_report("a", NodeReport(worker_id="w", host="a", problem="hangs"), _at(2.0), Ledger())
    assert metrics.probe_s == {}
    metrics.reset_usage(Ledger(), _at(3.0))
    assert metrics.usage.held == {}


def _at(mono_s: float) -> Instant:
    world = World()
    world.at_s = mono_s
    return world.now
