"""What connections between GPUs have to do with the answer to a request."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gpulease_protocol.model import Demand, Selection, TopologyMode
from gpulease_server.core.gpu_choice import can_connect, choose_gpus
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.placement import find_candidates, gpus_needed
from gpulease_server.core.wording import count_gpus, describe_gpus, some_of

MAX_NODES = 4
"""Nodes in one explanation, at most."""


def describe_unconnected(ledger: Ledger, demand: Demand, in_the_way: Collection[str]) -> str:
    """Where enough GPUs are free, but not all connected as the demand requires; empty where that keeps it nowhere.
    `in_the_way`: UUIDs of the GPUs that something else keeps from it."""
    if demand.topology is not TopologyMode.REQUIRED:
        return ""
    said = []
    for node, uuids in find_candidates(ledger, demand).by_node.items():
        needed = gpus_needed(demand, uuids)
        free = [uuid for uuid in uuids if uuid not in in_the_way and uuid in ledger.fleet.free.get(node, ())]
        if len(free) >= needed and not choose_gpus(ledger, demand, node, free, needed):
            indices = [ledger.gpus[uuid].device.index for uuid in free]
            said.append(
                f"{describe_gpus(indices)} of {node} are free, but no {needed} of them are all connected by NVLink,"
                " which topology=required asks for."
            )
    return " ".join(said[:MAX_NODES])


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
