"""Processes, GPUs, demands and amounts in words, as reasons and explanations name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpulease_protocol.model import Demand, Device, Priority, Process, Selection, TopologyMode
from gpulease_server.core.policy import Policy

MAX_NAMED = 8
"""Names in one sentence, at most."""
MAX_NAMED_PROCESSES = 4
"""Processes in one sentence, at most: their names are longer, and anyone may have hundreds on a GPU."""


def describe_processes(processes: Sequence[Process], policy: Policy) -> str:
    """The first of these processes in words, and how many there are beside them: pid, user and command of each, as far
    as they are known and may be told."""
    named = ", ".join(_describe_process(one, policy.show_commands) for one in processes[:MAX_NAMED_PROCESSES])
    return named + (f" and {more} more" if (more := len(processes) - MAX_NAMED_PROCESSES) > 0 else "")


def _describe_process(process: Process, command_too: bool) -> str:
    user = f" of {process.user}" if process.user else ""
    command = f" ({process.command[:60]})" if process.command and command_too else ""
    return f"pid {process.pid}{user}{command}"


def gibibytes(amount: int) -> str:
    """An amount of memory in words."""
    return f"{amount / 2**30:.1f} GiB"


def describe_demand(demand: Demand) -> str:
    """A demand in words."""
    if demand.selection is Selection.ALL:
        what = "a whole node"
    elif demand.selection is Selection.LISTED:
        names = [*map(str, demand.indices), *demand.uuids]
        what = f"GPU{'s' if len(names) > 1 else ''} {some_of(names)}"
    else:
        what = f"{'at least ' if demand.selection is Selection.AUTO else ''}{count_gpus(demand.count)}"
        what += f" on each of {node_range(demand)} nodes" if demand.nodes > 1 else ""
    limits = [
        f"of model {demand.gpu_model}" if demand.gpu_model is not None else "",
        f"with {demand.min_free_memory_bytes / 2**30:.1f} GiB free" if demand.min_free_memory_bytes else "",
        f"on node {demand.node}" if demand.node is not None else "",
        f"among {len(demand.among)} named ones" if demand.among is not None else "",
        "with NVLink between all of them" if demand.topology is TopologyMode.REQUIRED else "",
        f"for up to {duration(demand.time_s)}" if demand.time_s is not None else "",
        f"with priority {demand.priority}" if demand.priority is not Priority.NORMAL else "",
    ]
    preemptible = ", preemptible" if demand.preemptible and demand.priority is not Priority.SCAVENGE else ""
    return " ".join([what, *filter(None, limits)]) + preemptible


def name_nodes(nodes: Sequence[str]) -> str:
    """Nodes in words: "node a", "nodes a, b"."""
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {some_of(nodes)}"


def node_range(demand: Demand) -> str:
    """On how many nodes, in words: "2", or "2 to 4"."""
    return str(demand.nodes) if demand.max_nodes is None else f"{demand.nodes} to {demand.max_nodes}"


def duration(seconds: float) -> str:
    """A duration in the largest unit in which it is at least 2, such as "90 min"."""
    for unit, unit_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * unit_s:
            return f"{round(seconds / unit_s, 1):g} {unit}"
    return f"{seconds:.0f} s"


def some_of(names: Sequence[str]) -> str:
    """The first of many names, and how many there are beside them."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"


def describe_gpus(indices: list[int]) -> str:
    """GPU indices in words."""
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def describe_places(gpus: Iterable[Device]) -> str:
    """GPUs in words, by node: "GPUs 0, 1 of a; GPU 3 of b"."""
    indices: dict[str, list[int]] = {}
    for gpu in gpus:
        indices.setdefault(gpu.node, []).append(gpu.index)
    return "; ".join(f"{describe_gpus(found)} of {node}" for node, found in indices.items())


def count_gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
