"""The front page as text, for curl. Browsers get the dashboard instead (`gpulease_server.dashboard`)."""

from __future__ import annotations

from fastapi import Response
from fastapi.responses import PlainTextResponse

from gpulease_protocol.status_table import render_status
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.redaction import redact_gpu, redact_job
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.core.presentation import gpu_views, lease_view, node_view

router = new_router()


@router.get("/", tags=["service"], response_class=PlainTextResponse)
async def front_page(daemon: DaemonDep, caller: CallerDep, response: Response) -> str:
    """GPUs, holders and the queue as a text table. A client that prefers `text/html` gets the dashboard instead."""
    response.headers["Vary"] = "Accept"
    now, ledger = daemon.now(), daemon.ledger
    gpus = [redact_gpu(caller, gpu, daemon.access) for gpu in gpu_views(ledger, now, daemon.policy)]
    live = [record for record in ledger.leases.values() if record.lease.ended_at is None]
    leases = [
        lease_view(ledger, record, now, daemon.policy) for record in sorted(live, key=lambda record: record.number)
    ]
    jobs = [redact_job(caller, record, ledger, daemon.access) for record in ledger.live_jobs.values()]
    nodes = [node_view(ledger, node, now, daemon.policy) for node in ledger.nodes.values()]
    standby_notice = f"{daemon.writer.problem}\n\n" if daemon.leadership.standby_copy else ""
    return standby_notice + render_status(gpus, leases, jobs, now.at, nodes)
