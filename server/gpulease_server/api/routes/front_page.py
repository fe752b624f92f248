"""The front page as text, for curl. Browsers get the dashboard instead (`gpulease_server.dashboard`)."""

from __future__ import annotations

import asyncio
import itertools

from fastapi import Response
from fastapi.responses import PlainTextResponse

from gpulease_protocol.status_table import render_status
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.redaction import redact_gpu, redact_job
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.api.long_lists import in_slices
from gpulease_server.api.routes.gpus import last_use
from gpulease_server.core.order import Positions, in_order
from gpulease_server.core.presentation import GpuList, lease_view, node_list

router = new_router()
MAX_WAITING = 200
"""Waiting requests that are shown."""


@router.get("/", operation_id="getStatusTable", tags=["service"], response_class=PlainTextResponse)
async def front_page(daemon: DaemonDep, caller: CallerDep, response: Response) -> str:
    """GPUs, holders and the queue as a text table. A client that prefers `text/html` gets the dashboard instead."""
    response.headers["Vary"] = "Accept"
    now, ledger, policy = daemon.now(), daemon.ledger, daemon.policy
    gpus, add_last_use, positions = GpuList(ledger, now, policy), last_use(daemon), Positions(ledger)
    held = [lease for gpu in ledger.gpus.values() if (lease := ledger.leases.get(gpu.lease_id or "")) is not None]
    waiting = list(itertools.islice(in_order(ledger), MAX_WAITING))
    records = {record.lease.id: record for record in (*held, *waiting)}.values()
    live = [job for one in records if (job := ledger.live_jobs.get(one.lease.job_id or "")) is not None]
    nodes, node_of = node_list(ledger, now, policy)
    notice = f"{daemon.writer.problem}\n\n" if daemon.writer.problem else ""
    more, reservations = len(ledger.queue) - len(waiting), tuple(ledger.calendar.in_order())
    shown = (
        await in_slices(gpus.records(), lambda gpu: redact_gpu(caller, add_last_use(gpus.view(gpu)), daemon.access)),
        await in_slices(records, lambda record: lease_view(ledger, record, now, policy, positions)),
        await in_slices(live, lambda record: redact_job(caller, record, ledger, daemon.access)),
        now.at,
        await in_slices(nodes, node_of),
    )
    # In a thread: the table of 2,400 GPUs takes as long as hundreds of requests.
    table = await asyncio.to_thread(render_status, *shown, more_waiting=max(0, more), reservations=reservations)
    return notice + table
