"""No idle lease ends while its holder may trust it: one that does not reach the daemon does not hear of the notice."""

from __future__ import annotations

import pytest

from gpulease_protocol.model import Lease
from gpulease_server.core.policy import Policy
from tests.core.build import World
from tests.core.test_reclaim import AFTER_S, NOTICE_S, SLACK_S, ended, holds, kinds, reclaim_at_s, works

MOST_S = 300.0
"""The longest wait for what was promised."""


def world(gpus: int = 1) -> World:
    """A node, whose GPUs do nothing."""
    here = World(policy=Policy(reclaim_notice_s=NOTICE_S, reclaim_notice_most_s=MOST_S)).node(gpus=gpus)
    for index in range(gpus):
        works(here, index, 0.0)
    return here


def told(here: World, ttl_s: float) -> Lease:
    """A lease that has just been told, and a request that waits for its GPU; it renews in time before that."""
    lease = holds(here, ttl_s=ttl_s)
    here.lease(1, ttl_s=1e6)
    while not kinds(here, lease):
        here.pass_time(1.0)
        if here.ledger.deadlines[lease.id] - here.at_s < 2 / 3 * ttl_s and not kinds(here, lease):
            here.renew(lease)
    assert kinds(here, lease) == ["reclaim_notice"]
    return lease


@pytest.mark.parametrize("ttl_s", [120.0, 200.0])
def test_a_holder_that_is_cut_off_keeps_its_lease_for_as_long_as_it_was_promised(ttl_s: float) -> None:
    here = world()
    lease = told(here, ttl_s)
    promised_s = here.ledger.deadlines[lease.id] - here.at_s
    assert promised_s > NOTICE_S + 2 * SLACK_S, "else it shows nothing"
    assert reclaim_at_s(here, lease) == pytest.approx(promised_s, abs=1.5)
    here.pass_time(promised_s - 1.0)
    assert not ended(here, lease)
    here.pass_time(1.0 + SLACK_S)
    assert ended(here, lease)


def test_a_holder_that_renews_is_told_and_the_moment_stays() -> None:
    """It has heard of it: what it promises beyond that moves nothing."""
    here = world()
    lease = told(here, 120.0)
    at_s = here.at_s + (reclaim_at_s(here, lease) or 0.0)
    while not ended(here, lease):
        answer = here.renew(lease)
        assert isinstance(answer, Lease)
        assert answer.reclaim_at is not None
        assert here.at_s + (answer.reclaim_at - here.now.at).total_seconds() == pytest.approx(at_s, abs=0.1)
        here.pass_time(5.0)
    assert at_s <= here.at_s <= at_s + 2 * SLACK_S


def test_a_long_ttl_is_waited_for_within_a_bound_and_a_short_one_has_the_whole_notice() -> None:
    here = world(2)
    long, short = holds(here, ttl_s=1e6), holds(here, ttl_s=10.0)
    here.lease(2, ttl_s=1e6)
    for _ in range(int(AFTER_S + SLACK_S) // 3 + 1):
        here.pass_time(3.0)
        here.renew(short)
    assert reclaim_at_s(here, long) == pytest.approx(MOST_S, abs=SLACK_S)
    assert reclaim_at_s(here, short) == pytest.approx(NOTICE_S, abs=SLACK_S)
