"""The range in which a waiting request is said to start, by how long earlier leases lasted."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest

from gpulease_protocol.model import ExpectedBasis
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.forecast.expected_start import StartForecast, explain_expected_start, with_expected_start
from gpulease_server.core.forecast.lease_history import MAX_SAMPLES, MIN_SAMPLES, LeaseHistory
from gpulease_server.core.policy import Policy
from tests.core.build import World
from tests.core.test_expected_start import expected

LONG_S = 1e7


def world(gpus: int = 1) -> World:
    return World(policy=Policy(max_queued=1000)).node(gpus=gpus)


def lasted(here: World, *lengths_s: float, user: str = "ada", count: int = 1) -> None:
    """One lease after the other, each of which its user gave back after so long."""
    for length_s in lengths_s:
        held = here.lease(count, user=user, ttl_s=LONG_S)
        here.at_s += length_s
        here.report()
        here.release(held)
        here.report()


def waits(here: World, **what: Any) -> str:
    return here.lease(**({"user": "ada", "ttl_s": LONG_S} | what)).id


def range_s(here: World, lease_id: str) -> tuple[float, float, int | None] | None:
    """From when until when a request is said to start, from now on, and by how many leases at least."""
    found = expected(here.ledger, here.now, here.policy).get(lease_id)
    if found is None or found.until is None:
        return None
    assert found.basis is ExpectedBasis.HISTORY
    return (found.at - here.now.at).total_seconds(), (found.until - here.now.at).total_seconds(), found.samples


@pytest.mark.parametrize("elapsed_s", [0.0, 299.0, 599.0])
def test_where_history_repeats_itself_the_range_has_the_start_and_a_minute(elapsed_s: float) -> None:
    here = world()
    lasted(here, *[600.0] * MIN_SAMPLES)
    waits(here)
    first, second = waits(here), waits(here)
    here.at_s += elapsed_s
    here.report()
    for lease_id, start_s in ((first, 600 - elapsed_s), (second, 1200 - elapsed_s)):
        found = range_s(here, lease_id)
        assert found is not None
        assert start_s - 61 < found[0] <= start_s <= found[1] < start_s + 121
        assert found[2] == MIN_SAMPLES


def test_a_range_is_said_only_by_enough_leases_that_lasted_longer() -> None:
    here = world()
    lasted(here, *[10.0] * MIN_SAMPLES, *[1000.0] * (MIN_SAMPLES - 1))
    waits(here)
    waiting = waits(here)
    assert range_s(here, waiting) is not None
    here.at_s += 20
    here.report()
    assert range_s(here, waiting) is None, "of those that lasted longer than 20 s there is one too few"


def test_nothing_is_said_by_one_lease_too_few() -> None:
    here = world()
    lasted(here, *[600.0] * (MIN_SAMPLES - 1))
    waits(here)
    assert range_s(here, waits(here)) is None


def test_a_lease_that_has_run_for_long_lasts_as_those_that_did() -> None:
    here = world()
    lasted(here, *[10.0] * 200, *[5000.0] * MIN_SAMPLES)
    waits(here)
    waiting = waits(here)
    here.at_s += 1000
    here.report()
    found = range_s(here, waiting)
    assert found is not None
    assert 3900 < found[0] <= 4000 <= found[1] < 4121


@pytest.mark.parametrize(("user", "count", "length_s"), [("ada", 1, 600), ("ada", 3, 6000), ("bob", 2, 60)])
def test_the_closest_leases_count_first(user: str, count: int, length_s: float) -> None:
    """Those of the user for as many GPUs, then those of the user, then all: the newest ones."""
    here = world(3)
    lasted(here, *[600.0] * MIN_SAMPLES)
    lasted(here, *[6000.0] * MAX_SAMPLES, count=2)
    lasted(here, *[60.0] * MAX_SAMPLES, user="eve")
    waits(here, count=count, user=user)
    found = range_s(here, waits(here, count=3))
    assert found is not None
    assert length_s - 61 < found[0] <= length_s <= found[1] < length_s + 121


def test_a_lease_that_has_outlasted_all_others_may_end_soon_or_never() -> None:
    here = world(2)
    lasted(here, *[600.0] * MIN_SAMPLES)
    waits(here)
    here.at_s += 1900
    here.report()
    waits(here)
    one, both = waits(here), waits(here, count=2)
    found = range_s(here, one)
    assert found is not None
    assert 39 < found[0] <= 100
    assert 600 <= found[1] < 721
    assert range_s(here, both) is None


def test_what_was_cut_short_does_not_count() -> None:
    here = world()
    for _ in range(MIN_SAMPLES):
        held = here.lease(user="ada", ttl_s=LONG_S)
        here.at_s += 60
        here.report()
        here.revoke(held)
        here.report()
    waits(here)
    assert range_s(here, waits(here)) is None


def test_declared_times_are_said_first_and_end_leases_in_the_range_too() -> None:
    here = world()
    lasted(here, *[6000.0] * MIN_SAMPLES)
    here.lease(user="ada", time_s=600.0, ttl_s=LONG_S)
    declared, by_history = waits(here), waits(here)
    found = expected(here.ledger, here.now, here.policy)
    assert (found[declared].basis, found[declared].until) == (ExpectedBasis.DECLARED, None)
    range_found = range_s(here, by_history)
    assert range_found is not None
    assert 6539 < range_found[0] <= 6600 <= range_found[1] < 6721


def test_the_range_is_as_wide_as_history() -> None:
    here = world()
    lasted(here, *(float(60 * one) for one in range(1, MAX_SAMPLES + 1)))
    waits(here)
    found = range_s(here, waits(here))
    assert found is not None
    assert 120 < found[0] <= 180
    assert 60 * (MAX_SAMPLES - 1) <= found[1] < 60 * (MAX_SAMPLES + 2)


def test_the_same_is_said_each_time_and_nothing_is_changed() -> None:
    chance, here = random.Random(1), world(4)
    lasted(here, *(chance.uniform(10, 1000) for _ in range(60)))
    waiting = [waits(here, count=chance.choice([1, 2, 4])) for _ in range(12)]
    leases, queue = dict(here.ledger.leases), list(here.ledger.queue)
    first = expected(here.ledger, here.now, here.policy)
    assert first == expected(here.ledger, here.now, here.policy)
    assert any(first[one].until for one in waiting if one in first)
    assert (dict(here.ledger.leases), list(here.ledger.queue)) == (leases, queue)


def test_what_is_known_when_it_is_left_stays_true() -> None:
    """It may be left at any step, where a second has ended."""
    here = world()
    lasted(here, *(float(60 * one) for one in range(1, MAX_SAMPLES + 1)))
    waits(here)
    waiting = [waits(here) for _ in range(3)]
    whole, forecast, seen = expected(here.ledger, here.now, here.policy), None, 0
    forecast = StartForecast(here.ledger, here.now, here.policy)
    for _ in forecast.steps():
        assert forecast.starts.items() <= whole.items()
        seen += len(forecast.starts) == 1
    assert set(whole) == set(waiting)
    assert seen, "the first one is known before the others"


def test_a_history_looks_at_no_more_leases_than_it_may() -> None:
    here = world()
    lasted(here, *[600.0] * (MAX_SAMPLES + 10))
    ended = [here.ledger.leases[one].lease for one in here.ledger.ended_leases]
    time = LeaseHistory(ended).remaining(ended[0], 0.0, 1)
    assert time is not None
    assert time.samples == MAX_SAMPLES


def test_a_request_and_its_explanation_have_the_range() -> None:
    here = world()
    lasted(here, *[600.0] * MIN_SAMPLES)
    waits(here)
    record = here.ledger.leases[waits(here)]
    starts = expected(here.ledger, here.now, here.policy)
    start = starts[record.lease.id]
    assert start.until is not None
    assert start.at.second == start.until.second == 0
    assert timedelta(0) < start.until - start.at <= timedelta(minutes=2)
    explained = explain_expected_start(explain(here.ledger, record, here.now, here.policy), start)
    for shown in (with_expected_start(record.lease, starts), explained):
        assert (shown.expected_from, shown.expected_until, shown.expected_samples) == (start.at, start.until, 20)
        assert (shown.expected_at, shown.expected_basis) == (None, "history")
    between = f"between {start.at:%Y-%m-%d %H:%M:%S} UTC and {start.until:%Y-%m-%d %H:%M:%S} UTC"
    assert f"It probably starts {between}, judging by how long earlier leases lasted (20 or more" in explained.sentence
