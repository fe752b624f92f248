"""Happenings, the inputs of the core: requests, reports, ticks. Their ids are made and bodies checked before."""

from __future__ import annotations

from datetime import datetime

from gpulease_protocol.budgets import Budget
from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.limits import Limits
from gpulease_protocol.model import Demand, Holder, JobDependency, JobSpec, NodeMode
from gpulease_protocol.node_protocol import NodeReport
from gpulease_server.core.limit_records import LimitKey
from gpulease_server.core.records import Adoption, WatchedOwner


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyKey:
    """The caller's Idempotency-Key."""

    key: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequested:
    """A user asks for GPUs. Answered with the lease or a refusal, once recent readings allow a verdict."""

    cause: str
    lease_id: str
    demand: Demand
    holder: Holder
    ttl_s: float
    queue: bool
    key: IdempotencyKey | None = None
    watched_owner: WatchedOwner | None = None
    """Its owner, if that is confirmed and a worker can watch it."""
    watch_owner: bool = True
    """False: the lease must be renewed all the same, because its owner may outlive its use."""
    adoption: Adoption | None = None
    """The request is for the GPUs that its owner uses already, whatever the demand says."""
    budget: Budget | None = None
    """The budget of the bearer token that the request was sent with; its id is in the holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """One job of a submission."""

    job_id: str
    lease_id: str
    spec: JobSpec
    index: int | None = None
    """Its index in the array; None for a job that is in none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A user submits a job, or an array of jobs. Answered with the first job, like a lease that may queue."""

    cause: str
    jobs: tuple[SubmittedJob, ...]
    """The job; for an array all of its jobs, in order."""
    name: str
    demand: Demand
    """The GPUs that each of the jobs needs."""
    holder: Holder
    uid: int | None = None
    """User who submits it, and that it will run as; None if the connection does not show it."""
    gid: int | None = None
    """That user's group, where the connection shows it."""
    array_id: str | None = None
    array_at_most: int | None = None
    """How many jobs of the array may run at once; None for no limit."""
    after: tuple[JobDependency, ...] = ()
    """Jobs and arrays that must end first."""
    after_live: frozenset[str] = frozenset()
    """Those of them that had not ended when the API looked. The others were found to be met."""
    after_refused: GpuleaseError | None = None
    """Why one of them was found not to be met ever."""
    key: IdempotencyKey | None = None
    budget: Budget | None = None
    """As in `LeaseRequested`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalRequested:
    """The holder lives."""

    cause: str
    lease_id: str
    fencing_token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequested:
    """The holder gives its GPUs back, or no longer waits; or an administrator takes them back."""

    cause: str
    lease_id: str
    fencing_token: int | None
    revoked_by: str | None = None
    """The administrator who revokes another user's lease; no token is needed, but a wrong one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRequested:
    """The holder, their job or an administrator says that idle GPUs of a lease are kept on purpose."""

    cause: str
    lease_id: str
    fencing_token: int | None
    reason: str
    for_s: float
    by: str | None = None
    """Login name of who asked, where the connection shows it."""
    of_another: bool = False
    """An administrator asks for another user's lease; no token is needed, but a wrong one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiterPolled:
    """The holder waits for this lease at this moment. Not answered."""

    cause: str
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLost:
    """The client that asked for this lease, or waited for it, had gone away before it was answered. Not answered."""

    cause: str
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """A user wants the job to end."""

    cause: str
    job_id: str
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReported:
    """A worker sent its full view."""

    cause: str
    node: str
    report: NodeReport
    observed_at_s: float | None
    """The reading is not older than this, on the daemon's monotonic clock; None: of unknown age."""
    begun_at_s: float | None = None
    """The GPUs in `report.reread` were read no earlier than this; None: than `observed_at_s`."""
    may_take_over: bool = True
    """Whether it may show a GPU that another node has shown, and which has moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeModeRequested:
    """An administrator takes a node out of use, or puts it back. Answered with None, or with why not."""

    cause: str
    node: str
    mode: NodeMode
    force: bool = False
    """Pause although leases are active there."""
    reason: str | None = None
    """Why, for the users who wait; None keeps the reason of a node that is out of use already."""
    by: str | None = None
    """Login name of who asked, where the connection shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeForgetRequested:
    """An administrator says that a node's host is off, and wants the node forgotten. Answered with None, or with why
    not."""

    cause: str
    node: str
    by: str | None = None
    """Login name of who asked, where the connection shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonRequested:
    """An administrator takes one GPU out of use, or puts it back. Answered with None, or with why not."""

    cause: str
    uuid: str
    cordoned: bool
    by: str | None = None
    """Login name of who asked, where the connection shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BearerTokenChanged:
    """A bearer token was made or revoked, which affects no decision; it is recorded as an event. Answered with None."""

    cause: str
    kind: str
    """The event: `token.created` or `token.revoked`."""
    reason: str
    """Which token, its user, and who did it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsChanged:
    """An administrator sets the limits of a user, a group or a token, or removes them. Answered with None, or with why
    not."""

    cause: str
    key: LimitKey
    limits: Limits | None
    """All that are set from now on; None removes them."""
    members: tuple[str, ...] = ()
    """The users of a group."""
    by: str | None = None
    """Login name of who asked, where the connection shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRequested:
    """An administrator reserves GPUs in a window of time. Answered with None, or with why not."""

    cause: str
    reservation_id: str
    from_at: datetime
    to_at: datetime
    node: str | None = None
    count: int | None = None
    """So many GPUs of the node."""
    uuids: tuple[str, ...] = ()
    """Or these."""
    user: str | None = None
    """For whom."""
    group: str | None = None
    """Or for the users of which group."""
    reason: str | None = None
    by: str | None = None
    """Login name of who asked, where the connection shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationCancelled:
    """An administrator takes a reservation back. Answered with None, or with why not."""

    cause: str
    reservation_id: str
    by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed. Not answered."""

    cause: str
    since_last_s: float
    """Seconds since the tick before."""
    stalled_s: float = 0.0
    """Of those, the seconds in which the daemon could not run, and so heard no holder. A slow commit does not count:
    requests are taken meanwhile, and decided before the tick."""


Happening = (
    LeaseRequested
    | JobSubmitted
    | RenewalRequested
    | ReleaseRequested
    | KeepRequested
    | WaiterPolled
    | AnswerLost
    | CancelRequested
    | NodeReported
    | NodeModeRequested
    | NodeForgetRequested
    | CordonRequested
    | BearerTokenChanged
    | LimitsChanged
    | ReservationRequested
    | ReservationCancelled
    | Ticked
)
