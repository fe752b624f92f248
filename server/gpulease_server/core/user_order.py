"""The order among the requests of one user or group, where its limit of GPUs or leases keeps an older one out.

With a limit of 4 GPUs, a user whose sweep holds 3 or 4 asks for 4 at once. Each time that a member of the sweep ends,
the next one fits into the limit and the older request does not: without a bound it would wait for as long as the sweep
has members, though GPUs are free. So the requests under one limit have the rule of `core.backfill`, with the limit in
the place of the GPUs:

- A newer request *bypasses* an older one within their limit when, after its grant, the limit leaves the older one too
  little, and nothing but the limit keeps the older one waiting: on some node enough of the GPUs that it could use are
  free or held under the same limit. While others have those GPUs, the requests under the limit delay nothing, and count
  nothing. Where both its user's limit and that of the group leave it too little, only the user's counts: it is the
  user's own leases that the request waits for first, and the rest of the group does not wait for those. Where only the
  limit of interactive requests keeps it out, nothing counts, and nothing is claimed.
- That may happen `max_bypass` times, or for `max_bypass_s` seconds from the first time on. From then until the older
  request is granted, so many GPUs of the limit as it needs, and a lease, are *claimed* for it. Newer requests under the
  limit have what is left.
- Nothing is claimed while no lease that ends would help the older request: it asks for a node that is silent, or for
  GPUs that are cordoned; one of its limits was set below what it asks for; or the GPU-hours of one of its limits, or of
  the budget of its token, are used.
- One that *goes first* (`core.order`) claims what it needs of all of its limits at once, while GPUs for it are free,
  reserved for it, or held under its limits. While others have them the requests under its limits go on.
  It *misses* a grant when its limits keep it from GPUs that someone not under them gets, if the calendar does not close
  these to it. After `max_bypass` of these it
  claims what it needs until it is granted, even while others have the GPUs: else its limits would be used up each time
  that its GPUs are free, and its GPUs be taken each time that its limits leave enough.

| who | delayed by the older request that its limit keeps out |
|---|---|
| newer requests under the same limit | after the bound, until it is granted |
| everyone else | not at all: no GPU is held for it. Within the limit it waits like any other (`core.backfill`) |
| running leases | never |

A request that only lacks a recent reading, and so is about to be granted, claims its GPUs of its limits in that turn.
Under the limit of a token no newer request passes an older one at all (`core.token_budgets`).

How many times a request was bypassed is in memory only (`Ledger.limit_bypasses`). After a restart both bounds begin
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from enum import StrEnum, auto

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import Demand, Lease
from gpulease_server.core.backfill import Reservations, nodes_to_reserve
from gpulease_server.core.calendar import NO_GPUS
from gpulease_server.core.demand_classes import ClassKey
from gpulease_server.core.eligibility import min_gpus_of
from gpulease_server.core.limit_records import LimitKey, token_key
from gpulease_server.core.order_records import Overtakes
from gpulease_server.core.placement import can_have, find_candidates, lacks_memory
from gpulease_server.core.records import BypassCounts, GpuRecord, LeaseRecord
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import Applied, LimitedDemand, UserUsage, never_within_limits


class Out(StrEnum):
    """How a limit keeps a request out."""

    ALONE = auto()
    """Until leases end: no older request claims that limit."""
    BEHIND = auto()
    """An older request claims it."""


@dataclass(slots=True)
class UserOrder:
    """The requests under each limit that wait in this turn, oldest first."""

    reservations: Reservations
    _waiting: dict[LimitKey, list[LeaseRecord]] = field(default_factory=dict)
    _can_be_served: dict[LimitedDemand, bool] = field(default_factory=dict)
    _waits: dict[tuple[Demand, str | None, str | None], bool] = field(default_factory=dict)
    """By demand, user and token: `waits_for_leases`."""
    _within_reach: dict[tuple[Demand, str | None, str | None], bool] = field(default_factory=dict)
    """By demand, user and token: `_has_in_reach`."""
    _kept_first: list[LeaseRecord] = field(default_factory=list)
    """Those that go first, and that a limit keeps out."""
    _only_limited: dict[tuple[LimitKey, Demand, frozenset[str]], bool] = field(default_factory=dict)

    @property
    def users(self) -> UserUsage:
        """What each user and group has."""
        return self.reservations.users

    def add(self, record: LeaseRecord) -> None:
        """Add a request that waits, and claim what it needs of its limits if it was bypassed as often or as long as it
        may be."""
        if record.lease.id in self.reservations.ledger.go_first:
            self.claim(record)
            if self.kept_out(record) is not None:
                self._kept_first.append(record)
        if self._limits_of(record):
            self.extend([record])
            self.claim_if_due(record)

    def extend(self, records: Iterable[LeaseRecord]) -> None:
        """Add requests that wait, and for which nothing is to be claimed."""
        for record in records:
            for one in self._limits_of(record):
                self._waiting.setdefault(one.key, []).append(record)

    def count_bypass(
        self,
        turn: Turn,
        granted: LeaseRecord,
        gpus: Sequence[GpuRecord],
        is_before: Callable[[LeaseRecord], bool] | None = None,
    ) -> None:
        """Count a bypass for each older request under the same limit to which the grant of these GPUs leaves too little
        of it; and a miss for those that go first. `is_before`: only for those that still come before it; None if all
        do."""
        self._count_missed(turn, granted, gpus)
        if not self._waiting:
            return
        passed: dict[LimitKind, list[LeaseRecord]] = {}
        for one in self._limits_of(granted):
            for older in self._waiting.get(one.key, ()):
                if is_before is not None and not is_before(older):
                    continue
                if self._first_short(older) == one.key and self._is_only_limited(one, older):
                    passed.setdefault(one.key.kind, []).append(older)
        for kind, records in passed.items():
            records.sort(key=self.reservations.ledger.ordered_place)
            counts = tuple((record.lease.id, 1) for record in records)
            turn.put(BypassCounts(counts, turn.now.mono_s, within=kind))
        for record in {record.lease.id: record for records in passed.values() for record in records}.values():
            self.claim_if_due(record)

    def may_claim(self, one: Applied, key: ClassKey) -> bool:
        """True until it has turned out that nothing more can be claimed for requests that were not bypassed."""
        return self._only_limited.get((one.key, key.demand, NO_GPUS), True) and self.may_keep(one, key)

    def may_keep(self, one: Applied, key: ClassKey) -> bool:
        """True until it has turned out that nothing more of this limit can be kept for such requests."""
        return not self.users.is_all_kept(one) and self._waits.get((key.demand, key.user, key.token_id), True)

    def claim_if_due(self, record: LeaseRecord) -> None:
        """Claim what a waiting request needs of each limit within which it was bypassed as often or as long as it may
        be."""
        for one in self._limits_of(record):
            if self._is_due(one, record) and self.waits_for_leases(record):
                self.users.keep(one, record.lease.id, self._needs(record))
                if one.key.kind is LimitKind.GROUP:
                    self.reservations.keep_step(record)

    def claim(self, record: LeaseRecord, *, always: bool = False) -> None:
        """Claim what a waiting request needs of all of its limits, and the budget of its token, because it goes first;
        see `core.order`. Nothing while others have its GPUs, unless it has missed as many grants as it may, or
        `always`."""
        missed = self.reservations.ledger.go_first.get(record.lease.id, 0)
        is_due = nodes_to_reserve(missed, 0.0, self.reservations.policy) > 0
        if self.waits_for_leases(record) and (always or is_due or self._has_in_reach(record)):
            self.users.keep_all(record.lease, self._needs(record))

    def _count_missed(self, turn: Turn, granted: LeaseRecord, gpus: Sequence[GpuRecord]) -> None:
        """Count a miss for each request that goes first, but for its limits, and could use the GPUs of this grant."""
        ledger = self.reservations.ledger
        if not self._kept_first:
            return
        uuids, keys = {gpu.device.uuid for gpu in gpus}, ledger.limits.keys_of(granted.lease.holder)
        missed = [
            record.lease.id
            for record in self._kept_first
            if record.lease.id in ledger.go_first
            and self._keys_of(record).isdisjoint(keys)
            and not uuids.isdisjoint(self._open_to(record))
        ]
        if missed:
            turn.put(Overtakes(ledger.overtakes, missed=tuple(missed)))

    def _open_to(self, record: LeaseRecord) -> frozenset[str]:
        """The GPUs that could serve a request, but for those that the calendar closes to it."""
        found = find_candidates(self.reservations.ledger, record.lease.demand).uuids
        closed = self.users.closed_to(record.lease)
        return found - closed if closed else found

    def keeps_out(self, record: LeaseRecord) -> bool:
        """True while a limit of its user, group or token, or the budget of its token, keeps a request out of the queue:
        it reserves no GPU, and others pass it. Call it for one after the other, in order, see `UserUsage.keeps_out`."""
        lease = record.lease
        if not self.users.may_limit(lease):
            return False
        most_gpus = self._most_gpus(lease)
        return self.users.keeps_out(
            lease, self._needs(record), can_be_served=lambda: self._may_be_served(lease, most_gpus)
        )

    def kept_out(self, record: LeaseRecord) -> Out | None:
        """Whether a limit keeps a request out, or the budget of its token, after what older ones claim."""
        lease, tokens, needed = record.lease, self.users.tokens, self._needs(record)
        short = {one.key for one in self.users.applied(lease) if self.users.is_short(one, lease.id, needed)}
        by_budget = tokens is not None and tokens.limit_reached(lease, needed) is not None
        if not short.isdisjoint(self.users.kept) or (by_budget and tokens is not None and tokens.kept_for(lease)):
            return Out.BEHIND
        return Out.ALONE if short or by_budget else None

    def is_kept_out_alone(self, record: LeaseRecord) -> bool:
        """True while a limit of its user or token, and not of its group, leaves a request too little."""
        lease, needed = record.lease, self._needs(record)
        own = (one for one in self.users.applied(lease) if one.key.kind is not LimitKind.GROUP)
        return any(self.users.is_short(one, lease.id, needed) for one in own)

    def waits_for_leases(self, record: LeaseRecord) -> bool:
        """True for a request that its limits, the budget of its token and the nodes can serve once leases end."""
        lease = record.lease
        asked = lease.demand, lease.holder.user, lease.holder.token_id
        if asked not in self._waits:
            self._waits[asked] = self._waits_for_leases(record)
        return self._waits[asked]

    def _waits_for_leases(self, record: LeaseRecord) -> bool:
        lease, needed, users = record.lease, self._needs(record), self.users
        if never_within_limits(users, lease, needed) is not None or users.hours_are_used(lease):
            return False
        if users.tokens is not None and users.tokens.hours_used_until(lease, needed) is not None:
            return False
        return self._may_be_served(lease, self._most_gpus(lease))

    def _most_gpus(self, lease: Lease) -> int | None:
        """How many GPUs a lease may have within its limits and the budget of its token when nothing else is held; None
        for any number."""
        found = [one.limits.max_gpus for one in self.users.applied(lease)]
        if self.users.tokens is not None and (record := self.users.tokens.of(lease)) is not None:
            found.append(record.budget.max_gpus)
        return min((gpus for gpus in found if gpus is not None), default=None)

    def _may_be_served(self, lease: Lease, most_gpus: int | None) -> bool:
        served = LimitedDemand(lease.demand, most_gpus, self.users.closed_to(lease))
        if served not in self._can_be_served:
            self._can_be_served[served] = self.reservations.can_be_served(served)
        return self._can_be_served[served]

    def _is_due(self, one: Applied, record: LeaseRecord) -> bool:
        reservations, now_s = self.reservations, self.reservations.now.mono_s
        bypasses = reservations.ledger.limit_bypasses[one.key.kind]
        times, since_s = bypasses.get(record.lease.id, (0, now_s))
        if nodes_to_reserve(times, now_s - since_s, reservations.policy) == 0:
            return False
        first = self._first_short(record)
        if first is not None and first.interactive:
            return False
        return times > 0 or (first in (None, one.key) and self._is_only_limited(one, record))

    def _limits_of(self, record: LeaseRecord) -> tuple[Applied, ...]:
        """The limits of GPUs and leases of a request's user and group."""
        applied = self.users.ordered(record.lease.holder.user)
        return tuple(one for one in applied if (one.limits.max_gpus, one.limits.max_leases) != (None, None))

    def _first_short(self, record: LeaseRecord) -> LimitKey | None:
        """The first limit, or token, that leaves a request too little; None where all leave enough."""
        needed = self._needs(record)
        for one in self.users.applied(record.lease):
            if self.users.is_short(one, record.lease.id, needed):
                return one.key
        return None

    def _needs(self, record: LeaseRecord) -> int:
        return min_gpus_of(self.reservations.ledger, self.users, record.lease.demand)

    def _is_only_limited(self, one: Applied, record: LeaseRecord) -> bool:
        """True when so many nodes as a request asks for have enough GPUs that are free or held under the limit."""
        demand, closed = record.lease.demand, self.users.closed_to(record.lease)
        if (one.key, demand, closed) not in self._only_limited:
            self._only_limited[one.key, demand, closed] = can_have(
                self.reservations.ledger,
                demand,
                self.reservations.now,
                one.limits.max_gpus,
                lambda gpus: [gpu for gpu in gpus if self._is_free_or_own({one.key}, record, gpu)],
            )
        return self._only_limited[one.key, demand, closed]

    def _has_in_reach(self, record: LeaseRecord) -> bool:
        """The same for all limits of a request, and the budget of its token. GPUs that someone has given back count."""
        lease, keys, ledger = record.lease, self._keys_of(record), self.reservations.ledger
        asked = lease.demand, lease.holder.user, lease.holder.token_id
        if asked not in self._within_reach:
            self._within_reach[asked] = can_have(
                ledger,
                lease.demand,
                self.reservations.now,
                self._most_gpus(lease),
                lambda gpus: [gpu for gpu in gpus if self._is_free_or_own(keys, record, gpu, draining=True)],
            )
        return self._within_reach[asked]

    def _keys_of(self, record: LeaseRecord) -> set[LimitKey]:
        """What a request must be within: its limits, and the budget of its token."""
        found = {one.key for one in self.users.applied(record.lease)}
        token = token_key(record.lease.holder)
        return found if token is None else found | {token}

    def _is_free_or_own(
        self, keys: set[LimitKey], record: LeaseRecord, gpu: GpuRecord, *, draining: bool = False
    ) -> bool:
        reservations, demand = self.reservations, record.lease.demand
        if gpu.device.uuid in self.users.closed_to(record.lease):
            return False
        if reservations.is_free(gpu):
            reserved_for = reservations.by_uuid.get(gpu.device.uuid, record.lease.id)
            return reserved_for == record.lease.id and not lacks_memory(reservations.ledger, demand, gpu)
        holding = reservations.ledger.leases.get(gpu.lease_id or "")
        if draining and gpu.draining:
            return reservations.will_be_free(demand, gpu)
        own = holding is not None and not keys.isdisjoint(reservations.ledger.limits.keys_of(holding.lease.holder))
        return own and reservations.will_be_free(demand, gpu)
