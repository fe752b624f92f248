"""Waking those who wait for something to change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Topics:
    """Futures by topic, such as `lease:ID`, `job:ID`, `node:NAME`. A waiter looks first, then waits, with no `await`
    between, so that no change falls in the gap. Who has waited longest is woken first."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}

    async def wait(self, topic: str, timeout_s: float) -> bool:
        """True when the topic changed within the time, False when it did not."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(topic, {})[future] = None
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return False
        finally:
            waiting = self._waiting.get(topic)
            if waiting is not None:
                waiting.pop(future, None)
                if not waiting:
                    del self._waiting[topic]
        return True

    def changed(self, topics: Iterable[str]) -> None:
        """Wake everyone who waits for these, in an order that is the same in every process."""
        for topic in sorted(topics):
            for future in self._waiting.get(topic, ()):
                if not future.done():
                    future.set_result(None)

    def wake_all(self) -> None:
        """Wake everyone, at the end of the process."""
        self.changed(list(self._waiting))
