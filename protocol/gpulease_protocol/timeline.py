"""What happened to each GPU in a period: the nouns of `GET /v1/timeline`."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import TypedDict

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import EndReason, Noun

MAX_SPANS = 10_000
"""Leases on one page, at most."""
MAX_STEPS = 2000
"""Steps of the queue, at most."""


class TimelineChoice(TypedDict, total=False):
    """What a timeline is about; each is optional."""

    from_at: datetime | None
    """Begin of the period; by default a day before its end."""
    to_at: datetime | None
    """End of the period; by default now."""
    gpu: str | None
    """Only the GPU with this UUID."""
    node: str | None
    """Only GPUs of this node."""
    user: str | None
    """Only leases of this user, and only their requests in the queue."""
    limit: int | None
    """Maximum number of ended leases on the page."""
    cursor: str | None
    """`next` of the page before."""


class SpanKind(StrEnum):
    """What a span tells of its GPUs. `lease`: a lease held them. `unhealthy`, `foreign`, `unknown`, `draining`: as the
    states of a GPU of these names. `cordoned`: an administrator kept them, or their node, from being granted."""

    LEASE = "lease"
    UNHEALTHY = "unhealthy"
    CORDONED = "cordoned"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineGpu(Noun):
    """A GPU that a timeline is about."""

    uuid: str
    """Which one it is."""
    node: str
    """Where it is, or was."""
    index: int | None = None
    """Its number on the node; null where that is no longer known."""
    name: str | None = None
    """Product name."""
    present: bool = True
    """False for one that the ledger no longer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(Noun):
    """A time in which something was true of some GPUs."""

    kind: SpanKind
    """What was true."""
    gpus: tuple[str, ...]
    """UUIDs of the GPUs. Those of a lease are in one span, unless its nodes came and went."""
    from_at: datetime | None
    """Since when; it may be before the period. Null: since before what is kept, or not known."""
    to_at: datetime | None
    """Until when; it may be after the period. Null: it still is."""
    lease_id: str | None = None
    """The lease that held them, or that they were cleaned after."""
    job_id: str | None = None
    """The job of the lease."""
    user: str | None = None
    """Who held the lease."""
    label: str = ""
    """Its label."""
    end_reason: EndReason | None = None
    """Why the lease ended; null while it has not, and where only these GPUs left it."""
    reason: str | None = None
    """Why they were not usable, such as `xid:79`; null for a lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStep(Noun):
    """How many requests waited from a moment on, until the next step."""

    at: datetime
    """Since when."""
    length: int
    """How many requests had been made, and neither been granted nor ended; those of jobs that wait for other jobs are
    among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline(Noun):
    """What happened to GPUs in a period. Further pages have only `spans` of leases."""

    from_at: datetime
    """Begin of the period."""
    to_at: datetime
    """End of the period, at most the time of the answer."""
    complete_since: datetime | None = None
    """Null: everything in the period is told. Else what was over before this moment may be missing, because the daemon
    did not exist yet, because it is no longer kept, or because it is too much for one answer."""
    gpus: tuple[TimelineGpu, ...] = ()
    """The GPUs that there are, and those that a span is about and that are gone, by node and index."""
    spans: tuple[Span, ...] = ()
    """Leases, those that have not ended first and then the latest end first; after these, on the first page, the other
    kinds, which may overlap. A GPU that was clean within a second of the end of its lease has no span for that."""
    queue: tuple[QueueStep, ...] = ()
    """The length of the queue over the period, in at most 2000 steps; where there were more, each has the greatest
    length of its part of the period."""
    next: str | None = None
    """Cursor of the next page; null at the end."""
