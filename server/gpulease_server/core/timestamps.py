"""The wall-clock time at which something is due that is measured by the monotonic clock."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpulease_protocol.durations import LONGEST_S
from gpulease_server.core.records import Instant


def wall_clock(now: Instant, mono_s: float) -> datetime:
    """The wall-clock time of a monotonic moment, as seen from now; at most a century from now.

    The millisecond in which it lies: what is said to end then never ends before it."""
    after_us = round(min(mono_s - now.mono_s, LONGEST_S) * 1e6)
    return now.at + timedelta(0, 0, after_us - (now.at.microsecond + after_us) % 1000)
