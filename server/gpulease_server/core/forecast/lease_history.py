"""How much longer a lease lasts, by how long earlier ones did.

The sample of a lease are the newest `MAX_SAMPLES` leases of its user for as many GPUs that lasted longer than it has
lasted already: of a job that has run for a day it says nothing that most jobs end within a minute. Where these are
fewer than `MIN_SAMPLES`, those of its user count; else those of all. New ones say more than old ones, because a user
does the same thing many times over.

From that sample an end is taken at three levels: early, middle and late. Leases that run at once are often parts of
one thing and last equally long, so all are taken at one level: if each had a level of its own, long and short ones
would make up for each other, and ranges would be far too narrow (bench/policy/README.md has the figures).

| what happens | what is taken |
|---|---|
| a lease has outlasted all but few | at the early level it ends after a 19th of its age, at the others never |
| a lease was revoked, preempted, taken back while idle, or its node was lost | it is in no sample: it was cut short |
| a request was cancelled while it waited | the same |

A 19th: where one in two lasts twice as long as until now, whatever its age, one in 20 ends sooner (Harchol-Balter and
Downey, "Exploiting process lifetime distributions for dynamic load balancing", 1997, found that of processes).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import EndReason, Lease

MIN_SAMPLES = 20
"""From fewer leases nothing is taken."""
MAX_SAMPLES = 40
"""Of those that lasted long enough so many count: the newest."""
LEVELS = (0.05, 0.5, 0.95)
"""The shares of the sample that have ended by an early, a middle and a late end."""
EARLY = 0
"""Of these the early one."""
EARLY_SHARE = LEVELS[EARLY] / (1.0 - LEVELS[EARLY])
"""After this share of its age, a lease that has outlasted its sample ends at the early level."""
ENDS_OF_OTHERS = frozenset({EndReason.REVOKED, EndReason.NODE_LOST, EndReason.PREEMPTED, EndReason.RECLAIMED_IDLE})
"""A lease that ended so was cut short."""


@dataclass(frozen=True, slots=True)
class RemainingTime:
    """How much longer a lease is taken to last."""

    remaining_s: float
    samples: int | None = None
    """How many earlier leases that follows from; None for one that has outlasted them."""


class LeaseHistory:
    """How long these leases lasted, by user and number of GPUs: of those that the ledger keeps after their ends, which
    bounds it."""

    def __init__(self, oldest_first: Iterable[Lease] = ()) -> None:
        self._newest_first: dict[Hashable, list[float]] = {}
        for lease in oldest_first:
            if lease.granted_at is not None and lease.ended_at is not None and lease.end_reason not in ENDS_OF_OTHERS:
                lasted_s = max(0.0, (lease.ended_at - lease.granted_at).total_seconds())
                for key in _keys(lease):
                    self._newest_first.setdefault(key, []).append(lasted_s)
        for found in self._newest_first.values():
            found.reverse()

    def __bool__(self) -> bool:
        """True where something is known of how long a new lease lasts."""
        return len(self._newest_first.get(None, ())) >= MIN_SAMPLES

    def remaining(self, lease: Lease, elapsed_s: float, level: int) -> RemainingTime | None:
        """How much longer an active lease lasts that has lasted for so long, at one of `LEVELS`; None where that is not
        known. Costs a look at each lease that it is made of, at most."""
        for key in _keys(lease):
            longer = (one_s for one_s in self._newest_first.get(key, ()) if one_s > elapsed_s)
            sample_s = sorted(islice(longer, MAX_SAMPLES))
            if len(sample_s) >= MIN_SAMPLES:
                return RemainingTime(sample_s[int(len(sample_s) * LEVELS[level])] - elapsed_s, len(sample_s))
        return RemainingTime(elapsed_s * EARLY_SHARE) if level == EARLY and self else None


def _keys(lease: Lease) -> tuple[Hashable, ...]:
    """To which samples a lease belongs, the closest ones first. Without a name there is no user."""
    user, demand = lease.holder.user, lease.demand
    return ((user, demand.count * demand.nodes), user, None) if user else (None,)
