"""Budgets of bearer tokens: nothing that is done with a token gets more than its budget, and everyone is told why."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.errors import LeaseLost, NotNow, OverQuota
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.model import EndReason, Holder, JobState, Lease, LeaseState, Liveness, Selection
from gpulease_protocol.node_protocol import OwnerState
from gpulease_server.core.explain.dry_run import dry_run
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.happenings import CancelRequested, IdempotencyKey
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import lease_view
from gpulease_server.core.records import Deadline
from gpulease_server.core.token_budgets import budget_use
from tests.core.build import NOON, World

DAY_S = 86400.0


def world(gpus: int = 8, **limits: int) -> World:
    """A node, a minute after noon."""
    return World(at_s=60.0, policy=Policy(limits=UserLimits(**limits))).node(gpus=gpus)


def budget(gpus: int | None = None, lease_s: float | None = None, hours: float | None = None) -> Budget:
    return Budget(max_gpus=gpus, max_lease_s=lease_s, gpu_hours_per_day=hours)


def used_hours(here: World, token: str = "t") -> float:
    return budget_use(here.ledger, token, budget(), here.now).gpu_hours_today


def why(here: World, lease: Lease) -> str:
    return explain(here.ledger, here.ledger.leases[lease.id], here.now, here.policy).sentence


def skip(here: World, seconds: float) -> None:
    """Time passes in one leap, in which every holder is heard at the end."""
    here.at_s += seconds
    for lease_id in list(here.ledger.deadlines):
        here.ledger.apply(Deadline(lease_id, here.at_s + 60))
    here.report()
    here.pass_time(0.5)


# GPUs at a time


def test_many_requests_of_one_turn_get_no_more_than_the_budget() -> None:
    here = world()
    calls = [here.ask(token="t", budget=budget(gpus=3)) for _ in range(6)]
    here.answer_wanted()
    states = [here.answers[call].state for call in calls]  # type: ignore[union-attr]
    assert sorted(states) == [LeaseState.ACTIVE] * 3 + [LeaseState.QUEUED] * 3
    here.check()


def test_a_request_over_the_budget_waits_and_delays_no_one_else() -> None:
    here = world(4)
    held = here.lease(2, token="t", budget=budget(gpus=2))
    waits = here.lease(1, token="t", budget=budget(gpus=2))
    assert waits.state is LeaseState.QUEUED
    assert "2 GPUs are held with token t, and 1 more are asked for; its budget is 2 at a time" in why(here, waits)
    assert here.lease(1).state is LeaseState.ACTIVE, "another request of the same user, without that token"
    assert here.lease(1, token="u", budget=budget(gpus=1)).state is LeaseState.ACTIVE, "another token"
    here.release(held)
    here.pass_time(1.0)
    assert here.now_of(waits).state is LeaseState.ACTIVE


def test_what_is_never_within_the_budget_is_refused_for_good() -> None:
    here = world()
    for what, said in (
        ({"count": 3}, "token t may have 2 at a time"),
        ({"count": 1, "selection": Selection.ALL}, "token t may have 2 at a time"),
    ):
        call = here.ask(**what, token="t", budget=budget(gpus=2))  # type: ignore[arg-type]
        here.answer_wanted()
        answer = here.answers[call]
        assert isinstance(answer, OverQuota)
        assert (answer.status, said in answer.detail) == (422, True), answer.detail
    assert not here.ledger.leases_of_tokens


def test_auto_takes_no_more_than_the_budget() -> None:
    here = world(gpus=8)
    here.lease(1, token="t", budget=budget(gpus=3))
    assert len(here.lease(1, selection=Selection.AUTO, token="t", budget=budget(gpus=3)).gpus) == 2
    here = World(policy=Policy(limits=UserLimits(gpus=4))).node(gpus=8)
    assert len(here.lease(1, selection=Selection.AUTO, token="t", budget=budget(gpus=3)).gpus) == 3
    assert len(here.lease(1, selection=Selection.AUTO, token="u", budget=budget(gpus=3)).gpus) == 1


def test_an_older_request_of_the_token_is_not_passed_by_newer_ones() -> None:
    here = world()
    first = here.lease(2, token="t", budget=budget(gpus=3))
    older = here.lease(3, token="t", budget=budget(gpus=3))
    newer = here.lease(1, token="t", budget=budget(gpus=3))
    assert newer.state is LeaseState.QUEUED
    assert f"the older request {older.id} of token t is granted first" in why(here, newer)
    here.release(first)
    here.pass_time(1.0)
    assert here.now_of(older).state is LeaseState.ACTIVE
    assert here.now_of(newer).state is LeaseState.QUEUED
    here.check()


def test_the_limits_of_the_user_count_every_token() -> None:
    here = world(gpus=8)
    here.policy = Policy(limits=UserLimits(gpus=3))
    here.lease(2, token="t", budget=budget(gpus=2))
    waits = here.lease(2, token="u", budget=budget(gpus=2))
    assert waits.state is LeaseState.QUEUED
    assert "user ann has 2 GPUs" in why(here, waits)


def test_a_job_counts_like_a_lease_and_so_does_its_next_attempt() -> None:
    here = world()
    job = here.submit(2, token="t", budget=budget(gpus=2), retries=1)
    here.answer_wanted()
    assert here.ledger.jobs[job].job.state is JobState.STARTING
    assert here.lease(1, token="t", budget=budget(gpus=2)).state is LeaseState.QUEUED
    assert here.ledger.leases[here.ledger.jobs[job].job.lease_id].lease.holder.token_id == "t"


# The time of a lease


@pytest.mark.parametrize("owner", [None, 7])
def test_renewals_and_a_living_owner_do_not_outlast_the_time_of_a_lease(owner: int | None) -> None:
    here = world()
    lease = here.lease(token="t", budget=budget(lease_s=100), owner=owner)
    if owner is not None:
        here.owners[owner] = OwnerState.ALIVE
        assert lease.liveness is Liveness.PROCESS
    view = lease_view(here.ledger, here.ledger.leases[lease.id], here.now, here.policy)
    assert view.ends_at is not None
    assert abs((view.ends_at - here.now.at).total_seconds() - 100) < 1
    for _ in range(4):
        here.pass_time(24)
        assert isinstance(here.renew(lease), Lease)
    here.pass_time(5)
    ended = here.now_of(lease)
    assert (ended.state, ended.end_reason) == (LeaseState.ENDED, EndReason.BUDGET_SPENT)
    assert isinstance(here.renew(lease), LeaseLost), "a late renewal does not revive it"
    assert any(getattr(change, "kind", "") == "lease.budget_spent" for change in here.changes)


def test_a_lease_that_a_wall_clock_was_put_back_under_ends_in_time() -> None:
    here = world()
    lease = here.lease(token="t", budget=budget(lease_s=100), ttl_s=1000)
    here.wall_jump_s = -7200
    here.pass_time(101)
    assert here.now_of(lease).end_reason is EndReason.BUDGET_SPENT


def test_a_job_is_stopped_when_its_time_is_over() -> None:
    here = world()
    job = here.submit(1, token="t", budget=budget(lease_s=100), retries=3)
    here.answer_wanted()
    here.run_job(job)
    here.pass_time(101)
    record = here.ledger.jobs[job]
    assert record.job.state is JobState.STOPPING
    why = "cancelled: the 100 s that a lease of token t may last are over"
    assert record.job.reason == why
    here.ended(job, 143)
    ended = here.ledger.jobs[job].job
    assert (ended.state, ended.reason) == (JobState.CANCELLED, why)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_that_no_node_has_taken_up_says_that_its_time_was_over(nodes: int) -> None:
    here = World().node("a").node("b")
    job = here.submit(1, token="t", budget=budget(lease_s=100), nodes=nodes)
    skip(here, 101.0)
    here.pass_time(0.5)
    ended = here.ledger.jobs[job].job
    why = "cancelled: the 100 s that a lease of token t may last are over"
    assert (ended.state, ended.reason) == (JobState.CANCELLED, why)


def test_a_job_that_was_cancelled_with_a_long_grace_ends_with_its_budget_all_the_same() -> None:
    here = world()
    job = here.submit(token="t", budget=budget(lease_s=100.0))
    here.run_job(job)
    here.pass_time(1.0)
    here.turn(CancelRequested(cause="cancel", job_id=job, grace_s=3600.0))
    skip(here, 90.0)
    assert here.ledger.jobs[job].grace_s == 3600.0
    skip(here, 11.0)
    assert here.ledger.jobs[job].grace_s == 35.0
    spent = here.events("lease.budget_spent")
    assert [one.job_id for one in spent] == [job], "it is told once"


# GPU-hours a day


def test_spent_hours_end_every_lease_of_the_token_and_no_other() -> None:
    here = world()
    mine = [here.lease(2, token="t", budget=budget(hours=1.0)) for _ in range(2)]
    other = here.lease(1, token="u", budget=budget(hours=1.0))
    skip(here, 890)
    assert [here.now_of(lease).state for lease in mine] == [LeaseState.ACTIVE] * 2
    skip(here, 11)
    assert {here.now_of(lease).end_reason for lease in mine} == {EndReason.BUDGET_SPENT}
    assert here.now_of(other).state is LeaseState.ACTIVE
    waits = here.lease(1, token="t", budget=budget(hours=1.0))
    assert waits.state is LeaseState.QUEUED
    assert "of the 1 GPU-hours a day of token t are used; the next day begins at 2026-01-02 00:00 UTC" in why(
        here, waits
    )
    call = here.ask(token="t", budget=budget(hours=1.0), queue=False)
    here.answer_wanted()
    refused = here.answers[call]
    assert isinstance(refused, NotNow)
    assert "GPU-hours a day" in refused.detail


def test_a_new_day_begins_with_a_new_budget() -> None:
    here = world()
    here.lease(4, token="t", budget=budget(hours=1.0))
    skip(here, 901)
    waits = here.lease(1, token="t", budget=budget(hours=1.0))
    skip(here, (NOON + timedelta(hours=12) - here.now.at).total_seconds() - 5)
    assert here.now_of(waits).state is LeaseState.QUEUED
    skip(here, 10)
    assert here.now_of(waits).state is LeaseState.ACTIVE
    assert used_hours(here) < 0.01


def test_what_is_held_over_midnight_counts_for_both_days() -> None:
    here = world()
    here.lease(1, token="t", budget=budget(hours=20.0))
    skip(here, (NOON + timedelta(hours=12) - here.now.at).total_seconds() + 3600)
    assert 0.99 < used_hours(here) < 1.01, "of the new day"


def test_short_leases_do_not_add_up_to_more_than_the_budget() -> None:
    here = world()
    for _ in range(20):
        lease = here.lease(1, token="t", budget=budget(hours=0.5), queue=True)
        if lease.state is LeaseState.QUEUED:
            break
        for _ in range(20):
            skip(here, 4.5)
        here.release(lease)
        here.pass_time(1.0)
    assert 0.4 < used_hours(here) < 0.501


def test_nothing_is_granted_that_would_end_within_a_minute() -> None:
    here = world()
    first = here.lease(1, token="t", budget=budget(hours=1.0))
    skip(here, 3560)
    here.release(first)
    here.pass_time(1.0)
    assert here.lease(1, token="t", budget=budget(hours=1.0)).state is LeaseState.QUEUED, "40 s are left"


@pytest.mark.parametrize("jump_s", [-7200.0, -50_000.0, 7200.0])
def test_a_jump_of_the_wall_clock_gives_no_time_and_takes_none(jump_s: float) -> None:
    """To the same day, or back over midnight."""
    here = world()
    first = here.lease(1, token="t", budget=budget(hours=10.0))
    skip(here, 3600)
    here.release(first)
    here.pass_time(0.5)
    here.lease(1, token="t", budget=budget(hours=10.0))
    here.wall_jump_s = jump_s
    skip(here, 1800)
    assert 1.49 < used_hours(here) < 1.51


def test_a_retried_request_is_the_same_lease() -> None:
    here, key = world(), IdempotencyKey(key="1000:a", fingerprint="f")
    first = here.lease(1, token="t", budget=budget(gpus=1), key=key)
    assert here.lease(1, token="t", budget=budget(gpus=1), key=key).id == first.id
    assert sum(here.ledger.leases_of_tokens["t"].values()) == 1


def test_a_late_renewal_revives_only_what_the_budget_still_has_room_for() -> None:
    here = world()
    late = here.lease(2, token="t", budget=budget(gpus=2), ttl_s=10)
    here.pass_time(11)
    assert here.now_of(late).end_reason is EndReason.EXPIRED
    here.lease(1, token="t", budget=budget(gpus=2))
    assert isinstance(here.renew(late), LeaseLost)


def test_a_dry_run_tells_of_the_budget_of_a_token_that_was_never_used() -> None:
    here = world()
    holder = Holder(user="ann", token_id="t")
    lease = Lease(
        id="x",
        state=LeaseState.QUEUED,
        holder=holder,
        demand=here.lease(3, queue=True).demand,
        ttl_s=1,
        liveness=Liveness.JOB,
        created_at=here.now.at,
    )
    here.report()
    assert isinstance(dry_run(here.ledger, lease, here.now, here.policy, budget=budget(gpus=2)), OverQuota)
    fits = dry_run(here.ledger, lease, here.now, here.policy, budget=budget(gpus=3))
    assert isinstance(fits, Explanation)
    assert fits.verdict == "fits_now"
    assert not here.ledger.budgets


def test_budgets_of_tokens_that_are_not_used_leave_the_ledger() -> None:
    here = world()
    here.release(here.lease(1, token="old", budget=budget(gpus=1)))
    held: Any = here.lease(1, token="held", budget=budget(gpus=1))
    skip(here, 3 * DAY_S)
    here.lease(1, token="new", budget=budget(gpus=1))
    assert set(here.ledger.budgets) == {"held", "new"}
    assert here.now_of(held).state is LeaseState.ACTIVE
