"""The history of a GPU: each answer says what the readings of its time said, whatever it is made of; a gap is no 0."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease_protocol.model import GpuReading
from gpulease_server.runtime.gpu_metrics.history import GAP, Block, Curve, GpuHistory, Window, curve, steps, window
from gpulease_server.runtime.gpu_metrics.time_series import DamagedSeries
from gpulease_server.runtime.reading_gaps import GAP_S
from gpulease_server.store.gpu_metrics_table import HOURS, MINUTES, QUARTERS, RESOLUTIONS, SECONDS, Resolution
from tests.core.build import gpu

NOON = 1_800_000_000 - 1_800_000_000 % HOURS.block_s + 12 * 3600
"""A full hour."""


def reading(ratio: float | None, **what: float | None) -> GpuReading:
    return gpu(0, utilization_ratio=ratio, **{"power_w": 300.0, "temperature_c": 60.0} | what)  # type: ignore[arg-type]


def shown(history: GpuHistory, span: Window, measure: int = 0) -> Curve:
    """What is in memory, read as the recorder reads it."""
    blocks = [
        (block, history.summed_until_s(span.resolution) if block.resolution is not span.resolution else 0)
        for block in history.blocks.values()
        if block.resolution in (span.resolution, SECONDS)
    ]
    return curve(measure, span, blocks)


def span(resolution: Resolution, buckets: int, bucket_s: int | None = None, from_s: int = NOON) -> Window:
    bucket_s = bucket_s or resolution.width_s
    return Window(from_s, from_s + buckets * bucket_s, bucket_s, resolution)


def test_seconds_minutes_quarters_and_hours_say_the_same() -> None:
    history, chance = GpuHistory(), random.Random(1)
    ratios = [chance.randint(0, 100) / 100 for _ in range(3700)]
    for second, ratio in enumerate(ratios):
        history.add(NOON + second, steps(reading(ratio)))
    for resolution, most in ((MINUTES, 61), (QUARTERS, 4), (HOURS, 1)):
        found = shown(history, span(resolution, most))
        for bucket in range(most):
            part = ratios[bucket * resolution.width_s : (bucket + 1) * resolution.width_s]
            assert found.mean[bucket] == pytest.approx(sum(part) / len(part), abs=2e-4), (resolution, bucket)
            assert found.high[bucket] == max(part)
            assert found.known_s[bucket] == len(part)
    last = shown(history, span(SECONDS, 100, from_s=NOON + 3600))
    assert list(last.mean) == ratios[3600:]


def test_the_minute_that_is_not_over_is_in_every_answer() -> None:
    history = GpuHistory()
    for second in range(30):
        history.add(NOON + second, steps(reading(0.5)))
    for resolution in (MINUTES, QUARTERS, HOURS):
        found = shown(history, span(resolution, 1))
        assert (found.mean, found.known_s) == ((0.5,), (30.0,)), resolution
        history.sum_up()
        assert shown(history, span(resolution, 1)) == found, "counted twice once it is summed up"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 130), st.one_of(st.none(), st.integers(0, 100))), max_size=80))
def test_every_resolution_knows_the_seconds_that_readings_stand_for(pauses: list[tuple[int, int | None]]) -> None:
    history, known, at, before = GpuHistory(), dict[int, float | None](), NOON, None
    for pause, percent in pauses:
        at += pause
        ratio = None if percent is None else percent / 100
        history.add(at, steps(reading(ratio)))
        first = at if before is None or not 0 < at - before <= GAP_S else before + 1
        known |= dict.fromkeys(range(first, at + 1), ratio)
        before = at
    for resolution in (MINUTES, QUARTERS, HOURS):
        found = shown(history, span(resolution, 4 * 3600 // resolution.width_s))
        for bucket, (mean, high, seconds) in enumerate(zip(found.mean, found.high, found.known_s, strict=True)):
            start = NOON + bucket * resolution.width_s
            values = [known.get(second) for second in range(start, start + resolution.width_s)]
            some = [value for value in values if value is not None]
            assert seconds == len(some)
            assert mean == (pytest.approx(math.fsum(some) / len(some), abs=3e-4) if some else None)
            assert high == max(some, default=None)


def test_a_reading_stands_for_the_time_since_the_last_one_but_not_for_a_silence() -> None:
    history = GpuHistory()
    for second in (0, 2, 10):
        history.add(NOON + second, steps(reading(1.0)))
    assert shown(history, span(SECONDS, 12)).mean == (1.0, 1.0, 1.0, *(None,) * 7, 1.0, None)


def test_what_the_driver_cannot_tell_is_unknown_and_not_zero() -> None:
    history = GpuHistory()
    history.add(NOON, steps(reading(None, power_w=math.nan, temperature_c=-5.0)))
    for measure in (0, 2, 3):
        assert shown(history, span(SECONDS, 1), measure) == Curve((None,), (None,), (0.0,))
    history.add(NOON + 1, steps(reading(0.0)))
    assert shown(history, span(SECONDS, 2)).mean == (None, 0.0)


@pytest.mark.parametrize("absurd", [10**400, 2.0**61, -1.0, math.inf, math.nan])
def test_a_figure_that_no_driver_can_mean_is_unknown(absurd: float) -> None:
    assert steps(reading(absurd, power_w=absurd))[0] == steps(reading(0.5, power_w=absurd))[2] == GAP


def test_memory_of_a_large_gpu_fits() -> None:
    history = GpuHistory()
    history.add(NOON, steps(gpu(0, memory_used_bytes=288 * 2**30)))
    assert shown(history, span(SECONDS, 1), 1).mean == (288 * 2**30,)


def test_a_clock_that_is_set_back_replaces_what_was_recorded_and_forgets_what_is_to_come() -> None:
    history = GpuHistory()
    for second in range(300):
        history.add(NOON + second, steps(reading(1.0)))
    for second in range(100, 130):
        history.add(NOON + second, steps(reading(0.0)))
    assert set(shown(history, span(SECONDS, 100)).mean) == {1.0}
    assert set(shown(history, span(SECONDS, 30, from_s=NOON + 100)).mean) == {0.0}
    assert set(shown(history, span(SECONDS, 100, from_s=NOON + 130)).mean) == {None}
    history.sum_up()
    assert shown(history, span(MINUTES, 3)).mean == (1.0, pytest.approx(40 / 60, abs=1e-3), 0.0)


def test_a_block_is_what_it_was_written_as_and_a_damaged_one_is_said() -> None:
    for resolution in RESOLUTIONS:
        block = Block(resolution, NOON)
        block.cells[7] = 5
        assert Block.from_bytes(resolution, NOON, block.to_bytes()).cells == block.cells
        for content in (b"", b"x", block.to_bytes()[:-1], block.to_bytes() + b"xx"):
            with pytest.raises(DamagedSeries):
                Block.from_bytes(resolution, NOON, content)


def test_of_two_versions_of_a_block_the_one_that_knows_more_of_a_bucket_counts() -> None:
    before, after = GpuHistory(), GpuHistory()
    for second in range(90):
        before.add(NOON + second, steps(reading(1.0)))
    for second in range(100, 180):
        after.add(NOON + second, steps(reading(0.0)))
    before.sum_up()
    after.sum_up()
    merged = after.block(MINUTES, NOON)
    merged.merge(before.block(MINUTES, NOON))
    found = curve(0, span(MINUTES, 3), [(merged, 0)])
    assert (found.mean, found.known_s) == ((1.0, 1.0, 0.0), (60.0, 30.0, 60.0))


DAY = 86400.0


@pytest.mark.parametrize(
    ("ago_s", "for_s", "points", "bucket_s", "made_of"),
    [
        (60, 60, 300, 1, SECONDS),
        (3600, 3600, 60, 120, MINUTES),
        (3600, 3600, 61, 60, MINUTES),
        (3600, 3600, 1000, 5, SECONDS),
        (3700, 60, 300, 60, MINUTES),
        (DAY, DAY, 300, 300, MINUTES),
        (7 * DAY, 7 * DAY, 1000, 900, QUARTERS),
        (7 * DAY, DAY, 1000, 900, QUARTERS),
        (8 * DAY, 60, 1000, 3600, HOURS),
        (90 * DAY, 90 * DAY, 100, 86400, HOURS),
        (5000 * DAY, 5000 * DAY, 60, 128 * 86400, HOURS),
        (5000 * DAY, 5000 * DAY, 2, 8192 * 86400, HOURS),
    ],
)
def test_a_window_is_as_fine_as_is_kept_and_as_was_asked_for(
    ago_s: float, for_s: float, points: int, bucket_s: int, made_of: Resolution
) -> None:
    now_s = NOON + 30.5
    found = window(now_s - ago_s, now_s - ago_s + for_s, now_s, points)
    assert (found.bucket_s, found.resolution) == (bucket_s, made_of)
    assert found.count <= points
    assert found.from_s <= now_s - ago_s
    assert found.from_s + found.count * found.bucket_s >= now_s - ago_s + for_s
