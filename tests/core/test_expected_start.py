"""When a waiting request is said to start, beside when it does."""

from __future__ import annotations

import random
import sys
from collections import deque
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import ExpectedBasis, GpuState, Lease, LeaseState, NodeMode, Priority
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_protocol.reservations import Reservation
from gpulease_server.core.calendar import END_MARGIN_S
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.forecast.expected_start import ExpectedStart, StartForecast, explain_expected_start
from gpulease_server.core.forecast.virtual_queue import VirtualQueue
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.order_records import Overtakes
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant
from gpulease_server.replay.recorded_requests import RecordedRequest, uniform_nodes
from gpulease_server.replay.virtual_daemon import Outcome, VirtualDaemon
from gpulease_server.runtime.outage import copy_ledger
from tests.core.build import GIB, NOON, World, gpu, uuid
from tests.replay.build import BEGUN, DRAIN_S, GREEDY, MANY, STRICT, limit, scheduled, workload

HOUR_S = 3600.0


def expected(ledger: Ledger, now: Instant, policy: Policy) -> dict[str, ExpectedStart]:
    forecast = StartForecast(ledger, now, policy)
    for _ in forecast.steps():
        pass
    return forecast.starts


def starts_in(here: World, waiting: Lease, seconds: float) -> None:
    """It waits until a second before that, and has its GPUs half a second after."""
    here.at_s += seconds - 2
    here.pass_time(1)
    assert here.now_of(waiting).state is LeaseState.QUEUED
    here.pass_time(1.5)
    assert here.now_of(waiting).state is LeaseState.ACTIVE


def in_s(world: World, lease_id: str) -> int | None:
    """In how many seconds a request is expected to start at the latest, by what was declared."""
    found = expected(world.ledger, world.now, world.policy).get(lease_id)
    if found is None or found.basis is not ExpectedBasis.DECLARED:
        return None
    return round((found.at - world.now.at).total_seconds())


def world(gpus: int = 1, **rules: Any) -> World:
    return World(policy=Policy(**rules)).node(gpus=gpus)


def test_a_request_starts_when_the_declared_time_of_the_holder_is_over() -> None:
    here = world()
    here.lease(time_s=HOUR_S, ttl_s=HOUR_S)
    here.pass_time(600)
    assert in_s(here, here.lease().id) == 3000


def test_an_explanation_has_one_time_where_a_start_is_expected() -> None:
    here = world()
    here.submit(timeout_s=HOUR_S)
    record = here.ledger.leases[here.lease().id]
    start = expected(here.ledger, here.now, here.policy)[record.lease.id]
    said = explain(here.ledger, record, here.now, here.policy, start_known=True)
    sentence = explain_expected_start(said, start).sentence
    assert f"It starts at about {start.at:%Y-%m-%d %H:%M:%S} UTC" in sentence
    assert "By the times that were declared" not in sentence


def test_the_next_one_waits_for_both() -> None:
    here = world()
    here.lease(time_s=HOUR_S)
    here.lease(time_s=60)
    assert in_s(here, here.lease().id) == 3660


def test_who_starts_once_a_limit_keeps_out_an_earlier_request_is_expected_then() -> None:
    here = world(3, max_bypass=1, limits=UserLimits(gpus=3))
    here.lease(time_s=HOUR_S)
    here.lease(2, user="dan", time_s=60)
    for count in (3, 1):
        here.lease(count, user="dan", time_s=HOUR_S)
    last = here.lease(user="cid", time_s=HOUR_S, ttl_s=HOUR_S)
    assert in_s(here, last.id) == 60
    here.pass_time(61)
    assert here.now_of(last).state is LeaseState.ACTIVE


def test_without_an_end_nothing_is_said() -> None:
    here = world()
    here.lease()
    assert in_s(here, here.lease().id) is None


def test_nothing_is_said_behind_a_request_without_an_end() -> None:
    here = world()
    here.lease(time_s=HOUR_S)
    first = here.lease()
    assert (in_s(here, first.id), in_s(here, here.lease().id)) == (3600, None)


def test_an_end_that_it_does_not_need_may_be_unknown() -> None:
    here = world(2)
    here.lease()
    here.lease(time_s=60)
    assert in_s(here, here.lease().id) == 60
    assert in_s(here, here.lease(2).id) is None


def test_a_job_ends_with_its_timeout() -> None:
    here = world()
    here.submit(timeout_s=90)
    assert in_s(here, here.lease().id) == 90


def test_the_clock_of_a_worker_does_not_count() -> None:
    here = world()
    job_id = here.submit(timeout_s=HOUR_S)
    begun = here.now.at - timedelta(minutes=30)
    here.jobs["a"] = [JobReport(job_id=job_id, attempt=1, state=RunState.RUNNING, started_at=begun)]
    here.report()
    assert in_s(here, here.lease().id) == HOUR_S


def test_a_job_that_outlasts_its_time_is_not_always_expected_to_end_soon() -> None:
    here = world()
    job_id = here.submit(timeout_s=60)
    here.run_job(job_id)
    waiting = here.lease(ttl_s=HOUR_S)
    here.pass_time(90)
    assert in_s(here, waiting.id) == 0
    here.pass_time(120)
    assert in_s(here, waiting.id) is None


def test_a_stuck_job_is_not_expected_to_end() -> None:
    here = world()
    job_id = here.submit(timeout_s=60)
    waiting = here.lease()
    assert in_s(here, waiting.id) == 60
    here.ledger.apply(replace(here.ledger.jobs[job_id], stuck_on=("a",)))
    assert in_s(here, waiting.id) is None


def test_a_stranger_beside_a_lease_stays_when_that_ends() -> None:
    here = world()
    holder = here.lease(time_s=60)
    here.node(gpus=[gpu(0, pids=(7,), lease=holder.id)])
    waiting = here.lease()
    assert in_s(here, waiting.id) == 60
    here.node(gpus=[gpu(0, pids=(4242,))])
    here.report()
    assert in_s(here, waiting.id) is None


def test_memory_that_is_in_use_without_any_lease_is_not_given_back() -> None:
    here = World().node(gpus=[gpu(0, memory_used_bytes=GIB)])
    here.pass_time(2)
    here.lease(time_s=60)
    fits, never = (here.lease(min_free_memory_bytes=most, time_s=1) for most in (79 * GIB, 79 * GIB + 1))
    assert (in_s(here, fits.id), in_s(here, never.id)) == (60, None)


@pytest.mark.parametrize("how", ["foreign", "cordoned", "paused"])
def test_a_gpu_that_is_out_of_use_is_not_expected_back(how: str) -> None:
    here = world(2)
    here.lease(time_s=60)
    if how == "foreign":
        here.node(gpus=[gpu(0), gpu(1, pids=(4242,))])
    elif how == "cordoned":
        here.cordon(1)
    else:
        here.node("b", gpus=2).set_mode(NodeMode.DRAINING, "b")
        here.lease(time_s=30)
    assert in_s(here, here.lease(2).id) == (None if how != "paused" else 60)


def test_a_node_that_goes_gives_nothing_back_from_then_on() -> None:
    here = world()
    here.lease(time_s=HOUR_S, ttl_s=HOUR_S)
    here.report(available_s=1800)
    waiting = here.lease()
    assert in_s(here, waiting.id) is None
    here.report(available_s=2 * HOUR_S)
    assert in_s(here, waiting.id) == HOUR_S


def test_what_fits_before_its_node_goes_starts_there() -> None:
    here = world(2)
    here.node("b", gpus=1)
    here.lease(2, time_s=600)
    here.lease(time_s=HOUR_S)
    here.report(available_s=1800)
    waiting = here.lease(2, time_s=1000), here.lease(2), here.lease()
    assert [in_s(here, one.id) for one in waiting] == [600, 1600, HOUR_S]


def test_an_end_by_a_budget_moves_when_other_leases_of_the_token_end() -> None:
    here, budget = world(8), Budget(gpu_hours_per_day=4.0)
    here.lease(4, time_s=600, token="t", budget=budget, ttl_s=HOUR_S)
    here.lease(4, token="t", budget=budget, ttl_s=HOUR_S)
    last_s = 600 + (4 * HOUR_S - 8 * 600) / 4
    assert in_s(here, here.lease(8).id) == last_s


def test_a_silent_node_gives_nothing_back() -> None:
    here = world()
    here.lease(time_s=60, ttl_s=HOUR_S)
    waiting = here.lease(ttl_s=HOUR_S)
    assert in_s(here, waiting.id) == 60
    here.pass_time(10, silent=("a",))
    assert in_s(here, waiting.id) is None


def test_a_gpu_that_does_not_get_clean_is_not_expected_back_by_readers_either() -> None:
    here = world(max_bypass=0)
    readers = copy_ledger(here.ledger)
    here.changes.clear()
    holder = here.lease(time_s=60, ttl_s=HOUR_S)
    waiting = here.lease(ttl_s=HOUR_S)
    here.node(gpus=[gpu(0, pids=(4242,), lease=holder.id)])
    here.release(holder)

    def said() -> str:
        """What is said to those who wait, by the ledger that only ever sees what is recorded."""
        for change in here.changes:
            readers.apply(change)
        here.changes.clear()
        record = readers.leases[waiting.id]
        return explain(readers, record, here.now, here.policy).sentence

    assert "By the times that were declared" in said()
    assert expected(readers, here.now, here.policy)
    here.pass_time(120)
    assert "By the times that were declared" not in said()
    assert not expected(readers, here.now, here.policy)


def test_a_request_of_a_higher_priority_goes_first() -> None:
    here = world()
    here.lease(time_s=60)
    waiting = here.lease(time_s=60)
    assert in_s(here, waiting.id) == 60
    first = here.lease(time_s=500, priority=Priority.INTERACTIVE)
    assert (in_s(here, first.id), in_s(here, waiting.id)) == (60, 560)


def test_a_limit_keeps_a_request_waiting_beside_a_free_gpu() -> None:
    here = world(2)
    here.limit("ann", max_gpus=1)
    here.lease(time_s=100)
    assert in_s(here, here.lease(time_s=10).id) == 100
    assert in_s(here, here.lease(user="bob").id) is None  # it has started


def test_a_forecast_changes_nothing() -> None:
    here = world(2)
    here.lease(2, time_s=60)
    here.lease(time_s=60)
    before = repr(here.ledger)
    expected(here.ledger, here.now, here.policy)
    assert repr(here.ledger) == before
    here.check()


def test_what_happens_while_it_is_made_changes_no_forecast() -> None:
    here = world()
    job_id = here.submit(timeout_s=60)
    waiting = here.lease()
    forecast = StartForecast(here.ledger, here.now, here.policy)
    here.ledger.apply(replace(here.ledger.jobs[job_id], stuck_on=("a",)))
    here.lease()
    for _ in forecast.steps():
        pass
    assert list(forecast.starts) == [waiting.id]


class Watched(VirtualDaemon):
    """Says what it expects once all requests have been made."""

    expected: dict[str, float] | None = None

    def _step(self, arrivals: deque[Outcome]) -> None:
        super()._step(arrivals)
        if self.expected is None and not arrivals:
            now = self._instant()
            found = expected(self.ledger, now, self.policy)
            self.expected = {name: (one.at - BEGUN).total_seconds() for name, one in found.items()}


def kept(requests: list[RecordedRequest], within_s: float) -> list[RecordedRequest]:
    """The same, each with the time that it takes as declared; all within these seconds."""
    longest_s = max(one.asked_at_s for one in requests)
    return [
        RecordedRequest(
            id=one.id,
            asked_at_s=one.asked_at_s * within_s / longest_s,
            duration_s=one.duration_s,
            user=one.user,
            demand=one.demand.__class__(
                count=one.demand.count, time_s=one.duration_s, priority=one.demand.priority, nodes=one.demand.nodes
            ),
        )
        for one in requests
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("rules", "nodes", "limits"),
    [
        (STRICT, 1, ()),
        (GREEDY, 1, ()),
        ({}, 3, ()),
        ({"max_bypass": 2}, 2, ()),
        ({"max_bypass_s": 50.0}, 2, ()),
        ({"fair_share": True, "max_bypass": 0}, 2, ()),
        ({}, 2, (limit(LimitKind.USER, "u1", max_gpus=2), limit(LimitKind.GROUP, "g", "u2", "u3", max_gpus=4))),
    ],
)
def test_if_all_keep_their_time_each_starts_as_expected(
    seed: int, rules: dict[str, Any], nodes: int, limits: tuple[Any, ...]
) -> None:
    requests = kept(workload(seed, 60, 4), 120.0)
    unlimited = UserLimits(queued=0, queued_bytes=0, interactive_gpus=0, interactive_s=0.0)
    policy = Policy(limits=unlimited, max_queued=MANY, **rules)
    daemon = Watched(uniform_nodes(nodes, 4), policy, BEGUN, DRAIN_S, limits)
    outcomes = {one.request.id: one.granted_at_s or 0.0 for one in daemon.run(requests)}
    assert daemon.expected is not None
    assert len(daemon.expected) > 20
    wrong = {name: (at_s, outcomes[name]) for name, at_s in daemon.expected.items() if abs(at_s - outcomes[name]) > 1}
    assert not wrong
    if rules is GREEDY:  # a scheduler of a few lines, which knows nothing of the core, says the same
        alone = scheduled(requests, 4, greedy=True)
        assert all(abs(at_s - (alone[name] or 0)) <= 1 for name, at_s in daemon.expected.items())


def test_gpus_of_a_request_that_preempts_are_held_for_it_and_nothing_is_said_from_its_start_on() -> None:
    here = world(2, preemption=True, preempt_after_s=60.0, preempt_notice_s=20.0).node("b", gpus=2)
    job_id = here.submit(priority=Priority.SCAVENGE, user="bob")
    here.run_job(job_id)
    for time_s in (75.0, HOUR_S):
        here.lease(node="b", time_s=time_s, ttl_s=HOUR_S)
    here.pass_time(61.0)
    preempts = here.lease(2, node="a", ttl_s=HOUR_S)
    here.pass_time(1.5)
    assert list(here.ledger.preemptions) == [preempts.id]
    held, soon, later = (here.lease(node=node, ttl_s=HOUR_S) for node in ("a", "b", "b"))
    assert here.state(1) is GpuState.FREE
    assert [in_s(here, one.id) for one in (preempts, held, soon, later)] == [None, None, 12, None]


def test_a_request_starts_when_the_window_of_others_is_over() -> None:
    here = world(2)
    here.reserve(uuid(0), user="ada", after_s=600.0, for_s=1200.0)
    here.lease(time_s=HOUR_S, ttl_s=HOUR_S)  # has GPU 1, or GPU 0 until after the window
    assert in_s(here, here.lease(user="bob").id) == 1800
    assert in_s(here, here.lease(user="bob", time_s=10.0).id) is None, "it has started"


def test_a_reservation_that_is_not_in_the_way_changes_nothing() -> None:
    here = world(2)
    here.reserve(uuid(0), user="ada", after_s=3 * HOUR_S)
    here.lease(2, user="ada", time_s=600.0, ttl_s=HOUR_S)
    mine, own = here.lease(user="bob", time_s=60.0), here.lease(user="ada")
    assert [in_s(here, one.id) for one in (mine, own)] == [600, 600]


def test_one_that_no_longer_fits_before_the_window_starts_after_it() -> None:
    here = world()
    here.reserve(uuid(0), user="ada", after_s=HOUR_S, for_s=HOUR_S)
    here.lease(user="bob", time_s=1800.0, ttl_s=HOUR_S)
    fits, too_long = here.lease(user="bob", time_s=600.0), here.lease(user="bob", time_s=2000.0)
    assert [in_s(here, one.id) for one in (fits, too_long)] == [1800, 2 * HOUR_S]


def test_nothing_is_said_where_some_seconds_decide_whether_one_fits_before_a_window() -> None:
    """The lease before it may be settled a minute later than is taken: then it starts after the window."""
    here = world()
    here.reserve(uuid(0), user="ada", after_s=HOUR_S, for_s=HOUR_S)
    here.lease(user="bob", time_s=600.0, ttl_s=HOUR_S)
    barely = here.lease(user="bob", time_s=HOUR_S - 600.0 - END_MARGIN_S - 10.0)
    behind = here.lease(user="bob", time_s=60.0)
    assert [in_s(here, one.id) for one in (barely, behind)] == [None, None]


def test_nothing_is_said_where_a_window_ends_as_a_lease_does() -> None:
    here = world()
    here.reserve(uuid(0), user="ada", after_s=0.0, for_s=630.0)
    here.lease(user="ada", time_s=600.0, ttl_s=HOUR_S)
    others = here.lease(user="bob", time_s=60.0), here.lease(user="ada", time_s=60.0)
    assert [in_s(here, one.id) for one in others] == [None, None], "who of them is first depends on half a minute"


class Reserving(Watched):
    """Has reservations from the start, and ticks when one ends."""

    def reserve(self, *entries: Reservation) -> None:
        for entry in entries:
            self.ledger.apply(entry)
            self._plan((entry.to_at - BEGUN).total_seconds() + 0.01, "tick", None)


def reservations(pick: random.Random, nodes: int) -> list[Reservation]:
    """On each node one window after the other, each of some GPUs, for someone."""
    made = list[Reservation]()
    for node in range(nodes):
        at_s = pick.randrange(500, 3000)
        for number in range(4):
            lasts_s = pick.randrange(500, 5000)
            from_at = BEGUN + timedelta(seconds=at_s)
            made.append(
                Reservation(
                    id=f"reservation-{node}-{number}",
                    gpus=tuple(pick.sample(uniform_nodes(nodes, 4)[node].gpus, pick.choice([1, 2, 4]))),
                    from_at=from_at,
                    to_at=from_at + timedelta(seconds=lasts_s),
                    user=f"u{pick.randrange(4)}",
                    made_at=BEGUN,
                )
            )
            at_s += lasts_s + pick.randrange(0, 3000)
    return made


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 6])
@pytest.mark.parametrize(("rules", "nodes"), [({}, 1), ({"max_bypass": 2}, 2), ({"fair_share": True}, 2)])
def test_with_reservations_each_starts_as_expected_too(seed: int, rules: dict[str, Any], nodes: int) -> None:
    pick = random.Random(seed)
    requests = kept(workload(seed, 40, 4), 120.0)
    unlimited = UserLimits(queued=0, queued_bytes=0, interactive_gpus=0, interactive_s=0.0)
    policy = Policy(limits=unlimited, max_queued=MANY, retained_memory_s=1.0, **rules)
    daemon = Reserving(uniform_nodes(nodes, 4), policy, BEGUN, DRAIN_S)
    daemon.reserve(*reservations(pick, nodes))
    outcomes = {one.request.id: one.granted_at_s or 0.0 for one in daemon.run(requests)}
    assert daemon.expected
    wrong = {name: (at_s, outcomes[name]) for name, at_s in daemon.expected.items() if abs(at_s - outcomes[name]) > 1}
    assert not wrong


def test_one_behind_the_first_hundred_that_may_pass_them_is_known() -> None:
    here = world(8, max_queued=1000)
    here.lease(4, time_s=600)
    here.lease(4, time_s=1200)
    first = here.lease(8, time_s=60)
    for _ in range(100):
        here.ask(8, time_s=60)
    assert in_s(here, first.id) == 1200
    here.ask(4)
    assert in_s(here, first.id) is None


def test_what_is_said_is_bounded() -> None:
    here = world(max_queued=1000)
    here.lease(time_s=60)
    waiting = [here.lease(time_s=1).id for _ in range(120)]
    found = expected(here.ledger, here.now, here.policy)
    assert list(found) == waiting[:100]
    assert found[waiting[99]].at - found[waiting[0]].at == timedelta(seconds=99)


def calls_to_begin(nodes: int) -> int:
    """How many functions it calls to begin a forecast where each GPU of so many nodes runs a job."""
    here = World()
    for number in range(nodes):
        here.node(chr(0x100 + number), gpus=2)
    for _ in range(2 * nodes):
        here.submit(timeout_s=60)
    here.lease()
    found = 0

    def count(_: FrameType, event: str, __: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        StartForecast(here.ledger, here.now, here.policy)
    finally:
        sys.setprofile(None)
    return found


def test_the_event_loop_waits_for_no_work_on_each_node_and_job() -> None:
    assert calls_to_begin(nodes=5) == calls_to_begin(nodes=1)


def test_who_goes_first_has_missed_as_many_grants_in_the_forecast() -> None:
    """From then on its limits are claimed for it, which may change who starts next."""
    here = world(gpus=2)
    here.lease(2)
    first = here.lease(2)
    here.ledger.apply(Overtakes(0, go_first=(first.id,)))
    for _ in range(4):
        here.ledger.apply(Overtakes(0, missed=(first.id,)))

    copy = Ledger()
    for change in VirtualQueue(here.ledger, here.now, Policy(max_bypass=3))._changes():
        copy.apply(change)

    assert copy.go_first == {first.id: 3}, "more make no difference"


def test_one_whose_gpu_hours_are_used_starts_when_enough_leave_the_window() -> None:
    here = world(2)
    here.limit("ann", gpu_hours=0.05, window_s=HOUR_S)
    here.lease(time_s=200.0, ttl_s=HOUR_S)
    here.lease(user="bob", ttl_s=2 * HOUR_S)
    here.pass_time(190)
    waiting = here.lease(ttl_s=2 * HOUR_S)
    said = in_s(here, waiting.id)
    assert said is not None
    here.pass_time(15)
    starts_in(here, waiting, said - 15)


def test_a_request_starts_on_what_was_held_for_another_once_that_no_longer_fits_before_a_window() -> None:
    here = world(2, max_bypass=0)
    here.reserve(uuid(0), uuid(1), user="ada", after_s=1000.0)
    here.lease(user="bob", time_s=500.0, ttl_s=HOUR_S)
    first, behind = here.lease(2, time_s=200.0, ttl_s=HOUR_S), here.lease(user="cid", time_s=60.0, ttl_s=HOUR_S)
    closes_s = 1000 - END_MARGIN_S - 200
    assert [in_s(here, one.id) for one in (first, behind)] == [4600, closes_s]
    starts_in(here, behind, closes_s)


def test_a_request_starts_when_its_token_has_a_new_day() -> None:
    here, budget = world(2), Budget(gpu_hours_per_day=0.05)
    here.lease(user="bob", ttl_s=2 * HOUR_S)
    here.lease(token="t", budget=budget, ttl_s=HOUR_S)
    here.pass_time(190)
    day_ends_s = (NOON + timedelta(hours=12) - here.now.at).total_seconds()
    waiting = here.lease(token="t", budget=budget, time_s=60.0)
    assert in_s(here, waiting.id) == round(day_ends_s)
    here.pass_time(50)
    here.wall_jump_s = day_ends_s - 50
    here.pass_time(1)
    assert here.now_of(waiting).state is LeaseState.ACTIVE


def test_a_request_starts_on_what_was_held_for_another_once_the_gpu_hours_of_that_are_used() -> None:
    here = world(2, max_bypass=0)
    here.limit("ann", gpu_hours=0.1, window_s=HOUR_S)
    here.lease(time_s=HOUR_S, ttl_s=HOUR_S)
    first, behind = here.lease(2, time_s=200.0, ttl_s=HOUR_S), here.lease(user="cid", time_s=60.0, ttl_s=HOUR_S)
    assert in_s(here, behind.id) == 360
    here.at_s += 358
    here.pass_time(1)
    assert [here.now_of(one).state for one in (first, behind)] == [LeaseState.QUEUED, LeaseState.QUEUED]
    here.pass_time(1.5)
    assert [here.now_of(one).state for one in (first, behind)] == [LeaseState.QUEUED, LeaseState.ACTIVE]


@pytest.mark.parametrize("first_ends_s", [3600.0, 3850.0, 4125.0, 4400.0])
def test_users_are_taken_to_be_on_the_steps_that_the_daemon_counts_every_five_minutes(first_ends_s: float) -> None:
    here = world(4, fair_share=True)
    before = here.lease(4, user="ann", ttl_s=MANY)
    here.at_s += 1800
    here.release(before)
    here.report()
    for user, count, time_s in (("ann", 1, 9000.0), ("bob", 2, 9000.0), ("eve", 1, first_ends_s)):
        here.lease(count, user=user, time_s=time_s, ttl_s=MANY)
    waiting = [here.lease(user=user, time_s=3000.0, ttl_s=MANY) for user in ("bob", "ann")]
    here.pass_time(1)  # bob comes to have used as much as ann, and soon more
    said = {one.id: in_s(here, one.id) or 0 for one in waiting}
    begun_s, counted_s = here.at_s, here.ledger.steps_counted_at_s
    assert counted_s is not None
    while counted_s + 305 < begun_s + min(said.values()):
        here.at_s = counted_s = counted_s + 300.01
        here.pass_time(0.25)
    here.at_s = begun_s + min(said.values()) - 1
    here.pass_time(2)
    started = [one.id for one in waiting if here.now_of(one).state is LeaseState.ACTIVE]
    assert started == [min(said, key=said.__getitem__)]


def test_a_user_who_holds_gpus_on_at_a_limit_of_gpu_hours_does_not_take_the_time_of_a_forecast() -> None:
    here = world(2)
    here.limit("ann", gpu_hours=0.5, window_s=HOUR_S)
    here.lease(ttl_s=MANY)
    here.at_s += HOUR_S
    here.report()
    here.lease(ttl_s=MANY)
    turns = sum(one is None for one, _ in VirtualQueue(here.ledger, here.now, here.policy).starts())
    assert 100 < turns < 300
