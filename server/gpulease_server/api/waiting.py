"""Long polls and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Query, Request

from gpulease.errors import InvalidRequest

from .callers import Caller
from .daemon import Daemon

MAX_WAIT_S = 3600.0
SLICE_S = 5.0
"""How often a long poll looks whether its client is still there."""

WaitSeconds = Annotated[
    float,
    Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Hold the answer for at most so many seconds."),
]
Limit = Annotated[int, Query(ge=1, le=1000, description="Items on a page, at most.")]
Cursor = Annotated[str | None, Query(description="`next` of the page before.", pattern=r"^[0-9]{1,18}$")]


async def hold(
    daemon: Daemon,
    request: Request,
    caller: Caller,
    topic: str,
    wait_s: float,
    settled: Callable[[], bool],
    alive: Callable[[], None] = lambda: None,
    slice_s: float = SLICE_S,
) -> None:
    """Return once `settled` is true, the time is over, the client is gone or the daemon stops.

    `alive` is called now and in every slice of the wait while the client is still there. Raises `NotAuthenticated` when
    the caller's token is in force no more.
    """
    until_s = daemon.now().mono_s + wait_s
    while not settled() and not daemon.stopping.is_set() and not await request.is_disconnected():
        left_s = until_s - daemon.now().mono_s
        if left_s <= 0:
            break
        daemon.require_known(caller)
        alive()
        if not settled():
            await daemon.writer.topics.wait(topic, min(left_s, slice_s))
    daemon.require_known(caller)


def number_of(cursor: str | None) -> int | None:
    """What a cursor of ours says. Raises `InvalidRequest` for any other text."""
    if cursor is None:
        return None
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise InvalidRequest(f"cursor: {cursor[:40]!r} is not the `next` of a page.")
    return int(cursor)
