"""Which GPUs a demand can be given: ever, and now."""

from __future__ import annotations

import functools
import heapq
import ipaddress
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Demand, Device, GpuState, Priority, Selection, TopologyMode
from gpulease_server.core.calendar import NO_GPUS
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.fleet import Candidates
from gpulease_server.core.gpu import ends_too_soon, is_cordoned, is_recent, is_stale, node_problem, reading_of, state_of
from gpulease_server.core.gpu_choice import can_connect, choose_after_reading, choose_gpus
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuRecord, Instant


@dataclass(frozen=True, slots=True)
class Placed:
    """These GPUs can be granted now. Those of a gang come node by node, by rank."""

    gpus: tuple[GpuRecord, ...]


@dataclass(frozen=True, slots=True)
class NeedsReading:
    """These GPUs could be granted if fresh readings of these nodes show them free."""

    nodes: tuple[str, ...]
    gpus: tuple[GpuRecord, ...]


@dataclass(frozen=True, slots=True)
class Blocked:
    """Not now. `candidates` are the UUIDs of the GPUs that could serve the demand later; empty means never."""

    candidates: frozenset[str]


def mismatch(demand: Demand, gpu: GpuRecord) -> str | None:
    """Why this GPU can never serve the demand, as an `Obstacle` code; None when it can."""
    device = gpu.device
    if demand.node is not None and device.node != demand.node:
        return "other_node"
    listed = demand.selection is not Selection.LISTED or device.index in demand.indices or device.uuid in demand.uuids
    if not listed or (demand.among is not None and device.uuid not in demand.among):
        return "not_listed"
    if demand.gpu_model is not None and demand.gpu_model.lower() not in (device.name or "").lower():
        return "other_model"
    if (demand.min_free_memory_bytes or 0) > (device.memory_total_bytes or 0):
        return "too_little_memory"
    return None


def lacks_memory(ledger: Ledger, demand: Demand, gpu: GpuRecord) -> bool:
    """True when too little of the GPU's memory is free now, or when it is not known how much is."""
    if demand.min_free_memory_bytes is None:
        return False
    reading = reading_of(ledger, gpu)
    if reading is None or reading.memory_used_bytes is None or reading.memory_total_bytes is None:
        return True
    return reading.memory_total_bytes - reading.memory_used_bytes < demand.min_free_memory_bytes


def gpus_needed(demand: Demand, gpus: Collection[GpuRecord | str]) -> int:
    """The fewest GPUs that a grant takes on the node that has these GPUs for the demand."""
    return len(gpus) if demand.selection is Selection.ALL else demand.count


def grant_size(demand: Demand, gpus: Collection[GpuRecord | str]) -> int:
    """How many GPUs a grant takes in all if it takes some of these, which a node has for the demand."""
    return gpus_needed(demand, gpus) * demand.nodes


def of_anyone(demand: Demand) -> Demand:
    """What a demand asks for, without what says nothing of the GPUs: its time, its priority, and when it may end."""
    return replace(demand, time_s=None, priority=Priority.NORMAL, preemptible=False, reclaim_idle_after_s=None)


def find_candidates(ledger: Ledger, demand: Demand) -> Candidates:
    """The GPUs that could serve the demand now or later. Costs a walk over all GPUs once for each demand; what
    `of_anyone` leaves out makes no difference."""
    own = demand.time_s, demand.priority, demand.preemptible, demand.reclaim_idle_after_s
    if own != (None, Priority.NORMAL, False, None):
        demand = of_anyone(demand)
    known = ledger.fleet.candidates.get(demand)
    if known is not None:
        return known
    devices: dict[str, dict[str, list[Device]]] = {}
    is_any = demand == Demand(count=demand.count, nodes=demand.nodes, max_nodes=demand.max_nodes)
    for gpu in ledger.gpus.values():
        if is_any or mismatch(demand, gpu) is None:
            model = gpu.device.name or "" if demand.nodes > 1 else ""
            devices.setdefault(model, {}).setdefault(gpu.device.node, []).append(gpu.device)
    by_model: dict[str, dict[str, tuple[str, ...]]] = {}
    for model, by_node in sorted(devices.items()):
        enough = {
            node: tuple(device.uuid for device in sorted(some, key=lambda device: device.index))
            for node, some in by_node.items()
            if len(some) >= demand.count
        }
        if demand.topology is TopologyMode.REQUIRED:
            enough = {
                node: uuids
                for node, uuids in enough.items()
                if can_connect(ledger, demand, node, uuids, gpus_needed(demand, uuids))
            }
        if len(enough) >= demand.nodes:
            by_model[model] = enough
    uuids = (uuid for nodes in by_model.values() for some in nodes.values() for uuid in some)
    found = Candidates(by_model, frozenset(uuids))
    ledger.fleet.keep_candidates(demand, found)
    return found


def candidates(ledger: Ledger, demand: Demand, most_gpus: int | None = None) -> dict[str, list[GpuRecord]]:
    """By node, the GPUs that could serve the demand now or later, in PCI order; only nodes that have enough of them,
    and where a grant takes at most `most_gpus`."""
    return {
        node: [ledger.gpus[uuid] for uuid in uuids]
        for node, uuids in find_candidates(ledger, demand).by_node.items()
        if most_gpus is None or grant_size(demand, uuids) <= most_gpus
    }


def reach_of(ledger: Ledger, demand: Demand, node: str) -> str | None:
    """From where the other nodes of a gang reach a node: anywhere (empty), or only on its own host if its address is a
    loopback one. None if it has no address, and so cannot take part. Nodes take part together if this is the same."""
    if demand.nodes == 1:
        return ""
    observation = ledger.node_observations.get(node)
    if observation is None or observation.address is None:
        return None
    return ledger.nodes[node].host if is_loopback(observation.address) else ""


@functools.lru_cache(16_384)  # more than there are nodes: a walk over all would find none of a smaller one
def is_loopback(address: str) -> bool:
    """True for an IP address that only its own host reaches."""
    return ipaddress.ip_address(address).is_loopback


def has_enough(ledger: Ledger, demand: Demand, node: str, gpus: list[GpuRecord], needed: int) -> bool:
    """True when these GPUs of a node are enough for the demand, and may be connected as it requires."""
    return len(gpus) >= needed and can_connect(ledger, demand, node, [gpu.device.uuid for gpu in gpus], needed)


def gpus_to_have(
    ledger: Ledger,
    demand: Demand,
    now: Instant,
    most_gpus: int | None,
    counting: Callable[[list[GpuRecord]], list[GpuRecord]],
    only: Collection[str] | None = None,
) -> list[GpuRecord] | None:
    """GPUs that the demand could have, of so many nodes as it asks for that have enough of those that count, and do not
    go too soon; None where there are none. `counting`: those of a node's candidates that count; `most_gpus`: what a
    grant may take in all; `only`: the nodes that have GPUs that count, where that is known."""
    for nodes in find_candidates(ledger, demand).by_model.values():
        enough: dict[str, list[list[GpuRecord]]] = {}
        for node, uuids in nodes.items():
            if only is not None and node not in only:
                continue
            reach = reach_of(ledger, demand, node)
            if reach is None or (most_gpus is not None and grant_size(demand, uuids) > most_gpus):
                continue
            if ends_too_soon(ledger, demand, node, now):
                continue
            counted, needed = counting([ledger.gpus[uuid] for uuid in uuids]), gpus_needed(demand, uuids)
            if not has_enough(ledger, demand, node, counted, needed):
                continue
            found = enough.setdefault(reach, [])
            found.append(counted[:needed])
            if len(found) == demand.nodes:
                return [gpu for some in found for gpu in some]
    return None


def can_have(
    ledger: Ledger,
    demand: Demand,
    now: Instant,
    most_gpus: int | None,
    counting: Callable[[list[GpuRecord]], list[GpuRecord]],
) -> bool:
    """True where there are GPUs that the demand could have, see `gpus_to_have`."""
    return gpus_to_have(ledger, demand, now, most_gpus, counting) is not None


def min_gpus(ledger: Ledger, demand: Demand) -> int:
    """The fewest GPUs that a grant of this demand has."""
    if demand.selection is not Selection.ALL:
        return demand.count * demand.nodes
    by_node = find_candidates(ledger, demand).by_node
    return min(map(len, by_node.values()), default=demand.count)


class RankedNode(NamedTuple):
    """What a node has for a demand; the lowest rank is the best."""

    rank: tuple[bool, int, str]
    """Whether it needs a reading, what is left of it, and its name."""
    choose: Callable[[], Iterable[GpuRecord]]
    """Chooses the GPUs: only of the node that is taken, as that costs more than its rank."""

    @property
    def gpus(self) -> tuple[GpuRecord, ...]:
        """The GPUs that it gives."""
        return tuple(self.choose())

    @property
    def placed(self) -> Placed | NeedsReading:
        """The GPUs, to be granted or read."""
        return NeedsReading((self.rank[2],), self.gpus) if self.rank[0] else Placed(self.gpus)


@dataclass(frozen=True, slots=True)
class Search:
    """The arguments of `place`."""

    ledger: Ledger
    demand: Demand
    reserved: Collection[str]
    now: Instant
    policy: Policy
    late_nodes: Collection[str]
    most_gpus: int | None
    requested_at_s: float
    allow_reread: bool
    closed: frozenset[str] = NO_GPUS
    """Those of `reserved` that the calendar closes to the request."""

    @property
    def is_within_limit(self) -> bool:
        """True when the user's limit leaves as many GPUs as are asked for."""
        return self.most_gpus is None or self.demand.count * self.demand.nodes <= self.most_gpus

    def by_count(self) -> Placed | NeedsReading | None:
        """Any so many GPUs; None where no node has so many. Looks at the nodes that are left with the fewest first, and
        at no more than it must."""
        after_reading: NeedsReading | None = None
        for _, node, uuids in self._by_what_is_left():
            if node_problem(self.ledger, node, self.now, self.policy) is not None or not self._may_serve(node, 0):
                continue
            if after_reading is not None and is_stale(self.ledger, node, self.now, self.policy, self.requested_at_s):
                continue
            gpus = [
                self.ledger.gpus[uuid] for uuid in choose_gpus(self.ledger, self.demand, node, uuids, self.demand.count)
            ]
            if self._all_recent(node, gpus):
                return Placed(tuple(gpus))
            after_reading = after_reading or NeedsReading((node,), tuple(gpus))
        return after_reading

    def open_nodes(self, found: Candidates | None = None) -> Collection[str]:
        """All nodes with a free GPU that the calendar does not close to the request, and maybe others. `found`: of
        those that have these."""
        fleet = self.ledger.fleet
        if not self.closed:
            return fleet.free
        fewest = fleet.free_gpus if found is None else min(fleet.free_gpus, found.uuids, key=len)
        return self._nodes_of(fewest - self.closed)

    def _nodes_of(self, uuids: Iterable[str]) -> Collection[str]:
        gpus = self.ledger.gpus
        return {gpus[uuid].device.node for uuid in uuids if uuid in gpus}

    def _by_what_is_left(self) -> Iterator[tuple[int, str, tuple[str, ...]]]:
        """Nodes with enough free GPUs that are not reserved, in the order of what is left there; with that number and
        these GPUs. Looks at each node with reserved GPUs; or, where most are closed, at each with others."""
        free, by_free, count = self.ledger.fleet.free, self.ledger.fleet.nodes_by_free, self.demand.count
        whole: Iterable[tuple[int, str, tuple[str, ...]]] = ()
        if len(self.closed) * 2 > len(self.ledger.fleet.free_gpus):
            divided = self.open_nodes()
        else:
            divided = self._nodes_of(self.reserved)
            whole = (
                (number - count, node, free[node])
                for number in sorted(by_free)
                if number >= count
                for node in by_free[number]
                if node not in divided
            )
        parts = []
        for node in divided:
            uuids = tuple(uuid for uuid in free.get(node, ()) if uuid not in self.reserved)
            if len(uuids) >= count:
                parts.append((len(uuids) - count, node, uuids))
        return heapq.merge(whole, sorted(parts))

    def on_each_node(self) -> Placed | NeedsReading | Blocked:
        """Looks at each node that could serve the demand and has GPUs that no lease holds."""
        found = find_candidates(self.ledger, self.demand)
        best: RankedNode | None = None
        after_reading: NeedsReading | None = None
        open_nodes = self.open_nodes(found)
        for node in found.nodes_in(self.ledger.fleet.unheld):
            ranked = self.on_node(node, found) if node in open_nodes else None
            if ranked is not None:
                best = ranked if best is None or ranked.rank < best.rank else best
            elif self.allow_reread and after_reading is None:
                after_reading = self.after_reading(node, found.by_node[node])
        return best.placed if best is not None else after_reading or self.blocked(found)

    def on_node(self, node: str, found: Candidates, model: str | None = None) -> RankedNode | None:
        """The GPUs of a node for the demand; None if it has too few. `found`: those that could serve it ever; `model`:
        only those of it."""
        ledger, uuids = self.ledger, found.by_node[node] if model is None else found.by_model[model][node]
        needed, ever = gpus_needed(self.demand, uuids), found.uuids if model is None else uuids
        free = ledger.fleet.free.get(node, ())
        if len(free) < needed or not self._may_serve(node, needed):
            return None
        if node_problem(ledger, node, self.now, self.policy) is not None:
            return None
        usable: Sequence[str] = free
        if self.reserved or len(uuids) < len(ledger.fleet.gpus_of_node[node]):
            usable = [uuid for uuid in free if uuid in ever and uuid not in self.reserved]
        if self.demand.min_free_memory_bytes is not None:
            usable = [uuid for uuid in usable if not lacks_memory(ledger, self.demand, ledger.gpus[uuid])]
        if len(usable) < needed:
            return None
        left = -len(usable) if self.demand.selection is Selection.AUTO else len(usable) - needed
        if self.demand.topology is not TopologyMode.REQUIRED and not ledger.node_observations[node].reread_at_s:
            is_old = is_stale(ledger, node, self.now, self.policy, self.requested_at_s, for_gang=self.demand.nodes > 1)
            return RankedNode((is_old, left, node), functools.partial(self._choose, node, usable, needed))
        chosen = self._choose(node, usable, needed)
        return RankedNode((not self._all_recent(node, chosen), left, node), lambda: chosen) if chosen else None

    def after_reading(self, node: str, uuids: tuple[str, ...]) -> NeedsReading | None:
        """The GPUs of a node for the demand, if only an old reading rules them out."""
        needed, unheld = gpus_needed(self.demand, uuids), self.ledger.fleet.unheld.get(node, {})
        if len(unheld) < needed or not self._may_serve(node, needed) or self.closed.issuperset(unheld):
            return None
        gpus = [self.ledger.gpus[uuid] for uuid in uuids]
        return None if self._all_recent(node, gpus) else self._maybe_after_reading(node, gpus, needed)

    def blocked(self, found: Candidates) -> Blocked:
        """That no node can serve the demand now."""
        return Blocked(self._within_limit(found))

    def _may_serve(self, node: str, needed: int) -> bool:
        if node in self.late_nodes or (self.most_gpus is not None and needed * self.demand.nodes > self.most_gpus):
            return False
        return not ends_too_soon(self.ledger, self.demand, node, self.now)

    def _all_recent(self, node: str, gpus: Iterable[GpuRecord]) -> bool:
        observation = self.ledger.node_observations.get(node)
        return all(
            is_recent(
                observation,
                gpu.device.uuid,
                self.now,
                self.policy,
                self.requested_at_s,
                for_gang=self.demand.nodes > 1,
            )
            for gpu in gpus
        )

    def _choose(self, node: str, usable: Sequence[str], needed: int) -> list[GpuRecord]:
        """The GPUs to be granted, in their order."""
        most = needed
        if self.demand.selection is Selection.AUTO:
            most = len(usable) if self.most_gpus is None else min(self.most_gpus, len(usable))
        chosen = [self.ledger.gpus[uuid] for uuid in choose_gpus(self.ledger, self.demand, node, usable, most)]
        if self.demand.selection is not Selection.LISTED:
            return chosen
        # As they were listed; those listed by UUID come after those listed by index.
        names: tuple[int | str, ...] = (*self.demand.indices, *self.demand.uuids)
        places = {name: place for place, name in enumerate(names)}
        return sorted(chosen, key=lambda gpu: places.get(gpu.device.index, places.get(gpu.device.uuid, 0)))

    def _maybe_after_reading(self, node: str, gpus: list[GpuRecord], needed: int) -> NeedsReading | None:
        """Enough GPUs that are free, or that only the last reading of the hardware ruled out."""
        possible = (GpuState.FREE, GpuState.FOREIGN, GpuState.UNHEALTHY, GpuState.PROHIBITED)
        found = [
            gpu
            for gpu in gpus
            if gpu.device.uuid not in self.reserved
            and state_of(self.ledger, gpu, self.now, self.policy) in possible
            and gpu.lease_id is None
            and not is_cordoned(self.ledger, gpu)
        ]
        if self.demand.topology is TopologyMode.REQUIRED:
            found = choose_after_reading(self.ledger, self.demand, node, found, needed)
        return NeedsReading((node,), tuple(found[:needed])) if len(found) >= needed > 0 else None

    def _within_limit(self, found: Candidates) -> frozenset[str]:
        """The candidates on the nodes where a grant takes at most `most_gpus`, and that do not go too soon."""
        if self.most_gpus is None and self.demand.time_s is None:
            return found.uuids
        allowed = (
            uuids
            for node, uuids in found.by_node.items()
            if (self.most_gpus is None or grant_size(self.demand, uuids) <= self.most_gpus)
            and not ends_too_soon(self.ledger, self.demand, node, self.now)
        )
        return frozenset(uuid for uuids in allowed for uuid in uuids)
