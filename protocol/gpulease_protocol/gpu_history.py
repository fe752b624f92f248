"""What GPUs showed, leased or not: the nouns of `GET /v1/gpus/history` and `GET /v1/gpus/{uuid}/history`.

All lists of one answer have the same length, an entry for each bucket, oldest first. Bucket i begins at `from_at`
plus i times `bucket_s`, and ends where the next one begins. What is not known is null, so that a plot has a gap
there."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TypedDict

from gpulease_protocol.job_metrics import MetricSeries
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun

MAX_HISTORY_POINTS = 1000
"""Buckets of one GPU in an answer, at most."""


class HistoryChoice(TypedDict, total=False):
    """What is asked for; each is optional."""

    from_at: datetime | None
    """Begin of the period."""
    to_at: datetime | None
    """Its end; now if it is not given."""
    last_s: float | None
    """The period in place of `from_at`: so many seconds up to its end; an hour if neither is given."""
    points: int | None
    """Buckets of each GPU, at most (2 to 1000)."""
    node: str | None
    """Of all GPUs: only those of this node."""
    measures: Iterable[str]
    """Of all GPUs: names of measures, such as `power_w`."""


def query_of(choice: HistoryChoice) -> tuple[tuple[str, str], ...]:
    """The choice as query parameters."""
    from_at, to_at = choice.get("from_at"), choice.get("to_at")
    given = {
        "from": from_at and from_at.isoformat(),
        "to": to_at and to_at.isoformat(),
        "last_s": choice.get("last_s"),
        "points": choice.get("points"),
        "node": choice.get("node"),
        "measures": ",".join(choice.get("measures", ())) or None,
    }
    return tuple((name, str(value)) for name, value in given.items() if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryWindow(Noun):
    """The period of an answer, and how it is divided."""

    from_at: datetime
    """When the first bucket begins."""
    to_at: datetime
    """End of the period; the last bucket may end later."""
    bucket_s: int
    """Length of a bucket in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHistory(HistoryWindow):
    """What one GPU showed in a period."""

    uuid: str
    """The GPU."""
    node: str | None = None
    """Its node; null if the daemon no longer knows the GPU."""
    index: int | None = None
    """Its index on the node."""
    name: str | None = None
    """Its product name."""
    utilization_ratio: MetricSeries
    """Share of time in which a kernel ran, 0 to 1."""
    memory_used_bytes: MetricSeries
    """Memory in use, in steps of 16 MiB."""
    power_w: MetricSeries
    """Power draw in watts."""
    temperature_c: MetricSeries
    """Core temperature in degrees Celsius."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMeans(Noun):
    """The means of one GPU, for each measure that was asked for."""

    uuid: str
    """The GPU."""
    node: str
    """Its node."""
    index: int
    """Its index on the node."""
    name: str | None = None
    """Its product name."""
    utilization_ratio: tuple[float | None, ...] | None = None
    """Share of time in which a kernel ran, 0 to 1; null if it was not asked for."""
    memory_used_bytes: tuple[float | None, ...] | None = None
    """Memory in use, in steps of 16 MiB; null if it was not asked for."""
    power_w: tuple[float | None, ...] | None = None
    """Power draw in watts; null if it was not asked for."""
    temperature_c: tuple[float | None, ...] | None = None
    """Core temperature in degrees Celsius; null if it was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHistory(HistoryWindow):
    """What all GPUs showed in a period."""

    gpus: tuple[GpuMeans, ...]
    """By node and index, as in `GET /v1/gpus`."""
