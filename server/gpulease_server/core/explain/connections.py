"""What connections between GPUs have to do with the answer to a request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import combinations

from gpulease_protocol.model import Demand, Device, GpuLink, Selection, TopologyMode
from gpulease_server.core.gpu_choice import can_connect, choose_gpus
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.node_topology import MAX_GPUS, score_of
from gpulease_server.core.placement import find_candidates, gpus_needed
from gpulease_server.core.wording import count_gpus, describe_gpus, some_of

MAX_NODES = 4
"""Nodes in one explanation, at most."""
IN_ORDER = ", so the first free ones were taken"
PATHS = {
    "same_board": "on one board",
    "one_switch": "through one PCIe switch",
    "several_switches": "through several PCIe switches",
    "host_bridge": "through the PCIe host bridge of a CPU",
    "numa_node": "through the PCIe host bridges of a NUMA node",
    "system": "from one NUMA node to another",
    "pcie": "by PCIe",
}
"""By `GpuLink.path`."""


def describe_unconnected(ledger: Ledger, demand: Demand, usable: Collection[str]) -> str:
    """Where enough GPUs are free, but not all connected as the demand requires; empty where that keeps it nowhere.
    `usable`: UUIDs of the GPUs that nothing else keeps from it."""
    if demand.topology is not TopologyMode.REQUIRED:
        return ""
    said = []
    for node, uuids in find_candidates(ledger, demand).by_node.items():
        needed = gpus_needed(demand, uuids)
        free = [uuid for uuid in uuids if uuid in usable and uuid in ledger.fleet.free_gpus]
        if len(free) >= needed and not choose_gpus(ledger, demand, node, free, needed):
            indices = [ledger.gpus[uuid].device.index for uuid in free]
            said.append(
                f"{describe_gpus(indices)} of {node} are free, but no {needed} of them are all connected by NVLink,"
                " which topology=required asks for."
            )
    return " ".join(said[:MAX_NODES])


def describe_connections(ledger: Ledger, demand: Demand, gpus: Iterable[Device]) -> str:
    """How the GPUs of a grant are connected and why it has them, as a sentence to follow others; empty where they were
    named, or nothing is known that concerns a single one."""
    by_node: dict[str, list[Device]] = {}
    for gpu in gpus:
        by_node.setdefault(gpu.node, []).append(gpu)
    pairs = [pair for devices in by_node.values() for pair in combinations(devices[:MAX_GPUS], 2)]
    links = _links(ledger, by_node)
    chosen = demand.selection in (Selection.COUNT, Selection.AUTO) and demand.topology is not TopologyMode.ANY
    if not pairs:
        return " Of the free GPUs it was the one that breaks the least for others." if chosen and links else ""
    known = [pair for pair in pairs if frozenset((pair[0].uuid, pair[1].uuid)) in links]
    if not known:
        return f" How they are connected is not known: the driver does not tell{IN_ORDER if chosen else ''}."
    if len(known) < len(pairs):
        first, second = next(pair for pair in pairs if pair not in known)
        return f" How GPUs {first.index} and {second.index} of {first.node} are connected is not known."
    worst = min(known, key=lambda pair: score_of(links[frozenset((pair[0].uuid, pair[1].uuid))]))
    path = links[frozenset((worst[0].uuid, worst[1].uuid))].path
    best = ", the best that was free" if chosen else ""
    if path == "nvlink":
        return f" {'They are' if len(by_node) == 1 else 'Those of a node are'} all connected by NVLink{best}."
    return f" GPUs {worst[0].index} and {worst[1].index} of {worst[0].node} are connected {_over(path)} at worst{best}."


def _links(ledger: Ledger, nodes: Iterable[str]) -> dict[frozenset[str], GpuLink]:
    """The links of these nodes of which something is known, by the two GPUs."""
    observations = (ledger.node_observations.get(node) for node in nodes)
    links = (link for observation in observations if observation is not None for link in observation.links)
    return {frozenset((link.first, link.second)): link for link in links if score_of(link)}


def _over(path: str) -> str:
    return PATHS.get(path, f"by {path}")


def why_never_connected(ledger: Ledger, demand: Demand, nodes: dict[str, tuple[str, ...]]) -> str:
    """Why none of these nodes can ever have GPUs that are connected as the demand requires. By node: the UUIDs of those
    that could serve it otherwise."""
    unknown = sorted(node for node in nodes if not _is_known(ledger, node))
    most = max((_most_connected(ledger, demand, node, uuids) for node, uuids in nodes.items()), default=1)
    which = {
        Selection.ALL: "On no node are all GPUs connected",
        Selection.LISTED: "These GPUs are not all connected",
    }.get(demand.selection, f"No {count_gpus(demand.count)} of one node are all connected")
    connected = f"the most are {most}" if most > 1 else "no two are"
    of_unknown = f" Of {some_of(unknown)} no connections are known: the driver does not tell." if unknown else ""
    return (
        f"{which} by NVLink, which topology=required asks for; {connected}.{of_unknown}"
        " Without it the request takes those that are connected best."
    )


def _is_known(ledger: Ledger, node: str) -> bool:
    observation = ledger.node_observations.get(node)
    return observation is not None and bool(observation.links)


def _most_connected(ledger: Ledger, demand: Demand, node: str, uuids: tuple[str, ...]) -> int:
    """How many of these GPUs are all connected by NVLink, at most."""
    sizes: Iterator[int] = iter(range(len(uuids), 1, -1))
    return next((size for size in sizes if can_connect(ledger, demand, node, uuids, size)), 1)
