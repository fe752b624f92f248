"""For how long a lease holds its GPUs: what it declared, and what its limits and the budget of its token leave it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.limits import LimitsRequest
from gpulease_protocol.model import EndReason, Lease, LeaseState
from gpulease_protocol.requests import JobRequest, LeaseRequest
from gpulease_protocol.tokens import TokenRequest
from gpulease_server.core.presentation import lease_view
from gpulease_server.core.token_budgets import held_s
from gpulease_server.runtime.outage import reset_deadlines
from tests.core.build import World

YEAR_S = 366 * 24 * 3600


@pytest.mark.parametrize(
    ("body", "name", "what"),
    [
        (LeaseRequest, "time_s", {}),
        (JobRequest, "timeout_s", {"command": ["train.py"]}),
        (LimitsRequest, "max_lease_s", {}),
        (TokenRequest, "max_lease_s", {"user": "ann"}),
    ],
)
def test_a_time_to_hold_gpus_is_a_year_at_most(body: Any, name: str, what: dict[str, Any]) -> None:
    body(**what, **{name: YEAR_S})
    for wrong in (0, YEAR_S + 1, 1e300, float("nan")):
        with pytest.raises(ValueError, match=f"{name}: must be over 0 and at most 31622400 seconds"):
            body(**what, **{name: wrong})


def test_a_time_beyond_the_calendar_harms_no_turn_and_no_list() -> None:
    world = World().node()
    lease = world.view(world.lease(time_s=1e300))
    assert lease.state is LeaseState.ACTIVE
    assert lease.ends_at is not None
    assert lease.ends_at.year == world.now.at.year + 100
    assert isinstance(world.renew(lease), Lease)


def restart(world: World) -> None:
    """The daemon loads its ledger again, which has no times of the monotonic clock."""
    for record in list(world.ledger.leases.values()):
        world.ledger.apply(replace(record, granted_at_s=None))
    reset_deadlines(world.ledger, world.now)
    world.report()


def test_each_restart_gives_a_lease_no_new_time() -> None:
    world = World().node()
    lease = world.lease(time_s=1000.0, ttl_s=1000.0)
    assert lease_view(world.ledger, world.ledger.leases[lease.id], world.now, world.policy).ends_in_s == 1000.0
    granted_s = world.at_s
    for _ in range(9):
        world.at_s += 100.0
        restart(world)
        world.renew(lease)
        shown = lease_view(world.ledger, world.ledger.leases[lease.id], world.now, world.policy)
        assert shown.ends_at is not None
        assert (shown.ends_at - world.now.at).total_seconds() <= max(granted_s + 1000.0 - world.at_s, 300.0) + 0.1
        assert held_s(world.ledger.leases[lease.id], world.now) == pytest.approx(world.at_s - granted_s)
    world.pass_time(290.0)
    assert world.now_of(lease).state is LeaseState.ACTIVE, "the wall clock may be wrong"
    world.pass_time(15.0)
    assert world.now_of(lease).end_reason is EndReason.TIME_OVER


def test_a_restart_gives_a_lease_no_new_time_of_its_tokens_budget() -> None:
    world = World().node()
    lease = world.lease(time_s=900.0, ttl_s=900.0, token="t", budget=Budget(max_lease_s=1000.0))
    granted_s = world.at_s
    world.at_s += 850.0
    restart(world)
    world.renew(lease)
    world.pass_time(granted_s + 995.0 - world.at_s)
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(10.0)
    assert world.now_of(lease).end_reason is EndReason.BUDGET_SPENT


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"time_s": 60.0}, EndReason.TIME_OVER),
        ({"token": "t", "budget": Budget(max_lease_s=60.0)}, EndReason.BUDGET_SPENT),
    ],
)
def test_a_lease_whose_time_and_ttl_are_over_at_once_ends_for_its_time(what: dict[str, Any], reason: EndReason) -> None:
    world = World().node()
    lease = world.lease(ttl_s=60.0, **what)
    world.pass_time(61.0)
    assert world.now_of(lease).end_reason is reason


@pytest.mark.parametrize("what", [{"time_s": 70.0}, {"token": "t", "budget": Budget(max_lease_s=70.0)}])
@pytest.mark.parametrize(("after_s", "revives"), [(68.0, True), (72.0, False)])
def test_a_late_renewal_revives_no_lease_whose_time_is_over(what: Any, after_s: float, revives: bool) -> None:
    world = World().node()
    lease = world.lease(ttl_s=60.0, **what)
    world.pass_time(61.0)
    assert world.now_of(lease).end_reason is EndReason.EXPIRED
    world.pass_time(after_s - 61.0)
    assert isinstance(world.renew(lease), Lease) is revives
    world.pass_time(3.0)
    ends = world.events("lease.ended")
    assert world.now_of(lease).state is LeaseState.ENDED
    assert len(ends) == (2 if revives else 1)
