"""Waits for asyncio tasks and cancels them without losing the caller's own cancellation."""

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


async def wait_for_either(task: asyncio.Task[Any], event: asyncio.Event, at_least_s: float) -> None:
    """Wait for the end of a task, or for an event, but for that only once the task has had so many seconds."""
    await asyncio.wait({task}, timeout=at_least_s)
    if task.done():
        return
    change = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, change}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(change)
