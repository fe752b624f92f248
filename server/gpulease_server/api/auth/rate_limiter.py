"""Rate limiter: a token bucket for each user, which refills at the allowed rate and holds two seconds' worth."""

from __future__ import annotations

from gpulease_protocol.errors import OverQuota

BURST_S = 2.0
"""How many seconds' worth of requests may come at once; at least one request."""
MAX_BUCKETS = 10_000
"""Above this number, buckets that are full again are dropped."""


class RateLimiter:
    """One bucket for each key. For one event loop."""

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}
        """Requests left, and when that was so."""

    def take(self, key: str, per_second: float, now_s: float) -> None:
        """Count one request. Raises `OverQuota`, with the time until the next one is allowed."""
        capacity = max(1.0, BURST_S * per_second)
        left, since_s = self._buckets.get(key, (capacity, now_s))
        left = min(capacity, left + max(0.0, now_s - since_s) * per_second)
        if left < 1.0:
            self._buckets[key] = (left, now_s)
            error = OverQuota(
                f"You have sent more than {per_second:g} requests per second.",
                remedy="Wait as long as Retry-After says. With ?wait_s= one request replaces many.",
            )
            error.retry_after_s = (1.0 - left) / per_second
            raise error
        self._buckets[key] = (left - 1.0, now_s)
        if len(self._buckets) > MAX_BUCKETS:
            self._drop_full(per_second, capacity, now_s)

    def _drop_full(self, per_second: float, capacity: float, now_s: float) -> None:
        full = [key for key, (left, at_s) in self._buckets.items() if left + (now_s - at_s) * per_second >= capacity]
        for key in full:
            del self._buckets[key]
