"""Signs of life: how long a lease lasts from each."""

from __future__ import annotations

from gpulease.exchange import MAX_OWNERS
from gpulease.model import Lease, Liveness

from .gpu import silence_of
from .ledger import Deadline, Ledger, OwnerWatch
from .turn import Turn

STEP_S = 0.25
"""Sights of an owner that would move a deadline by less than this, or by less than a tenth, leave it where it is."""


def liveness_of(ledger: Ledger, watched: OwnerWatch | None) -> Liveness:
    """How the holder of a new lease is known to live: by its process, unless its worker watches too many already."""
    if watched is None:
        return Liveness.HEARTBEAT
    owners = ledger.watched.get(watched.node, {})
    return Liveness.PROCESS if watched.owner in owners or len(owners) < MAX_OWNERS else Liveness.HEARTBEAT


def live_on(turn: Turn, lease: Lease) -> None:
    """The holder has been heard: the lease lasts a full `ttl_s` from now, and no less than it would have anyway."""
    until_s = turn.now.mono_s + lease.ttl_s
    if lease.liveness is Liveness.PROCESS:
        until_s = max(until_s, turn.ledger.deadlines.get(lease.id, until_s))
    turn.put(Deadline(lease.id, until_s))


def seen_alive(turn: Turn, lease: Lease, node: str) -> None:
    """The owner has been seen by this node's worker: a full `ttl_s` from now, in memory only.

    A lease whose `ttl_s` is shorter than the time between two reports lasts until its worker counts as silent, because
    the worker would have told of a death at once.
    """
    lasts_s = max(lease.ttl_s, silence_of(turn.ledger.sightings.get(node), turn.policy))
    until_s = turn.now.mono_s + lasts_s
    if until_s - turn.ledger.deadlines.get(lease.id, 0.0) >= min(STEP_S, lasts_s / 10):
        turn.put(Deadline(lease.id, until_s))
