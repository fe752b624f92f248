"""Tickets that bound the age of a node's reading by the daemon's own clock. See `gpulease_protocol.node_protocol`."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

from gpulease_protocol.node_protocol import DesiredState, LeaseOwner, LogRequest
from gpulease_server.core.fast_replace import replace
from gpulease_server.runtime import clock, ids

NO_NEWS = "ticket", "complete", "owners", "log_requests"
WHAT_IS_NEWS = attrgetter(*(one.name for one in fields(DesiredState) if one.name not in NO_NEWS))
"""Of a desired state: what a worker is to be told at once."""
MAX_TICKETS = 64
"""Tickets remembered per node: a report may name one of several answers ago, see `NodeReport.ticket`."""


class DesiredStateTickets:
    """Issues a ticket with each desired state; knows when it was issued and what the last one contained, by node."""

    def __init__(self) -> None:
        self._last = ids.first_ticket()
        self._issued: dict[str, dict[int, float]] = {}
        self._sent: dict[str, DesiredState] = {}

    def issue(self, node: str, desired: DesiredState, *, complete: bool) -> DesiredState:
        """The desired state with a new ticket, to be sent now. `complete`: whether it asks for a complete reading."""
        self._last += 1
        issued = self._issued.setdefault(node, {})
        issued[self._last] = clock.mono_s()
        while len(issued) > MAX_TICKETS:
            del issued[next(iter(issued))]
        self._sent[node] = replace(desired, ticket=self._last, complete=complete)
        return self._sent[node]

    def issued_at_s(self, node: str, ticket: int | None) -> float | None:
        """When a ticket was issued to this node by this process; None for any other ticket."""
        return None if ticket is None else self._issued.get(node, {}).get(ticket)

    def sent_owners(self, node: str) -> tuple[LeaseOwner, ...]:
        """The owners that the last answer told the node's worker to watch."""
        sent = self._sent.get(node)
        return () if sent is None else sent.owners

    def sent_log_requests(self, node: str) -> tuple[LogRequest, ...]:
        """The logs that the last answer asked the node's worker for."""
        sent = self._sent.get(node)
        return () if sent is None else sent.log_requests

    def is_up_to_date(self, node: str, ticket: int | None, desired: DesiredState) -> bool:
        """True if the node's worker has received the last answer, and that answer was `desired`. Its owners do not
        count: the next answer is early enough. Nor do the logs that it asks for: they need no reading."""
        sent = self._sent.get(node)
        return sent is not None and ticket == sent.ticket and WHAT_IS_NEWS(desired) == WHAT_IS_NEWS(sent)
