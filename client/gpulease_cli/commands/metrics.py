"""`gpulease metrics`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta

import click

from gpulease.client import Client
from gpulease_cli import id_completion, names, output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import MOMENT
from gpulease_cli.options import JSON
from gpulease_cli.parameters import argument, option
from gpulease_cli.plot import axis, plot
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.gpu_history import GpuHistory
from gpulease_protocol.job_metrics import GpuHours, GpuMetrics, JobMetrics, LeaseMetrics, MetricSeries
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.status_table import align_columns, gibibytes

SPARKS = "▁▂▃▄▅▆▇█"
UNKNOWN = "·"
SPARK_COLUMNS = 40
PLOT_POINTS = 142
HEADS = ("GPU", "HELD", "USED", "UNKNOWN", "UTIL", "MEMORY", "POWER", "TEMP", "UTILIZATION")
GPU_WORD = re.compile(r"GPU-.+|MIG-.+|.+:[0-9]+|[0-9]{1,3}", re.IGNORECASE)
"""A GPU: the beginning of a UUID, NODE:INDEX, or INDEX. Three digits are too few for the beginning of an id."""
MEASURES = ("utilization_ratio", "memory_used_bytes", "power_w", "temperature_c")


@command(
    examples=(
        "gpulease metrics job-82c4b92c1f47e880",
        "gpulease metrics --plot job-82c4b92c1f47e880",
        "gpulease metrics --plot --since 7d gpubox:0",
        "gpulease metrics --csv job-82c4b92c1f47e880",
    )
)
@argument(
    "name",
    metavar="JOB|LEASE|GPU",
    help="A job as in `gpulease show`, a lease by its id, or a GPU: UUID, NODE:INDEX, or INDEX if there is one node.",
    shell_complete=id_completion.jobs,
)
@option("--plot", "as_plot", is_flag=True, help="Plot utilization, memory, power and temperature over time.")
@option(
    "--since",
    type=MOMENT,
    metavar="TIME",
    show_default="1h",
    help="For a GPU: start of the period, such as 2026-11-23T18:00 or 03:00, or how long ago.",
)
@option("--csv", is_flag=True, help="Print every bucket of every GPU of a job as CSV, for pandas or numpy.")
@JSON
def metrics(name: str, as_plot: bool, since: datetime | None, csv: bool, json: bool) -> None:
    """Show GPU utilization, memory and power of a job, a lease or a GPU over time, and GPU-hours.

    Jobs and leases are shown from the grant of their GPUs to their end; a GPU for the last hour, or since --since.
    """
    if csv + json + as_plot > 1:
        raise InvalidRequest("--csv, --json and --plot cannot be combined.", remedy="Use one of them.")
    if since is not None and GPU_WORD.fullmatch(name) is None:
        raise InvalidRequest("--since is for GPUs: a job is shown as a whole.", remedy="Leave it out.")
    with Client() as client:
        if csv:
            sys.stdout.write(_csv(client, name))
            return
        shown = _find(client, name, since, None if json else PLOT_POINTS if as_plot else SPARK_COLUMNS)
    if json:
        output.print_json(shown)
    elif as_plot:
        click.echo("\n".join(plots(shown)))
    elif isinstance(shown, GpuHistory):
        click.echo(render_gpu(shown), nl=False)
    else:
        output.print_table(render(shown))


def _csv(client: Client, name: str) -> str:
    if GPU_WORD.fullmatch(name) is not None or _lease_without_job(client, name) is not None:
        raise InvalidRequest("--csv is for jobs.", remedy="Use `--json`.")
    return client.job_metrics_csv(names.find_job(client, name).id)


def _find(
    client: Client, name: str, since: datetime | None, points: int | None
) -> GpuHistory | LeaseMetrics | JobMetrics:
    if GPU_WORD.fullmatch(name) is not None:
        return client.gpu_history(names.find_gpu(client, name).uuid, from_at=since, points=points)
    lease_id = _lease_without_job(client, name)
    if lease_id is not None:
        return client.lease_metrics(lease_id, points)
    return client.job_metrics(names.find_job(client, name).id, points)


def _lease_without_job(client: Client, word: str) -> str | None:
    """The id of the lease with an id that begins with `word`, if no job runs under it."""
    if not word.startswith("lease-"):
        return None
    lease = client.lease_by_id(names.find(client, word, ("lease",)).id)
    return None if lease.job_id is not None else lease.id


def render(shown: JobMetrics | LeaseMetrics) -> str:
    """A line for each GPU of each attempt: GPU-hours, means, maxima, utilization over time; below them the totals."""
    heads: tuple[str, ...] = HEADS
    if isinstance(shown, LeaseMetrics):
        rows, who = [_row(gpu) for gpu in shown.gpus], shown.lease_id
    else:
        heads, who = ("ATTEMPT", *HEADS), shown.job_id
        rows = [(str(attempt.attempt), *_row(gpu)) for attempt in shown.attempts for gpu in attempt.gpus]
    if not rows:
        return f"{who} has not been granted a GPU yet.\n"
    held, used, unknown = _hours(shown)
    table = align_columns(heads, rows, output.terminal_width(), cut={"GPU": 8}, drop=("TEMP", "POWER", "UNKNOWN"))
    return table + f"\nGPU-hours: {held} held, {used} used (utilization times time), {unknown} unknown\n"


def render_gpu(history: GpuHistory) -> str:
    """A line for a GPU: means, maxima, and utilization over time; below it the period."""
    row = (_label(history), *_measures(history), spark(history.utilization_ratio))
    begin, end = (f"{at.astimezone():%Y-%m-%d %H:%M}" for at in (history.from_at, history.to_at))
    return align_columns((HEADS[0], *HEADS[4:]), [row]) + f"\nFrom {begin} to {end}\n"


@dataclass(frozen=True, slots=True)
class Panel:
    """What is plotted: curves of some GPUs over the same time."""

    title: str
    begin_at: datetime
    end_at: datetime
    gpus: Sequence[GpuHistory | GpuMetrics]


def plots(shown: GpuHistory | JobMetrics | LeaseMetrics) -> list[str]:
    """Four plots, each with the curves of all GPUs; of a job those of its last attempt."""
    panel = _panel(shown)
    if panel is None:
        return ["There is nothing to plot yet."]
    lines = [panel.title]
    day = "%H:%M:%S" if panel.end_at - panel.begin_at < timedelta(hours=12) else "%Y-%m-%d %H:%M"
    times = tuple(at.astimezone().strftime(day) for at in (panel.begin_at, panel.end_at))
    for name in MEASURES:
        series: list[MetricSeries] = [getattr(gpu, name) for gpu in panel.gpus]
        means = [mean for one in series if (mean := _mean(one)) is not None]
        most = max((value for one in series if (value := _maximum(one)) is not None), default=None)
        if most is None or not means:
            lines += ["", f"{_title(name)}: unknown"]
            continue
        low = 10.0 * (min(value for one in series for value in one.mean if value is not None) // 10)
        low = low if name == "temperature_c" else 0.0
        high = 1.0 if name == "utilization_ratio" else max(most, low + 1)
        mean = sum(means) / len(means)
        lines += ["", f"{_title(name)}: mean {_figure(name, mean)}, max {_figure(name, most)}"]
        lines += plot([one.mean for one in series], low, high, (_figure(name, high), _figure(name, low)))
        lines.append(axis(*times))
    return lines


def _panel(shown: GpuHistory | JobMetrics | LeaseMetrics) -> Panel | None:
    if isinstance(shown, GpuHistory):
        end_at = shown.from_at + timedelta(seconds=shown.bucket_s * len(shown.utilization_ratio.mean))
        return Panel(f"{_label(shown)}  {shown.name or ''}".rstrip(), shown.from_at, end_at, [shown])
    if isinstance(shown, LeaseMetrics):
        of, title = shown.gpus, shown.lease_id
    elif shown.attempts:
        of, title = shown.attempts[-1].gpus, shown.job_id
        title += f"  attempt {len(shown.attempts)}" if len(shown.attempts) > 1 else ""
    else:
        return None
    gpus = [gpu for gpu in of if gpu.start_at]
    if not gpus:
        return None
    end_at = max(gpu.start_at[-1] + timedelta(seconds=gpu.seconds[-1]) for gpu in gpus)
    return Panel(f"{title}  {', '.join(map(_label, gpus))}", gpus[0].start_at[0], end_at, gpus)


def spark(series: MetricSeries) -> str:
    """A ratio over time, one character per bucket; a dot where it is unknown."""
    return "".join(UNKNOWN if mean is None else SPARKS[min(int(mean * len(SPARKS)), 7)] for mean in series.mean)


def _label(gpu: GpuHistory | GpuMetrics) -> str:
    return gpu.uuid if gpu.node is None else f"{gpu.node}:{gpu.index}"


def _row(gpu: GpuMetrics) -> tuple[str, ...]:
    return (_label(gpu), *_hours(gpu), *_measures(gpu), spark(gpu.utilization_ratio))


def _hours(spent: GpuHours) -> tuple[str, str, str]:
    held, used, unknown = (
        f"{hours:.2f}" if hours >= 1 else f"{hours:.2g}" if hours >= 1e-4 else f"{hours:.5f}"
        for hours in (spent.gpu_hours_held, spent.gpu_hours_used, spent.gpu_hours_unknown)
    )
    return held, used, unknown


def _measures(gpu: GpuMetrics | GpuHistory) -> tuple[str, str, str, str]:
    ratio, memory = _mean(gpu.utilization_ratio), _maximum(gpu.memory_used_bytes)
    power, heat = _mean(gpu.power_w), _maximum(gpu.temperature_c)
    return (
        "?" if ratio is None else f"{ratio:.0%}",
        "?" if memory is None else f"max {gibibytes(int(memory))} GiB",
        "?" if power is None else f"{power:.0f} W",
        "?" if heat is None else f"max {heat:.0f} C",
    )


def _title(measure: str) -> str:
    return {"utilization_ratio": "Utilization", "memory_used_bytes": "Memory", "power_w": "Power"}.get(
        measure, "Temperature"
    )


def _figure(measure: str, value: float) -> str:
    match measure:
        case "utilization_ratio":
            return f"{value:.0%}"
        case "memory_used_bytes":
            return f"{gibibytes(int(value))} GiB"
        case "power_w":
            return f"{value:.0f} W"
        case _:
            return f"{value:.0f} C"


def _mean(series: MetricSeries) -> float | None:
    """The mean over the time for which it is known."""
    parts = [(mean, seconds) for mean, seconds in zip(series.mean, series.known_s, strict=True) if mean is not None]
    known_s = sum(seconds for _, seconds in parts)
    return sum(mean * seconds for mean, seconds in parts) / known_s if known_s > 0 else None


def _maximum(series: MetricSeries) -> float | None:
    return max((value for value in series.max if value is not None), default=None)
