"""What is recorded of a change, and a page of that."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.noun import Noun

_VERBS = {
    "gpu": "clean conflict conflict_over cordoned foreign foreign_over gone leftover recovered uncordoned unhealthy",
    "job": "ended ended_for_reservation grown preempted ready regrouped retried running shrunk starting stopping stuck"
    " submitted",
    "lease": "budget_spent ended granted grown kept lost preempted preempting preemption_withdrawn queued"
    " reclaim_notice reclaim_withdrawn reclaimed revived revoked shrunk unwatched",
    "ledger": "recovered",
    "limits": "removed set",
    "node": "drained forgotten lost paused ready resumed unknown",
    "reservation": "cancelled created ended",
    "token": "created revoked",
}
KINDS: Mapping[str, tuple[str, ...]] = {noun: tuple(verbs.split()) for noun, verbs in _VERBS.items()}
"""The kinds of events of this release, by noun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Noun):
    """One recorded change. `seq` increases by one with each and is never reused; those of bearer tokens
    (`token.created`, `token.revoked`) and limits (`limits.set`, `limits.removed`) are shown to administrators alone."""

    seq: int
    """Position in the history."""
    at: datetime
    """When it was decided."""
    kind: str
    """Noun and verb, such as `lease.granted`."""
    cause: str
    """Id of the request, report or timer that led to it; one cause may have several events."""
    lease_id: str | None = None
    """The lease concerned."""
    job_id: str | None = None
    """The job concerned."""
    node: str | None = None
    """The node concerned."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs concerned."""
    fencing_token: int | None = None
    """Fencing token of the grant concerned."""
    reason: str | None = None
    """A word or sentence that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage(Noun):
    """One page of the events, oldest first, or newest first."""

    items: tuple[Event, ...]
    """The events of this page."""
    next: str | None = None
    """Pass as `after` for the next page, or as `before` when the newest come first; null at the end."""
    pruned_seq: int = 0
    """Events up to this `seq` are no longer kept; 0 while all are. If it is greater than `after`, there is a gap."""
    last_seq: int = 0
    """`seq` of the newest event, of whatever page; 0 while there is none."""
