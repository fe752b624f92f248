"""Changes of what the order of requests rests on, beside the requests themselves; see `core.order`."""

from __future__ import annotations

from dataclasses import field
from datetime import datetime

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Demand
from gpulease_server.core.preemption_records import PreemptionChange


@dataclass(frozen=True, slots=True)
class Overtakes:
    """How many requests were granted by priority or usage, and which ones go first from now on because of that, see
    `core.order`. In memory only: a restart begins to count again."""

    times: int
    go_first: tuple[str, ...] = ()
    """Lease ids, beside those that go first already."""
    missed: tuple[str, ...] = ()
    """Ids of leases that go first: their limits kept them from GPUs that someone else was granted."""


@dataclass(frozen=True, slots=True)
class PlacesKept:
    """Which requests keep their places because GPUs are held for them, see `core.order`. In memory only: after a
    restart each does again once GPUs are held for it."""

    kept: tuple[tuple[str, int], ...]
    """Lease ids, beside those that do already, and the steps of their users when GPUs were held; or a greater one that
    the user has come to since."""
    let_go: tuple[str, ...] = ()
    """Ids of leases that no end of a lease would help any more."""


@dataclass(frozen=True, slots=True)
class RanAhead:
    """A lease was granted before older requests that it does not delay, see `core.easy_backfill`. In memory only."""

    lease_id: str
    passed: tuple[str, ...] = ()
    """Lease ids of the oldest of these, for people."""
    undelayed: frozenset[Demand] = frozenset()
    """What these ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """What a user has used, as of one moment; see `core.fair_share`."""

    user: str
    """Login name; empty where it is not known."""
    used_s: float = 0.0
    """GPU-seconds up to `counted_at`, decayed to that moment, weighted by the models of GPUs."""
    held: float = 0.0
    """GPUs that the user's leases hold from then on, weighted."""
    entry_s: float = 0.0
    """GPU-seconds that count for these leases beside the time that they have held, weighted."""
    counted_at: datetime
    counted_at_s: float | None = field(default=None, compare=False)
    """The same on the monotonic clock; None for a record of an earlier daemon process."""


@dataclass(frozen=True, slots=True)
class UsageRemoved:
    """What a user has used has decayed to nothing."""

    user: str


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """What the members of a group have used together, see `core.group_usage`. In memory only: it is the sum of what is
    stored of them."""

    group: str
    usage: UsageRecord
    """The sum."""
    step: int
    """The step of the group since then."""


@dataclass(frozen=True, slots=True)
class UsageSteps:
    """On which steps the usages of users are, which orders their requests. In memory only: it follows from what is
    stored, the clock and the configuration."""

    steps: tuple[tuple[str | None, int], ...]
    lowest: int
    """Who has a lower step counts as on this one."""
    counted_at_s: float | None = None
    """When all users who wait were put on their steps; None where only some were."""


OrderChange = (
    Overtakes | PlacesKept | RanAhead | UsageRecord | UsageRemoved | GroupUsage | UsageSteps | PreemptionChange
)
