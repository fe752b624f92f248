"""How many requests a user may still send now: a bucket that fills at the allowed rate, and holds two seconds of it."""

from __future__ import annotations

from gpulease.errors import OverQuota

BURST_S = 2.0
"""How many seconds' worth of requests may come at once; at least one request."""
MAX_BUCKETS = 10_000
"""Buckets at one time; beyond that those that are full again are forgotten."""


class Rates:
    """A bucket for each user. For one event loop."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, who: str, per_second: float, now_s: float) -> None:
        """Count one request. Raises `OverQuota`, with the time after which there is room for one."""
        most = max(1.0, BURST_S * per_second)
        left, since_s = self._left.get(who, (most, now_s))
        left = min(most, left + max(0.0, now_s - since_s) * per_second)
        if left < 1.0:
            self._left[who] = (left, now_s)
            error = OverQuota(
                f"You have sent more than {per_second:g} requests per second.",
                remedy="Wait as long as Retry-After says; ?wait_s= makes one request out of many.",
            )
            error.retry_after_s = (1.0 - left) / per_second
            raise error
        self._left[who] = (left - 1.0, now_s)
        if len(self._left) > MAX_BUCKETS:
            self._forget_full(per_second, most, now_s)

    def _forget_full(self, per_second: float, most: float, now_s: float) -> None:
        full = [who for who, (left, at_s) in self._left.items() if left + (now_s - at_s) * per_second >= most]
        for who in full:
            del self._left[who]
