"""Nodes in the order in which a demand takes them, for the many requests of one turn that ask for the same.

Within a walk through the queue GPUs are only taken: granted, or reserved. So the nodes are ranked once for each demand,
and after that only those again from which something was taken (`Reservations.taken`). The result is that of
`place` without a ranking. Gangs have a ranking of their own (`core.gang_placement`).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import field

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Selection
from gpulease_server.core.gang_placement import GangRanking
from gpulease_server.core.placement import Blocked, NeedsReading, Placed, RankedNode, Search, find_candidates


@dataclass(slots=True)
class NodeRanking:
    """The nodes that have enough free GPUs for one demand."""

    taken: list[str]
    """Names of nodes, as something is taken from them."""
    _ranks: dict[str, tuple[bool, int, str]] = field(default_factory=dict)
    _heap: list[tuple[bool, int, str]] = field(default_factory=list)
    """The ranks, and former ones."""
    _seen: int | None = None
    """How many of `taken` have been looked at; None before the nodes were ranked."""
    _ruled_out: int = 0
    """How many nodes, in the order of the candidates, no reading would help."""

    def place(self, search: Search) -> Placed | NeedsReading | Blocked:
        """GPUs for a request with this demand."""
        found = find_candidates(search.ledger, search.demand)
        first = self._seen is None
        names = found.nodes_in(search.open_nodes(found)) if first else dict.fromkeys(self.taken[self._seen :])
        self._seen = len(self.taken)
        looked_at: dict[str, RankedNode] = {}
        for node in names:
            ranked = search.on_node(node, found) if node in found.by_node else None
            if ranked is None:
                self._ranks.pop(node, None)
            elif self._ranks.get(node) != ranked.rank:
                self._ranks[node] = ranked.rank
                heapq.heappush(self._heap, ranked.rank)
            if ranked is not None:
                looked_at[node] = ranked
        while self._heap:
            rank = self._heap[0]
            is_current = self._ranks.get(rank[2]) == rank
            ranked = (looked_at.get(rank[2]) or search.on_node(rank[2], found)) if is_current else None
            if ranked is not None:
                return ranked.placed
            heapq.heappop(self._heap)
        nodes = list(found.by_node) if search.allow_reread else []
        for node in nodes[self._ruled_out :]:
            needs_reading = search.after_reading(node, found.by_node[node])
            if needs_reading is not None:
                return needs_reading
            self._ruled_out += 1
        return search.blocked(found)


@dataclass(slots=True)
class NodeRankings:
    """The rankings of one walk."""

    taken: list[str]
    """See `NodeRanking`."""
    _rankings: dict[Hashable, NodeRanking] = field(default_factory=dict)
    _gangs: dict[Hashable, GangRanking] = field(default_factory=dict)

    def of(self, search: Search) -> NodeRanking | GangRanking | None:
        """The ranking for a request; None for the first one of its kind, for which to rank all nodes would not pay."""
        demand, most_gpus = search.demand, search.most_gpus
        by_limit = demand.selection in (Selection.ALL, Selection.AUTO) or demand.max_nodes is not None
        limit = most_gpus if by_limit else search.is_within_limit
        key = (demand, limit, search.requested_at_s, search.closed)
        if demand.nodes > 1:
            return self._gangs.setdefault(key, GangRanking(self.taken))
        known = self._rankings.get(key)
        if known is None:
            self._rankings[key] = NodeRanking(self.taken)
        return known
