"""A plot in the terminal shows high where values are high, and a gap where nothing is known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpulease_cli import output
from gpulease_cli.commands.metrics import GPU_WORD, plots, render, render_gpu
from gpulease_cli.plot import BLANK, DOTS, LABEL, axis, plot
from gpulease_protocol.gpu_history import GpuHistory
from gpulease_protocol.job_metrics import GpuMetrics, JobMetrics, LeaseMetrics, MetricSeries


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """Row and column of each dot."""
    return {
        (4 * line + row, 2 * column + side)
        for line, text in enumerate(lines)
        for column, character in enumerate(text[LABEL + 1 :])
        for row, pair in enumerate(DOTS)
        for side, bit in enumerate(pair)
        if (ord(character) - BLANK) & bit
    }


def test_a_line_rises_with_its_values() -> None:
    lines = plot([[value / 41 for value in range(42)]], 0.0, 1.0, ("100%", "0%"), width=LABEL + 1 + 21, height=5)
    assert [line[:LABEL].strip() for line in lines] == ["100%", "", "", "", "0%"]
    found = dots(lines)
    assert {(19, 0), (0, 41)} <= found
    highest = [min(row for row, column in found if column == x) for x in range(42)]
    assert highest == sorted(highest, reverse=True)
    assert max(len(line) for line in lines) == LABEL + 1 + 21


def test_what_is_unknown_is_a_gap_and_a_jump_is_a_line() -> None:
    found = dots(plot([[0.0, 0.0, None, None, 1.0, 0.0]], 0.0, 1.0, ("", ""), width=LABEL + 1 + 3, height=2))
    assert {column for _, column in found} == {0, 1, 4, 5}
    assert {row for row, column in found if column == 5} == set(range(8))
    assert dots(plot([[None] * 5], 0.0, 1.0, ("", ""))) == set()
    assert dots(plot([[]], 0.0, 1.0, ("", ""))) == set()


def test_curves_are_overlaid() -> None:
    one, other = [0.0] * 10, [1.0] * 10
    both = dots(plot([one, other], 0.0, 1.0, ("", "")))
    assert both == dots(plot([one], 0.0, 1.0, ("", ""))) | dots(plot([other], 0.0, 1.0, ("", "")))


def test_more_values_than_columns_are_their_means() -> None:
    found = dots(plot([[0.0, 1.0] * 500], 0.0, 1.0, ("", ""), width=LABEL + 1 + 5, height=5))
    assert {row for row, _ in found} <= {9, 10}


def history(mean: tuple[float | None, ...]) -> GpuHistory:
    series = MetricSeries(mean=mean, max=mean, known_s=tuple(0.0 if one is None else 60.0 for one in mean))
    unknown = MetricSeries(mean=(None,) * len(mean), max=(None,) * len(mean), known_s=(0.0,) * len(mean))
    at = datetime(2026, 11, 26, 12, tzinfo=UTC)
    return GpuHistory(
        uuid="GPU-1", node="n1", index=0, name="H100", from_at=at, to_at=at + timedelta(hours=1), bucket_s=60,
        utilization_ratio=series, memory_used_bytes=unknown, power_w=series, temperature_c=series,
    )  # fmt: skip


def test_four_plots_fit_80_columns_and_say_what_is_unknown() -> None:
    lines = plots(history((0.5,) * 30 + (None,) * 30))
    assert lines[0] == "n1:0  H100"
    assert "Utilization: mean 50%, max 50%" in lines
    assert "Memory: unknown" in lines
    assert max(map(len, lines)) <= 80
    first = lines.index("Utilization: mean 50%, max 50%") + 1
    columns = {column for _, column in dots(lines[first : first + 6])}
    assert (min(columns), max(columns)) == (0, 70)


def test_the_metrics_of_a_lease_fit_80_columns_with_the_whole_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 80)
    at = datetime(2026, 11, 28, tzinfo=UTC)
    busy = MetricSeries(mean=(1.0,) * 32, max=(1.0,) * 32, known_s=(1.0,) * 32)
    gpu = GpuMetrics(
        uuid="GPU-1",
        node="a-node-with-a-long-name",
        index=0,
        bucket_s=1.0,
        start_at=tuple(at + timedelta(seconds=second) for second in range(32)),
        seconds=(1.0,) * 32,
        utilization_ratio=busy,
        memory_used_bytes=busy,
        power_w=busy,
        temperature_c=busy,
        gpu_hours_held=0.00085,
        gpu_hours_used=0.0005,
        gpu_hours_unknown=0.000088,
    )
    hours = {"gpu_hours_held": 0.00085, "gpu_hours_used": 0.0005, "gpu_hours_unknown": 0.000088}
    shown = render(LeaseMetrics(lease_id="lease-1", gpus=(gpu,), **hours))
    table, _, total = shown.partition("\n\n")
    assert max(map(len, table.splitlines())) <= 80
    assert table.count("\N{FULL BLOCK}") == 32
    assert "0.00009 unknown" in total


def test_a_gpu_without_readings_is_unknown_and_not_zero() -> None:
    unknown = [line for line in plots(history((None,) * 60)) if line]
    assert unknown[1:] == [f"{name}: unknown" for name in ("Utilization", "Memory", "Power", "Temperature")]
    assert "0%" not in render_gpu(history((None,) * 60))
    assert plots(JobMetrics(job_id="job-1", attempts=(), gpu_hours_held=0, gpu_hours_used=0, gpu_hours_unknown=0)) == [
        "There is nothing to plot yet."
    ]


def test_the_axis_names_both_ends() -> None:
    assert axis("12:00:00", "13:00:00") == " " * 9 + "12:00:00" + " " * 55 + "13:00:00"


@pytest.mark.parametrize(
    ("word", "is_gpu"),
    [
        ("0", True), ("127", True), ("1234", False), ("gpubox:3", True), ("GPU-3f1c", True), ("job-82c4", False),
        ("lease-82c4", False), ("sweep[3]", False), ("82c4", False), ("train", False), ("MIG-3f1c", True),
    ],
)  # fmt: skip
def test_a_word_means_a_gpu_or_a_job(word: str, is_gpu: bool) -> None:
    assert (GPU_WORD.fullmatch(word) is not None) == is_gpu
