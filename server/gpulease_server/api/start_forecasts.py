"""When waiting requests are expected to start: worked out when someone asks, in a thread, and kept for a while.

With hundreds of GPUs and a long queue it takes a second of computing, and more is never taken but for the step that is
under way then: that finds the earliest starts. Then it rests nine times as long, however many ask, so it takes a tenth
of the daemon's time at most; where a whole second has found nothing, as with ten thousand GPUs, longer each time, up to
a minute. Who asks while one is made gets the last one, unless that is old. No one waits for longer than it takes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

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
MAX_STALE_S = 30.0
"""While the next one is made, one that is older is told no one: they wait."""


@dataclass(slots=True)
class StartForecasts:
    """The last forecast, for one event loop."""

    _starts: Mapping[str, ExpectedStart] = field(default_factory=dict)
    _ledger: Ledger | None = None
    """Of which ledger it is."""
    _seq: int = 0
    """After which event."""
    _made_at_s: float = float("-inf")
    _pause_s: float = 0.0
    """For how long it rests, after the last one."""
    _rests_until_s: float = float("-inf")
    _making: asyncio.Task[None] | None = None
    """The next one, while it is made; it goes on where who asked first has gone."""

    async def expected_starts(self, ledger: Ledger, now: Instant, policy: Policy) -> Mapping[str, ExpectedStart]:
        """By lease id, when the first requests of the queue are expected to start, as far as that is known."""
        if not ledger.queue:
            return {}
        making, age_s = self._making, now.mono_s - self._made_at_s
        is_of_this, is_news = self._ledger is ledger, ledger.next_seq != self._seq or age_s >= MAX_AGE_S
        if making is None and now.mono_s >= self._rests_until_s and (is_news or not is_of_this):
            making = self._making = asyncio.create_task(self._make(ledger, now, policy))
            await asyncio.wait([making], timeout=MAX_WAIT_S)
        elif making is not None and (age_s > MAX_STALE_S or not is_of_this):
            await asyncio.wait([making], timeout=MAX_WAIT_S)
        return self._starts if self._ledger is ledger else {}

    async def _make(self, ledger: Ledger, now: Instant, policy: Policy) -> None:
        begun_s, seq, starts = time.perf_counter(), ledger.next_seq, dict[str, ExpectedStart]()
        try:
            forecast = StartForecast(ledger, now, policy)
            await asyncio.to_thread(_compute, forecast)
            starts = forecast.starts
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


def _compute(forecast: StartForecast) -> None:
    """Do the steps of a forecast, as far as the budget allows.

    Garbage is not collected meanwhile: what is made for a large fleet would bring on a full collection, which looks at
    all that the daemon keeps in one piece. What is made has no cycles, and is gone before it goes on.
    """
    begun_s, collects = time.perf_counter(), gc.isenabled()
    gc.disable()
    try:
        for _ in forecast.steps():
            if time.perf_counter() - begun_s > BUDGET_S:
                break
    finally:
        if collects:
            gc.enable()
