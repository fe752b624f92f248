"""The order among the requests of one user, where a limit of GPUs (`--max-gpus-per-user`) keeps an older one out.

With a limit of 4 GPUs, a user whose sweep holds 3 or 4 asks for 4 at once. Each time that a member of the sweep ends,
the next one fits into the limit and the older request does not: without a bound it would wait for as long as the sweep
has members, though GPUs are free. So the user's own requests have the rule of `core.backfill`, with the limit in the
place of the GPUs:

- A newer request of the same user *bypasses* the older one within the limit when, after its grant, the limit leaves the
  older one too little, and nothing but the limit keeps the older one waiting: on some node enough of the GPUs that it
  could use are free or held by the same user. While other users have those GPUs, the user's other requests delay
  nothing, and count nothing.
- That may happen `max_bypass` times, or for `max_bypass_s` seconds from the first time on. From then until the older
  request is granted, so many GPUs of the user's limit as it needs are *claimed* for it. Newer requests of the same user
  have what is left.
- Nothing is claimed while no node could serve the older request when leases end: it asks for a node that is silent, or
  for GPUs that are cordoned.

| who | delayed by the older request that its limit keeps out |
|---|---|
| the user's newer requests | after the bound, until it is granted |
| other users | not at all: no GPU is held for it. Within the limit it waits like any other (`core.backfill`) |
| running leases | never |

A request that only lacks a recent reading, and so is about to be granted, claims its GPUs of the limit in that turn.

How many times a request was bypassed is in memory only (`Ledger.user_bypasses`). After a restart both bounds begin
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpulease_protocol.model import Demand
from gpulease_server.core.backfill import Reservations, nodes_to_reserve
from gpulease_server.core.eligibility import min_gpus_of
from gpulease_server.core.placement import can_have, lacks_memory
from gpulease_server.core.records import BypassCounts, GpuRecord, LeaseRecord
from gpulease_server.core.turn import Turn


@dataclass(slots=True)
class UserOrder:
    """The requests of each user that wait in this turn, oldest first. Empty where users have no limit of GPUs."""

    reservations: Reservations
    _waiting: dict[str | None, list[LeaseRecord]] = field(default_factory=dict)
    _can_be_served: dict[Demand, bool] = field(default_factory=dict)
    _only_limited: dict[tuple[str | None, Demand], bool] = field(default_factory=dict)

    def add(self, record: LeaseRecord) -> None:
        """Add a request that waits, and claim GPUs of its user's limit for it if it was bypassed as often or as long as
        it may be."""
        if self.reservations.users.limits.gpus:
            self.extend([record])
            self.claim_if_due(record)

    def extend(self, records: Iterable[LeaseRecord]) -> None:
        """Add requests that wait, and for which nothing is to be claimed."""
        if self.reservations.users.limits.gpus:
            for record in records:
                self._waiting.setdefault(record.lease.holder.user, []).append(record)

    def count_bypass(self, turn: Turn, granted: LeaseRecord) -> None:
        """Count a bypass for each older request of the same user to which this grant leaves too little of the limit."""
        users = self.reservations.users
        passed = [
            older
            for older in self._waiting.get(granted.lease.holder.user, ())
            if (users.gpus_left(older.lease) or 0) < self._needs(older) and self._is_only_limited(older)
        ]
        if passed:
            passed.sort(key=self.reservations.ledger.ordered_place)
            counts = tuple((record.lease.id, 1) for record in passed)
            turn.put(BypassCounts(counts, turn.now.mono_s, within_user=True))
            for record in passed:
                self.claim_if_due(record)

    def may_claim(self, user: str | None, demand: Demand) -> bool:
        """True until it has turned out that nothing more can be claimed for requests that were not bypassed."""
        return self._only_limited.get((user, demand), True) and self.may_keep(user, demand)

    def may_keep(self, user: str | None, demand: Demand) -> bool:
        """True until it has turned out that nothing more of this user's limit can be kept for such requests."""
        users = self.reservations.users
        is_full = sum(users.kept.get(user, {}).values()) >= users.limits.gpus
        return not is_full and self._can_be_served.get(demand, True)

    def claim_if_due(self, record: LeaseRecord) -> None:
        """Claim GPUs of its user's limit for a waiting request that was bypassed as often or as long as it may be."""
        if not self.reservations.users.limits.gpus:
            return
        reservations, now_s = self.reservations, self.reservations.now.mono_s
        times, since_s = reservations.ledger.user_bypasses.get(record.lease.id, (0, now_s))
        is_due = nodes_to_reserve(times, now_s - since_s, reservations.policy) > 0
        if not is_due or not (times or self._is_only_limited(record)):
            return
        demand = record.lease.demand
        if demand not in self._can_be_served:
            self._can_be_served[demand] = reservations.can_be_served(demand, reservations.users.limits.gpus)
        if self._can_be_served[demand]:
            reservations.users.keep(record.lease, self._needs(record))

    def _needs(self, record: LeaseRecord) -> int:
        return min_gpus_of(self.reservations.ledger, self.reservations.users, record.lease.demand)

    def _is_only_limited(self, record: LeaseRecord) -> bool:
        """True when so many nodes as a request asks for have enough GPUs that are free or held by its own user."""
        user, demand = record.lease.holder.user, record.lease.demand
        if (user, demand) not in self._only_limited:
            self._only_limited[user, demand] = can_have(
                self.reservations.ledger,
                demand,
                self.reservations.now,
                self.reservations.users.limits.gpus,
                lambda gpus: [gpu for gpu in gpus if self._is_free_or_own(record, gpu)],
            )
        return self._only_limited[user, demand]

    def _is_free_or_own(self, record: LeaseRecord, gpu: GpuRecord) -> bool:
        reservations, demand = self.reservations, record.lease.demand
        if reservations.is_free(gpu):
            reserved_for = reservations.by_uuid.get(gpu.device.uuid, record.lease.id)
            return reserved_for == record.lease.id and not lacks_memory(reservations.ledger, demand, gpu)
        holding = reservations.ledger.leases.get(gpu.lease_id or "")
        own = holding is not None and holding.lease.holder.user == record.lease.holder.user
        return own and reservations.will_be_free(demand, gpu)
