"""Ending asyncio tasks without losing one's own end."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended; whatever it ends with is dropped.

    It is waited for, not awaited: a caller that is cancelled meanwhile must see its own cancellation, and awaiting the
    task under a suppressed CancelledError would take the one for the other.
    """
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # or asyncio complains that nobody asked
