"""The newest committed events, for those who follow them: who keeps up never asks the database."""

from __future__ import annotations

from collections import deque
from itertools import islice

from gpulease.model import Event

EVENTS = "events"
"""The topic that changes with every event."""
KEPT = 4096
"""Events in memory, at most; 4 MiB of them."""


class RecentEvents:
    """Committed events without a gap, the last of them the last there is.

    The writer adds each after its commit, and begins anew when it has read the ledger: what a failed commit may have
    written is in the database, and who needs it reads it there.
    """

    def __init__(self) -> None:
        self.last_seq = 0
        """`seq` of the last event that is committed."""
        self._events: deque[Event] = deque(maxlen=KEPT)

    def add(self, event: Event) -> None:
        """One more was committed."""
        if event.seq != self.last_seq + 1:
            self._events.clear()
        self._events.append(event)
        self.last_seq = event.seq

    def begin_after(self, seq: int) -> None:
        """All up to `seq` are in the database; those after it are still to come."""
        self._events.clear()
        self.last_seq = seq

    def after(self, seq: int, limit: int) -> list[Event] | None:
        """The events after `seq`, oldest first, at most `limit`; None when some of them are in the database alone."""
        if seq >= self.last_seq:
            return []
        skipped = seq + 1 - (self._events[0].seq if self._events else self.last_seq + 1)
        return None if skipped < 0 else list(islice(self._events, skipped, skipped + limit))
