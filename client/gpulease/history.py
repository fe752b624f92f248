"""A page of the history of events, which begins where older events have been pruned."""

from __future__ import annotations

from dataclasses import dataclass

from gpulease.model import Event, Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage(Noun):
    """One page of the events, oldest first."""

    items: tuple[Event, ...]
    """The events of this page."""
    next: str | None = None
    """Pass as `after` for the next page; null at the end."""
    pruned_seq: int = 0
    """Events up to this `seq` are no longer kept; 0 while all are. If it is over `after`, there is a gap."""
    last_seq: int = 0
    """`seq` of the newest event, of whatever page; 0 while there is none."""
