"""Metrics of a job: what its GPUs showed over its life, as JSON or CSV."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

from fastapi import Header, Query, Response
from pydantic import TypeAdapter

from gpulease_protocol.errors import NotFound
from gpulease_protocol.job_metrics import (
    MAX_POINTS,
    AttemptMetrics,
    GpuHours,
    GpuMetrics,
    JobMetrics,
    LeaseMetrics,
    MetricSeries,
)
from gpulease_protocol.model import Device, Lease
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.daemon_state import DaemonDep, DaemonState
from gpulease_server.api.problems import MAYBE_PRUNED, error_responses
from gpulease_server.core.records import LeaseRecord
from gpulease_server.runtime.gpu_metrics.recorder import decode_series
from gpulease_server.runtime.gpu_metrics.time_series import DIGITS, MEASURES, DamagedSeries, TimeSeries
from gpulease_server.store import gpu_metrics_table
from gpulease_server.store.held_gpus import NodeChange, changes_of, held_gpus

router = new_router("/v1/jobs", "jobs")
log = logging.getLogger("gpulease.metrics")

MAX_ANSWER_POINTS = 60_000
"""Buckets in one answer, for all GPUs and attempts: 100 GPUs at full resolution, more with wider buckets."""
CSV = "text/csv; charset=utf-8"
JSON: TypeAdapter[JobMetrics] = TypeAdapter(JobMetrics)
Points = Annotated[
    int, Query(ge=1, le=MAX_POINTS, description="Maximum number of buckets for each GPU; fewer are wider.")
]


class Format(StrEnum):
    """Format of the answer."""

    JSON = "json"
    CSV = "csv"


@router.get(
    "/{job_id}/metrics",
    operation_id="getJobMetrics",
    response_model=JobMetrics,
    responses=error_responses("not_found") | {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
async def show_metrics(
    job_id: str,
    daemon: DaemonDep,
    format: Annotated[
        Format | None, Query(description="`json` or `csv`; if absent, CSV if `Accept` names text/csv.")
    ] = None,
    points: Points = MAX_POINTS,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Utilization, memory, power and temperature of a job's GPUs over its life, and its GPU-hours.

    Buckets are 1 s wide at first. Whenever a GPU has 600, they are merged in pairs, so that a job of any age has 300
    to 600. Unknown values are null in JSON and `nan` in CSV.
    """
    leases = await asyncio.to_thread(gpu_metrics_table.leases_of_job, daemon.store.engine, job_id)
    if not leases:
        raise NotFound(f"There is no job {job_id}.", remedy=MAYBE_PRUNED.format("jobs"))
    as_csv = format is Format.CSV or (format is None and "text/csv" in accept)
    granted = [record for record in leases if record.lease.granted_at is not None]
    live = {record.lease.id: daemon.recorder.encoded(record.lease.id) for record in granted}
    return await asyncio.to_thread(_answer, daemon, job_id, granted, live, points, as_csv)


def _answer(
    daemon: DaemonState,
    job_id: str,
    leases: list[LeaseRecord],
    live: Mapping[str, bytes | None],
    points: int,
    as_csv: bool,
) -> Response:
    saved = gpu_metrics_table.load(
        daemon.store.engine, [lease_id for lease_id, content in live.items() if content is None]
    )
    contents = {lease_id: saved.get(lease_id) if content is None else content for lease_id, content in live.items()}
    held = sum(len(record.lease.gpus) for record in leases)
    points = max(1, min(points, MAX_ANSWER_POINTS // max(1, held)))
    changes = changes_of(daemon.store.engine, live)
    metrics = job_metrics(job_id, leases, contents, daemon.now().at, points, changes)
    if as_csv:
        return Response(csv(metrics), media_type=CSV)
    return Response(JSON.dump_json(metrics), media_type="application/json")


def job_metrics(
    job_id: str,
    leases: list[LeaseRecord],
    contents: Mapping[str, bytes | None],
    now: datetime,
    points: int,
    changes: Mapping[str, Sequence[NodeChange]],
) -> JobMetrics:
    """The noun, from the leases of a job's attempts, the time series of each, and how the nodes of each changed."""
    attempts = tuple(
        _attempt(number, record.lease, contents.get(record.lease.id), now, points, changes.get(record.lease.id, ()))
        for number, record in enumerate(leases, 1)
    )
    return JobMetrics(job_id=job_id, attempts=attempts, **_sum(attempts))


def _attempt(
    number: int, lease: Lease, content: bytes | None, now: datetime, points: int, changes: Sequence[NodeChange]
) -> AttemptMetrics:
    gpus, given_back = _gpus(lease, content, now, points, changes)
    assert lease.granted_at is not None
    return AttemptMetrics(
        attempt=number,
        lease_id=lease.id,
        held_from_at=lease.granted_at,
        held_until_at=lease.ended_at,
        gpus=gpus,
        **_sum((*gpus, *given_back)),
    )


def lease_metrics(
    record: LeaseRecord, content: bytes | None, now: datetime, points: int, changes: Sequence[NodeChange]
) -> LeaseMetrics:
    """The noun of one lease, from its time series, and how its nodes changed."""
    lease = record.lease
    gpus, given_back = _gpus(lease, content, now, points, changes)
    return LeaseMetrics(
        lease_id=lease.id,
        held_from_at=lease.granted_at,
        held_until_at=lease.ended_at if lease.granted_at is not None else None,
        gpus=gpus,
        **_sum((*gpus, *given_back)),
    )


def _gpus(
    lease: Lease, content: bytes | None, now: datetime, points: int, changes: Sequence[NodeChange]
) -> tuple[tuple[GpuMetrics, ...], tuple[GpuHours, ...]]:
    """What the GPUs showed that a lease has, or had last; and the hours of those that it gave back before: nodes of
    an elastic lease, of which only the UUIDs are known."""
    granted_at = lease.granted_at
    if granted_at is None:
        return (), ()
    held_s = _held_s(lease, granted_at, lease.ended_at or now, changes)
    try:
        series = {} if content is None else decode_series(content)
    except DamagedSeries as error:
        log.error("the metrics of lease %s cannot be read: %s", lease.id, error)
        series = {}
    gpus = tuple(
        _gpu(device, series.get(device.uuid) or TimeSeries.empty(), granted_at, held_s[device.uuid], points)
        for device in lease.gpus
    )
    given_back = held_s.keys() - {device.uuid for device in lease.gpus}
    return gpus, tuple(_hours(series.get(uuid) or TimeSeries.empty(), held_s[uuid]) for uuid in sorted(given_back))


def _held_s(lease: Lease, granted_at: datetime, end: datetime, changes: Sequence[NodeChange]) -> dict[str, float]:
    """By UUID: for how long a lease held each GPU that it ever had."""
    last: dict[str, list[str]] = {}
    for device in lease.gpus:
        last.setdefault(device.node, []).append(device.uuid)
    held_s = dict.fromkeys((device.uuid for device in lease.gpus), 0.0)
    for part in held_gpus(last, granted_at, lease.ended_at, changes):
        for uuid in part.uuids:
            held_s[uuid] = held_s.get(uuid, 0.0) + part.seconds_between(granted_at, end)
    return held_s


def _hours(series: TimeSeries, held_s: float) -> GpuHours:
    return GpuHours(
        gpu_hours_held=held_s / 3600,
        gpu_hours_used=series.used_s() / 3600,
        gpu_hours_unknown=max(0.0, held_s - series.known_s()) / 3600,
    )


def _gpu(device: Device, series: TimeSeries, granted_at: datetime, held_s: float, points: int) -> GpuMetrics:
    hours = _hours(series, held_s)
    series.downsample(points)
    width_s, count = series.width_s, series.closed + (series.until_s > series.closed * series.width_s)
    return GpuMetrics(
        gpu_hours_held=hours.gpu_hours_held,
        gpu_hours_used=hours.gpu_hours_used,
        gpu_hours_unknown=hours.gpu_hours_unknown,
        uuid=device.uuid,
        node=device.node,
        index=device.index,
        name=device.name,
        bucket_s=width_s,
        start_at=tuple(granted_at + timedelta(seconds=place * width_s) for place in range(count)),
        seconds=tuple(round(min(width_s, series.until_s - place * width_s), 3) for place in range(count)),
        **{name: _metric_series(series, place, count, DIGITS[name]) for place, name in enumerate(MEASURES)},
    )


def _metric_series(series: TimeSeries, measure: int, count: int, digits: int) -> MetricSeries:
    known_s, *values = series.tracks[measure].columns()
    mean, high = (tuple(None if one is None else round(one, digits) for one in column[:count]) for column in values)
    return MetricSeries(mean=mean, max=high, known_s=tuple(round(seconds, 3) for seconds in known_s[:count]))


def _sum(parts: Iterable[Any]) -> dict[str, float]:
    parts = list(parts)
    names = ("gpu_hours_held", "gpu_hours_used", "gpu_hours_unknown")
    return {name: sum(getattr(part, name) for part in parts) for name in names}


def csv(metrics: JobMetrics) -> str:
    """One line for each bucket of each GPU. Unknown values are `nan`, which pandas and numpy understand.

    Only the node's name can contain a comma or a quote; it is quoted if it does.
    """
    heads = ["attempt", "node", "index", "uuid", "start_at", "start_s", "seconds", "known_s"]
    heads += [f"{name}_{what}" for name in MEASURES for what in ("mean", "max")]
    lines = [",".join(heads)]
    for attempt in metrics.attempts:
        for gpu in attempt.gpus:
            curves = [getattr(gpu, name) for name in MEASURES]
            who = f"{attempt.attempt},{_quoted(gpu.node)},{gpu.index},{gpu.uuid}"
            for place, start_at in enumerate(gpu.start_at):
                numbers = [place * gpu.bucket_s, gpu.seconds[place], gpu.utilization_ratio.known_s[place]]
                numbers += [column[place] for curve in curves for column in (curve.mean, curve.max)]
                at = start_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
                lines.append(f"{who},{at}," + ",".join("nan" if one is None else f"{one:.12g}" for one in numbers))
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(one in text for one in ',"\r\n') else text
