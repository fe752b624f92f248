"""`gpulease metrics`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gpulease.cli import output
from gpulease.cli.jobs import JobId
from gpulease.cli.options import Json
from gpulease.client import Client
from gpulease.errors import InvalidRequest
from gpulease.metrics import Curve, GpuHours, GpuMetrics, JobMetrics
from gpulease.table import columns, gibibytes

SPARKS = "▁▂▃▄▅▆▇█"
UNKNOWN = "·"
SPARK_COLUMNS = 40
HEADS = ("ATTEMPT", "GPU", "HELD", "USED", "UNKNOWN", "UTIL", "MEMORY", "POWER", "TEMP", "UTILIZATION")


def metrics(
    job: JobId,
    csv: Annotated[bool, typer.Option("--csv", help="Print every bucket of every GPU, for pandas or numpy.")] = False,
    json: Json = False,
) -> None:
    """Show what a job's GPUs did over its life, and its GPU-hours held and used."""
    if csv and json:
        raise InvalidRequest("--csv and --json are two forms of the same.", remedy="Give one of them.")
    with Client() as client:
        if csv:
            sys.stdout.write(client.job_metrics_csv(job))
            return
        found = client.job_metrics(job, None if json else SPARK_COLUMNS)
    if json:
        output.noun(found)
    else:
        output.text(render(found))


def render(found: JobMetrics) -> str:
    """A line for each GPU of each attempt: GPU-hours, means, maxima, and utilization over time; below them the sums."""
    rows = [
        (str(attempt.attempt), f"{gpu.node}:{gpu.index}", *_hours(gpu), *_measures(gpu), spark(gpu.utilization_ratio))
        for attempt in found.attempts
        for gpu in attempt.gpus
    ]
    if not rows:
        return f"Job {found.job_id} was not granted any GPU yet.\n"
    held, used, unknown = _hours(found)
    table = columns(HEADS, rows)
    return table + f"\nGPU-hours: {held} held, {used} used (utilization times time), {unknown} of unknown use\n"


def spark(curve: Curve) -> str:
    """A ratio over time, a character for each bucket; where nothing is known it has a dot."""
    return "".join(UNKNOWN if mean is None else SPARKS[min(int(mean * len(SPARKS)), 7)] for mean in curve.mean)


def _hours(spent: GpuHours) -> tuple[str, str, str]:
    held, used, unknown = (
        f"{hours:.2f}" if hours >= 1 else f"{hours:.2g}"
        for hours in (spent.gpu_hours_held, spent.gpu_hours_used, spent.gpu_hours_unknown)
    )
    return held, used, unknown


def _measures(gpu: GpuMetrics) -> tuple[str, str, str, str]:
    ratio, memory = _mean(gpu.utilization_ratio), _high(gpu.memory_used_bytes)
    power, heat = _mean(gpu.power_w), _high(gpu.temperature_c)
    return (
        "?" if ratio is None else f"{ratio:.0%}",
        "?" if memory is None else f"max {gibibytes(int(memory))} GiB",
        "?" if power is None else f"{power:.0f} W",
        "?" if heat is None else f"max {heat:.0f} C",
    )


def _mean(curve: Curve) -> float | None:
    """Over the time for which it is known."""
    parts = [(mean, seconds) for mean, seconds in zip(curve.mean, curve.known_s, strict=True) if mean is not None]
    known_s = sum(seconds for _, seconds in parts)
    return sum(mean * seconds for mean, seconds in parts) / known_s if known_s > 0 else None


def _high(curve: Curve) -> float | None:
    return max((value for value in curve.max if value is not None), default=None)
