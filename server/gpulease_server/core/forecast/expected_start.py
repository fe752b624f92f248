"""What is said of when each of the first requests of the queue starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from gpulease_protocol.explanation import Explanation
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import ExpectedBasis, Lease, LeaseState
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.forecast.lease_history import LEVELS, LeaseHistory
from gpulease_server.core.forecast.virtual_queue import VirtualQueue
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant

SETTLING_S = 30.0
"""A range ends so much later than the last start in it, since jobs have to start, and GPUs to be seen clean. It is said
in whole minutes: it is not known better, and an answer should not change all the time."""


@dataclass(frozen=True, slots=True)
class ExpectedStart:
    """When a request is expected to start."""

    at: datetime
    """By history: the begin of the range."""
    basis: ExpectedBasis
    until: datetime | None = None
    """The end of the range; None by declared times."""
    samples: int | None = None
    """By history: how many earlier leases say, at least, how long each lease lasts that ends before it."""

    @property
    def sentence(self) -> str:
        """The same for people, to be put behind an explanation."""
        when = f"{self.at:%Y-%m-%d %H:%M:%S} UTC"
        if self.until is None:
            return (
                f" It starts at about {when} if every lease lasts as long as was declared and no newer request passes."
            )
        return (
            f" It probably starts between {when} and {self.until:%Y-%m-%d %H:%M:%S} UTC, judging by how long earlier"
            f" leases lasted ({self.samples} or more for each lease in the way). That is not promised."
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a lease or an explanation that say it."""
        if self.until is None:
            return {"expected_at": self.at, "expected_basis": self.basis}
        return {
            "expected_from": self.at,
            "expected_until": self.until,
            "expected_samples": self.samples,
            "expected_basis": self.basis,
        }


class StartForecast:
    """When the first requests of the queue are expected to start, as of one moment. See the package's docstring.

    Making it costs a look at each GPU, node and active lease. `steps` does the work, and takes nothing from the ledger,
    so it may be done in another thread.
    """

    def __init__(self, ledger: Ledger, now: Instant, policy: Policy) -> None:
        self.starts: dict[str, ExpectedStart] = {}
        """What is known so far, by lease id."""
        self.declared: dict[str, ExpectedStart] | None = None
        """What follows from declared times; None until all of that is known."""
        self._now, self._queue = now, VirtualQueue(ledger, now, policy)
        self._ended = list(map(ledger.leases.__getitem__, ledger.ended_leases))

    def steps(self) -> Iterator[None]:
        """Find them, a step at a time. It may be left at any step: what is known by then is true."""
        for lease_id, start_s in self._queue.starts():
            if lease_id is not None:
                self.starts[lease_id] = ExpectedStart(_moment(self._now, start_s), ExpectedBasis.DECLARED)
            yield
        self.declared = self.starts.copy()
        yield
        history = LeaseHistory(record.lease for record in self._ended)
        if self._queue.waiting and history:
            yield from self._ranges([self._queue.by_history(history, level) for level in range(len(LEVELS))])

    def _ranges(self, plays: list[VirtualQueue]) -> Iterator[None]:
        """Find the range of each request that starts in every play; a step of each play at a time, so that the earliest
        starts are known first. A request that one play ends without is not looked for in the others."""
        found = {lease_id: list[tuple[float, int | None]]() for lease_id in self._queue.waiting}
        under_way = {play: play.starts() for play in plays}
        while under_way and found:
            for play, steps in list(under_way.items()):
                if (step := next(steps, None)) is None:
                    del under_way[play]
                    found = {one: starts for one, starts in found.items() if one not in play.waiting}
                elif step[0] in found:
                    starts = found[step[0]]
                    starts.append((step[1], play.samples))
                    if len(starts) == len(plays):
                        self._put_range(step[0], found.pop(step[0]))
                yield

    def _put_range(self, lease_id: str, starts: list[tuple[float, int | None]]) -> None:
        """Say it of a request that starts so in the plays, unless no end by history came before."""
        samples = min((one for _, one in starts if one is not None), default=None)
        if samples is None:
            return
        starts_s = [at_s for at_s, _ in starts]
        first, last = _moment(self._now, min(starts_s)), _moment(self._now, max(starts_s) + SETTLING_S)
        from_at = first - timedelta(seconds=first.second)
        until = last + timedelta(seconds=-last.second % 60)
        self.starts[lease_id] = ExpectedStart(from_at, ExpectedBasis.HISTORY, until, samples)


def with_expected_start(lease: Lease, starts: Mapping[str, ExpectedStart]) -> Lease:
    """The lease with when it is expected to start, if it waits and that is known."""
    start = starts.get(lease.id) if lease.state is LeaseState.QUEUED else None
    if start is None:
        return lease
    return replace(lease, **start.fields)


def explain_expected_start(explanation: Explanation, start: ExpectedStart | None) -> Explanation:
    """The explanation of a waiting request, with when it is expected to start."""
    if start is None or explanation.verdict != "not_now":
        return explanation
    return replace(explanation, sentence=explanation.sentence + start.sentence, **start.fields)


def _moment(now: Instant, at_s: float) -> datetime:
    """A time on the wall clock, to the second: an answer that changes every millisecond would never be the one that the
    caller has (ETag)."""
    at = now.at + timedelta(seconds=at_s - now.mono_s, microseconds=500_000)
    return at.replace(microsecond=0)
