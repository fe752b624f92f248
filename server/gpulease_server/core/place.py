"""Where the GPUs for a request come from: one node, or several at once."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from gpulease_protocol.model import Demand, TopologyMode
from gpulease_server.core.calendar import NO_GPUS
from gpulease_server.core.gang_placement import GangRanking
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.placement import Blocked, NeedsReading, Placed, Search, find_candidates
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant


class Ranking(Protocol):
    """The nodes in the order in which a demand takes them, see `core.node_ranking`."""

    def place(self, search: Search) -> Placed | NeedsReading | Blocked:
        """What `place` returns."""


class Rankings(Protocol):
    """Those of the demands that several requests of a walk have."""

    def of(self, search: Search) -> Ranking | None:
        """That of a request; None if it is the first of its kind."""


def place(
    ledger: Ledger,
    demand: Demand,
    reserved: Collection[str],
    now: Instant,
    policy: Policy,
    late_nodes: Collection[str] = (),
    *,
    most_gpus: int | None = None,
    requested_at_s: float = float("-inf"),
    allow_reread: bool = False,
    closed: frozenset[str] = NO_GPUS,
    rankings: Rankings | None = None,
) -> Placed | NeedsReading | Blocked:
    """Find GPUs for one demand. Nodes with a recent reading come first, then those that are left with the fewest free
    GPUs; on a node the set that is connected best is taken (`core.topology`), in PCI order; listed ones come in the
    order of the list: rank 0 is on the first. Of a demand on several nodes all are found at once, see
    `core.gang_placement`.

    `reserved`: UUIDs that are kept for older requests; `closed`: those that the calendar closes to this one.
    `late_nodes`: nodes that were asked for a reading too long ago. `most_gpus`: what the user's limit leaves: a node
    where the demand takes more is passed over, and `auto` takes no more. `requested_at_s`: when the request was made.
    With `allow_reread`, GPUs that only an old reading rules out are read again before the answer is no. `rankings`: of
    the walk through the queue that this is a part of.
    """
    if closed:
        reserved = closed.union(reserved) if reserved else closed
    search = Search(ledger, demand, reserved, now, policy, late_nodes, most_gpus, requested_at_s, allow_reread, closed)
    ranking: Ranking | None = None if rankings is None else rankings.of(search)
    if ranking is None and demand.nodes > 1:
        ranking = GangRanking([])
    if ranking is not None:
        return ranking.place(search)
    plain = Demand(
        count=demand.count,
        time_s=demand.time_s,
        topology=demand.topology,
        priority=demand.priority,
        preemptible=demand.preemptible,
        reclaim_idle_after_s=demand.reclaim_idle_after_s,
    )
    if search.is_within_limit and demand == plain and demand.topology is not TopologyMode.REQUIRED:
        found = search.by_count()
        if found is not None or not (allow_reread and ledger.fleet.unheld):
            return found or search.blocked(find_candidates(ledger, demand))
    return search.on_each_node()
