"""How the GPUs of a node are connected, from what its worker reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import GpuLink, GpuReading
from gpulease_server.core.topology import NVLINK, SCORES, Score, Topology, best_set, topology_of

MAX_GPUS = 64
"""Of a node with more GPUs the connections are not looked at: it counts as one of which nothing is known."""

MAX_NVLINKS = 36
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

    def best_linked(self, usable: Iterable[str], free: Iterable[str], count: int) -> Score | None:
        """The best set with NVLink between every pair; None if there is none. Looks at each island alone."""
        left, found = {self.positions[uuid] for uuid in usable}, []
        while left:
            island, at = [min(left)], 0
            left.remove(island[0])
            while at < len(island):
                near = [one for one in left if self.topology.scores[island[at]][one] >= NVLINK]
                left.difference_update(near)
                island, at = [*island, *near], at + 1
            if len(island) >= count:
                mask = sum(1 << position for position in island)
                found.append(best_set(self.topology, mask, self.mask(free) | mask, count))
        best = max(found, default=None)
        return None if best is None or best.worst < NVLINK else best


class TopologyCache:
    """The topology of one node, made again only when its links or NUMA nodes change."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: _Known = _Known((), {}, (), None)

    def of(self, links: tuple[GpuLink, ...], readings: Mapping[str, GpuReading]) -> NodeTopology | None:
        """The topology with these links; None where the node has too many GPUs, or none."""
        if not 0 < len(readings) <= MAX_GPUS:
            return None
        last = self._last
        if links is last.links and readings is last.readings:
            return last.found
        facts = tuple(sorted((one.index, uuid, one.numa_node) for uuid, one in readings.items()))
        is_same = links == last.links and facts == last.facts
        found = last.found if is_same else _node_topology(links, facts)
        self._last = _Known(links, readings, facts, found)
        return found


class _Known(NamedTuple):
    """A topology, and what it was made of."""

    links: tuple[GpuLink, ...]
    readings: Mapping[str, GpuReading]
    facts: tuple[tuple[int, str, int | None], ...]
    found: NodeTopology | None


def _node_topology(links: tuple[GpuLink, ...], facts: tuple[tuple[int, str, int | None], ...]) -> NodeTopology:
    uuids = tuple(uuid for _, uuid, _ in facts)
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


def nvlink_islands(links: Iterable[GpuLink]) -> tuple[tuple[str, ...], ...]:
    """The GPUs that NVLink connects, directly or through others: each island's UUIDs, sorted; none of a single GPU."""
    island_of: dict[str, set[str]] = {}
    for link in links:
        if link.path == "nvlink" and link.first != link.second:
            joined = island_of.get(link.first, {link.first}) | island_of.get(link.second, {link.second})
            island_of |= dict.fromkeys(joined, joined)
    return tuple(sorted({tuple(sorted(island)) for island in island_of.values()}))
