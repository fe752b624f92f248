"""Events, health, and the front page."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from gpulease.errors import Unavailable
from gpulease.history import EventPage
from gpulease.table import render

from ..core.view import gpu_views, lease_view, node_view
from . import event_stream
from .daemon import TheDaemon
from .identity import TheCaller
from .problems import documented
from .routers import new_router
from .visible import event_for, gpu_for, job_for, kinds_hidden
from .waiting import Limit

router = new_router()


@router.get(
    "/v1/events",
    tags=["events"],
    response_model=EventPage,
    responses=documented("events_pruned")
    | {200: {"content": {event_stream.MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def list_events(
    daemon: TheDaemon,
    caller: TheCaller,
    request: Request,
    after: Annotated[
        int | None,
        Query(
            ge=0,
            lt=2**63,
            description="Only events with a greater `seq`; 0: from the oldest that is kept. When left out, a page"
            " begins there, too, and a stream with what comes next.",
        ),
    ] = None,
    limit: Limit = 100,
) -> Any:
    """What was recorded, oldest first. Go on with `after` = the last `seq`. When events between that and the next one
    are no longer kept, the answer is 410 with `pruned_seq`, after which the rest is. Events of bearer tokens are for
    administrators alone.

    With `Accept: text/event-stream` it is a stream of server-sent events that goes on for ever: `id` is `seq`, `event`
    the kind, `data` the event. `Last-Event-ID` goes on where an earlier one ended.
    """
    if event_stream.wanted(request):
        return await event_stream.opened(daemon, caller, request, after)
    after = after or 0
    found, pruned_seq = await asyncio.to_thread(daemon.store.history, after, limit, kinds_hidden(caller))
    if 0 < after < pruned_seq:
        raise event_stream.pruned(after, pruned_seq)
    items = tuple(event_for(caller, event, daemon.ledger) for event in found)
    following = str(found[-1].seq) if len(found) == limit else None
    last_seq = await asyncio.to_thread(daemon.store.last_seq)
    return EventPage(items=items, next=following, pruned_seq=pruned_seq, last_seq=max(last_seq, pruned_seq))


@router.get("/healthz", tags=["service"])
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", tags=["service"], responses=documented("unavailable"))
async def readyz(daemon: TheDaemon) -> Any:
    """The daemon can grant: its ledger is read, and its own host's worker has reported."""
    problem, copy = daemon.not_ready(), daemon.standing.copy
    if copy is not None:
        raise Unavailable(f"Not ready: {problem}", remedy="Ask that one.", extra={"writer": copy.writer})
    if problem is not None:
        raise Unavailable(f"Not ready: {problem}", remedy="Ask again.")
    return JSONResponse({"status": "ready"})


@router.get("/", tags=["service"], response_class=PlainTextResponse)
async def front_page(daemon: TheDaemon, caller: TheCaller, response: Response) -> str:
    """GPUs, holders and the queue as a text table. Who prefers `text/html` gets the dashboard instead."""
    response.headers["Vary"] = "Accept"
    now, ledger = daemon.now(), daemon.ledger
    gpus = [gpu_for(caller, gpu, daemon.access) for gpu in gpu_views(ledger, now, daemon.policy)]
    live = [record for record in ledger.leases.values() if record.lease.ended_at is None]
    leases = [
        lease_view(ledger, record, now, daemon.policy) for record in sorted(live, key=lambda record: record.number)
    ]
    jobs = [job_for(caller, record, ledger, daemon.access) for record in ledger.live_jobs.values()]
    nodes = [node_view(ledger, node, now, daemon.policy) for node in ledger.nodes.values()]
    copy = daemon.standing.copy
    return (f"{daemon.writer.problem}\n\n" if copy else "") + render(gpus, leases, jobs, now.at, nodes)
