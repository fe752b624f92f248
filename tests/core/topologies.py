"""Hosts as `nvidia-smi topo -m` shows them, and an oracle for the best set of GPUs.

The oracle is the definition in `gpulease_server.core.topology` word by word, without its code: of all sets it crosses
out, rule by rule, those that another set beats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from gpulease_protocol.model import GpuLink, GpuReading
from gpulease_server.core.node_topology import MAX_NVLINKS, TopologyCache
from gpulease_server.core.topology import Topology
from tests.core.build import gpu, uuid

PATHS = {
    "PIX": "one_switch",
    "PXB": "several_switches",
    "PHB": "host_bridge",
    "NODE": "numa_node",
    "SYS": "system",
}
"""The words of nvidia-smi. `NV2` are two NVLinks, or the NVLinks of a GPU to an NVSwitch."""
Subset = tuple[int, ...]


@dataclass(frozen=True)
class Host:
    """A host: one word for each pair, and the NUMA node of each GPU."""

    words: tuple[tuple[str, ...], ...]
    numa: tuple[int | None, ...]
    switched: bool = False
    """Its NVLinks lead to an NVSwitch, so that the driver counts none between two GPUs."""

    def readings(self, node: str = "a") -> list[GpuReading]:
        """What a worker reports of its GPUs."""
        return [gpu(index, node, numa_node=self.numa[index]) for index in range(len(self.words))]

    def links(self, node: str = "a") -> tuple[GpuLink, ...]:
        """What a worker reports of its pairs; nothing of one that is `?`."""
        pairs = combinations(range(len(self.words)), 2)
        return tuple(
            GpuLink(first=uuid(first, node), second=uuid(second, node), **self._path(self.words[first][second]))
            for first, second in pairs
            if self.words[first][second] != "?"
        )

    def _path(self, word: str) -> dict[str, Any]:
        if not word.startswith("NV"):
            return {"path": PATHS[word], "peer_to_peer": False}
        return {"path": "nvlink", "peer_to_peer": True, "nvlinks": None if self.switched else int(word[2:])}

    def topology(self) -> Topology | None:
        """The topology that the daemon makes of it."""
        readings = {one.uuid: one for one in self.readings()}
        found = TopologyCache().of(self.links(), readings)
        return None if found is None else found.topology

    def relabelled(self, order: list[int]) -> Host:
        """The same host with its GPUs in another order."""
        words = tuple(tuple(self.words[one][other] for other in order) for one in order)
        return Host(words, tuple(self.numa[one] for one in order), self.switched)


def matrix(text: str, numa: Iterable[int | None], *, switched: bool = False) -> Host:
    """A host from the rows of `nvidia-smi topo -m`."""
    return Host(tuple(tuple(line.split()) for line in text.strip().splitlines()), tuple(numa), switched)


DGX_1V = matrix(
    """
    X   NV1 NV1 NV2 NV2 SYS SYS SYS
    NV1 X   NV2 NV1 SYS NV2 SYS SYS
    NV1 NV2 X   NV2 SYS SYS NV1 SYS
    NV2 NV1 NV2 X   SYS SYS SYS NV1
    NV2 SYS SYS SYS X   NV1 NV1 NV2
    SYS NV2 SYS SYS NV1 X   NV2 NV1
    SYS SYS NV1 SYS NV1 NV2 X   NV2
    SYS SYS SYS NV1 NV2 NV1 NV2 X
    """,
    [0, 0, 0, 0, 1, 1, 1, 1],
)
"""Eight V100 in a hybrid cube mesh."""
A100_BRIDGES = matrix(
    """
    X    NV12 SYS  SYS
    NV12 X    SYS  SYS
    SYS  SYS  X    NV12
    SYS  SYS  NV12 X
    """,
    [0, 0, 1, 1],
)
"""Four A100 PCIe, two and two with NVLink bridges."""
BRIDGES_ACROSS = matrix(
    """
    X    NODE NV4  NODE
    NODE X    NODE NV4
    NV4  NODE X    NODE
    NODE NV4  NODE X
    """,
    [None, None, None, None],
)
"""Four RTX A6000, of which the first and the third, the second and the fourth have a bridge."""
HGX = Host(
    tuple(tuple("X" if one == two else "NV18" for two in range(8)) for one in range(8)), (0,) * 4 + (1,) * 4, True
)
"""Eight H100 behind NVSwitches."""
RTX = matrix(
    """
    X   PIX PXB PXB SYS SYS SYS SYS
    PIX X   PXB PXB SYS SYS SYS SYS
    PXB PXB X   PIX SYS SYS SYS SYS
    PXB PXB PIX X   SYS SYS SYS SYS
    SYS SYS SYS SYS X   PIX PXB PXB
    SYS SYS SYS SYS PIX X   PXB PXB
    SYS SYS SYS SYS PXB PXB X   PIX
    SYS SYS SYS SYS PXB PXB PIX X
    """,
    [0, 0, 0, 0, 1, 1, 1, 1],
)
"""Eight GPUs without NVLink on two NUMA nodes."""
TWO_3090 = matrix("X NV4\nNV4 X", [None, None])
GB200 = Host(tuple(tuple("X" if one == two else "NV18" for two in range(4)) for one in range(4)), (0, 0, 1, 1), True)
"""A node of an NVL72."""
HALF_KNOWN = matrix("X PHB ? ?\nPHB X ? ?\n? ? X ?\n? ? ? X", [0, 0, 0, 0])
NOTHING_KNOWN = Host(tuple(tuple("X" if one == two else "?" for two in range(8)) for one in range(8)), (None,) * 8)
HOSTS = {
    "DGX-1V": DGX_1V,
    "A100 with bridges": A100_BRIDGES,
    "bridges across": BRIDGES_ACROSS,
    "HGX": HGX,
    "RTX on two NUMA nodes": RTX,
    "two 3090": TWO_3090,
    "GB200": GB200,
    "half known": HALF_KNOWN,
    "nothing known": NOTHING_KNOWN,
}


def oracle(host: Host, usable: Collection[int], free: Collection[int], count: int) -> Subset:
    """The best set of `count` usable GPUs."""
    points = {"PIX": 50, "PXB": 40, "PHB": 30, "NODE": 20, "SYS": 10, "?": 0}

    def value(one: int, other: int) -> int:
        word = host.words[one][other]
        if word[:2] == "NV":
            return 100 if host.switched else 100 * min(int(word[2:]), MAX_NVLINKS)
        return points[word]

    def worst(some: Subset) -> float:
        return min([value(one, other) for one in some for other in some if one < other] or [0])

    def together(some: Subset) -> float:
        return sum(value(one, other) for one in some for other in some if one < other)

    def kept_whole(some: Subset) -> float:
        return -sum(value(*pair) for pair in _parted(some) if host.words[pair[0]][pair[1]].startswith("NV"))

    def near(some: Subset) -> float:
        return -len({host.numa[one] for one in some})

    def kept_near(some: Subset) -> float:
        return -sum(value(*pair) for pair in _parted(some))

    def _parted(some: Subset) -> list[tuple[int, int]]:
        return [(one, other) for one in some for other in free if other not in some]

    left = list(combinations(sorted(usable), count))
    rules: list[Callable[[Subset], float]] = [worst, together, kept_whole, near, kept_near]
    for rule in rules:
        best = max(rule(some) for some in left)
        left = [some for some in left if rule(some) == best]
    return left[0]
