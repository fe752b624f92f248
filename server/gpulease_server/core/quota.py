"""What one user may have: leases and GPUs at a time, and requests in the queue.

Whoever is at his limit waits, as in Slurm: his requests take no part in the queue until he gives something back, claim
no GPU and delay nobody, as those of an array at its limit. One that is over the limit all by itself would wait for
ever, and is refused for good; so is, for the moment, one beyond what he may have in the queue. The limits hold for
everybody alike, administrators included, and never end a lease that somebody has.

What drains of an ended lease counts no more: its user has given it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpulease.errors import OverQuota
from gpulease.model import Demand, Lease, LeaseState

from .ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one user may have at a time. 0: as much as there is."""

    leases: int = 0
    """Active leases, those of jobs included."""
    gpus: int = 0
    """GPUs in active leases."""
    queued: int = 8000
    """Requests that wait; of all users together there may be `Policy.max_queued`."""


class NeverWithinLimits(OverQuota):
    """The request alone is over what its user may have at a time. Ask for fewer GPUs."""

    status = 422


@dataclass
class Had:
    """What each user has in active leases, kept up while leases are granted."""

    limits: Limits
    leases: Counter[str | None] = field(default_factory=Counter)
    gpus: Counter[str | None] = field(default_factory=Counter)
    least: dict[Demand, int] = field(default_factory=dict)
    """How many GPUs a demand gets at least, of those that were looked at."""

    @property
    def limited(self) -> bool:
        """True when there is any limit on what a user has."""
        return bool(self.limits.leases or self.limits.gpus)

    def granted(self, lease: Lease, gpus: int) -> None:
        """Count one more."""
        self.leases[lease.holder.user] += 1
        self.gpus[lease.holder.user] += gpus

    def room(self, lease: Lease) -> int | None:
        """How many GPUs more a lease's user may have; None for any number."""
        return None if not self.limits.gpus else self.limits.gpus - self.gpus[lease.holder.user]

    def limit_met(self, lease: Lease, wanted: int) -> str | None:
        """The limit that keeps a lease of so many GPUs from its user now, in words; None where there is room for it."""
        user, limits = lease.holder.user, self.limits
        if limits.leases and self.leases[user] >= limits.leases:
            return f"user {user} has {_counted(self.leases[user], 'lease')}, and may have {limits.leases} at a time"
        if limits.gpus and self.gpus[user] + wanted > limits.gpus:
            has = _counted(self.gpus[user], "GPU")
            return f"user {user} has {has}, asks for {wanted}, and may have {limits.gpus} at a time"
        return None


def had(ledger: Ledger, limits: Limits) -> Had:
    """What each user has now. One walk over the GPUs where there is a limit, and over nothing where there is none."""
    found = Had(limits)
    if found.limited:
        held = Counter(gpu.lease_id for gpu in ledger.gpus.values() if gpu.lease_id is not None and not gpu.draining)
        for lease_id, gpus in held.items():
            lease = ledger.leases[lease_id].lease
            if lease.state is LeaseState.ACTIVE:
                found.granted(lease, gpus)
    return found


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def never_within(limits: Limits, lease: Lease, wanted: int) -> NeverWithinLimits | None:
    """Why a request of so many GPUs can never be granted within its user's limits; None where it can."""
    if not limits.gpus or wanted <= limits.gpus:
        return None
    detail = f"It asks for {wanted} GPUs, and user {lease.holder.user} may have {limits.gpus} at a time."
    return NeverWithinLimits(detail, remedy="Ask for fewer GPUs, or an administrator for a higher --max-gpus-per-user.")


def queue_is_full(ledger: Ledger, user: str | None, undecided: Iterable[str], further: int, limits: Limits) -> bool:
    """True when so many further requests are more than a user may have in the queue. `undecided` are the leases of
    which nobody knows yet whether they will wait."""
    if not limits.queued or ledger.waiting[user] + further <= limits.queued:
        return False
    own = sum(ledger.leases[lease_id].lease.holder.user == user for lease_id in undecided)
    return ledger.waiting[user] - own + further > limits.queued
