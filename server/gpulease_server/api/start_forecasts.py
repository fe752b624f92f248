"""When waiting requests are expected to start: worked out when someone asks, in a thread, and kept for a while.

With hundreds of GPUs and a long queue it takes a second of computing, and more is never taken but for the step that is
under way then: that finds the earliest starts. Then it rests nine times as long, however many ask, so it takes a tenth
of the daemon's time at most; where a whole second has found nothing, as with ten thousand GPUs, longer each time, up to
a minute. Who asks while one is made gets the last one, unless that is old. No one waits for longer than it takes.

What follows from declared times is told first. Ranges by history take several times as long, so they are kept for a
while, and who asks gets the last ones while new ones are made, unless they are old.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import field

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import ExpectedBasis
from gpulease_server.core.forecast.expected_start import ExpectedStart, StartForecast
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant

log = logging.getLogger("gpulease.forecast")

BUDGET_S = 1.0
"""How long it computes at most."""
MAX_WAIT_S = 2.0
"""How long who asks waits for it. One step may take longer than the budget, with thousands of GPUs and many kinds of
requests: then they get the last one."""
PAUSE_FACTOR = 9
"""It rests for so many times as long as it took."""
MAX_PAUSE_S = 60.0
"""The longest rest after it has found nothing in all of its time."""
MAX_AGE_S = 5.0
"""While nothing happens it is kept for so long."""
RANGES_KEPT_S = 10.0
"""So long no new ranges by history are made."""
MAX_STALE_S = 30.0
"""While the next one is made, one that is older is told no one: they wait."""


@dataclass(slots=True)
class StartForecasts:
    """The last forecast, for one event loop."""

    _starts: Mapping[str, ExpectedStart] = field(default_factory=dict)
    _ledger: Ledger | None = None
    """The ledger that it is of."""
    _seq: int = 0
    """After which event."""
    _made_at_s: float = float("-inf")
    _ranges_made_at_s: float = float("-inf")
    _pause_s: float = 0.0
    """For how long it rests, after the last one."""
    _rests_until_s: float = float("-inf")
    _making: asyncio.Task[None] | None = None
    """The next one, while it is made; it goes on where who asked first has gone."""
    _declared: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `_starts` has what follows from declared times of the one that is made."""

    async def expected_starts(self, ledger: Ledger, now: Instant, policy: Policy) -> Mapping[str, ExpectedStart]:
        """By lease id, when the first requests of the queue are expected to start, as far as that is known."""
        if not ledger.queue:
            return {}
        making, age_s = self._making, now.mono_s - self._made_at_s
        is_of_this, is_news = self._ledger is ledger, ledger.next_seq != self._seq or age_s >= MAX_AGE_S
        if making is None and now.mono_s >= self._rests_until_s and (is_news or not is_of_this):
            ranges_age_s = now.mono_s - self._ranges_made_at_s if is_of_this else float("inf")
            self._declared = asyncio.Event()
            new_ranges = ranges_age_s > RANGES_KEPT_S
            making = self._making = asyncio.create_task(self._make(ledger, now, policy, new_ranges=new_ranges))
            await self._wait(making, has_ranges=RANGES_KEPT_S < ranges_age_s <= MAX_STALE_S)
        elif making is not None and (age_s > MAX_STALE_S or not is_of_this):
            await self._wait(making, has_ranges=False)
        return self._starts if self._ledger is ledger else {}

    async def _wait(self, making: asyncio.Task[None], *, has_ranges: bool) -> None:
        """Wait for a forecast, or for its first part where it makes new ranges and the last ones are not old."""
        declared = asyncio.create_task(self._declared.wait())
        try:
            waits = [making, declared] if has_ranges else [making]
            await asyncio.wait(waits, timeout=MAX_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            declared.cancel()

    def _tell_declared(self, ledger: Ledger, declared: Mapping[str, ExpectedStart]) -> None:
        """Tell what follows from declared times, beside the last ranges of the same ledger."""
        if self._ledger is ledger:
            ranges = {one: start for one, start in self._starts.items() if start.basis is ExpectedBasis.HISTORY}
            self._starts = ranges | dict(declared)
        self._declared.set()

    async def _make(self, ledger: Ledger, now: Instant, policy: Policy, *, new_ranges: bool) -> None:
        begun_s, seq = time.perf_counter(), ledger.next_seq
        starts: Mapping[str, ExpectedStart] = {}
        try:
            forecast = StartForecast(ledger, now, policy)
            loop = asyncio.get_running_loop()

            def tell(declared: Mapping[str, ExpectedStart]) -> None:
                loop.call_soon_threadsafe(self._tell_declared, ledger, declared)

            await asyncio.to_thread(_compute, forecast, tell, new_ranges=new_ranges)
            starts = forecast.starts
            if not new_ranges and forecast.declared is not None:
                self._tell_declared(ledger, forecast.declared)
                starts = self._starts
            elif new_ranges:
                self._ranges_made_at_s = now.mono_s
        except Exception:  # an answer without a forecast is better than none
            log.exception("no start can be forecast")
        finally:
            took_s = time.perf_counter() - begun_s
            is_too_much = not starts and took_s > BUDGET_S
            longer_s = min(2 * self._pause_s, MAX_PAUSE_S) if is_too_much else 0.0
            self._pause_s = max(took_s * PAUSE_FACTOR, longer_s)
            self._rests_until_s = now.mono_s + took_s + self._pause_s
            self._starts, self._ledger, self._seq, self._made_at_s = starts, ledger, seq, now.mono_s
            self._making = None


def _compute(
    forecast: StartForecast, tell_declared: Callable[[Mapping[str, ExpectedStart]], None], *, new_ranges: bool
) -> None:
    """Do the steps of a forecast, as far as the budget allows.

    Garbage is not collected meanwhile: what is made for a large fleet would bring on a full collection, which looks at
    all that the daemon keeps in one piece. What is made has no cycles, and is gone before it goes on.
    """
    begun_s, collects, is_told = time.perf_counter(), gc.isenabled(), False
    gc.disable()
    try:
        for _ in forecast.steps():
            if forecast.declared is not None and not is_told:
                tell_declared(forecast.declared)
                is_told = True
            if time.perf_counter() - begun_s > BUDGET_S or (is_told and not new_ranges):
                break
    finally:
        if collects:
            gc.enable()
