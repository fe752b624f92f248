"""Who waits in a long poll for a grant, and is told of it as soon as it is committed.

That a holder was told of a grant must outlast a restart (`core.liveness`), so it is recorded before the answer. Where
the holder waits when the grant is decided, it is recorded with the grant: one commit later the poll is answered. It
would take another commit to record it once the poll has woken up.

| what happens | what follows |
|---|---|
| the poll waits until the grant is committed | it is answered |
| its time is over while the grant is committed | it waits for the end of that, `COMMIT_S` at most |
| its client goes, its token is revoked, the daemon stops, in that time | `AnswerLost`: the lease is unclaimed again |
| the commit fails, whatever became of it | the same, unless the poll still waits and finds what was recorded |
| its client goes, and polls again before `AnswerLost` is decided | it renews the lease before it is told |
| the daemon is killed between commit and answer | as for a grant at once: its client polls again, or releases it |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gpulease_server.core.happenings import AnswerLost
from gpulease_server.runtime import ids

COMMIT_S = 5.0
"""How long a poll whose time is over waits for a commit that would answer it."""
MAX_LOST = 1000
"""Lost answers that are remembered: they are decided within the next turns."""


class GrantWaiters:
    """The holders who wait, by the ids of their leases."""

    def __init__(self) -> None:
        self._polls: Counter[str] = Counter()
        self._told: frozenset[str] = frozenset()
        self._lost: dict[str, None] = {}

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._polls

    @contextmanager
    def waiting(self, lease_id: str) -> Iterator[None]:
        """While its holder waits for this lease."""
        self._polls[lease_id] += 1
        try:
            yield
        finally:
            self._polls[lease_id] -= 1
            if not self._polls[lease_id]:
                del self._polls[lease_id]

    def begin_commit(self, told: Iterable[str]) -> None:
        """These leases are granted in a turn that records that their holders, who wait, are told."""
        self._told = frozenset(told)

    def is_told(self, lease_id: str) -> bool:
        """True while such a grant is committed."""
        return lease_id in self._told

    def end_commit(self) -> list[AnswerLost]:
        """What is to be decided of holders who no longer wait, once it is known what was recorded."""
        untold = sorted(lease_id for lease_id in self._told if lease_id not in self._polls)
        self._told = frozenset()
        return [self.lost_answer(lease_id) for lease_id in untold]

    def lost_answer(self, lease_id: str) -> AnswerLost:
        """What is to be decided at once: this holder has gone before the answer."""
        self._lost[lease_id] = None
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        return AnswerLost(cause=ids.new_id("poll"), lease_id=lease_id)

    def may_be_lost(self, lease_id: str) -> bool:
        """True after `lost_answer`, which may not be decided yet, until `note_renewed`."""
        return lease_id in self._lost

    def note_renewed(self, lease_id: str) -> None:
        """A renewal of this lease is about to be decided."""
        self._lost.pop(lease_id, None)
