"""One turn of the writer: the only way by which a decision takes effect."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import field
from typing import Any

from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Event, Job, Lease
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.pending import PendingRequests
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Change, Instant, KeyRecord, LeaseRecord
from gpulease_server.core.usage_changes import usage_changes

Answer = Lease | Job | GpuleaseError | None
"""What a caller is told. An error is a value here: refusing is an expected outcome. A lease that was requested is as
the ledger has it: who shows it looks at it after the commit."""


@dataclass
class Turn:
    """The ledger at one moment, and everything decided in it."""

    ledger: Ledger
    now: Instant
    policy: Policy
    pending: PendingRequests = field(default_factory=PendingRequests)
    """Undecided requests; outlives the turn, unlike the rest."""
    requested_readings: dict[str, float] = field(default_factory=dict)
    """Nodes asked for a fresh reading, and since when; outlives the turn."""
    waiting_holders: Container[str] = frozenset()
    """Ids of leases with a holder that waits at this moment: it is told of a grant once that is committed."""
    told: list[str] = field(default_factory=list)
    """Ids of those that were granted."""
    busy_ports: dict[str, set[int]] = field(default_factory=dict)
    """By host: the ports that were taken when the first lease was granted there, and those given since."""
    cause: str = ""
    """Id of the happening now being decided."""
    changes: list[Change] = field(default_factory=list)
    answers: list[tuple[str, Answer]] = field(default_factory=list)
    """(call id, answer), to be given after the commit."""

    def put(self, change: Change) -> None:
        """Apply a change and record it; before that the usage of its user, if it is of a lease that takes GPUs, or
        gives them back."""
        if isinstance(change, LeaseRecord):
            for usage in usage_changes(self.ledger, change, self.now, self.policy):
                self.put(usage)
        self.ledger.apply(change)
        self.changes.append(change)
        if isinstance(change, KeyRecord):
            self.ledger.keys_known_since[change.key] = self.now.mono_s

    def emit(self, kind: str, **what: Any) -> None:
        """Record that something happened."""
        event = Event(seq=self.ledger.next_seq, at=self.now.at, kind=kind, cause=self.cause, **what)
        self.ledger.apply(event)
        self.changes.append(event)

    def answer(self, call: str, answer: Answer) -> None:
        """Tell a caller, once the turn is committed."""
        self.answers.append((call, answer))

    def request_reading(self, node: str) -> None:
        """Ask the node for a reading begun after now."""
        self.requested_readings.setdefault(node, self.now.mono_s)
