"""Which GPUs a demand can be given: ever, and now."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gpulease_protocol.model import Demand, GpuState, Selection
from gpulease_server.core.gpu import is_cordoned, is_recent, reading_of, state_of
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
    """Not now. `candidates` are the GPUs that could serve the demand later; empty means never."""

    candidates: tuple[GpuRecord, ...]


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


def gpus_needed(demand: Demand, gpus: Collection[GpuRecord]) -> int:
    """The fewest GPUs that a grant takes on the node that has these GPUs for the demand."""
    return len(gpus) if demand.selection is Selection.ALL else demand.count


def candidates(ledger: Ledger, demand: Demand, most_gpus: int | None = None) -> dict[str, list[GpuRecord]]:
    """By node, the GPUs that could serve the demand now or later, in PCI order; only nodes that have enough of them,
    and where a grant takes at most `most_gpus`."""
    by_node: dict[str, list[GpuRecord]] = {}
    for gpu in ledger.gpus.values():
        if mismatch(demand, gpu) is None:
            by_node.setdefault(gpu.device.node, []).append(gpu)
    return {
        node: sorted(gpus, key=lambda gpu: gpu.device.index)
        for node, gpus in by_node.items()
        if len(gpus) >= demand.count and (most_gpus is None or gpus_needed(demand, gpus) <= most_gpus)
    }


def min_gpus(ledger: Ledger, demand: Demand) -> int:
    """The fewest GPUs that a grant of this demand has."""
    if demand.selection is not Selection.ALL:
        return demand.count
    return min((len(gpus) for gpus in candidates(ledger, demand).values()), default=demand.count)


def place(
    ledger: Ledger,
    demand: Demand,
    reserved: Collection[str],
    now: Instant,
    policy: Policy,
    late_nodes: Iterable[str] = (),
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
    possible = candidates(ledger, demand, most_gpus)
    best: tuple[tuple[bool, int, str], list[GpuRecord]] | None = None
    after_reading: NeedsReading | None = None
    for node, gpus in possible.items():
        if node in late_nodes:
            continue
        usable = [
            gpu
            for gpu in gpus
            if gpu.device.uuid not in reserved
            and state_of(ledger, gpu, now, policy) is GpuState.FREE
            and not lacks_memory(ledger, demand, gpu)
        ]
        needed = gpus_needed(demand, gpus)
        observation = ledger.node_observations.get(node)
        if len(usable) < needed:
            old = not all(is_recent(observation, gpu.device.uuid, now, policy, requested_at_s) for gpu in gpus)
            if allow_reread and old and after_reading is None:
                after_reading = _maybe_after_reading(ledger, node, gpus, reserved, needed, now, policy)
            continue
        chosen = usable[: most_gpus if demand.selection is Selection.AUTO else needed]
        if demand.selection is Selection.LISTED:
            chosen = _in_list_order(demand, chosen)
        stale = not all(is_recent(observation, gpu.device.uuid, now, policy, requested_at_s) for gpu in chosen)
        left = -len(usable) if demand.selection is Selection.AUTO else len(usable) - needed
        if best is None or (stale, left, node) < best[0]:
            best = ((stale, left, node), chosen)
    if best is None:
        return after_reading or Blocked(tuple(gpu for gpus in possible.values() for gpu in gpus))
    (stale, _, node), chosen = best
    return NeedsReading(node, tuple(chosen)) if stale else Placed(tuple(chosen))


def _in_list_order(demand: Demand, gpus: list[GpuRecord]) -> list[GpuRecord]:
    """Listed GPUs as they were listed; those listed by UUID come after those listed by index."""
    names: tuple[int | str, ...] = (*demand.indices, *demand.uuids)
    places = {name: place for place, name in enumerate(names)}
    return sorted(gpus, key=lambda gpu: places.get(gpu.device.index, places.get(gpu.device.uuid, 0)))


def _maybe_after_reading(
    ledger: Ledger,
    node: str,
    gpus: list[GpuRecord],
    reserved: Collection[str],
    needed: int,
    now: Instant,
    policy: Policy,
) -> NeedsReading | None:
    """Enough GPUs that are free, or that only the last reading of the hardware ruled out."""
    possible = (GpuState.FREE, GpuState.FOREIGN, GpuState.UNHEALTHY, GpuState.PROHIBITED)
    found = [
        gpu
        for gpu in gpus
        if gpu.device.uuid not in reserved
        and state_of(ledger, gpu, now, policy) in possible
        and gpu.lease_id is None
        and not is_cordoned(ledger, gpu)
    ]
    return NeedsReading(node, tuple(found[:needed])) if len(found) >= needed > 0 else None
