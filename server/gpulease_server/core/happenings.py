"""What the core can be told. Ids are made, and bodies checked, before a happening is made."""

from __future__ import annotations

from dataclasses import dataclass

from gpulease.exchange import NodeReport
from gpulease.model import Demand, Holder, JobSpec, NodeMode

from .ledger import OwnerWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The caller's Idempotency-Key."""

    key: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAsked:
    """Somebody asks for GPUs. Answered with the lease or why not, once fresh readings allow a verdict."""

    cause: str
    lease_id: str
    demand: Demand
    holder: Holder
    ttl_s: float
    queue: bool
    key: Key | None = None
    watched: OwnerWatch | None = None
    """Its owner, if that is confirmed and a worker can watch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMember:
    """A further job of an array."""

    job_id: str
    lease_id: str
    index: int
    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """Somebody submits a job. Answered like a lease that queues."""

    cause: str
    job_id: str
    lease_id: str
    name: str
    spec: JobSpec
    demand: Demand
    holder: Holder
    uid: int | None = None
    """User who submits it, and as whom it will run; None where the connection does not show it."""
    gid: int | None = None
    """That user's group, where the connection shows it."""
    array_id: str | None = None
    """The array whose first job it is."""
    array_index: int | None = None
    array_at_most: int | None = None
    further: tuple[ArrayMember, ...] = ()
    """The others of that array."""
    key: Key | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed:
    """The holder lives."""

    cause: str
    lease_id: str
    token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased:
    """The holder gives its GPUs back, or no longer waits; or an administrator takes them back."""

    cause: str
    lease_id: str
    token: int | None
    revoked_by: str | None = None
    """The administrator who revokes another user's lease; he needs no token, but a wrong one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiterSeen:
    """Somebody waits for this queued lease at this moment. Not answered."""

    cause: str
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled:
    """Somebody wants the job to end."""

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
    """When the reading was begun, at the earliest, of which `report.reread` are; None: at `observed_at_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeModeSet:
    """An administrator takes a node out of use, or puts it back. Answered with None, or with why not."""

    cause: str
    node: str
    mode: NodeMode
    force: bool = False
    """Pause although leases are active there."""
    by: str | None = None
    """Login name of who asked, where the connection shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonSet:
    """An administrator takes one GPU out of use, or puts it back. Answered with None, or with why not."""

    cause: str
    uuid: str
    cordoned: bool
    by: str | None = None
    """Login name of who asked, where the connection shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChanged:
    """A bearer token was made or revoked, which no decision rests on; it is for the history. Answered with None."""

    cause: str
    kind: str
    """The event: `token.created` or `token.revoked`."""
    reason: str
    """Which token, whose, and who did it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed. Not answered."""

    cause: str
    since_last_s: float
    """Seconds since the tick before; more than the period when the daemon could not run."""


Happening = (
    LeaseAsked
    | JobSubmitted
    | LeaseRenewed
    | LeaseReleased
    | WaiterSeen
    | JobCancelled
    | NodeReported
    | NodeModeSet
    | CordonSet
    | TokenChanged
    | Ticked
)
