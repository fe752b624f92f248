"""What a job's GPUs showed over its life, as JSON and as CSV."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

from fastapi import Header, Query, Response
from pydantic import TypeAdapter

from gpulease.errors import NotFound
from gpulease.metrics import MAX_POINTS, AttemptMetrics, Curve, GpuMetrics, JobMetrics
from gpulease.model import Device, Lease

from ..core.ledger import LeaseRecord
from ..runtime.recorder import unpacked
from ..runtime.series import MEASURES, DamagedSeries, Series
from ..store import metrics
from .daemon import Daemon, TheDaemon
from .problems import PERHAPS_PRUNED, documented
from .routers import new_router

router = new_router("/v1/jobs", "jobs")
log = logging.getLogger("gpulease.metrics")

MAX_ANSWER_POINTS = 60_000
"""Buckets in one answer, all GPUs and attempts together: 100 GPUs whole, more of them in wider buckets."""
CSV = "text/csv; charset=utf-8"
DIGITS = {"utilization_ratio": 5, "memory_used_bytes": 0, "power_w": 2, "temperature_c": 2}
"""Digits after the point that are shown; no driver tells more, and a series keeps no more than 24 bits."""
JSON: TypeAdapter[JobMetrics] = TypeAdapter(JobMetrics)


class Format(StrEnum):
    """How metrics are written."""

    JSON = "json"
    CSV = "csv"


@router.get(
    "/{job_id}/metrics",
    response_model=JobMetrics,
    responses=documented("not_found") | {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
async def show(
    job_id: str,
    daemon: TheDaemon,
    format: Annotated[
        Format | None, Query(description="`json` or `csv`; when left out, CSV if `Accept` names text/csv.")
    ] = None,
    points: Annotated[
        int, Query(ge=1, le=MAX_POINTS, description="Buckets for each GPU, at most; fewer are wider.")
    ] = MAX_POINTS,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Utilization, memory, power and temperature of a job's GPUs over its life, and its GPU-hours.

    Buckets are 1 s wide at first; when a GPU has 600 of them, each two become one, so that it keeps 300 to 600 however
    old the job grows. What is not known is null in JSON and `nan` in CSV.
    """
    leases = await asyncio.to_thread(metrics.leases_of, daemon.store.engine, job_id)
    if not leases:
        raise NotFound(f"There is no job {job_id}.", remedy=PERHAPS_PRUNED.format("jobs"))
    as_csv = format is Format.CSV or (format is None and "text/csv" in accept)
    granted = [record for record in leases if record.lease.granted_at is not None]
    live = {record.lease.id: daemon.recorder.content(record.lease.id) for record in granted}
    return await asyncio.to_thread(_answer, daemon, job_id, granted, live, points, as_csv)


def _answer(
    daemon: Daemon, job_id: str, leases: list[LeaseRecord], live: Mapping[str, bytes | None], points: int, as_csv: bool
) -> Response:
    saved = metrics.load(daemon.store.engine, [lease_id for lease_id, content in live.items() if content is None])
    contents = {lease_id: saved.get(lease_id) if content is None else content for lease_id, content in live.items()}
    held = sum(len(record.lease.gpus) for record in leases)
    points = max(1, min(points, MAX_ANSWER_POINTS // max(1, held)))
    found = job_metrics(job_id, leases, contents, daemon.now().at, points)
    if as_csv:
        return Response(csv(found), media_type=CSV)
    return Response(JSON.dump_json(found), media_type="application/json")


def job_metrics(
    job_id: str, leases: list[LeaseRecord], contents: Mapping[str, bytes | None], now: datetime, points: int
) -> JobMetrics:
    """The noun, from the leases of a job's attempts and what is kept of each."""
    attempts = tuple(
        _attempt(number, record.lease, contents.get(record.lease.id), now, points)
        for number, record in enumerate(leases, 1)
    )
    return JobMetrics(job_id=job_id, attempts=attempts, **_sum(attempts))


def _attempt(number: int, lease: Lease, content: bytes | None, now: datetime, points: int) -> AttemptMetrics:
    granted_at = lease.granted_at
    assert granted_at is not None
    held_s = max(0.0, ((lease.ended_at or now) - granted_at).total_seconds())
    try:
        series = {} if content is None else unpacked(content)
    except DamagedSeries as error:
        log.error("the metrics of lease %s cannot be read: %s", lease.id, error)
        series = {}
    gpus = tuple(
        _gpu(device, series.get(device.uuid) or Series.empty(), granted_at, held_s, points) for device in lease.gpus
    )
    return AttemptMetrics(
        attempt=number,
        lease_id=lease.id,
        held_from_at=granted_at,
        held_until_at=lease.ended_at,
        gpus=gpus,
        **_sum(gpus),
    )


def _gpu(device: Device, series: Series, granted_at: datetime, held_s: float, points: int) -> GpuMetrics:
    used_s, known_s = series.used_s(), series.known_s()
    series.thinned(points)
    width_s, count = series.width_s, series.closed + (series.until_s > series.closed * series.width_s)
    return GpuMetrics(
        gpu_hours_held=held_s / 3600,
        gpu_hours_used=used_s / 3600,
        gpu_hours_unknown=max(0.0, held_s - known_s) / 3600,
        uuid=device.uuid,
        node=device.node,
        index=device.index,
        name=device.name,
        bucket_s=width_s,
        start_at=tuple(granted_at + timedelta(seconds=place * width_s) for place in range(count)),
        seconds=tuple(round(min(width_s, series.until_s - place * width_s), 3) for place in range(count)),
        **{name: _curve(series, place, count, DIGITS[name]) for place, name in enumerate(MEASURES)},
    )


def _curve(series: Series, measure: int, count: int, digits: int) -> Curve:
    known_s, *values = series.tracks[measure].columns()
    mean, high = (tuple(None if one is None else round(one, digits) for one in column[:count]) for column in values)
    return Curve(mean=mean, max=high, known_s=tuple(round(seconds, 3) for seconds in known_s[:count]))


def _sum(parts: Iterable[Any]) -> dict[str, float]:
    parts = list(parts)
    names = ("gpu_hours_held", "gpu_hours_used", "gpu_hours_unknown")
    return {name: sum(getattr(part, name) for part in parts) for name in names}


def csv(found: JobMetrics) -> str:
    """A line for each bucket of each GPU; what is not known is `nan`, which pandas and numpy read as they are.

    No field can contain a comma or a quote but the node's name, which is quoted where it does.
    """
    heads = ["attempt", "node", "index", "uuid", "start_at", "start_s", "seconds", "known_s"]
    heads += [f"{name}_{what}" for name in MEASURES for what in ("mean", "max")]
    lines = [",".join(heads)]
    for attempt in found.attempts:
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
