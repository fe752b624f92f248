"""Which GPUs a demand can be given: ever, and now."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from gpulease_protocol.model import Demand, Device, GpuState, Selection
from gpulease_server.core.fleet import Candidates
from gpulease_server.core.gpu import is_cordoned, is_recent, node_problem, reading_of, state_of
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuRecord, Instant


@dataclass(frozen=True, slots=True)
class Placed:
    """These GPUs can be granted now."""

    gpus: tuple[GpuRecord, ...]


@dataclass(frozen=True, slots=True)
class NeedsReading:
    """These GPUs could be granted if a fresh reading of their node shows them free."""

    node: str
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


def find_candidates(ledger: Ledger, demand: Demand) -> Candidates:
    """The GPUs that could serve the demand now or later. Costs a walk over all GPUs once for each demand."""
    known = ledger.fleet.candidates.get(demand)
    if known is not None:
        return known
    by_node: dict[str, list[Device]] = {}
    for gpu in ledger.gpus.values():
        if mismatch(demand, gpu) is None:
            by_node.setdefault(gpu.device.node, []).append(gpu.device)
    enough = {
        node: tuple(device.uuid for device in sorted(devices, key=lambda device: device.index))
        for node, devices in by_node.items()
        if len(devices) >= demand.count
    }
    found = Candidates(enough, frozenset(uuid for uuids in enough.values() for uuid in uuids))
    ledger.fleet.keep_candidates(demand, found)
    return found


def candidates(ledger: Ledger, demand: Demand, most_gpus: int | None = None) -> dict[str, list[GpuRecord]]:
    """By node, the GPUs that could serve the demand now or later, in PCI order; only nodes that have enough of them,
    and where a grant takes at most `most_gpus`."""
    return {
        node: [ledger.gpus[uuid] for uuid in uuids]
        for node, uuids in find_candidates(ledger, demand).by_node.items()
        if most_gpus is None or gpus_needed(demand, uuids) <= most_gpus
    }


def min_gpus(ledger: Ledger, demand: Demand) -> int:
    """The fewest GPUs that a grant of this demand has."""
    if demand.selection is not Selection.ALL:
        return demand.count
    by_node = find_candidates(ledger, demand).by_node
    return min(map(len, by_node.values()), default=demand.count)


def place(
    ledger: Ledger,
    demand: Demand,
    reserved: Collection[str],
    now: Instant,
    policy: Policy,
    late_nodes: Collection[str] = (),
    *,
    most_gpus: int | None = None,
    requested_at_s: float = float("-inf"),
    allow_reread: bool = False,
) -> Placed | NeedsReading | Blocked:
    """Find GPUs for one demand. Nodes with a recent reading come first, then those that are left with the fewest free
    GPUs; on a node, GPUs are taken in PCI order, and listed ones come in the order of the list: rank 0 is on the first.

    `reserved`: UUIDs that are kept for older requests. `late_nodes`: nodes that were asked for a reading too long ago.
    `most_gpus`: what the user's limit leaves: a node where the demand takes more is passed over, and `auto` takes no
    more. `requested_at_s`: when the request was made. With `allow_reread`, GPUs that only an old reading rules out are
    read again before the answer is no.
    """
    search = _Search(ledger, demand, reserved, now, policy, late_nodes, most_gpus, requested_at_s, allow_reread)
    within_limit = most_gpus is None or demand.count <= most_gpus
    if within_limit and demand == Demand(count=demand.count):
        found = search.by_count()
        if found is not None or not (allow_reread and ledger.fleet.unheld):
            return found or Blocked(find_candidates(ledger, demand).uuids)
    return search.on_each_node()


@dataclass(frozen=True, slots=True)
class _Search:
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

    def by_count(self) -> Placed | NeedsReading | None:
        """Any so many GPUs; None where no node has so many. Looks at the nodes that are left with the fewest first, and
        at no more than it must."""
        after_reading: NeedsReading | None = None
        for _, node, uuids in self._by_what_is_left():
            if node in self.late_nodes or node_problem(self.ledger, node, self.now, self.policy) is not None:
                continue
            gpus = [self.ledger.gpus[uuid] for uuid in uuids]
            if self._all_recent(node, gpus):
                return Placed(tuple(gpus))
            after_reading = after_reading or NeedsReading(node, tuple(gpus))
        return after_reading

    def _by_what_is_left(self) -> Iterator[tuple[int, str, tuple[str, ...]]]:
        """Nodes with enough free GPUs that are not reserved, in the order of what is left there; with that number and
        the GPUs."""
        ledger, count = self.ledger, self.demand.count
        kept = {gpu.device.node for uuid in self.reserved if (gpu := ledger.gpus.get(uuid)) is not None}
        whole = (
            (free - count, node, ledger.fleet.free[node][:count])
            for free in sorted(ledger.fleet.nodes_by_free)
            if free >= count
            for node in ledger.fleet.nodes_by_free[free]
            if node not in kept
        )
        parts = []
        for node in kept & ledger.fleet.free.keys():
            uuids = tuple(uuid for uuid in ledger.fleet.free[node] if uuid not in self.reserved)
            if len(uuids) >= count:
                parts.append((len(uuids) - count, node, uuids[:count]))
        return heapq.merge(whole, sorted(parts))

    def on_each_node(self) -> Placed | NeedsReading | Blocked:
        """Looks at each node that could serve the demand and has GPUs that no lease holds."""
        found = find_candidates(self.ledger, self.demand)
        best: tuple[tuple[bool, int, str], list[GpuRecord]] | None = None
        after_reading: NeedsReading | None = None
        for node in found.nodes_in(self.ledger.fleet.unheld):
            uuids = found.by_node[node]
            needed = gpus_needed(self.demand, uuids)
            too_many = self.most_gpus is not None and needed > self.most_gpus
            if too_many or node in self.late_nodes or len(self.ledger.fleet.unheld.get(node, ())) < needed:
                continue
            gpus = [self.ledger.gpus[uuid] for uuid in uuids]
            usable = [gpu for gpu in gpus if self._is_usable(gpu)]
            if len(usable) < needed:
                if self.allow_reread and after_reading is None and not self._all_recent(node, gpus):
                    after_reading = self._maybe_after_reading(node, gpus, needed)
                continue
            chosen = self._choose(usable, needed)
            left = -len(usable) if self.demand.selection is Selection.AUTO else len(usable) - needed
            rank = (not self._all_recent(node, chosen), left, node)
            if best is None or rank < best[0]:
                best = rank, chosen
        if best is None:
            return after_reading or Blocked(self._within_limit(found))
        (stale, _, node), chosen = best
        return NeedsReading(node, tuple(chosen)) if stale else Placed(tuple(chosen))

    def _is_usable(self, gpu: GpuRecord) -> bool:
        is_free = state_of(self.ledger, gpu, self.now, self.policy) is GpuState.FREE
        return is_free and gpu.device.uuid not in self.reserved and not lacks_memory(self.ledger, self.demand, gpu)

    def _all_recent(self, node: str, gpus: Iterable[GpuRecord]) -> bool:
        observation = self.ledger.node_observations.get(node)
        return all(is_recent(observation, gpu.device.uuid, self.now, self.policy, self.requested_at_s) for gpu in gpus)

    def _choose(self, usable: list[GpuRecord], needed: int) -> list[GpuRecord]:
        """The GPUs to be granted, in their order."""
        if self.demand.selection is Selection.AUTO:
            return usable[: self.most_gpus]
        if self.demand.selection is not Selection.LISTED:
            return usable[:needed]
        # As they were listed; those listed by UUID come after those listed by index.
        names: tuple[int | str, ...] = (*self.demand.indices, *self.demand.uuids)
        places = {name: place for place, name in enumerate(names)}
        return sorted(usable[:needed], key=lambda gpu: places.get(gpu.device.index, places.get(gpu.device.uuid, 0)))

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
        return NeedsReading(node, tuple(found[:needed])) if len(found) >= needed > 0 else None

    def _within_limit(self, found: Candidates) -> frozenset[str]:
        """The candidates on the nodes where a grant takes at most `most_gpus`."""
        if self.most_gpus is None:
            return found.uuids
        allowed = (uuids for uuids in found.by_node.values() if gpus_needed(self.demand, uuids) <= self.most_gpus)
        return frozenset(uuid for uuids in allowed for uuid in uuids)
