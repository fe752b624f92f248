"""Metrics of a lease, with or without a job: what its GPUs showed over its life."""

from __future__ import annotations

import asyncio

from fastapi import Response
from pydantic import TypeAdapter

from gpulease_protocol.errors import NotFound
from gpulease_protocol.job_metrics import MAX_POINTS, LeaseMetrics
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.api.problems import MAYBE_PRUNED, error_responses
from gpulease_server.api.routes.job_metrics import MAX_ANSWER_POINTS, Points, lease_metrics
from gpulease_server.store import gpu_metrics_table
from gpulease_server.store.held_gpus import changes_of

router = new_router("/v1/leases", "leases")
LEASE_JSON: TypeAdapter[LeaseMetrics] = TypeAdapter(LeaseMetrics)


@router.get(
    "/{lease_id}/metrics",
    operation_id="getLeaseMetrics",
    response_model=LeaseMetrics,
    responses=error_responses("not_found"),
)
async def show_lease_metrics(lease_id: str, daemon: DaemonDep, points: Points = MAX_POINTS) -> Response:
    """Utilization, memory, power and temperature of a lease's GPUs over its life, and its GPU-hours.

    Buckets are those of the metrics of jobs. Unknown values are null.
    """
    live = daemon.recorder.encoded(lease_id)
    record = daemon.ledger.leases.get(lease_id)

    def answer() -> bytes:
        found = record or daemon.store.lease(lease_id)
        if found is None:
            raise NotFound(f"There is no lease {lease_id}.", remedy=MAYBE_PRUNED.format("leases"))
        content = gpu_metrics_table.load(daemon.store.engine, [lease_id]).get(lease_id) if live is None else live
        most = max(1, min(points, MAX_ANSWER_POINTS // max(1, len(found.lease.gpus))))
        changes = changes_of(daemon.store.engine, [lease_id]).get(lease_id, ())
        return LEASE_JSON.dump_json(lease_metrics(found, content, daemon.now().at, most, changes))

    return Response(await asyncio.to_thread(answer), media_type="application/json")
