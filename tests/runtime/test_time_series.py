"""However often buckets are merged, each says what the readings of its time said."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease_server.runtime.gpu_metrics.time_series import MAX_BUCKETS, MEASURES, DamagedSeries, TimeSeries
from gpulease_server.runtime.reading_gaps import GAP_S

TICKS = 4
"""The reference knows the value of every quarter of a second."""
Known = dict[int, float]

readings = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 8), st.integers(1, 400), st.integers(1, 8000)),  # ticks since the last
        st.one_of(st.integers(1, 12), st.integers(1, 400)),  # ticks that it stands for
        st.one_of(st.none(), st.integers(0, 8)),
    ),
    max_size=120,
)


def told(
    steps: list[tuple[int, int, int | None]], series: TimeSeries | None = None, at: int = 0
) -> tuple[TimeSeries, Known, int]:
    """A series, and what every tick of it should be: only the first that is said of a tick counts."""
    series, known = series or TimeSeries.empty(), Known()
    for since, ticks, value in steps:
        before, at = at, at + since
        values = (value if value is None else value / 8, None, value, 35.0)
        series.add(at / TICKS, ticks / TICKS, values)
        if value is not None:
            known |= dict.fromkeys(range(max(before, at - ticks), at), value / 8)
    return series, known, at


def check(series: TimeSeries, known: Known, most: int = MAX_BUCKETS) -> None:
    """Every bucket has the mean, the maximum and the time of exactly its own ticks."""
    seconds, means, highs = series.tracks[0].columns()
    assert len(seconds) <= most
    width = series.width_s * TICKS
    buckets: dict[int, list[float]] = {}
    for tick, value in known.items():
        buckets.setdefault(int(tick // width), []).append(value)
    assert {place for place, one in enumerate(seconds) if one > 0} == set(buckets)
    for place, values in buckets.items():
        assert seconds[place] * TICKS == len(values)
        assert means[place] == pytest.approx(math.fsum(values) / len(values), rel=1e-6)
        assert highs[place] == max(values)
    assert series.known_s() * TICKS == pytest.approx(len(known))
    assert series.used_s() * TICKS == pytest.approx(math.fsum(known.values()), rel=1e-6)


@settings(max_examples=150, deadline=None)
@given(readings)
def test_a_bucket_has_the_mean_and_maximum_of_its_readings_and_no_other(
    steps: list[tuple[int, int, int | None]],
) -> None:
    series, known, _ = told(steps)
    check(series, known)
    assert series.width_s == 1 or series.closed >= MAX_BUCKETS // 2, "merged without need"


@settings(max_examples=60, deadline=None)
@given(readings, st.integers(1, MAX_BUCKETS))
def test_a_series_in_fewer_buckets_says_the_same(steps: list[tuple[int, int, int | None]], most: int) -> None:
    series, known, _ = told(steps)
    check(series.downsample(most), known, most)


@settings(max_examples=60, deadline=None)
@given(readings, readings)
def test_a_series_that_was_written_goes_on_where_it_was(
    before: list[tuple[int, int, int | None]], after: list[tuple[int, int, int | None]]
) -> None:
    series, known, at = told(before)
    again, more, _ = told(after, TimeSeries.from_bytes(series.to_bytes()), at)
    check(again, known | more)


def test_four_weeks_at_one_reading_a_second_take_no_more_room_than_an_hour() -> None:
    series = TimeSeries.empty()
    for second in range(1, 28 * 86400 // 8 + 1):  # a reading every 8 s, each standing for all of them
        series.add(second * 8, 8, (0.5, 2.0**30, 300.0, 60.0))
    assert series.closed < MAX_BUCKETS
    assert len(series.to_bytes()) < 30_000
    assert series.used_s() == pytest.approx(14 * 86400, rel=1e-6)
    assert series.known_s() == pytest.approx(28 * 86400, rel=1e-6)


def test_a_gap_is_a_bucket_without_a_value() -> None:
    series = TimeSeries.empty()
    series.add(1, 1, (0.5, 1.0, 100.0, 40.0))
    series.add(2, 1, (0.5, None, 100.0, 40.0))
    series.add(4, 1, (1.0, 3.0, 200.0, 50.0))
    assert series.tracks[0].columns()[1][:4] == [0.5, 0.5, None, 1.0]
    assert series.tracks[1].columns()[1][:4] == [1.0, None, None, 3.0]


def test_memory_in_whole_pages_is_exact() -> None:
    series = TimeSeries.empty()
    for second in range(1, 4):
        series.add(second, 1, (None, second * 2.0**21 + 80 * 2**30, None, None))
    assert series.tracks[1].columns()[2][:3] == [n * 2.0**21 + 80 * 2**30 for n in (1, 2, 3)]


@pytest.mark.parametrize(
    "content", [b"", b"x", TimeSeries.empty().to_bytes()[:-1], b"\0" * len(TimeSeries.empty().to_bytes())]
)
def test_bytes_that_are_no_series_are_refused(content: bytes) -> None:
    with pytest.raises(DamagedSeries):
        TimeSeries.from_bytes(content)


def test_what_is_kept_is_what_a_reading_has() -> None:
    assert MEASURES[0] == "utilization_ratio", "GPU-hours used rest on the first"
    assert GAP_S >= 2, "a reading that is late by one period is no gap"


@settings(max_examples=50)
@given(readings, st.integers(0, 12_000), st.integers(0, 12_000))
def test_of_a_part_of_the_time_only_its_buckets_are_looked_at(
    steps: list[tuple[int, int, int | None]], one: int, other: int
) -> None:
    """An answer by day asks for each day of a lease: looked at whole each time, thousands of leases took 10 s."""
    series, known, _ = told(steps)
    begin_s, end_s = min(one, other) / TICKS, max(one, other) / TICKS
    begin_s, end_s = (at_s // series.width_s * series.width_s for at_s in (begin_s, end_s))
    within = {at: value for at, value in known.items() if begin_s <= at / TICKS < end_s}
    looked_at = 0

    def count(_: FrameType, event: str, called: Any) -> None:
        nonlocal looked_at
        looked_at += event == "c_call" and called is max

    sys.setprofile(count)
    try:
        used_s, _, known_s = series.used_between(begin_s, end_s)
    finally:
        sys.setprofile(None)
    assert known_s == pytest.approx(len(within) / TICKS, rel=1e-4, abs=1e-4)
    assert used_s == pytest.approx(sum(within.values()) / TICKS, rel=1e-4, abs=1e-4)
    assert looked_at <= (end_s - begin_s) / series.width_s + 3
