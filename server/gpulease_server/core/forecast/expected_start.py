"""What is said of when each of the first requests of the queue starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpulease_protocol.explanation import Explanation
from gpulease_protocol.model import ExpectedBasis, Lease, LeaseState
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.forecast.virtual_queue import VirtualQueue
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant


@dataclass(frozen=True, slots=True)
class ExpectedStart:
    """When a request is expected to start."""

    at: datetime
    basis: ExpectedBasis

    @property
    def sentence(self) -> str:
        """The same for people, to be put behind an explanation."""
        when = f"{self.at:%Y-%m-%d %H:%M:%S} UTC"
        return f" It starts at about {when} if every lease lasts as long as was declared and no newer request passes."


class StartForecast:
    """When the first requests of the queue are expected to start, as of one moment. See the package's docstring.

    Making it costs a look at each GPU, node and active lease. `steps` does the work, and takes nothing from the ledger,
    so it may be done in another thread.
    """

    def __init__(self, ledger: Ledger, now: Instant, policy: Policy) -> None:
        self.starts: dict[str, ExpectedStart] = {}
        """What is known so far, by lease id."""
        self._now, self._queue = now, VirtualQueue(ledger, now, policy)

    def steps(self) -> Iterator[None]:
        """Find them, a step at a time. It may be left at any step: what is known by then is true."""
        for lease_id, start_s in self._queue.starts():
            if lease_id is not None:
                self.starts[lease_id] = ExpectedStart(_moment(self._now, start_s), ExpectedBasis.DECLARED)
            yield


def with_expected_start(lease: Lease, starts: Mapping[str, ExpectedStart]) -> Lease:
    """The lease with when it is expected to start, if it waits and that is known."""
    start = starts.get(lease.id) if lease.state is LeaseState.QUEUED else None
    if start is None:
        return lease
    return replace(lease, expected_at=start.at, expected_basis=start.basis)


def explain_expected_start(explanation: Explanation, start: ExpectedStart | None) -> Explanation:
    """The explanation of a waiting request, with when it is expected to start."""
    if start is None or explanation.verdict != "not_now":
        return explanation
    return replace(
        explanation,
        sentence=explanation.sentence + start.sentence,
        expected_at=start.at,
        expected_basis=start.basis,
    )


def _moment(now: Instant, at_s: float) -> datetime:
    """A time on the wall clock, to the second: an answer that changes every millisecond would never be the one that the
    caller has (ETag)."""
    at = now.at + timedelta(seconds=at_s - now.mono_s, microseconds=500_000)
    return at.replace(microsecond=0)
