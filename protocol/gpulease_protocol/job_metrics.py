"""What the GPUs of a job or a lease showed over its life: the nouns of `GET /v1/jobs/{id}/metrics` and of leases.

Beside `model` and not in it, because only these endpoints speak of them. All lists of a GPU have the same length, one
entry for each bucket, oldest first, and buckets follow each other without a hole: plot a `mean` over `start_at`. What
is not known is null, so that a plot has a gap there.
"""

from __future__ import annotations

from datetime import datetime

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun

MAX_POINTS = 600
"""Buckets that are kept of one GPU, and that an answer has of it, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSeries(Noun):
    """One measure of one GPU, an entry for each bucket."""

    mean: tuple[float | None, ...]
    """Mean over the time of the bucket for which it is known; null where it is known for none."""
    max: tuple[float | None, ...]
    """Largest value in the bucket; null where none is known."""
    known_s: tuple[float, ...]
    """For how much of the bucket it is known, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHours(Noun):
    """GPU time in hours: one GPU for one hour is 1."""

    gpu_hours_held: float
    """From the grant until the lease ended, or until now; a GPU of an elastic lease while the lease had it."""
    gpu_hours_used: float
    """Utilization times time, over the time for which utilization is known. The true figure is between this and this
    plus `gpu_hours_unknown`."""
    gpu_hours_unknown: float
    """The part of `gpu_hours_held` for which utilization is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMetrics(GpuHours):
    """What one GPU showed during one lease."""

    uuid: str
    """The GPU."""
    node: str
    """Its node."""
    index: int
    """Its index on the node."""
    name: str | None = None
    """Its product name."""
    bucket_s: float
    """Length of a bucket, a power of two: it doubles as the lease grows older."""
    start_at: tuple[datetime, ...]
    """When each bucket begins; the first when the lease was granted."""
    seconds: tuple[float, ...]
    """Length of each bucket: `bucket_s`, less for the last one."""
    utilization_ratio: MetricSeries
    """Share of time in which a kernel ran, 0 to 1."""
    memory_used_bytes: MetricSeries
    """Memory in use."""
    power_w: MetricSeries
    """Power draw in watts."""
    temperature_c: MetricSeries
    """Core temperature in degrees Celsius."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptMetrics(GpuHours):
    """One attempt of a job, with a lease and GPUs of its own."""

    attempt: int
    """Which of the job's attempts, 1 is the first."""
    lease_id: str
    """Its lease."""
    held_from_at: datetime
    """When its GPUs were granted."""
    held_until_at: datetime | None = None
    """When its lease ended; null while it holds them."""
    gpus: tuple[GpuMetrics, ...]
    """Its GPUs, in PCI order. Those that an elastic lease gave back count in its hours alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMetrics(GpuHours):
    """What the GPUs of a job showed over its life, all attempts together."""

    job_id: str
    """The job."""
    attempts: tuple[AttemptMetrics, ...]
    """Every attempt that was granted GPUs, the first one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseMetrics(GpuHours):
    """What the GPUs of a lease showed over its life."""

    lease_id: str
    """The lease."""
    held_from_at: datetime | None = None
    """When its GPUs were granted; null if it waits, or ended before."""
    held_until_at: datetime | None = None
    """When it ended; null while it holds them."""
    gpus: tuple[GpuMetrics, ...]
    """Its GPUs, in PCI order. Those that an elastic lease gave back count in its hours alone."""
