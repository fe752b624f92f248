"""Usage: GPU-hours held and used in a period."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Annotated

from fastapi import Query

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.usage import MAX_SHARES, Usage, UsageKey
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.api.time_parameters import Moment, PeriodEnd, begin_and_end
from gpulease_server.runtime.usage import gpu_usage

router = new_router("/v1/usage", "usage")
DEFAULT_PERIOD = timedelta(days=7)


@router.get("", operation_id="getUsage")
async def show_usage(
    daemon: DaemonDep,
    from_at: Annotated[
        Moment | None,
        Query(alias="from", description="Begin of the period, ISO 8601; if absent, a week before its end."),
    ] = None,
    to_at: PeriodEnd = None,
    by: Annotated[UsageKey, Query(description="What to group by.")] = UsageKey.USER,
    user: Annotated[str | None, Query(description="Only leases of this user.", max_length=255)] = None,
) -> Usage:
    """GPU-hours that leases held and used in a period, by user, label, node, agent, session or day (in UTC).

    Leases that are pruned (`serve --keep-days`) are not counted. Use is known of the 2000 leases with the most GPU
    time. A node of an elastic lease counts for the time that the lease had it. A time without an offset is UTC.
    """
    begin, end = begin_and_end(from_at, to_at, daemon.now().at, DEFAULT_PERIOD)
    if by is UsageKey.DAY and end - begin > timedelta(days=MAX_SHARES - 1):
        raise InvalidRequest(f"from: a period by day has at most {MAX_SHARES - 1} days.", remedy="Ask for less.")
    async with daemon.long_read:
        return await asyncio.to_thread(gpu_usage, daemon.store, begin, end, by, user)
