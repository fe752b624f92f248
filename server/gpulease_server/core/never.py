"""Why no known node can ever serve a demand: the first condition that leaves too few GPUs."""

from __future__ import annotations

from gpulease.model import Demand, Selection

from .ledger import GpuRecord, Ledger


def why_never(ledger: Ledger, demand: Demand) -> str:
    """A sentence that names what there is not. For a demand of which `is_never` is true."""
    gpus = [gpu for gpu in ledger.gpus.values() if demand.node in (None, gpu.device.node)]
    if not gpus:
        known = ", ".join(sorted({gpu.device.node for gpu in ledger.gpus.values()}))
        return f"There is no node {demand.node} with GPUs; there are: {known}."
    missing = _missing(demand, gpus)
    if missing:
        where = f"on node {demand.node}" if demand.node is not None else "on any node"
        return f"There is no GPU {', '.join(missing)} {where}."
    if demand.selection is Selection.LISTED:
        gpus = [gpu for gpu in gpus if gpu.device.index in demand.indices or gpu.device.uuid in demand.uuids]
    for condition in (_among, _of_model, _of_size):
        gpus, said = condition(demand, gpus)
        if said:
            return said
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
    models = ", ".join(sorted({gpu.device.name or "of an unknown model" for gpu in gpus}))
    return fitting, "" if fitting else f"None is of model {demand.gpu_model}; there are: {models}."


def _of_size(demand: Demand, gpus: list[GpuRecord]) -> tuple[list[GpuRecord], str]:
    wanted = demand.min_free_memory_bytes or 0
    fitting = [gpu for gpu in gpus if (gpu.device.memory_total_bytes or 0) >= wanted]
    known = [gpu.device.memory_total_bytes for gpu in gpus if gpu.device.memory_total_bytes is not None]
    largest = f"The largest has {max(known) / 2**30:.1f} GiB." if known else ""
    mute = len(gpus) - len(known)
    unknown = f"Of {mute} it is not known how much memory {'it has' if mute == 1 else 'they have'}." if mute else ""
    return fitting, "" if fitting else f"{largest} {unknown}".strip()


def _on_one_node(demand: Demand, gpus: list[GpuRecord]) -> str:
    nodes = [gpu.device.node for gpu in gpus]
    most = max((nodes.count(node) for node in nodes), default=0)
    if demand.selection is Selection.LISTED:
        return f"They are on different nodes ({', '.join(sorted(set(nodes)))}), and a lease lies on one."
    return f"No node has more than {most} such GPU{'' if most == 1 else 's'}, and a lease lies on one node."
