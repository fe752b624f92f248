"""GPU time of each user: held, used and idle; and how long each leased GPU has been idle.

Pure: time is an argument, in seconds on one monotonic clock. Held time follows from the ledger and needs no reading;
used and idle time follow from readings, and time without a reading counts as neither, as in
`runtime.gpu_metrics.time_series`.

A counter must never fall, or rates over it are wrong. So a user keeps a series while holding GPUs and for
`USER_EXPIRY_S` after; only then may another user take it. What was counted for `OTHER_USERS` stays there.
"""

from __future__ import annotations

from dataclasses import field, replace

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Activity
from gpulease_server.runtime.reading_gaps import FIRST_READING_S, GAP_S

MAX_USERS = 100
"""Users with series of their own, at most."""
OTHER_USERS, UNKNOWN_USER = "other", "unknown"
"""All other users together; holders without a known name."""
USER_EXPIRY_S = 3600.0
"""A user who has held nothing for this long may lose their series to another."""


@dataclass(slots=True)
class UserGpuTime:
    """GPU time of one user since their series began, in seconds."""

    held_s: float = 0.0
    """Held by their leases."""
    used_s: float = 0.0
    """Used: held time times utilization."""
    idle_s: float = 0.0
    """Held at a utilization of 0."""
    gpus: int = 0
    """GPUs that they hold now."""
    since_s: float = 0.0
    """Time up to which `held_s` is counted."""
    seen_s: float = 0.0
    """When one of their GPUs was last granted or given back."""

    def advance(self, now_s: float) -> None:
        """Count held time up to now."""
        self.held_s += self.gpus * (now_s - self.since_s)
        self.since_s = now_s


@dataclass(slots=True)
class LeasedGpu:
    """One GPU while a lease holds it."""

    lease_id: str
    user: str
    """The series that its time counts for."""
    read_s: float
    """When it was last read, or was granted."""
    idle_since_s: float
    """When it was last seen busy, or was granted."""
    read: bool = False
    """True once there was a reading under this lease."""
    from_grant: bool = True
    """False where the lease had it before this daemon started."""
    activity: Activity | None = None
    """What the last reading showed that tells it."""
    activity_since_s: float | None = None
    """Since when; None where that was before this daemon started."""


@dataclass(slots=True)
class GpuUsage:
    """Which user holds which GPU, and the totals."""

    totals: dict[str, UserGpuTime] = field(default_factory=dict)
    """By user, `OTHER` among them once there is one."""
    held: dict[str, LeasedGpu] = field(default_factory=dict)
    """By UUID."""

    def hold(self, uuid: str, lease_id: str, user: str | None, now_s: float, *, from_grant: bool = True) -> None:
        """A lease of a user holds a GPU from now on. Idempotent. `from_grant`: it did not before."""
        known = self.held.get(uuid)
        if known is not None and known.lease_id == lease_id:
            return
        self.drop(uuid, now_s)
        name = self._series_for(user or UNKNOWN_USER, now_s)
        totals = self.totals[name]
        totals.advance(now_s)
        totals.gpus += 1
        totals.seen_s = now_s
        self.held[uuid] = LeasedGpu(lease_id, name, now_s, now_s, from_grant=from_grant)

    def drop(self, uuid: str, now_s: float) -> None:
        """No lease holds a GPU from now on."""
        held = self.held.pop(uuid, None)
        if held is not None:
            totals = self.totals[held.user]
            totals.advance(now_s)
            totals.gpus -= 1
            totals.seen_s = now_s

    def read(self, uuid: str, utilization_ratio: float | None, now_s: float) -> None:
        """A reading of a GPU. It covers the time since the previous one, unless that is too long ago."""
        held = self.held.get(uuid)
        if held is None:
            return
        passed_s = now_s - held.read_s
        if passed_s > GAP_S:
            passed_s = FIRST_READING_S
        held.read_s, held.read = now_s, True
        if utilization_ratio is None:
            return
        totals = self.totals[held.user]
        totals.used_s += passed_s * utilization_ratio
        if utilization_ratio == 0:
            totals.idle_s += passed_s
        else:
            held.idle_since_s = now_s

    def observe(self, uuid: str, activity: Activity | None, now_s: float) -> None:
        """What a reading shows to happen on a GPU; None where it does not tell."""
        held = self.held.get(uuid)
        if held is None or activity is None or activity is held.activity:
            return
        is_known = held.from_grant or held.activity is not None
        held.activity, held.activity_since_s = activity, now_s if is_known else None

    def totals_at(self, now_s: float) -> dict[str, UserGpuTime]:
        """The totals up to now, by user. A copy."""
        for totals in self.totals.values():
            totals.advance(now_s)
        return {user: replace(totals) for user, totals in self.totals.items()}

    def idle_s(self, now_s: float) -> dict[str, float]:
        """For each leased GPU with a reading: seconds since it was last seen busy, or was granted."""
        return {uuid: now_s - held.idle_since_s for uuid, held in self.held.items() if held.read}

    def _series_for(self, user: str, now_s: float) -> str:
        if user in self.totals:
            return user
        if user != OTHER_USERS and len(self.totals) - (OTHER_USERS in self.totals) >= MAX_USERS:
            absent = (name for name, totals in self.totals.items() if name != OTHER_USERS and not totals.gpus)
            longest = min(absent, key=lambda name: self.totals[name].seen_s, default=None)
            if longest is None or now_s - self.totals[longest].seen_s < USER_EXPIRY_S:
                user = OTHER_USERS
            else:
                del self.totals[longest]
        self.totals.setdefault(user, UserGpuTime(since_s=now_s))
        return user
