"""The best set of GPUs on a node, by how they are connected.

Of the sets of so many usable GPUs the best one is, each rule deciding only where those before leave a tie:

1. the one with the best worst connection of a pair: a ring of ranks is as fast as its slowest hop,
2. the one with the best connections in sum,
3. the one that breaks the least NVLink: the sum over pairs of a GPU that is taken and one that stays free,
4. the one on the fewest NUMA nodes,
5. the one that breaks the least of all connections, so that GPUs behind one PCIe switch stay together,
6. the first in the order of the indices.

A single GPU has no pairs, so it is one that no free GPU is connected to well: what is left of a broken island.

An unknown pair scores 0. Where nothing is known at all, all sets are equal but for their NUMA nodes.

Cost
----
GPUs are *twins* if they have the same connections to all others and are on one NUMA node: which of them is taken makes
no difference. So a set is a number of GPUs from each class of twins; eight GPUs behind NVSwitches on two NUMA nodes
have 5 sets of four, not 70. All sets are looked at, up to `MAX_SETS`, which is enough for any 16 GPUs. Beyond that a
set is grown from one GPU and improved until no exchange of a GPU makes it better. Results are cached for each
topology, which nodes of one kind share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import combinations
from math import inf
from typing import NamedTuple

from gpulease_protocol.lazy_dataclass import dataclass

NVLINK = 100
"""Score of a pair for each NVLink between them. Pairs that are connected over PCIe alone score less."""
SCORES = {
    "nvlink": NVLINK,
    "same_board": 60,
    "one_switch": 50,
    "several_switches": 40,
    "host_bridge": 30,
    "numa_node": 20,
    "system": 10,
    "pcie": 10,
}
"""By `GpuLink.path`. Another word, of a newer worker, is not known: 0."""
MAX_SETS = 13_000
"""How many sets are looked at; 16 GPUs have at most 12,870 of one size."""
MAX_GROWN_FROM = 32
"""From how many usable GPUs a set is grown. Of more, the first ones are taken."""


class Score(NamedTuple):
    """How good a set is: the greater one is better."""

    worst: float
    """Score of the pair that is connected worst; infinite for a single GPU."""
    total: int
    """Sum over all pairs."""
    broken_nvlink: int
    """Sum over NVLink pairs between the set and the GPUs that stay free, negative."""
    numa_nodes: int
    """On how many NUMA nodes, negative."""
    broken: int
    """Sum over all pairs between the set and the GPUs that stay free, negative."""
    order: tuple[int, ...]
    """The positions, negative."""

    @property
    def positions(self) -> tuple[int, ...]:
        """The GPUs, in order."""
        return tuple(-position for position in self.order)


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """How the GPUs of a node are connected. Made by `topology_of`; nodes that are alike have the same one."""

    scores: tuple[tuple[int, ...], ...]
    """Of each pair, shape `(n_gpus, n_gpus)`, in the order of the indices; 0 where nothing is known."""
    numa_nodes: tuple[int | None, ...]
    """Of each GPU."""
    twins: tuple[int, ...] = field(init=False)
    """Of each GPU: the first one that is its twin."""

    def __post_init__(self) -> None:
        twins = list(range(len(self.scores)))
        for second in twins[:]:
            twins[second] = next((first for first in range(second) if self._are_twins(first, second)), second)
        object.__setattr__(self, "twins", tuple(twins))

    def _are_twins(self, first: int, second: int) -> bool:
        if self.numa_nodes[first] != self.numa_nodes[second]:
            return False
        rows = zip(self.scores[first], self.scores[second], strict=True)
        return all(one == other for at, (one, other) in enumerate(rows) if at not in (first, second))

    @property
    def is_uniform(self) -> bool:
        """True when it makes no difference which GPUs are taken."""
        return not any(self.twins)

    def score(self, chosen: Sequence[int], free: Sequence[int]) -> Score:
        """How good a set is while these GPUs are free, those of the set among them."""
        pairs = [self.scores[one][other] for one, other in combinations(chosen, 2)]
        others = set(free).difference(chosen)
        cut = [self.scores[one][other] for one in chosen for other in others]
        return Score(
            min(pairs, default=inf),
            sum(pairs),
            -sum(score for score in cut if score >= NVLINK),
            -len({self.numa_nodes[one] for one in chosen}),
            -sum(cut),
            tuple(-one for one in sorted(chosen)),
        )


@functools.lru_cache(64)
def topology_of(scores: tuple[tuple[int, ...], ...], numa_nodes: tuple[int | None, ...]) -> Topology:
    """The topology with these scores."""
    return Topology(scores, numa_nodes)


def positions_in(mask: int) -> list[int]:
    """The positions of the bits that are set."""
    return [position for position in range(mask.bit_length()) if mask >> position & 1]


@functools.lru_cache(4096)
def best_set(topology: Topology, usable: int, free: int, count: int) -> Score:
    """The best set of `count` of the usable GPUs. `usable` and `free` have a bit for each position; all that are
    usable are free, and there are at least `count` of them."""
    positions, others = positions_in(usable), positions_in(free)
    if topology.is_uniform or len(positions) == count:
        return topology.score(positions[:count], others)
    classes: dict[int, list[int]] = {}
    for position in positions:
        classes.setdefault(topology.twins[position], []).append(position)
    if _number_of_sets([len(members) for members in classes.values()], count) <= MAX_SETS:
        return _best_of_all(topology, list(classes.values()), others, count)
    if len(positions) > MAX_GROWN_FROM:
        return topology.score(positions[:count], others)
    return _grow(topology, positions, others, count)


def _number_of_sets(sizes: list[int], count: int) -> int:
    """How many ways there are to take `count` GPUs from classes of these sizes."""
    ways = [1] + [0] * count
    for size in sizes:
        ways = [sum(ways[max(0, taken - size) : taken + 1]) for taken in range(count + 1)]
    return ways[count]


def _best_of_all(topology: Topology, classes: list[list[int]], free: list[int], count: int) -> Score:
    """Looks at every number of GPUs from each class of twins; at none that begin with a pair worse than the worst one
    of a set that was found."""
    scores = topology.scores
    left = [sum(map(len, classes[at:])) for at in range(len(classes) + 1)]
    worst_found, best = -inf, None

    def sets(at: int, taken: tuple[int, ...], worst: float) -> Iterator[tuple[int, ...]]:
        if worst < worst_found:
            return
        if len(taken) == count:
            yield taken
            return
        members = classes[at]
        to_others = min((scores[members[0]][one] for one in taken), default=inf)
        inside = scores[members[0]][members[1]] if len(members) > 1 else inf
        for number in range(min(len(members), count - len(taken)), -1, -1):
            if count - len(taken) - number <= left[at + 1]:
                now = worst if not number else min(worst, to_others, inside if number > 1 else inf)
                yield from sets(at + 1, (*taken, *members[:number]), now)

    for taken in sets(0, (), inf):
        found = topology.score(taken, free)
        if best is None or found > best:
            worst_found, best = found.worst, found
    if best is None:
        raise AssertionError(f"there are no {count} GPUs among {classes}")
    return best


def _grow(topology: Topology, usable: list[int], free: list[int], count: int) -> Score:
    """A set that no exchange of a GPU makes better."""
    chosen: list[int] = []
    while len(chosen) < count:
        rest = [one for one in usable if one not in chosen]
        chosen.append(max(rest, key=lambda one: topology.score([*chosen, one], free)))
    best = topology.score(chosen, free)
    while (better := _exchange(topology, best, usable, free)) is not None:
        best = better
    return best


def _exchange(topology: Topology, best: Score, usable: list[int], free: list[int]) -> Score | None:
    """The best set that differs in one GPU; None if none is better."""
    chosen = best.positions
    found = max(
        topology.score([*chosen[:at], other, *chosen[at + 1 :]], free)
        for at in range(len(chosen))
        for other in usable
        if other not in chosen
    )
    return found if found > best else None
