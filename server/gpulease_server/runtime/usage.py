"""For how long users held GPUs, how much of that time the GPUs worked, and since when each leased one has not.

Pure: time is an argument, in seconds on one monotonic clock. Held time follows from the ledger and needs no reading;
used and idle time follow from readings, and time without one is in neither, as in `runtime.series`.

What grows must never fall, or a rate over it is wrong. So a user who has had a series keeps it while he holds GPUs and
for `ABSENT_S` after, only then may another take his place; and what was counted for `OTHER` stays there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .series import FIRST_S, GAP_S

TOP_USERS = 100
"""Users with series of their own, at most."""
OTHER, UNKNOWN = "other", "unknown"
"""All other users together; a holder whose name nobody knows."""
ABSENT_S = 3600.0
"""A user who has held nothing for so long may lose his series to another."""


@dataclass(slots=True)
class Totals:
    """GPU time of one user since he has had a series, in seconds."""

    held_s: float = 0.0
    """Held by his leases."""
    used_s: float = 0.0
    """Worked: held time times utilization."""
    idle_s: float = 0.0
    """Held at a utilization of 0."""
    gpus: int = 0
    """GPUs that he holds now."""
    since_s: float = 0.0
    """Until when `held_s` is counted."""
    seen_s: float = 0.0
    """When one of his GPUs was last granted or given back."""

    def advance(self, now_s: float) -> None:
        """Count held time up to now."""
        self.held_s += self.gpus * (now_s - self.since_s)
        self.since_s = now_s


@dataclass(slots=True)
class Held:
    """One GPU while a lease holds it."""

    lease_id: str
    user: str
    """The series that its time goes to."""
    read_s: float
    """When it was last read, or was granted."""
    quiet_since_s: float
    """When it was last seen to work, or was granted."""
    read: bool = False
    """True once it was read under this lease."""


@dataclass(slots=True)
class Usage:
    """Who holds what, and what it added up to."""

    totals: dict[str, Totals] = field(default_factory=dict)
    """By user, `OTHER` among them once there is one."""
    held: dict[str, Held] = field(default_factory=dict)
    """By UUID."""

    def hold(self, uuid: str, lease_id: str, user: str | None, now_s: float) -> None:
        """A lease of a user holds a GPU from now on. Saying it twice changes nothing."""
        known = self.held.get(uuid)
        if known is not None and known.lease_id == lease_id:
            return
        self.drop(uuid, now_s)
        name = self._series_of(user or UNKNOWN, now_s)
        totals = self.totals[name]
        totals.advance(now_s)
        totals.gpus += 1
        totals.seen_s = now_s
        self.held[uuid] = Held(lease_id, name, now_s, now_s)

    def drop(self, uuid: str, now_s: float) -> None:
        """No lease holds a GPU from now on."""
        held = self.held.pop(uuid, None)
        if held is not None:
            totals = self.totals[held.user]
            totals.advance(now_s)
            totals.gpus -= 1
            totals.seen_s = now_s

    def read(self, uuid: str, utilization_ratio: float | None, now_s: float) -> None:
        """A reading of a GPU. It stands for the time since the one before it, unless that is too long ago."""
        held = self.held.get(uuid)
        if held is None:
            return
        passed_s = now_s - held.read_s
        if passed_s > GAP_S:
            passed_s = FIRST_S
        held.read_s, held.read = now_s, True
        if utilization_ratio is None:
            return
        totals = self.totals[held.user]
        totals.used_s += passed_s * utilization_ratio
        if utilization_ratio == 0:
            totals.idle_s += passed_s
        else:
            held.quiet_since_s = now_s

    def until(self, now_s: float) -> dict[str, Totals]:
        """What it added up to until now, by user. A copy."""
        for totals in self.totals.values():
            totals.advance(now_s)
        return {user: replace(totals) for user, totals in self.totals.items()}

    def quiet_s(self, now_s: float) -> dict[str, float]:
        """For each leased GPU that was read, how long ago it was last seen to work, or was granted."""
        return {uuid: now_s - held.quiet_since_s for uuid, held in self.held.items() if held.read}

    def _series_of(self, user: str, now_s: float) -> str:
        if user in self.totals:
            return user
        if user != OTHER and len(self.totals) - (OTHER in self.totals) >= TOP_USERS:
            absent = (name for name, totals in self.totals.items() if name != OTHER and not totals.gpus)
            longest = min(absent, key=lambda name: self.totals[name].seen_s, default=None)
            if longest is None or now_s - self.totals[longest].seen_s < ABSENT_S:
                user = OTHER
            else:
                del self.totals[longest]
        self.totals.setdefault(user, Totals(since_s=now_s))
        return user
