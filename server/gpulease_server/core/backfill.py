"""Backfill with a bound: how many times a newer request may start first, and what is held for the older one after that.

A request that fits is granted although an older one waits that does not fit: this is backfill. Each such grant of a
GPU that the older request could use *bypasses* it once. That may happen `max_bypass` times, or for `max_bypass_s`
seconds from the first time on; after that, free GPUs are *held* (reserved) for the older request, and no newer
request gets them. With 0 for either bound no request is ever bypassed, but by one that does not delay it where
`Policy.easy_backfill` is on.

What is held
------------
All free GPUs of a node that the older request could use (its node, model, memory and list of GPUs), and only on a node
where enough such GPUs are free or will be when leases end. It is not known when a GPU comes back that is foreign,
cordoned, unhealthy, prohibited, on a silent node, or draining for longer than retained memory explains
(`2 * retained_memory_s`; `MAX_LEFTOVER_S` if its lease ran ahead of others). Where the older request would need one of
those, nothing is held on that node and its other GPUs go to other requests. So nothing is held for a request that can
never be served, or that waits for an absent node. Its bypass count is kept, and once the GPU is back others are held.

With several nodes: first on the node that lacks the fewest GPUs; each time that the bound is reached again, on twice as
many. So eight GPUs for one request leave at most seven idle at first, and yet long leases on one node cannot keep it
waiting forever: a request that `n` nodes could serve is bypassed at most `max_bypass * (1 + ceil(log2(n)))` times, that
is `max_bypass` times where only one could. From then on every GPU that it could use and that is given back waits for
it: it is granted after as many releases as it lacks GPUs on some node.

For a gang the node is a set of nodes, as many as it asks for, and the bound is reached again for twice as many sets. On
each node no more is held than the gang needs there. Nothing is held unless so many nodes could serve it when leases
end, so a gang that waits for an absent node holds nothing on the others. Two gangs never wait for each other: what is
held follows in each turn from the order of arrival, so an older one waits only for leases to end, and a newer
one for those and for the older. See `docs/design/0009-gangs.md`.

Several older requests hold GPUs in order of arrival; a GPU that is held for one is not held for the next. A request
that is not eligible (its array is at its limit, its retry pauses) is neither bypassed nor held for. GPUs are held for a
holder that died while it waited until its request ends: at once where the process is watched, at `ttl_s` otherwise.
A request that declares its time counts no bypass for those that it does not delay, and may then use what is held for
them, see `core.easy_backfill`. What it has is *lent*: it counts as free where GPUs are held, so what is held does not
move to another node because of it.
Where a limit keeps a request of a whole node from some nodes, only GPUs of the others are held for it.
On the first day of a request nothing is held on a node where, by the times that were declared, it cannot start before
a reservation closes it out (`core.declared_ends`): the GPUs would be idle until that is so. A holder may give GPUs back
sooner, so after that day they are held all the same, and it is served as without reservations. The day is counted by
the wall clock from the moment when it was made, which a restart does not change.

What is kept
------------
`Ledger.bypasses`, in memory. After a restart the number is counted again, see `core.recounted_bypasses`; the seconds
start again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import field
from typing import NamedTuple

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Demand, GpuState
from gpulease_server.core.declared_ends import is_closed_before_free
from gpulease_server.core.gpu import ends_too_soon, is_cordoned, node_problem, state_of
from gpulease_server.core.gpu_choice import set_to_wait_for
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.placement import (
    can_have,
    find_candidates,
    gpus_needed,
    grant_size,
    has_enough,
    lacks_memory,
    reach_of,
)
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import BypassCounts, GpuRecord, Instant, LeaseRecord
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import LimitedDemand, UserUsage

MAX_LEFTOVER_S = 3600.0
"""So long GPUs are held beside one on which something is left of a lease that ran ahead, from the end of that."""
CLOSED_OUT_S = 86400.0
"""So long after it was made nothing is held for a request where it is taken to be closed out before it starts."""
ALL_NODES = 2**30


@dataclass(frozen=True, slots=True)
class Undelayed:
    """The older requests that a grant passes and does not delay, see `core.easy_backfill`."""

    demands: frozenset[LimitedDemand] = frozenset()
    """All that ask for this."""
    told: tuple[str, ...] = ()
    """Lease ids of the oldest of them, for people."""


NONE_UNDELAYED = Undelayed()


class _Serving(NamedTuple):
    """What a node has for a waiting request."""

    lacking: int
    """How many GPUs it lacks."""
    node: str
    own: list[GpuRecord]
    """Those that are free for it, or lent to those who ran ahead of it."""

    def order(self) -> tuple[int, str]:
        """Where GPUs are held first."""
        return self.lacking, self.node


@dataclass(slots=True)
class Reservations:
    """The free GPUs that newer requests do not get, and for which request. Filled again in every turn, oldest first."""

    ledger: Ledger
    now: Instant
    policy: Policy
    users: UserUsage = field(default_factory=lambda: UserUsage(UserLimits()))
    """What each user has, and what is kept of their limits."""
    late_nodes: Collection[str] = ()
    """Nodes that were asked for a reading too long ago; nothing is granted there."""
    by_uuid: dict[str, str] = field(default_factory=dict)
    """The lease that each GPU is reserved for."""
    lent: dict[str, str] = field(default_factory=dict)
    """The same for GPUs of leases that ran ahead of it."""
    taken: list[str] = field(default_factory=list)
    """The node of each GPU that was reserved or granted in this turn, see `core.node_ranking`."""
    held_at: dict[str, int] = field(default_factory=dict)
    """By request that GPUs are held for, or a limit of its group is claimed: its user's step at that moment."""
    _left: str | None = ""
    """A free GPU that is not reserved; None when there is none, and at first no GPU."""
    _nodes: list[str] | None = None
    """Nodes that may have such a GPU; None at first."""
    _of_node: Iterator[str] | None = None
    """The GPUs of the last of these nodes that were not looked at yet; those before are taken for good."""
    _nothing_to_reserve: set[LimitedDemand] = field(default_factory=set)
    _lent_on: dict[str, list[GpuRecord]] = field(default_factory=dict)
    _lent_to: int = 0
    """By node, the GPUs of leases that ran ahead; and how many these are."""
    held_for: dict[str, int] = field(default_factory=dict)
    """By lease id, the requests that were bypassed as often or as long as they may be: on how many nodes GPUs are held
    for each."""
    due: dict[LimitedDemand, LeaseRecord] = field(default_factory=dict)
    """By what they ask for, the oldest of these."""
    closed_out: set[str] = field(default_factory=set)
    """Lease ids of those for which nothing is held on some node, as the calendar closes it before they could start."""
    is_complete: bool = True
    """False once the walk leaves out requests that wait, because nothing is left: then no one runs ahead of those."""

    @property
    def is_any_left(self) -> bool:
        """True while a free GPU is not reserved. It never becomes true again."""
        if self._left is not None and not self._is_left(self._left):
            self._left = self._find_left()
        return self._left is not None

    def _is_left(self, uuid: str) -> bool:
        gpu = self.ledger.gpus.get(uuid)
        return gpu is not None and gpu.lease_id is None and uuid not in self.by_uuid

    def _find_left(self) -> str | None:
        """A free GPU that is not reserved. Nodes that had none have none later in the turn."""
        if self._nodes is None:
            self._nodes = list(self.ledger.fleet.free)
        while self._nodes:
            node = self._nodes[-1]
            if self._of_node is None:
                self._of_node = iter(self.ledger.fleet.free.get(node, ()) if self._is_heard(node) else ())
            if (uuid := next(filter(self._is_left, self._of_node), None)) is not None:
                return uuid
            self._nodes.pop()
            self._of_node = None
        return None

    def _is_heard(self, node: str) -> bool:
        return node_problem(self.ledger, node, self.now, self.policy) is None

    def reserve(self, record: LeaseRecord, gpus: Iterable[GpuRecord]) -> None:
        """Reserve GPUs for a request."""
        for gpu in gpus:
            self.by_uuid.setdefault(gpu.device.uuid, record.lease.id)
            self.taken.append(gpu.device.node)

    def reserve_if_due(self, record: LeaseRecord) -> None:
        """Reserve GPUs for a waiting request if it has been bypassed as often or as long as it may be."""
        lease = record.lease
        demand = self.users.demand_within(lease)
        if not self.may_reserve(demand):
            return
        times, since_s = self.ledger.bypasses.get(lease.id, (0, self.now.mono_s))
        most = nodes_to_reserve(times, self.now.mono_s - since_s, self.policy)
        if most <= self.held_for.get(lease.id, 0):
            return
        held = self._gpus_to_reserve(record, demand, most) if self.is_any_left else []
        self.due.setdefault(demand, record)
        self.held_for[lease.id] = most
        lent = {gpu.device.uuid: record.lease.id for gpu in held if gpu.lease_id in self.ledger.ran_ahead}
        self.lent |= lent
        self.reserve(record, (gpu for gpu in held if gpu.device.uuid not in lent))
        if held:
            self.keep_step(record)
        else:
            # Its free GPUs are reserved already, or do not help. The same holds for newer requests with this demand.
            self._nothing_to_reserve.add(demand)

    def keep_step(self, record: LeaseRecord) -> None:
        """Note on which step a request is for which something is held or claimed; see `core.order.keep_places`."""
        self.held_at.setdefault(record.lease.id, self.ledger.ordered_place(record)[1])

    def may_reserve(self, demand: LimitedDemand) -> bool:
        """True until it has turned out that nothing more can be reserved for requests with this demand."""
        return demand not in self._nothing_to_reserve

    def reserved_for(self, record: LeaseRecord) -> tuple[str, ...]:
        """The GPUs that are reserved for a request."""
        return tuple(uuid for uuid, lease_id in self.by_uuid.items() if lease_id == record.lease.id)

    def can_be_served(self, limited: LimitedDemand) -> bool:
        """True where enough nodes have enough GPUs for the demand that are free, or will be when leases end."""

        def able(gpus: list[GpuRecord]) -> list[GpuRecord]:
            return [*self._usable(limited, gpus), *self._coming(limited, gpus)]

        return can_have(self.ledger, limited.demand, self.now, limited.most_gpus, able)

    def _usable(self, limited: LimitedDemand, gpus: list[GpuRecord]) -> list[GpuRecord]:
        """Those that are free for the demand, whether they are reserved or not."""
        free = [gpu for gpu in gpus if self.is_free(gpu) and not lacks_memory(self.ledger, limited.demand, gpu)]
        return [gpu for gpu in free if gpu.device.uuid not in limited.closed] if limited.closed else free

    def _coming(self, limited: LimitedDemand, gpus: list[GpuRecord]) -> list[GpuRecord]:
        """Those that will be free for the demand when leases end."""
        coming = [gpu for gpu in gpus if self.will_be_free(limited.demand, gpu)]
        return [gpu for gpu in coming if gpu.device.uuid not in limited.closed] if limited.closed else coming

    def _gpus_to_reserve(self, record: LeaseRecord, limited: LimitedDemand, most_nodes: int) -> list[GpuRecord]:
        """The free GPUs on the nodes that lack the fewest. Looks only at nodes that have a free GPU, or a lent one."""
        if limited.demand.nodes > 1:
            return self._gpus_of_gang(record, limited, most_nodes)
        found, serving = list[_Serving](), find_candidates(self.ledger, limited.demand)
        for node in serving.nodes_in(self._open_nodes()):
            if self._is_all_for_others(record, node):
                continue
            one = self._serving(record, limited, node, serving.by_node[node])
            if one is not None and one.own:
                found.append(one)
        return [gpu for one in sorted(found, key=_Serving.order)[:most_nodes] for gpu in one.own]

    def _is_all_for_others(self, record: LeaseRecord, node: str) -> bool:
        """True where each free GPU of a node is reserved for another request, and each one that is lent."""
        if any(self._is_lent_by(record, gpu) for gpu in self.lent_on().get(node, ())):
            return False
        lease_id, reserved = record.lease.id, self.by_uuid
        return all(reserved.get(uuid, lease_id) != lease_id for uuid in self.ledger.fleet.free.get(node, ()))

    def lent_on(self) -> dict[str, list[GpuRecord]]:
        """By node, the GPUs of leases that ran ahead of others."""
        ledger = self.ledger
        if len(ledger.ran_ahead) != self._lent_to:
            self._lent_on, self._lent_to = {}, len(ledger.ran_ahead)
            for record in filter(None, map(ledger.leases.get, ledger.ran_ahead)):
                for gpu in ledger.held_by(record.lease):
                    self._lent_on.setdefault(gpu.device.node, []).append(gpu)
        return self._lent_on

    def _is_lent_by(self, record: LeaseRecord, gpu: GpuRecord) -> bool:
        """True for a GPU that a lease has which ran ahead of this request, if no older one waits for it. Not where it
        delays this request: then it is as any lease, and what is held may be better elsewhere."""
        lease_id = gpu.lease_id or ""
        how, ahead = self.ledger.ran_ahead.get(lease_id), self.ledger.leases.get(lease_id)
        if how is None or ahead is None or record.lease.demand not in how.undelayed:
            return False
        is_newer, uuid = (ahead.granted_at_s or self.now.mono_s) >= record.requested_at_s, gpu.device.uuid
        return is_newer and self.lent.get(uuid, self.by_uuid.get(uuid, record.lease.id)) == record.lease.id

    def _open_nodes(self) -> Collection[str]:
        """Nodes that have a free GPU, or one that is lent."""
        free, lent = self.ledger.fleet.free, self.lent_on()
        return dict.fromkeys([*free, *lent]) if lent else free

    def _gpus_of_gang(self, record: LeaseRecord, limited: LimitedDemand, most_sets: int) -> list[GpuRecord]:
        """The same for a gang: on so many times as many nodes as it asks for, of those that lack the fewest. A node
        keeps no more for it than it needs there. Looks at nodes without a free GPU until there are enough."""
        demand, sets, open_nodes = limited.demand, list[tuple[int, str, str, list[_Serving]]](), self._open_nodes()
        for model, by_node in find_candidates(self.ledger, demand).by_model.items():
            found: dict[str, list[_Serving]] = {}
            for node in sorted(by_node, key=lambda one: one not in open_nodes):
                reach = reach_of(self.ledger, demand, node)
                if reach is None or (node not in open_nodes and len(found.get(reach, ())) >= demand.nodes):
                    continue
                one = self._serving(record, limited, node, by_node[node])
                if one is not None:
                    found.setdefault(reach, []).append(one)
            for reach, serving in found.items():
                serving.sort(key=_Serving.order)
                lacking = sum(max(0, one.lacking) for one in serving[: demand.nodes])
                if len(serving) >= demand.nodes:
                    sets.append((lacking, model, reach, serving))
        chosen = [one for *_, serving in sorted(sets, key=lambda one: one[:3]) for one in serving]
        return [gpu for one in chosen[: most_sets * demand.nodes] for gpu in one.own[: demand.count]]

    def _serving(
        self, record: LeaseRecord, limited: LimitedDemand, node: str, uuids: tuple[str, ...]
    ) -> _Serving | None:
        """What a node has for a waiting request; None where it could not serve it when leases end."""
        demand, gpus = limited.demand, [self.ledger.gpus[uuid] for uuid in uuids]
        needed, most_gpus = gpus_needed(demand, gpus), limited.most_gpus
        if node in self.late_nodes or (most_gpus is not None and grant_size(demand, gpus) > most_gpus):
            return None
        if ends_too_soon(self.ledger, demand, node, self.now):
            return None
        usable = self._usable(limited, gpus)
        able = [*usable, *self._coming(limited, gpus)]
        if not has_enough(self.ledger, demand, node, able, needed) or self._is_closed_out(record, able, needed):
            return None
        wanted = set_to_wait_for(self.ledger, demand, node, able, needed)
        not_others = (gpu for gpu in usable if self.by_uuid.get(gpu.device.uuid, record.lease.id) == record.lease.id)
        own = [gpu for gpu in not_others if gpu.device.uuid in wanted]
        if node in self.lent_on():
            own += [gpu for gpu in able if gpu.device.uuid in wanted and self._is_lent_by(record, gpu)]
            own.sort(key=lambda gpu: gpu.device.index)
        return _Serving(needed - len(own), node, own)

    def _is_closed_out(self, record: LeaseRecord, able: list[GpuRecord], needed: int) -> bool:
        """True where nothing is held on a node, as the calendar closes it before the request starts there."""
        if not self.ledger.calendar.entries or self.policy.max_bypass == 0 or self.policy.max_bypass_s == 0:
            return False
        if (self.now.at - record.lease.created_at).total_seconds() >= CLOSED_OUT_S:
            return False
        is_closed = is_closed_before_free(self.users, self.ledger, record, able, needed)
        if is_closed:
            self.closed_out.add(record.lease.id)
        return is_closed

    def is_free(self, gpu: GpuRecord) -> bool:
        """True when nothing keeps the GPU from being granted now, whether it is reserved or not."""
        return state_of(self.ledger, gpu, self.now, self.policy) is GpuState.FREE

    def will_be_free(self, demand: Demand, gpu: GpuRecord) -> bool:
        """True when only a lease, or a short time of draining, keeps the GPU from the demand."""
        state = state_of(self.ledger, gpu, self.now, self.policy)
        if state not in (GpuState.LEASED, GpuState.DRAINING) or is_cordoned(self.ledger, gpu):
            return False
        since_s = self.ledger.draining_since.get(gpu.device.uuid, self.now.mono_s)
        if state is GpuState.DRAINING and self.now.mono_s - since_s > self.policy.retained_memory_s * 2:
            # What one that ran ahead leaves behind must not void what is held for those that it passed.
            return gpu.lease_id in self.ledger.ran_ahead and self.now.mono_s - since_s <= MAX_LEFTOVER_S
        left = (gpu.device.memory_total_bytes or 0) - (gpu.baseline_bytes or 0)
        return left >= (demand.min_free_memory_bytes or 0)


def nodes_to_reserve(times: int, for_s: float, policy: Policy) -> int:
    """On how many nodes GPUs are held for a request with `times` bypasses, the first `for_s` seconds ago; 0 while it
    may still be bypassed."""
    if policy.max_bypass == 0 or policy.max_bypass_s == 0:
        return ALL_NODES
    used_up = max(times // policy.max_bypass, int(for_s // policy.max_bypass_s))
    return 0 if used_up == 0 else min(ALL_NODES, 1 << min(used_up - 1, 30))


@dataclass(slots=True)
class BlockedRequests:
    """The requests that cannot be granted in this turn, by demand and by what their user's limit leaves for it."""

    reservations: Reservations
    chance: Callable[[LeaseRecord], Hashable | None] = lambda _: None
    """What tells requests apart that may run ahead and ask for the same; None for one that may not."""
    _tried: set[tuple[LimitedDemand, Hashable]] = field(default_factory=set)
    """The chances of those that were blocked."""
    _usable: dict[LimitedDemand, frozenset[str]] = field(default_factory=dict)
    _waiting: dict[LimitedDemand, list[LeaseRecord]] = field(default_factory=dict)

    def has(self, record: LeaseRecord) -> bool:
        """True when an older request with the same demand waits, so that this one cannot be granted either."""
        demand = self.reservations.users.demand_within(record.lease)
        if demand not in self._waiting:
            return False
        return (chance := self.chance(record)) is None or (demand, chance) in self._tried

    def add(self, record: LeaseRecord, usable: frozenset[str] = frozenset()) -> None:
        """Add a request that waits; `usable` are the UUIDs of the GPUs that could serve it later, if its
        demand is new."""
        demand = self.reservations.users.demand_within(record.lease)
        if demand not in self._waiting:
            self._usable[demand] = usable
        if (chance := self.chance(record)) is not None:
            self._tried.add((demand, chance))
        self._waiting.setdefault(demand, []).append(record)
        self.reservations.reserve_if_due(record)

    def oldest(self, demand: LimitedDemand) -> LeaseRecord:
        """The oldest request with a demand that waits."""
        return self._waiting[demand][0]

    def __len__(self) -> int:
        """How many different demands wait."""
        return len(self._waiting)

    def extend(self, demand: LimitedDemand, records: Iterable[LeaseRecord]) -> None:
        """Add requests that wait behind one with the same demand, and for which nothing is to be reserved."""
        self._waiting[demand].extend(records)

    def could_use(self, gpus: Iterable[GpuRecord]) -> Iterator[LimitedDemand]:
        """The demands of older requests that could use GPUs which a newer one was granted."""
        if not self._waiting:
            return iter(())
        granted = {gpu.device.uuid for gpu in gpus}
        return (
            demand
            for demand in self._waiting
            if not (granted - demand.closed if demand.closed else granted).isdisjoint(self._usable[demand])
        )

    def count_bypass(
        self,
        turn: Turn,
        gpus: Iterable[GpuRecord],
        is_before: Callable[[LeaseRecord], bool] | None = None,
        undelayed: Undelayed = NONE_UNDELAYED,
    ) -> None:
        """Count a bypass for every older request that could use GPUs which a newer one was granted. `is_before`: of
        those only the ones that still come before it; None if all do. `undelayed`: those that it does not delay."""
        if not self._waiting:
            return
        demands = (demand for demand in self.could_use(gpus) if demand not in undelayed.demands)
        passed = [record for demand in demands for record in self._waiting[demand]]
        if is_before is not None:
            passed = [record for record in passed if is_before(record)]
        if passed:
            passed.sort(key=self.reservations.ledger.ordered_place)
            turn.put(BypassCounts(tuple((record.lease.id, 1) for record in passed), turn.now.mono_s))
            for record in passed:
                self.reservations.reserve_if_due(record)
