"""Whether this daemon is the writer of its database, and whether that is confirmed."""

from __future__ import annotations

import asyncio
from datetime import datetime
from enum import Enum, auto

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.runtime import clock
from gpulease_server.runtime.leadership.lock import WriterLock

CONFIRM_TIMEOUT_S = 2.0
"""How long an answer is held back until it is known whether another daemon has taken over."""
POLL_S = 0.02


class Leadership(Enum):
    """Whether what this daemon has in memory may be stale."""

    CONFIRMED = auto()
    """It is the writer, so nothing newer was committed."""
    UNCONFIRMED = auto()
    """Its lock is lost or cannot be confirmed: another daemon may have taken over."""
    SUPERSEDED = auto()
    """Another daemon has taken over."""


@dataclass(slots=True)
class StandbyCopy:
    """The copy of the ledger that a standby serves."""

    writer: str
    """The writer, for messages."""
    as_of: datetime | None = None
    """When the copy was read from the database; None before the first time."""


class LeadershipStatus:
    """The leadership of one daemon. Without a lock it is the only one, as in tests.

    A writer that was stopped and continued does not know it. So it answers only while its lock is confirmed; otherwise
    it waits until the lock is confirmed, or another daemon is known to hold it.
    """

    def __init__(self, lock: WriterLock | None = None) -> None:
        self._lock = lock
        self.standby_copy: StandbyCopy | None = None
        """Set on a standby."""
        self.superseded = False
        """Set, from any thread, when another daemon has taken over."""
        self.confirmed_at = clock.wall()
        """When it was last known to be the writer."""

    def state(self) -> Leadership:
        """Whether what was read from memory up to now may be stale."""
        if self.superseded:
            return Leadership.SUPERSEDED
        if self._lock is not None and not self._lock.is_confirmed():
            return Leadership.UNCONFIRMED
        self.confirmed_at = clock.wall()
        return Leadership.CONFIRMED

    async def wait_for_state(self) -> Leadership:
        """The state, after waiting at most `CONFIRM_TIMEOUT_S` for it to be known."""
        until_s = clock.now().mono_s + CONFIRM_TIMEOUT_S
        while (found := self.state()) is Leadership.UNCONFIRMED and clock.now().mono_s < until_s:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return found
