"""Budgets of bearer tokens: what may be held with one token, and for how long."""

from __future__ import annotations

from datetime import datetime

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Noun):
    """What may be held with one token. Null is no limit."""

    max_gpus: int | None = None
    """GPUs at a time, in leases and jobs together."""
    max_lease_s: float | None = None
    """For how long one lease, or one attempt of a job, may hold GPUs, however often it is renewed."""
    gpu_hours_per_day: float | None = None
    """GPU-hours in one day. A day begins at 00:00 UTC."""

    @property
    def limits_anything(self) -> bool:
        """False for a budget without any limit."""
        return (self.max_gpus, self.max_lease_s, self.gpu_hours_per_day) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetUse(Budget):
    """A budget, and what is used of it."""

    gpus: int
    """GPUs held now."""
    gpu_hours_today: float
    """GPU-hours held since 00:00 UTC."""
    day_ends_at: datetime
    """When the next day begins, and `gpu_hours_today` is 0 again."""
