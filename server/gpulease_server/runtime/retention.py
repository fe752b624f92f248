"""Prunes records that are too old or too many, beside the turns: in small batches, with pauses. See `store.retention`.

Each batch is deleted in the thread that commits, so that a turn waits for at most one; its transaction is fenced like
any other. The pause after a batch is nine times its duration, so that pruning takes a tenth of that thread. What is to
be deleted is searched in another thread.

What each failure does
----------------------
- SIGKILL, a failed commit, an outage, a takeover: deleted batches stay deleted, each with everything that belongs to
  it; the next pass goes on from there.
- The wall clock is wrong: an age counts only after the wall clock has agreed with the monotonic one for `STEADY_S`,
  also after a start. A clock that stays wrong makes records look older or younger by as much; the newest
  `ALWAYS_KEPT` of each kind are kept in any case.
- More arrives than a pass deletes: the next pass deletes more. 500 rows in 0.1 s are more than turns record.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from datetime import datetime, timedelta

from sqlalchemy.exc import SQLAlchemyError

from gpulease_server.core.records import Instant
from gpulease_server.runtime import clock
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.dialects import error_message
from gpulease_server.store.ledger_store import Store, StoreFailed
from gpulease_server.store.retention import PruneScan, RetentionLimits, delete_batch, prune_bounds

log = logging.getLogger("gpulease.retention")

PASS_S = 60.0
"""Time between two passes."""
RETRY_S = 1.0
"""Time until the next check of a writer that cannot record anything."""
PAUSE_S = 0.1
"""Minimum pause after a batch."""
PAUSE_FACTOR = 9
"""The pause, as a multiple of the duration of the batch."""
STEADY_S = 3600.0
"""How long the wall clock must not have jumped before ages count."""
JUMP_S = 60.0
"""A change of the difference of the clocks that counts as a jump."""
ORPHAN_SCAN_S = 24 * 3600.0
"""Time between two scans for metrics of leases that no longer exist."""


class Pruner:
    """Keeps the database within its retention limits. Used from the event loop only.

    Args:
        store: The ledger's database.
        writer: Its turns take precedence.
        keep: How much is kept.
    """

    def __init__(self, store: Store, writer: Writer, keep: RetentionLimits, *, pause_s: float = PAUSE_S) -> None:
        self._store = store
        self._writer = writer
        self._keep = keep
        self._pause_s = pause_s
        self._wall_at_zero: tuple[datetime, float] | None = None
        """The wall clock when the monotonic clock was 0, and since when this has held."""
        self._orphan_scan_s = float("-inf")
        self._problem = ""

    async def run(self) -> None:
        """Prune what is due, until cancelled."""
        while True:
            well = self._writer.problem is None
            if well:
                try:
                    await self.prune(clock.now())
                    self._log_problem("")
                except (StoreFailed, SQLAlchemyError) as error:
                    self._log_problem(error.detail if isinstance(error, StoreFailed) else error_message(error))
                except Exception:
                    log.exception("pruning failed; trying again")
            await asyncio.sleep(PASS_S if well else RETRY_S)

    async def prune(self, now: Instant) -> Counter[str]:
        """Delete everything that is due now; returns the number of each kind. Raises StoreFailed or SQLAlchemyError."""
        removed: Counter[str] = Counter()
        limits = await asyncio.to_thread(prune_bounds, self._store.engine, self._keep, self._cutoff(now))
        orphans = now.mono_s - self._orphan_scan_s >= ORPHAN_SCAN_S
        walk = PruneScan(self._store.engine, limits, orphans=orphans)
        while self._writer.problem is None:
            batch = await asyncio.to_thread(walk.next)
            if batch is None:
                self._orphan_scan_s = now.mono_s if orphans else self._orphan_scan_s
                break
            begun_s = clock.now().mono_s
            await self._writer.between_turns(delete_batch, self._store, batch)
            removed[batch.kind] += batch.rows
            await asyncio.sleep(
                max(self._pause_s, PAUSE_FACTOR * (clock.now().mono_s - begun_s) if self._pause_s else 0.0)
            )
        named = {f"{kind.removesuffix('s')}s": count for kind, count in removed.items()}
        named.pop("blocks", None)  # some every ten minutes
        if named:
            log.info("pruned %s", ", ".join(f"{count} {kind}" for kind, count in sorted(named.items())))
        return removed

    def _cutoff(self, now: Instant) -> datetime | None:
        """Records before this time are too old; None while the wall clock has not been steady for long enough."""
        wall_at_zero = now.at - timedelta(seconds=now.mono_s)
        if self._wall_at_zero is None or abs((wall_at_zero - self._wall_at_zero[0]).total_seconds()) > JUMP_S:
            self._wall_at_zero = (wall_at_zero, now.mono_s)
        if now.mono_s - self._wall_at_zero[1] < STEADY_S:
            return None
        self._wall_at_zero = (wall_at_zero, self._wall_at_zero[1])  # a slewed clock drifts, which is not a jump
        return now.at - timedelta(seconds=self._keep.age_s)

    def _log_problem(self, problem: str) -> None:
        """Log a problem once, and its end once."""
        if problem and not self._problem:
            log.error("cannot prune: %s", problem)
        elif self._problem and not problem:
            log.info("pruning goes on")
        self._problem = problem
