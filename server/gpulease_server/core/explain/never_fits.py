"""Why the known nodes can never serve a demand: the first condition that leaves too few GPUs."""

from __future__ import annotations

import heapq
from collections import Counter

from gpulease_protocol.model import Demand, Selection, TopologyMode
from gpulease_server.core.explain.connections import why_never_connected
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.placement import find_candidates
from gpulease_server.core.records import GpuRecord
from gpulease_server.core.wording import MAX_NAMED, count_gpus, some_of


def why_never(ledger: Ledger, demand: Demand) -> str:
    """A sentence that names what there is not. For a demand of which `is_never` is true."""
    gpus = [gpu for gpu in ledger.gpus.values() if demand.node in (None, gpu.device.node)]
    if not gpus:
        known = some_of(sorted({gpu.device.node for gpu in ledger.gpus.values()}))
        return f"There is no node {demand.node} with GPUs; there are: {known}."
    missing = _missing(demand, gpus)
    if missing:
        where = f"on node {demand.node}" if demand.node is not None else "on any node"
        return f"There is no GPU {some_of(missing)} {where}."
    if demand.selection is Selection.LISTED:
        gpus = [gpu for gpu in gpus if gpu.device.index in demand.indices or gpu.device.uuid in demand.uuids]
    for condition in (_among, _of_model, _of_size):
        gpus, said = condition(demand, gpus)
        if said:
            return said
    if demand.topology is TopologyMode.REQUIRED:
        otherwise = find_candidates(ledger, replace(demand, topology=TopologyMode.PREFERRED)).by_node
        if otherwise:
            return why_never_connected(ledger, demand, otherwise)
    return _on_one_node(demand, gpus)


def _missing(demand: Demand, gpus: list[GpuRecord]) -> list[str]:
    indices, uuids = {gpu.device.index for gpu in gpus}, {gpu.device.uuid for gpu in gpus}
    return [
        *(str(index) for index in demand.indices if index not in indices),
        *(uuid for uuid in demand.uuids if uuid not in uuids),
    ]


def _among(demand: Demand, gpus: list[GpuRecord]) -> tuple[list[GpuRecord], str]:
    if demand.among is None:
        return gpus, ""
    named = [gpu for gpu in gpus if gpu.device.uuid in demand.among]
    said = f"Of the {len(demand.among)} GPUs that may serve it, {len(named)} can."
    return named, said if len(named) < demand.count else ""


def _of_model(demand: Demand, gpus: list[GpuRecord]) -> tuple[list[GpuRecord], str]:
    if demand.gpu_model is None:
        return gpus, ""
    fitting = [gpu for gpu in gpus if demand.gpu_model.lower() in (gpu.device.name or "").lower()]
    models = some_of(sorted({gpu.device.name or "an unknown model" for gpu in gpus}))
    where = "" if demand.node is None else f" on node {demand.node}"
    said = f"No GPU{where} has {demand.gpu_model} in its name; the models{where and ' there'} are: {models}."
    return fitting, "" if fitting else said


def _of_size(demand: Demand, gpus: list[GpuRecord]) -> tuple[list[GpuRecord], str]:
    wanted = demand.min_free_memory_bytes or 0
    fitting = [gpu for gpu in gpus if (gpu.device.memory_total_bytes or 0) >= wanted]
    known = [gpu.device.memory_total_bytes for gpu in gpus if gpu.device.memory_total_bytes is not None]
    largest = f"The largest has {max(known) / 2**30:.1f} GiB." if known else ""
    mute = len(gpus) - len(known)
    unknown = f"The memory of {mute} is not known." if mute else ""
    return fitting, "" if fitting else f"{largest} {unknown}".strip()


def _on_one_node(demand: Demand, gpus: list[GpuRecord]) -> str:
    if demand.nodes > 1:
        return _on_several_nodes(demand, gpus)
    nodes = [gpu.device.node for gpu in gpus]
    most = max((nodes.count(node) for node in nodes), default=0)
    if demand.selection is Selection.LISTED:
        return f"They are on different nodes ({some_of(sorted(set(nodes)))}), and a lease uses one node."
    return f"No node has more than {most} such GPU{'' if most == 1 else 's'}, and the request is for one node."


def _on_several_nodes(demand: Demand, gpus: list[GpuRecord]) -> str:
    """How many nodes have enough GPUs of one model: of the one that the most nodes have enough of."""
    counts = Counter((gpu.device.name or "", gpu.device.node) for gpu in gpus)
    nodes = Counter(model for (model, _), count in counts.items() if count >= demand.count)
    most = max(nodes.values(), default=0)
    number = "no node has" if not most else "1 node has" if most == 1 else f"{most} nodes have"
    models = "" if len({model for model, _ in counts}) == 1 else ", all of one model"
    return f"No {demand.nodes} nodes have {count_gpus(demand.count)} like that each{models}; {number}."


def is_never(ledger: Ledger, demand: Demand) -> bool:
    """True when no known node has such GPUs. While no GPU is known at all, the answer is not never."""
    return bool(ledger.gpus) and not find_candidates(ledger, demand).by_node


def describe_nodes(ledger: Ledger) -> str:
    """How many GPUs each node has, in words; of many nodes the first."""
    by_node = ledger.fleet.gpus_of_node
    more = len(by_node) - MAX_NAMED
    named = sorted(by_node) if more <= 1 else heapq.nsmallest(MAX_NAMED, by_node)
    said = [f"Node {node} has {count_gpus(len(by_node[node]))}." for node in named]
    return " ".join(said if more <= 1 else [*said, f"There are {more} more nodes."])
