"""The history of GPUs: what each showed in a period, leased or not."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import Depends, Query, Response
from pydantic import TypeAdapter

from gpulease_protocol.bounds import MAX_NAME
from gpulease_protocol.errors import InvalidRequest, NotFound
from gpulease_protocol.gpu_history import MAX_HISTORY_POINTS, FleetHistory, GpuHistory, GpuMeans
from gpulease_protocol.gpu_uuid import canonical_uuid
from gpulease_protocol.job_metrics import MetricSeries
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Device
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.daemon_state import DaemonDep, DaemonState
from gpulease_server.api.problems import error_responses
from gpulease_server.api.time_parameters import Moment, PeriodEnd, in_utc
from gpulease_server.core.presentation import GpuList
from gpulease_server.runtime.gpu_metrics.history import Window, curve, window
from gpulease_server.runtime.gpu_metrics.history_recorder import Copied, read_blocks
from gpulease_server.runtime.gpu_metrics.time_series import DIGITS, MEASURES
from gpulease_server.store import gpu_metrics_table

router = new_router("/v1/gpus", "gpus")

DEFAULT_LAST_S = 3600.0
MAX_LAST_S = 100 * 366 * 86400.0
FLEET_POINTS, GPU_POINTS = 61, 300
"""Buckets of one GPU, unless the caller says how many: the last hour by the minute, which begins within a minute."""
AT_ONCE = 100
"""The history of at most so many GPUs is in memory at a time: 25 kB each for a year."""
MAX_ANSWER_POINTS = 60_000
"""Buckets in one answer, of all GPUs and measures."""
FLEET_JSON: TypeAdapter[FleetHistory] = TypeAdapter(FleetHistory)


@dataclass(frozen=True, slots=True)
class Period:
    """The period that a request is about, in seconds since the epoch."""

    from_s: float
    to_s: float
    now_s: float

    def window(self, points: int) -> Window:
        """The period in at most so many buckets."""
        return window(self.from_s, self.to_s, self.now_s, max(2, points))

    def bounds(self, span: Window) -> dict[str, datetime | int]:
        """The fields of `HistoryWindow`."""
        begin_at = datetime.fromtimestamp(span.from_s, UTC)
        end_at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=self.to_s)
        return {"from_at": begin_at, "to_at": end_at, "bucket_s": span.bucket_s}


async def requested_period(
    daemon: DaemonDep,
    from_at: Annotated[
        Moment | None, Query(alias="from", description="Begin of the period, ISO 8601; if absent, see `last_s`.")
    ] = None,
    to_at: PeriodEnd = None,
    last_s: Annotated[
        float | None,
        Query(gt=0, le=MAX_LAST_S, description="The period is this many seconds up to `to`; if absent, an hour."),
    ] = None,
) -> Period:
    """The period of the query. Raises InvalidRequest if it is none."""
    if from_at is not None and last_s is not None:
        raise InvalidRequest("from, last_s: cannot be combined.", remedy="Use one of them.")
    now_s = daemon.now().at.timestamp()
    to_s = min(in_utc(to_at).timestamp() if to_at else now_s, now_s)
    from_s = max(0.0, in_utc(from_at).timestamp() if from_at else to_s - (last_s or DEFAULT_LAST_S))
    if from_s >= to_s:
        raise InvalidRequest("from: must be before to, and before now.")
    return Period(from_s, to_s, now_s)


PeriodDep = Annotated[Period, Depends(requested_period)]
Points = Query(ge=2, le=MAX_HISTORY_POINTS, description="Maximum number of buckets for each GPU; fewer are wider.")


@router.get("/history", operation_id="listGpuHistories", response_model=FleetHistory)
async def list_histories(
    daemon: DaemonDep,
    period: PeriodDep,
    points: Annotated[int, Points] = FLEET_POINTS,
    node: Annotated[str | None, Query(description="Only GPUs of this node.", max_length=MAX_NAME)] = None,
    measures: Annotated[
        str,
        Query(description=f"Comma-separated, of {', '.join(f'`{name}`' for name in MEASURES)}.", max_length=200),
    ] = MEASURES[0],
) -> Response:
    """What every GPU showed in a period, leased or not: the means of some measures.

    Readings are kept by the second for an hour, by the minute for a day, by the quarter of an hour for a week, and by
    the hour as long as ended leases (`serve --keep-days`). Buckets are as fine as that and `points` allow, and wider if
    the answer would have more than 60,000.
    """
    asked = _measures(measures)
    listed = GpuList(daemon.ledger, daemon.now(), daemon.policy)
    devices = [gpu.device for gpu in listed.records() if node is None or gpu.device.node == node]
    span = period.window(min(points, MAX_ANSWER_POINTS // max(1, len(devices) * len(asked))))
    parts = [devices[at : at + AT_ONCE] for at in range(0, len(devices), AT_ONCE)]
    copied: dict[str, Copied] = {}
    for part in parts:
        copied |= daemon.recorder.history.copy([device.uuid for device in part], span)
        await asyncio.sleep(0)  # that of 10,000 GPUs takes 0.1 s

    def answer() -> bytes:
        gpus: list[GpuMeans] = []
        for part in parts:
            blocks = read_blocks(daemon.store, [device.uuid for device in part], span, copied)
            gpus += (_means(device, span, blocks[device.uuid], asked) for device in part)
        return FLEET_JSON.dump_json(FleetHistory(**period.bounds(span), gpus=tuple(gpus)))  # type: ignore[arg-type]

    return Response(await asyncio.to_thread(answer), media_type="application/json")


@router.get("/{uuid}/history", operation_id="getGpuHistory", responses=error_responses("not_found"))
async def show_history(
    uuid: str, daemon: DaemonDep, period: PeriodDep, points: Annotated[int, Points] = GPU_POINTS
) -> GpuHistory:
    """What one GPU showed in a period, leased or not, also one that is gone.

    Mean, maximum and the seconds that are known, for each bucket; see `GET /v1/gpus/history` for how long what is kept.
    """
    uuid = canonical_uuid(uuid)
    record = daemon.ledger.gpus.get(uuid)
    span = period.window(points)
    copied, device = daemon.recorder.history.copy([uuid], span), None if record is None else record.device
    return await asyncio.to_thread(_history, daemon, uuid, device, period, span, copied)


def _history(
    daemon: DaemonState, uuid: str, device: Device | None, period: Period, span: Window, copied: dict[str, Copied]
) -> GpuHistory:
    if device is None and not gpu_metrics_table.has_history(daemon.store.engine, uuid):
        raise NotFound(f"There is no GPU {uuid}.", remedy="`GET /v1/gpus` lists all GPUs.")
    blocks = read_blocks(daemon.store, [uuid], span, copied)[uuid]
    shown = {} if device is None else {"node": device.node, "index": device.index, "name": device.name}
    series = {name: _series(measure, span, blocks) for measure, name in enumerate(MEASURES)}
    return GpuHistory(uuid=uuid, **shown, **period.bounds(span), **series)  # type: ignore[arg-type]


def _means(device: Device, span: Window, blocks: Copied, measures: list[int]) -> GpuMeans:
    means = {
        MEASURES[measure]: _rounded(curve(measure, span, blocks).mean, DIGITS[MEASURES[measure]])
        for measure in measures
    }
    return GpuMeans(uuid=device.uuid, node=device.node, index=device.index, name=device.name, **means)


def _series(measure: int, span: Window, blocks: Copied) -> MetricSeries:
    found, digits = curve(measure, span, blocks), DIGITS[MEASURES[measure]]
    return MetricSeries(mean=_rounded(found.mean, digits), max=_rounded(found.high, digits), known_s=found.known_s)


def _rounded(values: tuple[float | None, ...], digits: int) -> tuple[float | None, ...]:
    return tuple(None if value is None else round(value, digits) for value in values)


def _measures(text: str) -> list[int]:
    """The places in `MEASURES`. Raises InvalidRequest."""
    names = text.split(",")
    if unknown := [name for name in names if name not in MEASURES]:
        raise InvalidRequest(
            f"measures: there is no measure {unknown[0]!r}.", remedy=f"Name some of {', '.join(MEASURES)}."
        )
    return sorted({MEASURES.index(name) for name in names})
