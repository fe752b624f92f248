"""Who held how many GPUs for how long: the nouns of `GET /v1/usage`."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun

MAX_SHARES = 1000
"""Shares in one answer, at most; also the days of a period that is summed by day."""


class UsageKey(StrEnum):
    """By what GPU-hours are summed."""

    USER = "user"
    LABEL = "label"
    NODE = "node"
    AGENT = "agent"
    SESSION = "session"
    DAY = "day"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTime(Noun):
    """GPU time in hours: one GPU for one hour is 1."""

    leases: int
    """How many leases held GPUs in the period."""
    gpu_hours_held: float
    """From the grant, or the beginning of the period, until the lease ended, or the end of the period."""
    gpu_hours_used: float | None = None
    """Utilization times time, over the time for which it was recorded. Null if it is known for none. The true figure is
    between this and this plus `gpu_hours_unknown`."""
    gpu_hours_idle: float | None = None
    """The part of `gpu_hours_held` in which utilization was 0, over the time for which it is known. At least so much:
    of a lease that has lasted a day, shorter idle times than some minutes are not told apart. Null if it is known for
    none."""
    gpu_hours_unknown: float
    """The part of `gpu_hours_held` for which utilization is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageShare(GpuTime):
    """GPU time of one user, label, node, agent, session or day."""

    key: str | None
    """The user, label, node, agent or session; or the day in UTC, as `2026-11-23`. Null where that is not known or
    empty; beyond 1000 it is that of all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(GpuTime):
    """GPU time in a period, in total and by user, label, node, agent, session or day."""

    from_at: datetime
    """Begin of the period."""
    to_at: datetime
    """End of the period, at most the time of the answer."""
    by: UsageKey
    """What the shares are of."""
    shares: tuple[UsageShare, ...]
    """The most GPU-hours first; days in their order."""
