"""Wakes tasks that wait for a lease, a job or a node to change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from gpulease_protocol.model import Event
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import Change, GpuRecord, JobRecord, LeaseRecord, NodeRecord
from gpulease_server.runtime.recent_events import EVENTS_KEY


class Wakeups:
    """Futures by key: `lease:ID`, `job:ID`, `node:NAME`, `events`. Longest waiting first.

    A waiter checks first, then waits, with no `await` in between, so that it misses no change.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Future[bool], None]] = {}

    async def wait(self, key: str, timeout_s: float, interrupts: list[Callable[[], None]] | None = None) -> bool:
        """True if the key was woken within the time, else False.

        Args:
            interrupts: While this waits, the list has a function that ends the wait early; the result is False then.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting.setdefault(key, {})[future] = None

        def give_up() -> None:
            _end(future, woken=False)

        timer = loop.call_later(timeout_s, give_up)
        if interrupts is not None:
            interrupts.append(give_up)
        try:
            return await future
        finally:
            timer.cancel()
            if interrupts is not None:
                interrupts.remove(give_up)
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.pop(future, None)
                if not waiting:
                    del self._waiting[key]

    def wake(self, keys: Iterable[str]) -> None:
        """Wake every task that waits for one of these keys, in a deterministic order."""
        for key in sorted(keys):
            for future in self._waiting.get(key, ()):
                _end(future, woken=True)

    def wake_all(self) -> None:
        """Wake every task."""
        self.wake(list(self._waiting))


def _end(future: asyncio.Future[bool], *, woken: bool) -> None:
    if not future.done():
        future.set_result(woken)


def wakeup_keys(changes: list[Change], before: Ledger) -> set[str]:
    """What these changes wake. The worker of a node is told of leases with GPUs there, and of those whose holder it
    watches: these may wait, or have their GPUs elsewhere. A renewal wakes no one: nothing of it is shown to a worker,
    or is a state that anyone waits for.

    Args:
        before: The ledger without the changes.
    """
    keys: set[str] = set()
    for change in changes:
        if isinstance(change, LeaseRecord):
            lease, watched, known = change.lease, change.watched_owner, before.leases.get(change.lease.id)
            if known is not None and change.is_renewal_of(known):
                continue
            keys.add(f"lease:{lease.id}")
            keys.update([f"node:{device.node}" for device in lease.gpus])
            if watched is not None:
                keys.add(f"node:{watched.node}")
        elif isinstance(change, GpuRecord):
            keys.add(f"node:{change.device.node}")
        elif isinstance(change, Event):
            keys.add(EVENTS_KEY)
        elif isinstance(change, JobRecord):
            keys.add(f"job:{change.job.id}")
            keys.update(f"node:{device.node}" for device in change.job.gpus)
        elif isinstance(change, NodeRecord):
            keys.add(f"node:{change.name}")
    return keys
