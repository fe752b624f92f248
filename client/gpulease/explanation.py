"""The answer to "why does this wait": nouns, as those of `gpulease.model`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from gpulease.model import Holder, Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle(Noun):
    """Why one GPU could not be granted."""

    uuid: str
    """The GPU in the way."""
    node: str
    """Its node."""
    index: int
    """Its index on the node."""
    code: str
    """The GPU's state, or `claimed` (held for an earlier request), `unread` (looked free, but no fresh reading
    came), `too_little_memory`, `other_model`, `other_node`, `not_listed`."""
    sentence: str
    """The same for people, naming pid, user and lease where there are any."""
    lease_id: str | None = None
    """The lease in the way."""
    holder: Holder | None = None
    """Who holds that lease."""
    pids: tuple[int, ...] = ()
    """Processes in the way."""
    until: datetime | None = None
    """When the lease in the way ends unless it is renewed; null where no time limit runs, or no lease is in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Noun):
    """Why a request has no GPUs: for now, or for ever."""

    verdict: str
    """`granted`, `not_now`, `never` or `ended`."""
    sentence: str
    """The answer for people."""
    position: int | None = None
    """Place in the queue; null unless queued."""
    passed: int | None = None
    """How often a younger request was granted a GPU that this one could use; null unless queued."""
    passed_s: float | None = None
    """Seconds since the first time; null if it was not passed."""
    held: tuple[str, ...] = ()
    """UUIDs of free GPUs that are held for it: no younger request gets them."""
    behind: tuple[str, ...] = ()
    """Earlier leases for which free GPUs are held that this one could use."""
    obstacles: tuple[Obstacle, ...] = ()
    """For each GPU of the daemon that cannot be granted to this request, why."""
