"""The front page as text, for curl. Browsers get the dashboard instead (`gpulease_server.dashboard`)."""

from __future__ import annotations

import itertools

from fastapi import Response
from fastapi.responses import PlainTextResponse

from gpulease_protocol.status_table import render_status
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.redaction import redact_gpu, redact_job
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.api.routes.gpus import with_last_use
from gpulease_server.core.order import Positions, in_order
from gpulease_server.core.presentation import gpu_views, lease_view, node_view

router = new_router()
MAX_WAITING = 200
"""Waiting requests that are shown."""


@router.get("/", operation_id="getStatusTable", tags=["service"], response_class=PlainTextResponse)
async def front_page(daemon: DaemonDep, caller: CallerDep, response: Response) -> str:
    """GPUs, holders and the queue as a text table. A client that prefers `text/html` gets the dashboard instead."""
    response.headers["Vary"] = "Accept"
    now, ledger = daemon.now(), daemon.ledger
    views = with_last_use(daemon, gpu_views(ledger, now, daemon.policy))
    gpus = [redact_gpu(caller, gpu, daemon.access) for gpu in views]
    held = [lease for gpu in ledger.gpus.values() if (lease := ledger.leases.get(gpu.lease_id or "")) is not None]
    waiting = list(itertools.islice(in_order(ledger), MAX_WAITING))
    records = {record.lease.id: record for record in (*held, *waiting)}.values()
    positions = Positions(ledger)
    leases = [lease_view(ledger, record, now, daemon.policy, positions) for record in records]
    live = [job for lease in leases if (job := ledger.live_jobs.get(lease.job_id or "")) is not None]
    jobs = [redact_job(caller, record, ledger, daemon.access) for record in live]
    nodes = [node_view(ledger, node, now, daemon.policy) for node in ledger.nodes.values()]
    notice = f"{daemon.writer.problem}\n\n" if daemon.writer.problem else ""
    more = len(ledger.queue) - len(waiting)
    reservations = ledger.calendar.in_order()
    shown = gpus, leases, jobs, now.at, nodes
    return notice + render_status(*shown, more_waiting=max(0, more), reservations=reservations)
