"""Cancels an asyncio task without losing the caller's own cancellation."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended; its result or error is dropped.

    It uses `asyncio.wait`, not `await`: a caller that is cancelled meanwhile must see its own cancellation, and
    awaiting the task with CancelledError suppressed would confuse the two.
    """
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # or asyncio logs that it was never retrieved
