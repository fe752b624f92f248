"""Which GPUs a demand can be given: ever, and now."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gpulease.model import Demand, GpuState, Selection

from .gpu import is_cordoned, is_fresh, reading_of, state_of
from .ledger import GpuRecord, Instant, Ledger
from .turn import Policy


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
    """Not now. `candidates` are the GPUs that could serve the demand one day; empty means never."""

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
    """True when too little of the GPU's memory is free now, or when nobody knows how much is."""
    if demand.min_free_memory_bytes is None:
        return False
    reading = reading_of(ledger, gpu)
    if reading is None or reading.memory_used_bytes is None or reading.memory_total_bytes is None:
        return True
    return reading.memory_total_bytes - reading.memory_used_bytes < demand.min_free_memory_bytes


def candidates(ledger: Ledger, demand: Demand) -> dict[str, list[GpuRecord]]:
    """By node, the GPUs that could serve the demand one day, in PCI order; only nodes that have enough of them."""
    by_node: dict[str, list[GpuRecord]] = {}
    for gpu in ledger.gpus.values():
        if mismatch(demand, gpu) is None:
            by_node.setdefault(gpu.device.node, []).append(gpu)
    return {
        node: sorted(gpus, key=lambda gpu: gpu.device.index)
        for node, gpus in by_node.items()
        if len(gpus) >= demand.count
    }


def least(ledger: Ledger, demand: Demand) -> int:
    """How many GPUs a demand gets at least, when it is granted."""
    if demand.selection is not Selection.ALL:
        return demand.count
    return min((len(gpus) for gpus in candidates(ledger, demand).values()), default=demand.count)


def place(
    ledger: Ledger,
    demand: Demand,
    claimed: Collection[str],
    now: Instant,
    policy: Policy,
    overdue: Iterable[str] = (),
    *,
    since_s: float = float("-inf"),
    hopeful: bool = False,
) -> Placed | NeedsReading | Blocked:
    """Find GPUs for one demand. Of several nodes, one whose reading is fresh, and of those the one that is left with
    the fewest free GPUs; there, in PCI order.

    `claimed` are the UUIDs that elder requests wait for; `overdue` the nodes that owe a fresh reading for too long;
    `since_s` when the request was made. With `hopeful` GPUs that only an old reading speaks against are looked at again
    before the answer is no.
    """
    possible = candidates(ledger, demand)
    best: tuple[tuple[bool, int, str], list[GpuRecord]] | None = None
    perhaps: NeedsReading | None = None
    for node, gpus in possible.items():
        if node in overdue:
            continue
        usable = [
            gpu
            for gpu in gpus
            if gpu.device.uuid not in claimed
            and state_of(ledger, gpu, now, policy) is GpuState.FREE
            and not lacks_memory(ledger, demand, gpu)
        ]
        needed = len(gpus) if demand.selection is Selection.ALL else demand.count
        sighting = ledger.sightings.get(node)
        if len(usable) < needed:
            old = not all(is_fresh(sighting, gpu.device.uuid, now, policy, since_s) for gpu in gpus)
            if hopeful and old and perhaps is None:
                perhaps = _perhaps(ledger, node, gpus, claimed, needed, now, policy)
            continue
        chosen = usable if demand.selection is Selection.AUTO else usable[:needed]
        stale = not all(is_fresh(sighting, gpu.device.uuid, now, policy, since_s) for gpu in chosen)
        left = -len(usable) if demand.selection is Selection.AUTO else len(usable) - needed
        if best is None or (stale, left, node) < best[0]:
            best = ((stale, left, node), chosen)
    if best is None:
        return perhaps or Blocked(tuple(gpu for gpus in possible.values() for gpu in gpus))
    (stale, _, node), chosen = best
    return NeedsReading(node, tuple(chosen)) if stale else Placed(tuple(chosen))


def _perhaps(
    ledger: Ledger,
    node: str,
    gpus: list[GpuRecord],
    claimed: Collection[str],
    needed: int,
    now: Instant,
    policy: Policy,
) -> NeedsReading | None:
    """Enough GPUs that are free, or that the hardware kept from being so when it was last looked at."""
    seen = (GpuState.FREE, GpuState.FOREIGN, GpuState.UNHEALTHY, GpuState.PROHIBITED)
    found = [
        gpu
        for gpu in gpus
        if gpu.device.uuid not in claimed
        and state_of(ledger, gpu, now, policy) in seen
        and gpu.lease_id is None
        and not is_cordoned(ledger, gpu)
    ]
    return NeedsReading(node, tuple(found[:needed])) if len(found) >= needed > 0 else None
