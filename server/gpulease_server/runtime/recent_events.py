"""The newest committed events in memory: a stream that keeps up never queries the database."""

from __future__ import annotations

from collections import deque
from itertools import islice

from gpulease_protocol.model import Event

EVENTS_KEY = "events"
"""The wakeup key of every event."""
MAX_EVENTS = 4096
"""Events in memory, at most; about 4 MiB."""


class RecentEvents:
    """The newest committed events, without a gap.

    The writer adds each event after its commit, and resets this after loading the ledger: what a failed commit may have
    written is read from the database.
    """

    def __init__(self) -> None:
        self.last_seq = 0
        """`seq` of the last committed event."""
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    @property
    def newest(self) -> Event | None:
        """The last event that was added since the ledger was loaded."""
        return self._events[-1] if self._events else None

    def add(self, event: Event) -> None:
        """Add an event that was committed."""
        if event.seq != self.last_seq + 1:
            self._events.clear()
        self._events.append(event)
        self.last_seq = event.seq

    def reset(self, seq: int) -> None:
        """Forget all events; the next one follows `seq`."""
        self._events.clear()
        self.last_seq = seq

    def after(self, seq: int, limit: int) -> list[Event] | None:
        """The events after `seq`, oldest first, at most `limit`; None if some of them are only in the database."""
        if seq >= self.last_seq:
            return []
        skipped = seq + 1 - (self._events[0].seq if self._events else self.last_seq + 1)
        return None if skipped < 0 else list(islice(self._events, skipped, skipped + limit))
