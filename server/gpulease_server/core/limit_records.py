"""Limits as the ledger keeps them, and the GPU time that counts against them."""

from __future__ import annotations

from dataclasses import field
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.limits import LimitKind, Limits
from gpulease_protocol.model import Holder, Lease, Priority

NO_LIMITS = Limits()
NO_USERS: frozenset[str | None] = frozenset()
ORDERED = (LimitKind.USER, LimitKind.GROUP)
"""Kinds of limits within which newer requests may pass older ones, with a bound, see `core.user_order`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLimits:
    """What one user may have at a time, where nothing else is set for that user. 0 means no limit."""

    leases: int = 0
    """Active leases, those of jobs included."""
    gpus: int = 0
    """GPUs in active leases."""
    interactive_gpus: int = 2
    """GPUs in active leases of priority `interactive`."""
    interactive_s: float = 4 * 3600.0
    """How long each of these may hold them."""
    queued: int = 8000
    """Requests that wait; of all users together there may be `Policy.max_queued`."""
    queued_bytes: int = 128 * 2**20
    """Memory that requests keep while they wait, see `core.footprint`; those without a verdict may keep as much
    again."""


class LimitKey(NamedTuple):
    """A user, a group or a token, which may have limits."""

    kind: LimitKind
    name: str | None
    """None for leases of a user who is not known."""
    interactive: bool = False
    """True for what a user has by interactive requests alone, which the configuration limits."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRecord:
    """The limits of a user, a group or a token, as an administrator has set them."""

    kind: LimitKind
    name: str
    limits: Limits
    members: tuple[str, ...] = ()
    """Of a group: its users."""
    set_at: datetime
    set_by: str | None = None

    @property
    def key(self) -> LimitKey:
        """Whose limits they are."""
        return LimitKey(self.kind, self.name)


@dataclass(frozen=True, slots=True)
class LimitRemoved:
    """These limits hold no longer."""

    key: LimitKey


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTimeRecord:
    """The GPU time that was held in a window, see `core.gpu_time`. There is one for each limit of GPU-hours."""

    kind: LimitKind
    name: str
    width_s: float
    """Of one part of the window."""
    parts: tuple[float, ...] = ()
    """GPU-seconds held in each part, the oldest first. The last one is going on."""
    counted_at: datetime
    """Up to when they are counted."""
    counted_at_s: float | None = field(default=None, compare=False)
    """The same on the monotonic clock; None for a record of an earlier daemon process."""

    @property
    def key(self) -> LimitKey:
        """Whose GPU time it is."""
        return LimitKey(self.kind, self.name)


@dataclass(frozen=True, slots=True)
class GpuTimeRemoved:
    """No GPU time is counted any more for this user, group or token."""

    key: LimitKey


@lru_cache(1000)
def user_key(user: str | None) -> LimitKey:
    """The user of a lease."""
    return LimitKey(LimitKind.USER, user)


def interactive_key(lease: Lease) -> LimitKey | None:
    """What the user of a lease has by interactive requests; None for a lease of another priority."""
    is_interactive = lease.demand.priority is Priority.INTERACTIVE
    return LimitKey(LimitKind.USER, lease.holder.user, interactive=True) if is_interactive else None


def token_key(holder: Holder) -> LimitKey | None:
    """The bearer token of a lease; None where it was asked for without one."""
    return None if holder.token_id is None else LimitKey(LimitKind.TOKEN, holder.token_id)
