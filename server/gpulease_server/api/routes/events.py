"""Events: pages of the history, or a live stream."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Query, Request, Response

from gpulease_protocol.model import EventPage
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.redaction import hidden_kind_prefix, redact_event
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.api.problems import error_responses
from gpulease_server.api.streams import event_stream
from gpulease_server.api.streams.long_poll import NEXT_LINK, Limit, link_to_next

router = new_router()


@router.get(
    "/v1/events",
    operation_id="listEvents",
    tags=["events"],
    response_model=EventPage,
    responses=error_responses("events_pruned")
    | {200: NEXT_LINK[200] | {"content": {event_stream.MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def list_events(
    daemon: DaemonDep,
    caller: CallerDep,
    request: Request,
    response: Response,
    after: Annotated[
        int | None,
        Query(
            ge=0,
            lt=2**63,
            description="Only events with a greater `seq`; 0: from the oldest that is kept. If absent, a page begins"
            " there, too, and a stream begins with the next event.",
        ),
    ] = None,
    limit: Limit = 100,
) -> Any:
    """Recorded events, oldest first. Continue with `after` = the last `seq`. If events between that and the next one
    have been pruned, the answer is 410; continue after its `pruned_seq`. Events of bearer tokens are for administrators
    only.

    With `Accept: text/event-stream` the answer is an endless stream of server-sent events: `id` is `seq`, `event` is
    the kind, `data` is the event. `Last-Event-ID` continues where an earlier stream ended.
    """
    if event_stream.is_requested(request):
        return await event_stream.open_stream(daemon, caller, request, after)
    after = after or 0
    events, pruned_seq = await asyncio.to_thread(daemon.store.history, after, limit, hidden_kind_prefix(caller))
    if 0 < after < pruned_seq:
        raise event_stream.events_pruned(after, pruned_seq)
    items = tuple(redact_event(caller, event, daemon.ledger) for event in events)
    next_cursor = str(events[-1].seq) if len(events) == limit else None
    link_to_next(request, response, next_cursor, "after")
    last_seq = await asyncio.to_thread(daemon.store.last_seq)
    return EventPage(items=items, next=next_cursor, pruned_seq=pruned_seq, last_seq=max(last_seq, pruned_seq))
