"""Whether this daemon is the writer of its database, and whether it may say so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto

from . import clock
from .lock import WriterLock

VERDICT_S = 2.0
"""How long an answer is held back while it is not known whether another daemon has taken over."""
LOOK_S = 0.02


class Verdict(Enum):
    """What is known of what this daemon has in memory."""

    CURRENT = auto()
    """It is the writer, so nothing newer was committed."""
    DOUBTFUL = auto()
    """Its lock is lost, or cannot be confirmed: another daemon may have taken over."""
    SUPERSEDED = auto()
    """Another one has."""


@dataclass(slots=True)
class Copy:
    """What a daemon that stands by shows."""

    writer: str
    """Who is the writer, in words."""
    as_of: datetime | None = None
    """When its ledger was read from the database; None before the first time."""


class Standing:
    """The standing of one daemon. Without a lock it is alone, as in a test.

    A writer that was stopped and continued does not know that it was stopped. So it answers only while its lock is
    confirmed, and otherwise waits until it is, or until it is known that somebody else has it.
    """

    def __init__(self, lock: WriterLock | None = None) -> None:
        self._lock = lock
        self.copy: Copy | None = None
        """Set while it stands by."""
        self.superseded = False
        """Set, from any thread, when another daemon has taken over."""
        self.confirmed_at = clock.now().at
        """When it was last seen to be the writer."""

    def verdict(self) -> Verdict:
        """What is known now of what was read from memory until now."""
        if self.superseded:
            return Verdict.SUPERSEDED
        if self._lock is not None and not self._lock.confirmed():
            return Verdict.DOUBTFUL
        self.confirmed_at = clock.now().at
        return Verdict.CURRENT

    async def settled(self) -> Verdict:
        """The same, after at most `VERDICT_S` in which it may become clear."""
        until_s = clock.now().mono_s + VERDICT_S
        while (found := self.verdict()) is Verdict.DOUBTFUL and clock.now().mono_s < until_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return found
