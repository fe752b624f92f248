"""Long polls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Query, Request

from gpulease_server.api.auth.callers import Caller, require_still_valid
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.http_limits import ON_DISCONNECT

MAX_WAIT_S = 3600.0
SLICE_S = 5.0
"""How often a long poll checks whether its caller's token is still valid, and whether its client is still there where
the server does not tell that at once."""
LONG_SLICE_S = 60.0
"""How often a long poll looks at anything else."""

WaitSeconds = Annotated[
    float,
    Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Hold the answer for at most this number of seconds."),
]


async def wait_until(
    daemon: DaemonState,
    request: Request,
    caller: Caller,
    topic: str,
    wait_s: float,
    condition: Callable[[], bool],
    keep_alive: Callable[[], None] = lambda: None,
    keep_alive_s: float = LONG_SLICE_S,
) -> None:
    """Return when `condition` is true, after `wait_s`, when the client has disconnected, or when the daemon stops.

    `keep_alive` is called at once, and then at least every `keep_alive_s` while the client is still there. Raises
    `NotAuthenticated` if the caller's token becomes invalid.
    """
    until_s = daemon.now().mono_s + wait_s
    interrupts: list[Callable[[], None]] | None = request.scope.get(ON_DISCONNECT)
    slice_s = min(keep_alive_s, LONG_SLICE_S if interrupts is not None and caller.token_id is None else SLICE_S)
    while not condition() and not daemon.stopping.is_set() and not await request.is_disconnected():
        left_s = until_s - daemon.now().mono_s
        if left_s <= 0:
            break
        require_still_valid(caller, daemon)
        keep_alive()
        if not condition():
            await daemon.wait_for(topic, min(left_s, slice_s), interrupts)
    require_still_valid(caller, daemon)
