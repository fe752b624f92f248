"""Idle GPUs are taken back while someone waits whom they would help: never earlier than was told, never without a
notice, and not from a lease that works, is kept, or of which nothing is known."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gpulease_protocol.model import EndReason, Event, JobState, Lease, LeaseState, NodeMode, Priority, Process
from gpulease_server.core import reclaim
from gpulease_server.core.calendar import END_MARGIN_S
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.idle import IdleTime, idle_time
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import lease_view
from gpulease_server.core.records import Instant
from tests.core.build import World, uuid
from tests.core.test_keep import keep

AFTER_S, NOTICE_S, CHECK_S = 60.0, 20.0, 5.0
SLACK_S = CHECK_S + 1.0
"""Between two looks at who waits."""
SHORT_NOTICE: dict[str, Any] = {"reclaim_notice_s": NOTICE_S, "reclaim_notice_most_s": NOTICE_S}
"""Of all leases, however long their holders may trust them."""


def world(gpus: int = 2, **what: Any) -> World:
    """A node, whose GPUs do nothing; notices are shorter than in earnest."""
    here = World(policy=Policy(**SHORT_NOTICE | what))
    here.node(gpus=gpus)
    for index in range(gpus):
        works(here, index, 0.0)
    return here


def works(here: World, index: int, ratio: float | None, node: str = "a", **what: Any) -> None:
    """What every reading of a GPU shows from now on."""
    here.nodes[node][index] = replace(here.nodes[node][index], utilization_ratio=ratio, **what)


def holds(here: World, count: int = 1, **what: Any) -> Lease:
    """A lease that gives idle GPUs back."""
    return here.lease(count, **{"ttl_s": 1e6, "reclaim_idle_after_s": AFTER_S} | what)


def kinds(here: World, lease: Lease) -> list[str]:
    """What became of a lease, without the prefix."""
    found = [one for one in here.changes if isinstance(one, Event) and one.lease_id == lease.id]
    return [one.kind.removeprefix("lease.") for one in found if one.kind.startswith("lease.recl")]


def reason(here: World, kind: str) -> str:
    """Of the last event of a kind."""
    return here.events(kind)[-1].reason or ""


def reclaim_at_s(here: World, lease: Lease) -> float | None:
    """The moment that its view tells, from now."""
    at = lease_view(here.ledger, here.ledger.leases[lease.id], here.now, here.policy).reclaim_at
    return None if at is None else (at - here.now.at).total_seconds()


def ended(here: World, lease: Lease) -> bool:
    return here.now_of(lease).state is LeaseState.ENDED


def test_an_idle_lease_is_told_a_moment_and_ends_after_it() -> None:
    here = world()
    lease = holds(here, 2)
    waits = here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S - 1)
    assert kinds(here, lease) == []
    here.pass_time(SLACK_S + 1)
    assert kinds(here, lease) == ["reclaim_notice"]
    left_s = reclaim_at_s(here, lease)
    assert left_s is not None
    assert NOTICE_S - SLACK_S <= left_s <= NOTICE_S
    view = lease_view(here.ledger, here.ledger.leases[lease.id], here.now, here.policy)
    [problem] = view.problems
    assert "taken back at" in problem
    assert view.ends_in_s is not None
    assert left_s - 0.11 < view.ends_in_s <= left_s
    told = explain(here.ledger, here.ledger.leases[waits.id], here.now, here.policy).sentence
    assert "idle, and taken back at" in told
    here.pass_time(left_s - 0.3)
    assert not ended(here, lease), "before its moment"
    view = lease_view(here.ledger, here.ledger.leases[lease.id], here.now, here.policy)
    assert view.ends_in_s == 2.0, "it may still be withdrawn, so the holder asks again"
    here.pass_time(SLACK_S + 2)
    assert here.now_of(lease).end_reason is EndReason.RECLAIMED_IDLE
    assert here.now_of(waits).state is LeaseState.ACTIVE
    said = reason(here, "lease.reclaimed")
    assert "readings or more of each of its GPUs (2) showed no work from" in said
    assert waits.id in said
    assert reason(here, "lease.lost") == "reclaimed_idle"
    assert not here.ledger.reclaims.leases
    here.check()


@pytest.mark.parametrize("ratio", [0.01, None])
def test_one_busy_second_or_one_unknown_reading_begins_the_time_again(ratio: float | None) -> None:
    here = world()
    lease = holds(here, 2)
    here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S - 5)
    works(here, 1, ratio)
    here.report()
    works(here, 1, 0.0)
    here.pass_time(AFTER_S - 1)
    assert kinds(here, lease) == []
    here.pass_time(SLACK_S + 1)
    assert kinds(here, lease) == ["reclaim_notice"]
    works(here, 0, ratio)
    here.pass_time(0.3)
    assert kinds(here, lease) == ["reclaim_notice", "reclaim_withdrawn"]
    assert reclaim_at_s(here, lease) is None
    here.pass_time(AFTER_S + NOTICE_S + 2 * SLACK_S)
    assert not ended(here, lease), "it works, or nothing is known of it"


def read_for(here: World, seconds: int, processes_s: int, busy: tuple[int, ...] = ()) -> None:
    """A worker reads utilization every second, and the processes only every so many: its reports name the ticket of
    that, and the newer one of their own reading. `busy`: in which seconds after a look at the processes it works."""
    looked_at_s = 0.0
    for second in range(seconds):
        since = second % processes_s
        works(here, 0, 0.5 if since in busy else 0.0)
        now_s = here.at_s + 0.001
        looked_at_s = looked_at_s if since else now_s
        here.report(age_s=now_s - looked_at_s, begun_s=0.0)
        here.pass_time(1.0, silent=("a",))


@pytest.mark.parametrize("processes_s", [2, 5])
def test_utilization_is_as_recent_as_the_reading_and_not_as_its_list_of_processes(processes_s: int) -> None:
    here = world(1)
    lease = holds(here)
    here.lease(1, ttl_s=1e6)
    read_for(here, int(AFTER_S + NOTICE_S) + 20, processes_s, busy=(1,))
    assert kinds(here, lease) == [], "it works every few seconds"
    read_for(here, int(AFTER_S + SLACK_S) + 2, processes_s)
    assert kinds(here, lease) == ["reclaim_notice"]
    read_for(here, processes_s, processes_s, busy=(1,))
    assert kinds(here, lease) == ["reclaim_notice", "reclaim_withdrawn"]
    read_for(here, int(AFTER_S + NOTICE_S + 3 * SLACK_S), processes_s)
    assert ended(here, lease)


def test_work_before_a_late_renewal_begins_the_time_again() -> None:
    """The lease has expired, and its GPU drains, while a reading shows work; then its holder renews."""
    here = world(1)
    lease = holds(here, ttl_s=AFTER_S - 5)
    here.lease(1, ttl_s=1e6)
    works(here, 0, 0.0, processes=(Process(pid=7, lease_id=lease.id),))
    here.pass_time(AFTER_S - 4.75)
    assert ended(here, lease)
    works(here, 0, 0.5)
    here.pass_time(0.5)
    works(here, 0, 0.0)
    here.renew(lease)
    assert not ended(here, lease)
    here.pass_time(AFTER_S - 8)
    assert kinds(here, lease) == []


def test_what_the_driver_does_not_tell_is_never_idle() -> None:
    here = world(1)
    works(here, 0, None)
    lease = holds(here)
    here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + NOTICE_S + 3 * SLACK_S)
    assert kinds(here, lease) == []


@pytest.mark.parametrize("how", ["silent", "hung", "unhealthy"])
def test_a_gap_is_not_idle_time(how: str) -> None:
    """The worker is silent, NVML hangs, or the GPU is not healthy: the time begins again after that."""
    here = world(1)
    lease = holds(here)
    here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + SLACK_S)
    assert kinds(here, lease) == ["reclaim_notice"]
    if how == "silent":
        here.pass_time(8, silent=("a",))
    elif how == "hung":
        for _ in range(16):
            here.at_s += 0.5
            here.report(problem="NVML hangs")
            here.pass_time(0.1, silent=("a",))
    else:
        works(here, 0, 0.0, health="xid:79")
        here.pass_time(1)
        works(here, 0, 0.0, health="ok")
    here.pass_time(1)
    assert kinds(here, lease) == ["reclaim_notice", "reclaim_withdrawn"]
    here.pass_time(AFTER_S - 3)
    assert kinds(here, lease)[2:] == []
    here.pass_time(SLACK_S + 4)
    assert kinds(here, lease)[2:] == ["reclaim_notice"]
    assert not ended(here, lease)


def test_keep_withdraws_the_notice_at_once_and_holds_until_its_moment() -> None:
    here = world(1)
    lease = holds(here)
    here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + SLACK_S)
    answer = keep(here, lease, 200.0)
    assert isinstance(answer, Lease)
    assert (answer.reclaim_at, answer.problems) == (None, ())
    assert kinds(here, lease) == ["reclaim_notice", "reclaim_withdrawn"]
    here.pass_time(199)
    assert kinds(here, lease)[2:] == []
    here.pass_time(SLACK_S + 1)
    assert kinds(here, lease)[2:] == ["reclaim_notice"]
    here.pass_time(NOTICE_S + SLACK_S)
    assert ended(here, lease)


def test_nothing_is_taken_while_no_one_waits_or_no_one_would_be_helped() -> None:
    here = world(2)
    works(here, 1, 1.0)
    lease, other = holds(here), here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + NOTICE_S + 2 * SLACK_S)
    assert kinds(here, lease) == [], "no one waits"
    here.lease(2, ttl_s=1e6)  # needs the GPU that works, too
    here.lease(1, ttl_s=1e6, among=(uuid(1),))
    here.pass_time(NOTICE_S + AFTER_S + 2 * SLACK_S)
    assert kinds(here, lease) == []
    assert not ended(here, other)


def test_a_request_that_a_limit_keeps_out_is_not_helped() -> None:
    here = world(2)
    lease = holds(here)
    works(here, 1, 1.0)
    here.limit("bob", max_gpus=1)
    here.lease(1, ttl_s=1e6, user="bob")
    assert here.lease(1, ttl_s=1e6, user="bob").state is LeaseState.QUEUED
    here.pass_time(AFTER_S + NOTICE_S + 2 * SLACK_S)
    assert kinds(here, lease) == []
    here.lease(1, ttl_s=1e6, user="carl")
    here.pass_time(SLACK_S)
    assert kinds(here, lease) == ["reclaim_notice"]


@pytest.mark.parametrize(("slack_s", "helps"), [(90.0, False), (120.0, True)])
def test_a_request_that_a_reservation_closes_out_by_then_is_not_helped(slack_s: float, helps: bool) -> None:
    here = world(1)
    assert here.reserve(uuid(0), user="eve", after_s=7200.0) is None
    lease = holds(here, time_s=3600.0)
    here.pass_time(AFTER_S)
    here.lease(1, ttl_s=1e6, time_s=7200.0 - AFTER_S - END_MARGIN_S - slack_s)
    here.pass_time(SLACK_S)
    assert kinds(here, lease) == (["reclaim_notice"] if helps else [])


def test_gpus_that_are_free_count_for_who_waits() -> None:
    here = world(2)
    lease = holds(here)
    waits = here.lease(2, ttl_s=1e6)
    here.pass_time(AFTER_S + NOTICE_S + 3 * SLACK_S)
    assert ended(here, lease)
    assert here.now_of(waits).state is LeaseState.ACTIVE


def test_a_request_that_leaves_takes_the_notice_with_it() -> None:
    here = world(1)
    lease = holds(here)
    waits = here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + SLACK_S)
    here.release(waits)
    here.pass_time(SLACK_S)
    assert kinds(here, lease) == ["reclaim_notice", "reclaim_withdrawn"]
    assert not here.ledger.reclaims.notices
    here.pass_time(NOTICE_S + SLACK_S)
    assert not ended(here, lease)


def test_no_more_leases_are_taken_than_those_who_wait_need() -> None:
    here = world(4)
    leases = [holds(here) for _ in range(4)]
    works(here, 0, 1.0)
    here.pass_time(2)
    works(here, 0, 0.0)
    here.lease(2, ttl_s=1e6)
    here.pass_time(AFTER_S + SLACK_S)
    told = [one for one in leases if kinds(here, one)]
    assert told == leases[1:3], "those that have been idle longest"
    here.pass_time(NOTICE_S + 2 * SLACK_S)
    assert [ended(here, one) for one in leases] == [False, True, True, False]
    here.pass_time(NOTICE_S + AFTER_S)
    assert not ended(here, leases[0])
    assert not ended(here, leases[3])


def test_a_gang_is_idle_where_all_of_its_nodes_are() -> None:
    here = World(policy=Policy(**SHORT_NOTICE)).node("a", gpus=1).node("b", gpus=1)
    for node in ("a", "b"):
        works(here, 0, 0.0, node)
    lease = holds(here, 1, nodes=2)
    assert lease.state is LeaseState.ACTIVE
    waits = here.lease(1, ttl_s=1e6, node="b")
    works(here, 0, 1.0, "a")
    here.pass_time(AFTER_S + NOTICE_S + SLACK_S)
    assert kinds(here, lease) == []
    works(here, 0, 0.0, "a")
    here.pass_time(AFTER_S + SLACK_S + 1)
    assert kinds(here, lease) == ["reclaim_notice"]
    here.pass_time(NOTICE_S + 2 * SLACK_S)
    assert ended(here, lease)
    assert here.now_of(waits).state is LeaseState.ACTIVE


def test_a_drained_node_or_a_cordoned_gpu_would_help_no_one() -> None:
    here = world(1)
    lease = holds(here)
    here.lease(1, ttl_s=1e6)
    here.set_mode(NodeMode.DRAINING)
    here.pass_time(AFTER_S + NOTICE_S + 2 * SLACK_S)
    assert kinds(here, lease) == []
    here.set_mode(NodeMode.ACTIVE)
    here.cordon(0)
    here.pass_time(2 * SLACK_S)
    assert kinds(here, lease) == []


def test_a_lease_that_ends_by_itself_soon_is_not_told() -> None:
    here = world(1)
    lease = holds(here, time_s=AFTER_S + NOTICE_S)
    here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + NOTICE_S + 1)
    assert here.now_of(lease).end_reason is EndReason.TIME_OVER
    assert kinds(here, lease) == []


def test_an_idle_job_is_stopped_as_if_cancelled_and_its_reason_names_that() -> None:
    here = world(1)
    job_id = here.submit(1, retries=3)
    record = here.ledger.jobs[job_id]
    lease = here.ledger.leases[record.job.lease_id]
    demand = replace(lease.lease.demand, reclaim_idle_after_s=AFTER_S)
    here.ledger.apply(replace(lease, lease=replace(lease.lease, demand=demand)))
    here.run_job(job_id)
    here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + NOTICE_S + 3 * SLACK_S)
    job = here.ledger.jobs[job_id]
    assert job.job.state is JobState.STOPPING
    assert "its GPUs did nothing for" in (job.job.reason or "")
    here.pass_time(SLACK_S)
    assert kinds(here, lease.lease) == ["reclaim_notice", "reclaimed"], "in its grace it is told nothing more"
    here.ended(job_id, 143)
    job = here.ledger.jobs[job_id]
    assert job.job.state is JobState.CANCELLED, "and it is not tried again"
    assert "its GPUs did nothing for" in (job.job.reason or ""), "who looks the next day reads why"


def test_interactive_leases_are_covered_where_the_administrator_says_so() -> None:
    here = world(3, reclaim_interactive_after_s=AFTER_S)
    asked = here.lease(1, ttl_s=1e6, priority=Priority.INTERACTIVE)
    assert asked.demand.reclaim_idle_after_s == AFTER_S
    sooner = here.lease(1, ttl_s=1e6, priority=Priority.INTERACTIVE, reclaim_idle_after_s=AFTER_S - 1)
    assert sooner.demand.reclaim_idle_after_s == AFTER_S - 1
    assert here.lease(1, ttl_s=1e6).demand.reclaim_idle_after_s is None
    untouched = world(1)
    plain = untouched.lease(1, ttl_s=1e6, priority=Priority.INTERACTIVE)
    untouched.lease(1, ttl_s=1e6)
    untouched.pass_time(AFTER_S + NOTICE_S + 2 * SLACK_S)
    assert kinds(untouched, plain) == []
    assert not ended(untouched, plain)


def test_a_restart_begins_the_time_again_and_a_stopped_daemon_gives_more() -> None:
    here = world(1)
    lease = holds(here)
    here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + SLACK_S)
    here.ledger.reclaims.notices.clear()  # neither is stored
    here.lose_reports()
    here.pass_time(AFTER_S - 1)
    assert kinds(here, lease) == ["reclaim_notice"]
    here.pass_time(SLACK_S + 2)
    assert kinds(here, lease) == ["reclaim_notice"] * 2
    left_s = reclaim_at_s(here, lease)
    here.pass_time(0.25, stalled_s=2.0)
    assert left_s is not None
    assert reclaim_at_s(here, lease) == pytest.approx(left_s + 2.0 - 0.25, abs=0.1)


def test_a_step_of_the_wall_clock_changes_no_moment() -> None:
    here = world(1)
    lease = holds(here)
    here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + SLACK_S)
    here.wall_jump_s = 1e5
    here.pass_time(NOTICE_S - SLACK_S - 1)
    assert not ended(here, lease)
    here.pass_time(2 * SLACK_S + 2)
    assert ended(here, lease)


@pytest.mark.parametrize("jump_s", [-1e5, 1e5])
def test_a_step_of_the_wall_clock_neither_spares_an_idle_job_nor_ends_it_sooner(jump_s: float) -> None:
    here = world(1, reclaim_interactive_after_s=AFTER_S)
    job_id = here.submit(1, timeout_s=1e4, priority=Priority.INTERACTIVE)
    here.run_job(job_id)
    lease = here.ledger.leases[here.ledger.jobs[job_id].job.lease_id].lease
    here.lease(1, ttl_s=1e6)
    here.wall_jump_s = jump_s
    here.pass_time(AFTER_S + SLACK_S)
    assert kinds(here, lease) == ["reclaim_notice"], "it would run for hours"
    here.pass_time(NOTICE_S - SLACK_S)
    assert here.ledger.jobs[job_id].job.state is JobState.RUNNING
    here.pass_time(3 * SLACK_S)
    assert here.ledger.jobs[job_id].job.state is JobState.STOPPING


@pytest.mark.parametrize("timeout_s", [AFTER_S + NOTICE_S - 5.0, AFTER_S + NOTICE_S + 4 * SLACK_S])
def test_a_job_that_its_node_ends_before_the_moment_is_not_told(timeout_s: float) -> None:
    here = world(1, reclaim_interactive_after_s=AFTER_S)
    job_id = here.submit(1, timeout_s=timeout_s, priority=Priority.INTERACTIVE)
    here.run_job(job_id)
    lease = here.ledger.leases[here.ledger.jobs[job_id].job.lease_id].lease
    here.lease(1, ttl_s=1e6)
    here.pass_time(AFTER_S + SLACK_S)
    assert bool(kinds(here, lease)) is (timeout_s > AFTER_S + NOTICE_S)


PLAY_S, PLAY_NOTICE_S = 20.0, 10.0
PLAY_NOTICE: dict[str, Any] = {"reclaim_notice_s": PLAY_NOTICE_S, "reclaim_notice_most_s": PLAY_NOTICE_S}
ACTIONS = ("work", "unknown", "keep", "silence", "release", *2 * ("rest",), *3 * ("lease",), *8 * ("time",))


def play(seed: int, steps: int = 150) -> list[str]:  # noqa: C901, PLR0912 - one case for each
    """What is wrong with the reclaims of a random run: by the readings that were shown and the events, not the code."""
    chance, here = random.Random(seed), World(policy=Policy(**PLAY_NOTICE)).node(gpus=3)
    leases, told, kept, wrong = list[Lease](), dict[str, float](), dict[str, float](), list[str]()
    for index in range(3):
        works(here, index, 0.0)
    for _ in range(steps):
        active = [one for one in leases if here.now_of(one).state is LeaseState.ACTIVE]
        match chance.choice(ACTIONS):
            case "work":
                works(here, chance.randrange(3), 0.5)
            case "unknown":
                works(here, chance.randrange(3), None)
            case "rest":
                for index in range(3):
                    works(here, index, 0.0)
            case "lease":
                leases.append(holds(here, chance.choice((1, 1, 2)), reclaim_idle_after_s=PLAY_S))
            case "keep" if active:
                one = chance.choice(active)
                keep(here, here.now_of(one), 40.0)
                kept[one.id] = here.at_s + 40.0
            case "silence":
                here.pass_time(chance.choice((1.0, 6.0)), silent=("a",))
            case "release" if active:
                here.release(here.now_of(active[0]))
        begun = len(here.changes)
        for _ in range(chance.choice((2, 10, 30))):
            here.pass_time(0.5)
            for change in here.changes[begun:]:
                if isinstance(change, Event) and change.lease_id is not None:
                    wrong += judged(here, change, told, kept)
            begun = len(here.changes)
        here.check()
    return wrong


def judged(here: World, event: Event, told: dict[str, float], kept: dict[str, float]) -> list[str]:
    """What an event says that was not promised."""
    lease_id = event.lease_id or ""
    if event.kind == "lease.reclaim_notice":
        told[lease_id] = here.at_s
    elif event.kind == "lease.reclaim_withdrawn":
        told.pop(lease_id, None)
    if event.kind != "lease.reclaimed":
        return []
    wrong = []
    if here.at_s - told.get(lease_id, here.at_s) < PLAY_NOTICE_S - 0.6:
        wrong.append(f"{lease_id}: not after its notice")
    if kept.get(lease_id, 0.0) > here.at_s:
        wrong.append(f"{lease_id}: it was kept")
    for one in event.gpus:
        late = [
            (at_s, reading) for at_s, _, reading in here.shown[one] if at_s > here.at_s - PLAY_S - PLAY_NOTICE_S + 1.0
        ]
        if any(reading.utilization_ratio != 0 for _, reading in late):
            wrong.append(f"{lease_id}: {one} has worked, or was not known")
        times = [at_s for at_s, _ in late]
        if max(after - before for before, after in pairwise(times)) > 5.0:
            wrong.append(f"{lease_id}: {one} was not seen for a while")
    return wrong


def count_reclaims(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The leases that are taken from here on."""
    found, end = list[str](), reclaim._end

    def noted(turn: Any, record: Any, *rest: Any) -> None:
        found.append(record.lease.id)
        end(turn, record, *rest)

    monkeypatch.setattr(reclaim, "_end", noted)
    return found


def test_no_lease_is_taken_that_worked_or_was_kept_and_none_before_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = count_reclaims(monkeypatch)
    for seed in range(3):
        assert play(seed) == [], f"seed {seed}"
    assert len(found) > 3, "nothing was put to the test"


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "end what works": (reclaim, "idle_time", lambda ledger, lease, now, policy: _always_idle(now)),
    "end what is kept": (reclaim, "kept_now", lambda *_: None),
    "end without notice": (reclaim, "_give_notice", reclaim._end),
}


def _always_idle(now: Instant) -> IdleTime:
    return IdleTime(now.mono_s - 1000.0, now.mono_s, 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_judge_knows_a_daemon_with_this_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    assert any(play(seed) for seed in range(3)), fault


def test_a_lease_without_a_rule_is_never_looked_at() -> None:
    here = world(1)
    lease = here.lease(1, ttl_s=1e6)
    here.pass_time(1)
    assert not here.ledger.reclaims.leases
    assert idle_time(here.ledger, lease, here.now, here.policy) is None
