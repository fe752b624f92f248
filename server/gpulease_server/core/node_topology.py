"""How the GPUs of a node are connected, from what its worker reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpulease_protocol.model import GpuLink, GpuReading
from gpulease_server.core.topology import NVLINK, SCORES, Score, Topology, best_set, topology_of

MAX_GPUS = 64
"""Of a node with more GPUs the connections are not looked at: it counts as one of which nothing is known."""

MAX_NVLINKS = 18
"""NVLinks of one GPU, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeTopology:
    """The topology of a node, by UUID."""

    topology: Topology
    uuids: tuple[str, ...]
    """Its GPUs, in the order of their positions."""
    positions: Mapping[str, int]
    """By UUID: its place in `uuids`."""
    is_uniform: bool
    """True when it makes no difference which GPUs are taken."""

    def mask(self, uuids: Iterable[str]) -> int:
        """The GPUs as bits."""
        mask = 0
        for uuid in uuids:
            mask |= 1 << self.positions[uuid]
        return mask

    def best(self, usable: Sequence[str], free: Iterable[str], count: int) -> Score:
        """The score of the best set of `count` of the usable GPUs, all of which are among the free ones."""
        return best_set(self.topology, self.mask(usable), self.mask(free), count)


class TopologyCache:
    """The topology of one node, made again only when its links or NUMA nodes change."""

    __slots__ = ("_facts", "_found", "_links", "_readings")

    def __init__(self) -> None:
        self._links: tuple[GpuLink, ...] | None = None
        self._readings: Mapping[str, GpuReading] | None = None
        self._facts: tuple[tuple[int, str, int | None], ...] = ()
        self._found: NodeTopology | None = None

    def of(self, links: tuple[GpuLink, ...], readings: Mapping[str, GpuReading]) -> NodeTopology | None:
        """The topology with these links; None where the node has too many GPUs, or none."""
        if links is not self._links or readings is not self._readings:
            facts = tuple(sorted((one.index, uuid, one.numa_node) for uuid, one in readings.items()))
            if links != self._links or facts != self._facts:
                self._facts, self._found = facts, _node_topology(links, facts)
            self._links, self._readings = links, readings
        return self._found


def _node_topology(links: tuple[GpuLink, ...], facts: tuple[tuple[int, str, int | None], ...]) -> NodeTopology | None:
    uuids = tuple(uuid for _, uuid, _ in facts)
    if not 0 < len(uuids) <= MAX_GPUS:
        return None
    positions = {uuid: position for position, uuid in enumerate(uuids)}
    scores = [[0] * len(uuids) for _ in uuids]
    for link in links:
        first, second = positions.get(link.first), positions.get(link.second)
        if first is not None and second is not None and first != second:
            scores[first][second] = scores[second][first] = score_of(link)
    topology = topology_of(tuple(map(tuple, scores)), tuple(numa_node for _, _, numa_node in facts))
    return NodeTopology(topology, uuids, positions, topology.is_uniform)


def score_of(link: GpuLink) -> int:
    """The score of a pair, see `core.topology`."""
    return NVLINK * min(max(link.nvlinks or 1, 1), MAX_NVLINKS) if link.path == "nvlink" else SCORES.get(link.path, 0)
