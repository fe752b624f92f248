"""Wakes tasks that wait for a lease, a job or a node to change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Wakeups:
    """Futures by key: `lease:ID`, `job:ID`, `node:NAME`, `events`. Longest waiting first.

    A waiter checks first, then waits, with no `await` in between, so that it misses no change.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}

    async def wait(self, key: str, timeout_s: float) -> bool:
        """True if the key was woken within the time, else False."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, {})[future] = None
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return False
        finally:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.pop(future, None)
                if not waiting:
                    del self._waiting[key]
        return True

    def wake(self, keys: Iterable[str]) -> None:
        """Wake every task that waits for one of these keys, in a deterministic order."""
        for key in sorted(keys):
            for future in self._waiting.get(key, ()):
                if not future.done():
                    future.set_result(None)

    def wake_all(self) -> None:
        """Wake every task."""
        self.wake(list(self._waiting))
