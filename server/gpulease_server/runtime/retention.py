"""Prunes what is too old or too much, beside the turns: in small batches, with pauses. `store.retention` says what.

Each batch is removed in the thread that commits, so that a turn waits for one at most; its transaction proves the term
like any other. The pause after it is nine times as long as it took, so that pruning has a tenth of that thread. What is
to go is looked for in another thread.

What each failure does
----------------------
- SIGKILL, a failed commit, an outage, another daemon that takes over: what was removed is removed, whole batches of
  what belongs together; the next pass goes on from there.
- The wall clock is wrong: an age counts only when the wall clock has agreed with the monotonic one for `STEADY_S`,
  after the start, too. One that stays wrong for longer makes things look older, or younger, by as much; the newest
  `STAYS` of each are kept in any case.
- More arrives than a pass removes: the next pass has more to remove. 500 rows in 0.1 s are more than turns record.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from datetime import datetime, timedelta

from sqlalchemy.exc import SQLAlchemyError

from ..core.ledger import Instant
from ..store.dialects import why
from ..store.retention import Keep, Pass, bounds, remove
from ..store.store import Store, StoreFailed
from . import clock
from .writer import Writer

log = logging.getLogger("gpulease.retention")

LOOK_S = 60.0
"""Time between two passes."""
RETRY_S = 1.0
"""Time until the next look at a writer that cannot record anything."""
PAUSE_S = 0.1
"""Pause after a batch, at least."""
SHARE = 9
"""The pause, in times of what the batch took."""
STEADY_S = 3600.0
"""How long the wall clock must not have jumped before it says how old things are."""
JUMP_S = 60.0
"""A difference of the clocks that is a jump."""
ORPHANS_S = 24 * 3600.0
"""Time between two looks for metrics of leases that are gone."""


class Pruner:
    """Keeps the database to its bounds. Used from the event loop alone.

    Args:
        store: The ledger's database.
        writer: Whose turns come first.
        keep: How much is kept.
    """

    def __init__(self, store: Store, writer: Writer, keep: Keep, *, pause_s: float = PAUSE_S) -> None:
        self._store = store
        self._writer = writer
        self._keep = keep
        self._pause_s = pause_s
        self._zero: tuple[datetime, float] | None = None
        """What the wall clock said when the monotonic one was 0, and since when it does."""
        self._orphans_s = float("-inf")
        self._problem = ""

    async def run(self) -> None:
        """Prune what is due until cancelled."""
        while True:
            well = self._writer.problem is None
            if well:
                try:
                    await self.prune(clock.now())
                    self._say("")
                except (StoreFailed, SQLAlchemyError) as error:
                    self._say(error.detail if isinstance(error, StoreFailed) else why(error))
                except Exception:
                    log.exception("pruning stumbled; trying again")
            await asyncio.sleep(LOOK_S if well else RETRY_S)

    async def prune(self, now: Instant) -> Counter[str]:
        """Remove all that is due at this moment; how many of each kind. Raises StoreFailed or SQLAlchemyError."""
        removed: Counter[str] = Counter()
        limits = await asyncio.to_thread(bounds, self._store.engine, self._keep, self._too_old(now))
        orphans = now.mono_s - self._orphans_s >= ORPHANS_S
        walk = Pass(self._store.engine, limits, orphans=orphans)
        while self._writer.problem is None:
            batch = await asyncio.to_thread(walk.next)
            if batch is None:
                self._orphans_s = now.mono_s if orphans else self._orphans_s
                break
            begun_s = clock.now().mono_s
            await self._writer.between_turns(remove, self._store, batch)
            removed[batch.kind] += batch.rows
            await asyncio.sleep(max(self._pause_s, SHARE * (clock.now().mono_s - begun_s) if self._pause_s else 0.0))
        if removed:
            log.info("pruned %s", ", ".join(f"{count} {kind}s" for kind, count in sorted(removed.items())))
        return removed

    def _too_old(self, now: Instant) -> datetime | None:
        """What was before this is too old; None while the wall clock has not been steady for long enough."""
        zero = now.at - timedelta(seconds=now.mono_s)
        if self._zero is None or abs((zero - self._zero[0]).total_seconds()) > JUMP_S:
            self._zero = (zero, now.mono_s)
        if now.mono_s - self._zero[1] < STEADY_S:
            return None
        self._zero = (zero, self._zero[1])  # a clock that is slewed drifts; that is no jump
        return now.at - timedelta(seconds=self._keep.age_s)

    def _say(self, problem: str) -> None:
        """Log what is wrong once, and once that it is over."""
        if problem and not self._problem:
            log.error("cannot prune: %s", problem)
        elif self._problem and not problem:
            log.info("pruning goes on")
        self._problem = problem
