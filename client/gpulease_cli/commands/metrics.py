"""`gpulease metrics`."""

from __future__ import annotations

import sys

from gpulease.client import Client
from gpulease_cli import names, output
from gpulease_cli.commands.jobs import JOB
from gpulease_cli.help_format import command
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.job_metrics import GpuHours, GpuMetrics, JobMetrics, MetricSeries
from gpulease_protocol.status_table import align_columns, gibibytes

SPARKS = "▁▂▃▄▅▆▇█"
UNKNOWN = "·"
SPARK_COLUMNS = 40
HEADS = ("ATTEMPT", "GPU", "HELD", "USED", "UNKNOWN", "UTIL", "MEMORY", "POWER", "TEMP", "UTILIZATION")


@command(examples=("gpulease metrics job-82c4b92c1f47e880", "gpulease metrics --csv job-82c4b92c1f47e880"))
@JOB
@option("--csv", is_flag=True, help="Print every bucket of every GPU as CSV, for pandas or numpy.")
@JSON
def metrics(job: str, csv: bool, json: bool) -> None:
    """Show a job's GPU utilization, memory and power over time, and its GPU-hours held and used."""
    if csv and json:
        raise InvalidRequest("--csv and --json cannot be combined.", remedy="Use one of them.")
    with Client() as client:
        job = names.find_job(client, job).id
        if csv:
            sys.stdout.write(client.job_metrics_csv(job))
            return
        job_metrics = client.job_metrics(job, None if json else SPARK_COLUMNS)
    if json:
        output.print_json(job_metrics)
    else:
        output.print_table(render(job_metrics))


def render(job_metrics: JobMetrics) -> str:
    """A line for each GPU of each attempt: GPU-hours, means, maxima, utilization over time; below them the totals."""
    rows = [
        (str(attempt.attempt), f"{gpu.node}:{gpu.index}", *_hours(gpu), *_measures(gpu), spark(gpu.utilization_ratio))
        for attempt in job_metrics.attempts
        for gpu in attempt.gpus
    ]
    if not rows:
        return f"{job_metrics.job_id} has not been granted a GPU yet.\n"
    held, used, unknown = _hours(job_metrics)
    table = align_columns(HEADS, rows)
    return table + f"\nGPU-hours: {held} held, {used} used (utilization times time), {unknown} unknown\n"


def spark(series: MetricSeries) -> str:
    """A ratio over time, one character per bucket; a dot where it is unknown."""
    return "".join(UNKNOWN if mean is None else SPARKS[min(int(mean * len(SPARKS)), 7)] for mean in series.mean)


def _hours(spent: GpuHours) -> tuple[str, str, str]:
    held, used, unknown = (
        f"{hours:.2f}" if hours >= 1 else f"{hours:.2g}"
        for hours in (spent.gpu_hours_held, spent.gpu_hours_used, spent.gpu_hours_unknown)
    )
    return held, used, unknown


def _measures(gpu: GpuMetrics) -> tuple[str, str, str, str]:
    ratio, memory = _mean(gpu.utilization_ratio), _maximum(gpu.memory_used_bytes)
    power, heat = _mean(gpu.power_w), _maximum(gpu.temperature_c)
    return (
        "?" if ratio is None else f"{ratio:.0%}",
        "?" if memory is None else f"max {gibibytes(int(memory))} GiB",
        "?" if power is None else f"{power:.0f} W",
        "?" if heat is None else f"max {heat:.0f} C",
    )


def _mean(series: MetricSeries) -> float | None:
    """The mean over the time for which it is known."""
    parts = [(mean, seconds) for mean, seconds in zip(series.mean, series.known_s, strict=True) if mean is not None]
    known_s = sum(seconds for _, seconds in parts)
    return sum(mean * seconds for mean, seconds in parts) / known_s if known_s > 0 else None


def _maximum(series: MetricSeries) -> float | None:
    return max((value for value in series.max if value is not None), default=None)
