"""How old a reading can be, by the daemon's own clock. See `gpulease.exchange`."""

from __future__ import annotations

from dataclasses import replace

from gpulease.exchange import DesiredState, LeaseOwner

from . import clock, ids

KEPT = 64
"""Tickets remembered per node: a report may name one from before several answers, see `NodeReport.ticket`."""


class Tickets:
    """Which answers went to which node, when, and what the last one said."""

    def __init__(self) -> None:
        self._last = ids.first_ticket()
        self._issued: dict[str, dict[int, float]] = {}
        self._told: dict[str, DesiredState] = {}

    def answer(self, node: str, desired: DesiredState) -> DesiredState:
        """The desired state with a new ticket, about to be sent."""
        self._last += 1
        issued = self._issued.setdefault(node, {})
        issued[self._last] = clock.now().mono_s
        while len(issued) > KEPT:
            del issued[next(iter(issued))]
        self._told[node] = replace(desired, ticket=self._last)
        return self._told[node]

    def issued_at_s(self, node: str, ticket: int | None) -> float | None:
        """When a ticket was issued to this node by this process; None for any other ticket."""
        return None if ticket is None else self._issued.get(node, {}).get(ticket)

    def told_owners(self, node: str) -> tuple[LeaseOwner, ...]:
        """Whom the last answer told the node's worker to watch."""
        told = self._told.get(node)
        return () if told is None else told.owners

    def knows(self, node: str, ticket: int | None, desired: DesiredState) -> bool:
        """True when the node's worker has seen the last answer, and that answer said all of `desired`."""
        told = self._told.get(node)
        if told is None or ticket != told.ticket:
            return False
        return replace(desired, ticket=told.ticket, fresh=told.fresh) == told
