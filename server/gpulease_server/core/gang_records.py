"""Since when a job on several nodes waits. In memory only."""

from __future__ import annotations

from gpulease_protocol.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class GangTimes:
    """Since when a job on several nodes waits, on the monotonic clock, see `core.gang_run`. In memory only: after a
    restart the times begin again."""

    job_id: str
    since_s: float
    """When its parts were first ordered."""
    led_s: float | None = None
    """When the leader was prepared."""
    failed_s: float | None = None
    """When a part had failed that only followed another."""
    stop_s: float | None = None
    """When all parts were ordered to end, or one of them has ended since then."""

    def later_by(self, seconds: float) -> GangTimes:
        """The same, after the daemon did not run for so long."""
        if seconds <= 0:
            return self
        later = [None if at_s is None else at_s + seconds for at_s in (self.led_s, self.failed_s, self.stop_s)]
        return GangTimes(self.job_id, self.since_s + seconds, *later)
