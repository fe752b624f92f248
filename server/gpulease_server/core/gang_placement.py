"""Placement of a gang: so many GPUs on each of several nodes, all found at once or none.

- The GPUs of all nodes are of one model: a gang is as fast as its slowest rank.
- All nodes reach each other (`placement.reach_of`): each has an address, and a loopback one serves nodes of one host.
- The reading of each node is recent. If those of some are not, these nodes are asked together, and the request waits
  for all of them.
- The nodes with the fewest free GPUs are taken first, so that whole nodes stay whole; those with recent readings alone,
  if there are enough of them. Of several models the one is taken for which this ends sooner.
- The ranks of the nodes are in the order of their names, which does not depend on who asks when.
- A demand for `nodes` to `max_nodes` nodes gets as many as are free, those that are free after a reading included. If a
  reading came too late to count, and there are enough nodes without that one, it does not wait for it.

Within a walk through the queue GPUs are only taken, as in `core.node_ranking`: a node is looked at once for each
demand, and again when something was taken from it. The nodes come by their number of free GPUs, and the search ends
where enough are found: a gang that waits costs a look at the nodes that have enough free GPUs, which are too few.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import NamedTuple

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.core.fleet import Candidates
from gpulease_server.core.placement import Blocked, NeedsReading, Placed, Search, find_candidates, reach_of
from gpulease_server.core.records import GpuRecord

GroupKey = tuple[str, str]
"""Model, and from where its nodes are reached: nodes of one group may take part in one gang."""
Place = tuple[float, str]
"""Number of free GPUs, and name of a node: the order in which nodes are taken."""
END: Place = (float("inf"), "")
"""Behind every node."""


class Member(NamedTuple):
    """What a node has for a gang, in the order in which nodes are taken."""

    free: float
    """How many free GPUs it has, for whatever demand."""
    node: str
    gpus: tuple[GpuRecord, ...]
    is_recent: bool
    """Its reading is recent."""

    @property
    def place(self) -> Place:
        """Its place among the nodes."""
        return self.free, self.node


@dataclass(slots=True)
class Group:
    """The nodes of a group that have enough free GPUs, sorted."""

    recent: list[Member] = field(default_factory=list)
    """Those with recent readings."""
    others: list[Member] = field(default_factory=list)

    def first(self, count: int, *, all_recent: bool) -> list[Member]:
        """So many of them, or fewer where there are no more."""
        if all_recent:
            return self.recent[:count]
        return sorted([*self.recent[:count], *self.others[:count]], key=lambda one: one.place)[:count]


@dataclass(slots=True)
class GangRanking:
    """The nodes that could take part in gangs of one demand."""

    taken: Sequence[str]
    """Names of nodes, as something is taken from them, see `core.node_ranking`."""
    _seen: int = 0
    """How many of `taken` have been looked at."""
    _places: Iterator[Place] | None = None
    """The nodes that are still to be looked at, in their order; None at first."""
    _reached: Place = (0, "")
    """Every node up to this place was looked at."""
    _looked_at: dict[str, list[GroupKey]] = field(default_factory=dict)
    """By node: the groups in which it is a member."""
    _groups: dict[GroupKey, Group] = field(default_factory=dict)

    def place(self, search: Search) -> Placed | NeedsReading | Blocked:
        """GPUs for a request with this demand."""
        found = find_candidates(search.ledger, search.demand)
        if not found.by_node or not search.is_within_limit:
            return search.blocked(found)
        if self._places is None:
            self._places = self._by_free(search, found)
        else:
            for node in dict.fromkeys(self.taken[self._seen :]):
                self._look_at(search, found, node)
        self._seen = len(self.taken)
        for nodes in _numbers_of_nodes(search):
            while (members := self._best(nodes, all_recent=True)) is None and self._reached != END:
                self._reached = next(self._places, END)
                if self._reached != END and self._reached[1] not in self._looked_at:
                    self._look_at(search, found, self._reached[1])
            if members is not None:
                return Placed(_by_rank(members))
            after = self._after_readings(search, found, nodes)
            is_least = nodes == search.demand.nodes
            if after is not None and (is_least or not any(_answers_too_late(search, node) for node in after.nodes)):
                return after
        return search.blocked(found)

    def _by_free(self, search: Search, found: Candidates) -> Iterator[Place]:
        """The candidates with enough free GPUs, without those on which the calendar closes all of them."""
        by_free, open_nodes = search.ledger.fleet.nodes_by_free, search.open_nodes(found)
        places = [(free, node) for free in sorted(by_free) if free >= search.demand.count for node in by_free[free]]
        return (place for place in places if place[1] in found.by_node and place[1] in open_nodes)

    def _look_at(self, search: Search, found: Candidates, node: str) -> None:
        """Find out what a node has for the gang at this moment."""
        for key in self._looked_at.get(node, ()):
            for members in (self._groups[key].recent, self._groups[key].others):
                members[:] = [one for one in members if one.node != node]
        self._looked_at[node] = []
        reach = reach_of(search.ledger, search.demand, node)
        if reach is None or node not in found.by_node:
            return
        for model, by_node in found.by_model.items():
            ranked = search.on_node(node, found, model) if node in by_node else None
            if ranked is not None:
                group = self._groups.setdefault((model, reach), Group())
                member = Member(len(search.ledger.fleet.free[node]), node, ranked.gpus, not ranked.rank[0])
                members = group.recent if member.is_recent else group.others
                bisect.insort(members, member, key=lambda one: one.place)
                self._looked_at[node].append((model, reach))

    def _best(self, nodes: int, *, all_recent: bool) -> list[Member] | None:
        """The first nodes of the group that has enough of them first; None if no group has, or if one that was not
        looked at could come before its last one."""
        sets = [(key, group.first(nodes, all_recent=all_recent)) for key, group in self._groups.items()]
        enough = [(members[-1].place, key, members) for key, members in sets if len(members) == nodes]
        last, _, members = min(enough, key=lambda one: one[:2]) if enough else (None, None, [])
        return members if last is not None and (not all_recent or last <= self._reached) else None

    def _after_readings(self, search: Search, found: Candidates, nodes: int) -> NeedsReading | None:
        """What a gang of so many nodes gets if readings show it free; those that only an old reading rules out among
        them, where the request may have them read again."""
        members = self._best(nodes, all_recent=False)
        if members is None and search.allow_reread:
            members = self._with_reread(search, found, nodes)
        if members is None:
            return None
        return NeedsReading(tuple(one.node for one in members if not one.is_recent), _by_rank(members))

    def _with_reread(self, search: Search, found: Candidates, nodes: int) -> list[Member] | None:
        """The members of the first group that has enough together with nodes which an old reading rules out."""
        for model, by_node in found.by_model.items():
            reached: dict[str, list[Member]] = {}
            for node in by_node:
                reach = reach_of(search.ledger, search.demand, node)
                if reach is None:
                    continue
                if reach not in reached:
                    group = self._groups.get((model, reach), Group())
                    reached[reach] = group.first(nodes, all_recent=False)
                if (model, reach) in self._looked_at.get(node, ()):
                    continue
                after = search.after_reading(node, by_node[node])
                if after is not None:
                    reached[reach].append(Member(0, node, after.gpus, False))
                if len(reached[reach]) == nodes:
                    return reached[reach]
        return None


def _answers_too_late(search: Search, node: str) -> bool:
    """True where a node's answer to a request for a reading was too old for a grant when it came, as the next will be:
    for one with a slow network."""
    one = search.ledger.node_observations.get(node)
    if one is None or one.observed_at_s is None or not one.answers_request:
        return False
    took_s = min(one.read_s or 0.0, one.reading_limit_s)
    return one.reported_at_s - one.observed_at_s > took_s + search.policy.max_observation_age_s


def _by_rank(members: list[Member]) -> tuple[GpuRecord, ...]:
    """The GPUs of all members, by rank."""
    return tuple(gpu for member in sorted(members, key=lambda one: one.node) for gpu in member.gpus)


def _numbers_of_nodes(search: Search) -> Iterator[int]:
    """On how many nodes the gang may be, the most first: no more than the user's limit leaves."""
    least, most = search.demand.nodes, search.demand.max_nodes or search.demand.nodes
    if search.most_gpus is not None:
        most = min(most, search.most_gpus // search.demand.count)
    return iter(range(max(least, most), least - 1, -1))
