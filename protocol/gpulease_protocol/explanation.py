"""The answer to "why does this wait": nouns, as those of `gpulease_protocol.model`."""

from __future__ import annotations

from datetime import datetime

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import ExpectedBasis, Holder, LeaseKeep, Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle(Noun):
    """Why one GPU could not be granted."""

    uuid: str
    """The GPU in the way."""
    node: str
    """Its node."""
    index: int
    """Its index on the node."""
    code: str
    """The GPU's state, or `claimed` (held for an older request), `reserved` (in the calendar, for someone else),
    `unread` (looked free, but no recent reading came), `over_limit` (a grant on its node takes more than the user's
    limit leaves), `too_little_memory`, `other_model`, `other_node`, `not_listed`."""
    sentence: str
    """The same for people, naming pid, user and lease where there are any."""
    lease_id: str | None = None
    """The lease in the way."""
    holder: Holder | None = None
    """Who holds that lease."""
    pids: tuple[int, ...] = ()
    """Processes in the way."""
    since: datetime | None = None
    """Since when that lease has held the GPU; with `reserved` when the reservation begins."""
    until: datetime | None = None
    """When the lease in the way ends: at the latest if it is a job's or has declared a time, else unless it is renewed;
    null where no time limit runs, or no lease is in the way. With `reserved` when the reservation ends."""
    job_id: str | None = None
    """The job that runs under that lease."""
    kept: LeaseKeep | None = None
    """Until when the holder of that lease keeps idle GPUs on purpose, and why; null where they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReadiness(Noun):
    """Whether one node is ready for a gang."""

    node: str
    """Its name."""
    ready: bool
    """True when it could take part now."""
    sentence: str
    """What it has, and what it waits for or lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentUsage(Noun):
    """What a user has used lately, by which requests of one priority are ordered where the administrator wants that."""

    user: str
    """Login name; empty where it is not known."""
    gpu_hours: float
    """GPU-hours: of what was used a half-life ago half counts, 7 days unless set otherwise. What is held now counts for
    an hour more."""
    group: str | None = None
    """The user's group, if the administrator has given it a share: its usage orders requests first. Null without."""
    group_gpu_hours: float | None = None
    """GPU-hours of all members of that group, counted in the same way; null without a group."""
    group_share: float | None = None
    """For how many users the group counts: its GPU-hours are divided by that; null without a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempts(Noun):
    """What ends so that a request can start."""

    leases: tuple[str, ...]
    """Ids of the leases that have been told to end and have not; empty once all have ended."""
    by: datetime
    """When they end at the latest, but for what SIGKILL does not end."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that are held for the request, also of those that are still leased. Empty once they are held no
    longer: they did not come in time, one is reserved for others, or a lease keeps its own after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Noun):
    """Why a request has no GPUs: for now, or forever."""

    verdict: str
    """`granted`, `not_now`, `never` or `ended`; of a dry run `fits_now`, `not_now` or `never`."""
    sentence: str
    """The answer for people."""
    position: int | None = None
    """Place in the queue; null unless queued."""
    expected_at: datetime | None = None
    """When it is expected to be granted, as `expected_at` of the lease."""
    expected_basis: ExpectedBasis | None = None
    """On what that rests, as of the lease."""
    expected_from: datetime | None = None
    """With basis `history`: the begin of the range in which it probably starts, as of the lease."""
    expected_until: datetime | None = None
    """The end of that range."""
    expected_samples: int | None = None
    """How many earlier leases tell, at least, how long each lease in the way lasts."""
    passed: int | None = None
    """How many times a newer request was granted a GPU that this one could use. While its user's limit keeps this one
    out: how many times one of the same user was granted what this one needs of it. Null unless queued."""
    passed_s: float | None = None
    """Seconds since the first time; null if that never happened."""
    held: tuple[str, ...] = ()
    """UUIDs of free GPUs that are held for it: no newer request gets them."""
    behind: tuple[str, ...] = ()
    """Older requests for which free GPUs are held that this one could use, or for which GPUs of their common user's
    limit are kept."""
    preempts: Preempts | None = None
    """Which leases end so that this request can start; null where none do."""
    recent_usage: tuple[RecentUsage, ...] = ()
    """Of its user, and of up to 3 users who go before it because they have less; empty unless queued."""
    after: tuple[str, ...] = ()
    """Jobs and arrays that must end before its job joins the queue."""
    obstacles: tuple[Obstacle, ...] = ()
    """For each GPU of the daemon that cannot be granted to this request, why. Where the daemon has over 256 GPUs, only
    those of its first nodes by name: of nodes that could serve the request, for a gang first those with GPUs in use,
    then of others."""
    unlisted_gpus: int = 0
    """How many GPUs of the daemon `obstacles` says nothing of for that reason."""
    nodes: tuple[NodeReadiness, ...] = ()
    """For each node of the daemon, whether it is ready for the gang that is asked for; empty for a request for one
    node."""
