"""How soon the GPUs of a node are read again while a lease drains."""

from __future__ import annotations

from collections.abc import Iterable

from gpulease_protocol.model import LeaseState
from gpulease_protocol.node_protocol import NodeLease

DRAIN_HOLD_S = (0.02, 1.0)
"""Second and longest pause between two readings while a lease drains; it doubles from one to the next, and the first is
none. A clean GPU is free after the first reading, or the second where the scan of open files takes long."""


class DrainPace:
    """Follows which leases drain, from one answer of the daemon to the next."""

    def __init__(self) -> None:
        self._draining: set[str] = set()
        """Leases that have ended, while their GPUs drain."""
        self._hold_s = 0.0

    def take(self, leases: Iterable[NodeLease]) -> bool:
        """Take in the leases of an answer. Returns whether some have ended since the answer before: their GPUs are to
        be read at once."""
        draining = {lease.id for lease in leases if lease.state is LeaseState.ENDED}
        has_released = bool(draining - self._draining)
        if has_released:
            self._hold_s = 0.0
        else:
            self._hold_s = min(max(self._hold_s * 2, DRAIN_HOLD_S[0]), DRAIN_HOLD_S[1])
        self._draining = draining
        return has_released

    def hold_s(self, poll_s: float) -> float:
        """The pause before the next reading, where it is `poll_s` while nothing drains."""
        return min(poll_s, self._hold_s) if self._draining else poll_s
