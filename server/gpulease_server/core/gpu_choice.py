"""Which of a node's usable GPUs a demand takes, and whether GPUs are connected as it requires.

`preferred` takes the best set of what is free, and waits for no better one. `required` takes only a set of which every
pair is connected by NVLink, directly or through an NVSwitch; a gang, such a set on each node. `any` takes the first
ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpulease_protocol.model import Demand, TopologyMode
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import GpuRecord
from gpulease_server.core.topology import NVLINK


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
    best = topology.best(usable, ledger.fleet.free.get(node, usable), count)
    if required and best.worst < NVLINK:
        return ()
    return [topology.uuids[position] for position in best.positions]


def choose_after_reading(
    ledger: Ledger, demand: Demand, node: str, gpus: list[GpuRecord], count: int
) -> list[GpuRecord]:
    """The same of GPUs of which some must be read first; all that the node shows count."""
    readings = ledger.node_observations[node].readings
    shown = [gpu.device.uuid for gpu in gpus if gpu.device.uuid in readings]
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
    return topology is not None and len(working) >= needed and topology.best(working, working, needed).worst >= NVLINK
