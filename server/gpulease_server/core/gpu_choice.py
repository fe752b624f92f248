"""Which of a node's usable GPUs a demand takes, and whether GPUs are connected as it requires.

`preferred` takes the best set of what is free, and waits for no better one. `required` takes only a set of which every
pair is connected by NVLink, directly or through an NVSwitch; a gang, such a set on each node. `any` takes the first
ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpulease_protocol.model import Demand, TopologyMode
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import GpuRecord


def choose_gpus(ledger: Ledger, demand: Demand, node: str, usable: Sequence[str], count: int) -> Sequence[str]:
    """The best set of `count` GPUs, see `core.topology`, in PCI order; none where those are not connected as the demand
    requires. `usable`: UUIDs of free GPUs of the node, in PCI order, at least so many."""
    observation = ledger.node_observations.get(node)
    required = demand.topology is TopologyMode.REQUIRED and count > 1
    if observation is None or (not required and (len(usable) <= count or demand.topology is TopologyMode.ANY)):
        return usable[:count]
    topology = observation.topology
    if not required and (topology is None or topology.is_uniform):
        return usable[:count]
    if topology is None:
        return ()
    free = ledger.fleet.free.get(node, usable)
    best = topology.best_linked(usable, free, count) if required else topology.best(usable, free, count)
    return () if best is None else [topology.uuids[position] for position in best.positions]


def choose_after_reading(
    ledger: Ledger, demand: Demand, node: str, gpus: list[GpuRecord], count: int
) -> list[GpuRecord]:
    """The same of GPUs of which some must be read first; all that the node shows count."""
    observation = ledger.node_observations.get(node)
    if observation is None:
        return []
    shown = [gpu.device.uuid for gpu in gpus if gpu.device.uuid in observation.readings]
    chosen = choose_gpus(ledger, demand, node, shown, count) if len(shown) >= count else ()
    return [ledger.gpus[uuid] for uuid in chosen]


def can_connect(ledger: Ledger, demand: Demand, node: str, uuids: Sequence[str], count: int) -> bool:
    """False where it is known that no `count` of these GPUs of a node are connected as the demand requires. Nothing is
    known of a node that has not reported, and of a GPU that does not answer."""
    if demand.topology is not TopologyMode.REQUIRED or count <= 1:
        return True
    observation = ledger.node_observations.get(node)
    if observation is None or observation.problem is not None:
        return True
    readings = observation.readings
    working = [uuid for uuid in uuids if uuid in readings and readings[uuid].health == "ok"]
    needed = count - (len(uuids) - len(working))
    if needed <= 1:
        return True
    topology = observation.topology
    return topology is not None and topology.best_linked(working, working, needed) is not None


def set_to_wait_for(
    ledger: Ledger, demand: Demand, node: str, gpus: Sequence[GpuRecord], count: int
) -> Collection[str]:
    """Of GPUs that are free or will be, the UUIDs of those that a request is to collect; all where any will do.

    It depends on these GPUs alone, and not on which of them are free already: one that is kept is still wanted when the
    next becomes free.
    """
    uuids = [gpu.device.uuid for gpu in sorted(gpus, key=lambda gpu: gpu.device.index)]
    if demand.topology is not TopologyMode.REQUIRED or count <= 1:
        return uuids
    observation = ledger.node_observations.get(node)
    topology = None if observation is None else observation.topology
    if topology is None or not topology.positions.keys() >= set(uuids):
        return uuids
    best = topology.best_linked(uuids, uuids, count)
    return uuids if best is None else {topology.uuids[position] for position in best.positions}
