"""The wall clock is set while the daemon is away, for which there is no other clock: no lease that is to end for others
ends before its holder had the whole notice, and none is spared, or has GPUs held for it, forever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpulease_protocol.model import EndReason, JobState, Lease, LeaseState, Priority
from gpulease_server.core.policy import Policy
from gpulease_server.core.preempted_gpus import preemptions_under_way
from gpulease_server.runtime.outage import reset_deadlines
from gpulease_server.store.ledger_store import Store
from tests.core.build import World
from tests.core.test_keep import keep as keep_on_purpose
from tests.core.test_preemption import AFTER_S, NOTICE_S, RULES, TTL_S, ask, give_back, keep, preempted_ids, scavenge
from tests.core.test_reclaim import AFTER_S as IDLE_S
from tests.core.test_reclaim import NOTICE_S as RECLAIM_S
from tests.core.test_reclaim import SHORT_NOTICE, SLACK_S, holds, works
from tests.core.test_reclaim import kinds as reclaim_kinds
from tests.store.test_ledger_store import save

DAY_S = 86_400.0
JUMPS = pytest.mark.parametrize("jump_s", [-400 * DAY_S, -300.0, 0.0, 400 * DAY_S])
AWAY_S = 120.0


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    store = Store(sqlite_url)
    yield store
    store.close()


def started_again(store: Store, before: World, jump_s: float) -> World:
    """Another process, after a reboot of its host, with what is in the database; the wall clock was set meanwhile."""
    save(store, before)
    here = World(policy=before.policy, ledger=store.load(), nodes=before.nodes, jobs=before.jobs, ids=before.ids)
    here.at_s = 50.0
    here.wall_jump_s = before.at_s + before.wall_jump_s + AWAY_S + jump_s - here.at_s
    reset_deadlines(here.ledger, here.now)
    here.report()
    here.pass_time(0.5)
    here.check()
    return here


def lasts_s(here: World, held: Lease, most_s: float) -> float:
    """For how long its holder, who renews, has it from now on; at most so long."""
    begun_s = here.at_s
    while here.now_of(held).state is LeaseState.ACTIVE and here.at_s < begun_s + most_s:
        keep(here, held, 5.0)
    return here.at_s - begun_s


@JUMPS
def test_a_preemption_that_was_told_comes_after_the_whole_notice_and_not_later(store: Store, jump_s: float) -> None:
    here = World(policy=Policy(**RULES)).node(gpus=1)
    held = scavenge(here)
    here.pass_time(AFTER_S)
    waits = ask(here)
    here.pass_time(1.5)
    assert preempted_ids(here) == [held.id]
    for _ in range(2):  # each restart gives the whole notice again
        here = started_again(store, here, jump_s)
        assert held.id in here.ledger.preempting
        keep(here, held, 40.0)
        assert here.now_of(held).state is LeaseState.ACTIVE
    assert TTL_S - 45.0 <= lasts_s(here, held, 300.0) <= TTL_S - 30.0
    assert here.now_of(held).end_reason is EndReason.PREEMPTED
    assert here.now_of(waits).state is LeaseState.ACTIVE


@pytest.mark.parametrize("jump_s", [-400 * DAY_S, -300.0, 0.0])
def test_a_lease_has_its_minimum_and_is_preempted_soon_after_it(store: Store, jump_s: float) -> None:
    """What it has held before may be forgotten, but it does not hold for less than nothing."""
    here = World(policy=Policy(**RULES)).node(gpus=1)
    held = scavenge(here)
    here = started_again(store, here, jump_s - AWAY_S)
    waits = ask(here)
    keep(here, held, AFTER_S - 5.0)
    assert not here.ledger.preempting
    assert TTL_S <= lasts_s(here, held, 300.0) <= TTL_S + 20.0
    assert here.now_of(waits).state is LeaseState.ACTIVE


@JUMPS
def test_what_is_held_for_a_request_is_let_go_after_the_bound_where_it_does_not_come(
    store: Store, jump_s: float
) -> None:
    here = World(policy=Policy(**RULES)).node(gpus=2)
    held = scavenge(here)
    job_id = here.submit(1, priority=Priority.SCAVENGE, user="bob")
    here.run_job(job_id)
    here.pass_time(AFTER_S)
    waits = ask(here, 2)
    here.pass_time(1.5)
    assert len(preempted_ids(here)) == 2
    give_back(here, held)
    here = started_again(store, here, jump_s)
    assert here.ledger.jobs[job_id].job.state is JobState.STOPPING, "it does not end"
    newer = ask(here, 1, user="eve")
    here.pass_time(NOTICE_S)
    assert here.now_of(newer).state is LeaseState.QUEUED
    [(one, _)] = preemptions_under_way(here.ledger, here.now, here.policy)
    left_s = one.held_until_s(here.policy) - here.at_s
    assert 0.0 < left_s < 3600.0
    here.pass_time(left_s + 1.0)
    assert not list(preemptions_under_way(here.ledger, here.now, here.policy))
    assert here.now_of(waits).state is LeaseState.QUEUED


@JUMPS
def test_the_time_of_an_idle_lease_begins_again_and_its_moment_comes(store: Store, jump_s: float) -> None:
    here = World(policy=Policy(**SHORT_NOTICE)).node(gpus=1)
    works(here, 0, 0.0)
    lease, waits = holds(here), here.lease(1, ttl_s=1e6)
    here.pass_time(IDLE_S + SLACK_S)
    assert reclaim_kinds(here, lease) == ["reclaim_notice"]
    here = started_again(store, here, jump_s)
    assert not here.ledger.reclaims.notices
    here.pass_time(IDLE_S - 2.0)
    assert reclaim_kinds(here, lease) == []
    here.pass_time(2.0 + SLACK_S)
    assert reclaim_kinds(here, lease) == ["reclaim_notice"]
    here.pass_time(RECLAIM_S - SLACK_S - 1.0)
    assert here.now_of(lease).state is LeaseState.ACTIVE
    here.pass_time(2 * SLACK_S + 1.0)
    assert here.now_of(lease).end_reason is EndReason.RECLAIMED_IDLE
    assert here.now_of(waits).state is LeaseState.ACTIVE


@pytest.mark.parametrize("jump_s", [-400 * DAY_S, -300.0, 0.0])
def test_what_is_kept_on_purpose_is_kept_for_no_longer_than_was_asked_for(store: Store, jump_s: float) -> None:
    here = World(policy=Policy(**SHORT_NOTICE)).node(gpus=1)
    works(here, 0, 0.0)
    lease = holds(here)
    here.lease(1, ttl_s=1e6)
    keep_on_purpose(here, lease, AWAY_S + 300.0)
    here = started_again(store, here, jump_s)
    here.pass_time(290.0)
    assert reclaim_kinds(here, lease) == []
    here.pass_time(AWAY_S + 10.0 + SLACK_S + IDLE_S)
    assert reclaim_kinds(here, lease)[:1] == ["reclaim_notice"]
