"""The timeline: what happened to each GPU in a period."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Annotated

from fastapi import Query, Request, Response
from pydantic import TypeAdapter

from gpulease_protocol.bounds import MAX_NAME
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.timeline import MAX_SPANS, Timeline
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.api.pages import NEXT_LINK, link_to_next
from gpulease_server.api.query_parameters import UUID_PATTERN
from gpulease_server.api.time_parameters import Moment, PeriodEnd, begin_and_end
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant
from gpulease_server.runtime.timeline import copy_of, look, read_cursor, read_timeline
from gpulease_server.store.ledger_store import Store
from gpulease_server.store.timeline import Scope

router = new_router("/v1/timeline", "timeline")
DEFAULT_PERIOD = timedelta(days=1)
TIMELINE_JSON: TypeAdapter[Timeline] = TypeAdapter(Timeline)


@router.get("", operation_id="getTimeline", response_model=Timeline, responses=NEXT_LINK)
async def show_timeline(
    daemon: DaemonDep,
    request: Request,
    from_at: Annotated[
        Moment | None,
        Query(alias="from", description="Begin of the period, ISO 8601; if absent, a day before its end."),
    ] = None,
    to_at: PeriodEnd = None,
    gpu: Annotated[str | None, Query(description="Only the GPU with this UUID.", pattern=UUID_PATTERN)] = None,
    node: Annotated[str | None, Query(description="Only GPUs of this node.", max_length=MAX_NAME)] = None,
    user: Annotated[
        str | None,
        Query(description="Only leases of this user, and only their requests in the queue.", max_length=MAX_NAME),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_SPANS, description="Maximum number of ended leases on a page.")] = 5000,
    cursor: Annotated[
        str | None, Query(description="`next` of the previous page.", pattern=r"^[0-9]{1,17}-[0-9]{1,18}$")
    ] = None,
) -> Response:
    """What happened to each GPU in a period: which leases held it; when it was unhealthy, cordoned, used outside any
    lease, unknown, or slow to get clean; and how long the queue was. A time without an offset is UTC."""
    begin, end = begin_and_end(from_at, to_at, daemon.now().at, DEFAULT_PERIOD)
    try:
        after = None if cursor is None else read_cursor(cursor)
    except OverflowError:
        raise InvalidRequest(f"cursor: {cursor} is not the `next` of a page.") from None
    scope = Scope(from_at=begin, to_at=end, gpu=gpu, node=node, user=user)
    async with daemon.long_read:
        content, next_cursor = await asyncio.to_thread(
            _encoded, daemon.store, scope, copy_of(daemon.ledger), daemon.now(), daemon.policy, limit, after
        )
    response = Response(content, media_type="application/json")
    link_to_next(request, response, next_cursor)
    return response


def _encoded(
    store: Store,
    scope: Scope,
    ledger: Ledger,
    now: Instant,
    policy: Policy,
    limit: int,
    after: tuple[datetime, int] | None,
) -> tuple[bytes, str | None]:
    """The page as JSON, and the cursor of the next one."""
    page = read_timeline(store, scope, look(ledger, now, policy), limit, after)
    return TIMELINE_JSON.dump_json(page, by_alias=True), page.next
