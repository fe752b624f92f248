"""The measures of a replay, computed by hand beside it."""

from __future__ import annotations

import pytest

from gpulease_server.replay.measures import (
    jain,
    measure,
    percentile,
    shares_while_waiting,
    waiting_over_time,
)
from gpulease_server.replay.virtual_daemon import Outcome
from tests.replay.build import request


def outcome(
    user: str,
    asked_at_s: float,
    granted_at_s: float | None,
    ended_at_s: float | None,
    gpus: int = 1,
    lost_s: float = 0.0,
) -> Outcome:
    duration_s = 100.0 if granted_at_s is None or ended_at_s is None else ended_at_s - granted_at_s
    one = Outcome(request(f"{user}-{asked_at_s}", asked_at_s, duration_s, gpus, user=user))
    one.asked_at_s, one.granted_at_s, one.ended_at_s, one.lost_s = asked_at_s, granted_at_s, ended_at_s, lost_s
    one.gpus = 0 if granted_at_s is None else gpus
    return one


TWO_GPUS = [
    outcome("ann", 0, 0, 100, 2),
    outcome("ann", 10, 100, 200, 1),  # waits for 90 s and runs for 100: 1.9
    outcome("bob", 20, 100, 105, 1),  # waits for 80 s and runs for 5, of which 10 count: 8.5
]


def test_waits_slowdowns_and_use_are_those_of_the_hand() -> None:
    found = measure(TWO_GPUS, gpus=2)

    assert (found.requests, found.refused, found.never_granted) == (3, 0, 0)
    assert found.wait_mean_s == pytest.approx(170 / 3)
    assert (found.wait_median_s, found.wait_p99_s, found.wait_max_s) == (80, 90, 90)
    assert found.slowdown_mean == pytest.approx((1 + 1.9 + 8.5) / 3)
    assert found.gpu_hours_held == pytest.approx((200 + 100 + 5) / 3600)
    assert found.utilization_ratio == pytest.approx(305 / 400)
    assert found.gpu_hours_idle_while_waited_for == 0.0
    assert found.end_s == 200
    assert [(one.user, one.requests, one.slowdown_mean) for one in found.users] == [
        ("ann", 2, pytest.approx(1.45)),
        ("bob", 1, pytest.approx(8.5)),
    ]
    assert found.jain_of_slowdowns == pytest.approx((1.45 + 8.5) ** 2 / (2 * (1.45**2 + 8.5**2)))
    # ann holds two GPUs while the second request waits, and bob none.
    assert found.jain_of_shares == pytest.approx(0.5)


def test_gpus_that_are_free_while_someone_waits_are_counted() -> None:
    held = [outcome("ann", 0, 0, 3600, 1), outcome("bob", 1800, 3600, 7200, 2)]

    assert measure(held, gpus=4).gpu_hours_idle_while_waited_for == pytest.approx(3 * 0.5)


def test_one_that_was_never_granted_waits_to_the_end_and_a_refused_one_does_not_count() -> None:
    refused = Outcome(request("no", 5, 10), asked_at_s=5, refused="never_fits")

    found = measure([outcome("ann", 0, 0, 1000), outcome("bob", 100, None, None), refused], gpus=1)

    assert (found.requests, found.refused, found.never_granted) == (3, 1, 1)
    assert found.refusals == {"never_fits": 1}
    assert found.wait_max_s == 900
    assert found.slowdown_mean == pytest.approx((1 + (900 + 100) / 100) / 2)


def test_what_was_held_without_effect_is_lost_and_makes_the_slowdown_longer() -> None:
    # Ended after 50 s, and again from 100 on, for 100 s.
    tried_twice = outcome("ann", 0, 0, 200, 2, lost_s=50.0)
    tried_twice.request = request("ann", 0, 100, 2)

    found = measure([tried_twice], gpus=2)

    assert found.gpu_hours_lost == pytest.approx(2 * 50 / 3600)
    assert found.slowdown_mean == pytest.approx(2.0)


def test_only_requests_of_the_period_are_counted_and_all_hold_gpus() -> None:
    before = outcome("ann", 0, 0, 100)
    before.request = request("ann", 0, 100)
    object.__setattr__(before.request, "counted", False)

    found = measure([before, outcome("bob", 50, 100, 200)], gpus=1)

    assert (found.requests, found.wait_mean_s) == (1, 50)
    assert found.utilization_ratio == 1.0


def test_nothing_that_could_be_granted_is_an_error() -> None:
    with pytest.raises(ValueError, match="no request"):
        measure([Outcome(request("no", 5, 10), asked_at_s=5, refused="never_fits")], gpus=1)


def test_how_many_waited_over_time_is_the_mean_of_each_part() -> None:
    waits = [outcome("ann", 0, 0, 100), outcome("ann", 10, 50, 100), outcome("bob", 25, 100, 100)]

    assert waiting_over_time(waits, 100, 4) == pytest.approx((15 / 25, 2, 1, 1))
    assert sum(waiting_over_time(waits, 100, 7)) * 100 / 7 == pytest.approx(40 + 75)


def test_shares_are_of_the_time_in_which_a_user_waits() -> None:
    shares = shares_while_waiting(
        [
            outcome("ann", 0, 0, 100, 2),
            outcome("ann", 40, 100, 110),
            outcome("bob", 50, 100, 150),
            outcome("eve", 0, 0, 9),
        ]
    )

    assert shares == pytest.approx([2.0, 0.0])


@pytest.mark.parametrize(
    ("values", "expected"), [([], 1.0), ([3, 3, 3], 1.0), ([1, 0, 0, 0], 0.25), ([1, 2, 3], 36 / 42), ([0.0], 1.0)]
)
def test_jains_index(values: list[float], expected: float) -> None:
    assert jain(values) == pytest.approx(expected)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (0.999, 100), (0.0, 1)])
def test_percentiles_are_those_of_nearest_rank(share: float, expected: float) -> None:
    assert percentile(range(1, 101), share) == expected
    assert percentile([], share) == 0.0
