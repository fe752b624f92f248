"""Whose deadlines have passed, without a look at every deadline."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import field

from gpulease_protocol.lazy_dataclass import dataclass

MIN_FORMER = 1000
"""How many former deadlines the heap may have, beside as many as there are deadlines, before it is built again."""


@dataclass(slots=True)
class DueLeases:
    """A heap of the deadlines of leases, beside the deadlines themselves: monotonic seconds by lease id."""

    heap: list[tuple[float, str]] = field(default_factory=list)
    """Every deadline, with the id of its lease, and former ones."""

    def push(self, lease_id: str, deadlines: Mapping[str, float]) -> None:
        """Take up the deadline of a lease, which is new, has changed, or is to be named again."""
        heapq.heappush(self.heap, (deadlines[lease_id], lease_id))
        if len(self.heap) > 2 * len(deadlines) + MIN_FORMER:
            self.heap = [(at_s, lease_id) for lease_id, at_s in deadlines.items()]
            heapq.heapify(self.heap)

    def pop(self, now_s: float, deadlines: Mapping[str, float]) -> list[str]:
        """The leases with a deadline that has passed. They are not returned again until they are pushed."""
        found: dict[str, None] = {}
        while self.heap and self.heap[0][0] <= now_s:
            at_s, lease_id = heapq.heappop(self.heap)
            if deadlines.get(lease_id) == at_s:
                found[lease_id] = None
        return list(found)
