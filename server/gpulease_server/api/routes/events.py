"""Events: pages of the history, or a live stream."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request, Response

from gpulease_protocol.bounds import MAX_NAME
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.model import EventPage
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.redaction import hidden_kinds, redact_event
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.api.pages import NEXT_LINK, Limit, link_to_next
from gpulease_server.api.problems import error_responses
from gpulease_server.api.query_parameters import UUID_PATTERN
from gpulease_server.api.streams import event_stream
from gpulease_server.api.time_parameters import Moment, in_utc
from gpulease_server.store.event_pages import EventFilter, find_events

router = new_router()
OF_A_STREAM = {"after"}
"""The query parameters of a stream."""
Kind = Annotated[str, Query(pattern=r"^[a-z_]{1,32}(\.[a-z_]{1,32})?$")]


async def event_filter(
    caller: CallerDep,
    from_at: Annotated[
        Moment | None, Query(alias="from", description="Only events at this time or later, ISO 8601.")
    ] = None,
    to_at: Annotated[Moment | None, Query(alias="to", description="Only events before this time, ISO 8601.")] = None,
    kind: Annotated[
        list[Kind] | None,
        Query(description="Only events of these kinds: `lease.granted`, or `lease` for all of leases.", max_length=32),
    ] = None,
    user: Annotated[
        str | None, Query(description="Only events of leases and jobs of this user.", max_length=MAX_NAME)
    ] = None,
    gpu: Annotated[
        str | None, Query(description="Only events of the GPU with this UUID.", pattern=UUID_PATTERN)
    ] = None,
    node: Annotated[str | None, Query(description="Only events of this node.", max_length=MAX_NAME)] = None,
    lease: Annotated[str | None, Query(description="Only events of this lease.", max_length=64)] = None,
    job: Annotated[str | None, Query(description="Only events of this job.", max_length=64)] = None,
) -> EventFilter:
    """The events that the query parameters mean."""
    return EventFilter(
        from_at=None if from_at is None else in_utc(from_at),
        to_at=None if to_at is None else in_utc(to_at),
        kinds=tuple(kind or ()),
        user=user,
        gpu=gpu,
        node=node,
        lease=lease,
        job=job,
        hidden_kinds=hidden_kinds(caller),
    )


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
    wanted: Annotated[EventFilter, Depends(event_filter)],
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
    before: Annotated[int | None, Query(ge=1, lt=2**63, description="Only events with a smaller `seq`.")] = None,
    order: Annotated[
        Literal["asc", "desc"], Query(description="`desc`: the newest first; continue with `before` = `next`.")
    ] = "asc",
    limit: Limit = 100,
) -> Any:
    """Recorded events, oldest first. Continue with `after` = `next`. If events between that and the next one have been
    pruned, the answer is 410; continue after its `pruned_seq`. Events of bearer tokens and of limits are for
    administrators only.

    A page looks through 100,000 events at most for those that are asked for. So it may be short or even empty and
    still have a `next`.

    With `Accept: text/event-stream` the answer is an endless stream of server-sent events: `id` is `seq`, `event` is
    the kind, `data` is the event. `Last-Event-ID` continues where an earlier stream ended. A stream has all events.

    A page or stream after an event that there has never been is refused with 410 as well: the database is another one,
    as after the restore of a backup.
    """
    if event_stream.is_requested(request):
        if others := sorted(set(request.query_params) - OF_A_STREAM - {"limit"}):
            raise InvalidRequest(
                f"{', '.join(others)}: a stream has all events.", remedy="Leave that out, and choose on your side."
            )
        return await event_stream.open_stream(daemon, caller, request, after)
    after = after or 0
    newest_first = order == "desc"
    found = await asyncio.to_thread(
        find_events, daemon.store.engine, wanted, limit, after=after, before=before, newest_first=newest_first
    )
    event_stream.require_kept(after, found)
    items = tuple(redact_event(caller, event, daemon.ledger) for event in found.events)
    next_cursor = None if found.next_seq is None else str(found.next_seq)
    link_to_next(request, response, next_cursor, "before" if newest_first else "after")
    last_seq = max(found.last_seq, found.pruned_seq)
    return EventPage(items=items, next=next_cursor, pruned_seq=found.pruned_seq, last_seq=last_seq)
