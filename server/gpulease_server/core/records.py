"""The records of the ledger, and every change that `Ledger.apply` can make."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import field, fields
from datetime import date, datetime
from operator import attrgetter

from gpulease_protocol.budgets import Budget
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import (
    ComputeMode,
    Device,
    Event,
    GpuLink,
    GpuReading,
    Job,
    JobSpec,
    Lease,
    LeaseState,
    NodeMode,
)
from gpulease_protocol.node_protocol import LeaseOwner
from gpulease_server.core.calendar import CalendarChange
from gpulease_server.core.gang_records import GangTimes
from gpulease_server.core.limit_records import GpuTimeRecord, GpuTimeRemoved, LimitRecord, LimitRemoved
from gpulease_server.core.node_topology import NodeTopology, TopologyCache
from gpulease_server.core.order_records import OrderChange
from gpulease_server.core.reclaim_records import ReclaimNotice

END_FIELDS = ("state", "end_reason", "ended_at")
UNENDED_VALUES = attrgetter(*(item.name for item in fields(Lease) if item.name not in END_FIELDS))
"""What the end of a lease leaves as it is."""


@dataclass(frozen=True, slots=True)
class Instant:
    """One moment on two clocks: for people, and for measuring how long."""

    at: datetime
    """Wall clock, aware UTC."""
    mono_s: float
    """Monotonic clock of this daemon process, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedOwner:
    """The process that owns a lease, so that the lease ends with it; and the node that watches it."""

    node: str
    """The node with the worker that watches it."""
    realm: str
    """Boot and pid namespace in which its pid counts, see `gpulease_protocol.host.process_id.realm`."""
    owner: LeaseOwner


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A process that is to become the holder of the GPUs that it uses already, see `core.adoption`."""

    pids: frozenset[int]
    """The process, and those of its user below it."""
    user: str | None = None
    """Whose process its node must show it to be; None where the daemon has seen that itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A lease as the ledger keeps it. Its noun leaves `expires_at` and `position` empty; see `core.presentation`."""

    lease: Lease
    number: int
    """Order in which leases were made. It never changes: who reads page by page goes on behind it."""
    place: int | None = None
    """Its place by arrival where that is not its number: that of the attempt which was preempted before this one."""
    cause: str
    """Id of the request that asked for it."""
    port: int | None = None
    """`MASTER_PORT`, leased with the GPUs."""
    renewed_at: datetime | None = None
    """Last sign of life; what a worker sees of an owner is not recorded. None from a grant of which no one was told, as
    one out of the queue for which no one waited, until its holder asks about it: the lease is unclaimed."""
    watched_owner: WatchedOwner | None = None
    """Its owner, where that is known beyond a pid. It is watched while the lease's liveness is `process`."""
    requested_at_s: float = field(default=float("-inf"), compare=False)
    """When it was asked for, on the monotonic clock; before everything for one of an earlier daemon process."""
    granted_at_s: float | None = field(default=None, compare=False)
    """When it was granted, on the monotonic clock."""
    kept_until_s: float | None = field(default=None, compare=False)
    """The moment of `lease.kept` on the monotonic clock; None for one that an earlier daemon process took in."""

    @property
    def arrival(self) -> int:
        """Its place by arrival."""
        return self.number if self.place is None else self.place

    def is_renewal_of(self, before: LeaseRecord) -> bool:
        """True where only the last sign of life of a lease that has not ended has changed, as most often."""
        if self.lease is not before.lease or self.watched_owner is not before.watched_owner or self.renewed_at is None:
            return False
        known = before.number, before.place, before.port, before.cause
        same = (self.number, self.place, self.port, self.cause) == known
        return same and self.lease.state is not LeaseState.ENDED

    def is_end_of(self, before: LeaseRecord) -> bool:
        """True where an active lease has ended, and nothing else of it has changed."""
        states = before.lease.state, self.lease.state
        if states != (LeaseState.ACTIVE, LeaseState.ENDED) or self.renewed_at != before.renewed_at:
            return False
        same = self.watched_owner is before.watched_owner and (self.port, self.number) == (before.port, before.number)
        return same and UNENDED_VALUES(self.lease) == UNENDED_VALUES(before.lease)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as the ledger keeps it."""

    job: Job
    spec: JobSpec
    number: int
    """Order of arrival."""
    grace_s: float = 35.0
    """Seconds between SIGTERM and SIGKILL once it is to stop."""
    log_directory: str | None = None
    """Where the logs of its last attempt lie on its node; None until the worker has taken that up."""
    uid: int | None = None
    """User who submitted it, and that it runs as; None if that is not known."""
    gid: int | None = None
    """That user's group as of submission; None where that could not be told."""
    cancelled_at: datetime | None = None
    """When it was first cancelled; None if it was not."""
    fenced: bool = False
    """True once its node has said that the last attempt keeps its `fence_s`."""
    go_at: datetime | None = None
    """When all nodes of a job on several were prepared; None before, and for a job on one."""
    parts_stopped_at: datetime | None = None
    """Since when all its parts are to end, because one of them has failed or a node joins; None while none does."""
    regroups: int = 0
    """How many of its attempts were begun because its nodes changed, see `core.elastic_jobs`."""
    grows_at: datetime | None = None
    """Since when its parts are to end so that a node can join; None while none does."""
    stuck_on: tuple[str, ...] = ()
    """Nodes on which processes of the last attempt did not die, as `job.stuck` has told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRecord:
    """A GPU as the ledger keeps it."""

    device: Device
    lease_id: str | None = None
    """The lease that holds it, or that it drains after."""
    draining: bool = False
    """True from the end of that lease until the GPU is seen clean."""
    fencing_token: int = 0
    """Fencing token of the last grant on it; 0 before the first."""
    baseline_bytes: int | None = None
    """Memory in use while it was free, before the last grant; None where the driver did not tell."""
    cordoned: bool = False
    """True while an administrator keeps it from being granted."""
    drains_since_s: float | None = field(default=None, compare=False)
    """While it drains: since when, on the monotonic clock; None after a restart, see `Ledger.draining_since`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What is known of a node for good."""

    name: str
    host: str
    driver_version: str | None = None
    simulated: bool = False
    mode: NodeMode = NodeMode.ACTIVE
    """What an administrator has made of it."""
    mode_reason: str | None = None
    """Why, in the words of the administrator."""
    mode_by: str | None = None
    """Login name of the administrator."""
    seen_at: datetime | None = None
    """When it last reported, to the day; None where that is not known."""
    realm: str | None = None
    """Boot and pid namespace of its worker, as it last reported them; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuObservation:
    """What is kept of a GPU from one reading to the next. Lives in memory only, as the readings do."""

    unhealthy: bool = False
    """The last reading showed it unhealthy."""
    lease_id: str | None = None
    """The lease that the rest is about, but for `free_bytes`."""
    since_s: float = 0.0
    """Only a reading begun after this knows of that lease."""
    strangers: tuple[int, ...] = ()
    """Pids that were in conflict with that lease."""
    leftovers: tuple[int, ...] = ()
    """Pids that were named as left behind by that lease."""
    quiet_since_s: float | None = None
    """Since when the draining GPU has had no process, nothing of its lease had it open, and its memory fell no
    further; or the same of a GPU whose memory is awaited."""
    lowest_bytes: int | None = None
    """Least memory in use in that time."""
    clean_since_s: float | None = None
    """When the draining GPU first had no process, nothing of its lease had it open, and its memory was back."""
    missing_since_s: float | None = None
    """Since when its node's readings have not shown the GPU."""
    memory_awaited: bool = False
    """A process without a lease was on the GPU, which no lease holds, and its memory is not back since."""
    free_bytes: tuple[int, ...] = ()
    """Memory in use in the last readings that showed the GPU free, oldest first."""
    foreign_since_s: float | None = None
    """Since when the GPU, which no lease holds, has been in use."""
    foreign: bool = False
    """`gpu.foreign` has told of that."""
    idle_since_s: float | None = None
    """Since when each reading under that lease has shown no work; None where the last one did not, see `core.idle`."""
    idle_read_s: float = float("-inf")
    """The last of these readings was begun no earlier than this."""
    idle_readings: int = 0
    """How many there were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObservation:
    """A node's last report. Lives in memory only: after a restart every node is unknown until it reports."""

    node: str
    worker_id: str
    reported_at_s: float
    """When the report arrived."""
    observed_at_s: float | None
    """Its reading is not older than this; None where the daemon cannot vouch for any age."""
    reread_at_s: dict[str, float] = field(default_factory=dict)
    """By UUID, for GPUs of which more is known: their last reading is not older than this."""
    newest_begun_at_s: float = float("-inf")
    """When the last reading that was taken in was begun; nothing is decided on one that was begun before."""
    answers_request: bool = False
    """Its reading was begun after the node had been asked for one."""
    read_s: float | None = None
    """How long the reading took; None where that is not known."""
    reading_limit_s: float = 0.0
    """How long a reading of this node may take."""
    silence_s: float = 0.0
    """The node is unknown when it has reported nothing for so long."""
    problem: str | None = None
    readings: dict[str, GpuReading] = field(default_factory=dict)
    """By UUID; empty when there is a problem."""
    claimed_elsewhere: dict[str, str] = field(default_factory=dict)
    """By UUID: GPUs of the node that are in the ledger of another daemon, with the reason."""
    ports_in_use: frozenset[int] = frozenset()
    ports_reserved: tuple[int, ...] = ()
    """In order: ports that no other daemon gives out on the node's host; empty where its worker could reserve none."""
    links: tuple[GpuLink, ...] = ()
    """How its GPUs are connected; empty when there is a problem."""
    topology_cache: TopologyCache = field(default_factory=TopologyCache, compare=False, repr=False)
    """The same object for all observations of a node."""
    gpus: dict[str, GpuObservation] = field(default_factory=dict)
    """By UUID; kept while there is a problem."""
    realm: str | None = None
    """Boot and pid namespace in which its worker sees processes; None where that is not known."""
    worker_version: str | None = None
    address: str | None = None
    """IP address under which other nodes reach this one."""
    interface: str | None = None
    """Network interface that has this address."""
    sends_logs: bool = False
    """Its worker sends the logs of its jobs to the daemon."""
    available_until_s: float | None = None
    """When the node goes, on the monotonic clock; None where no end is known."""
    leaving: bool = False
    """It is about to go, and nothing is granted there."""
    takes_gangs: bool = False
    """True when its worker can run its part of a job on several nodes."""
    _clear: list[frozenset[str]] = field(init=False, compare=False, repr=False, default_factory=list)
    """`clear`, once it was asked for: of an observation on the way to another one it is not."""

    @property
    def clear(self) -> frozenset[str]:
        """UUIDs of the GPUs that are free by this report where no lease holds them and no one has taken them out of
        use: an index of the readings and of `gpus`, so that what is free is looked for only when it changes."""
        if not self._clear:
            nothing = self.problem is not None or self.leaving
            self._clear.append(frozenset() if nothing else self._clear_among(self.readings))
        return self._clear[0]

    def find_clear(self, before: NodeObservation, shown: Collection[str]) -> None:
        """Find `clear` from that of the observation before, where nothing has changed but what these GPUs show."""
        self._clear.append(before.clear.difference(shown) | self._clear_among(shown))

    def _clear_among(self, uuids: Iterable[str]) -> frozenset[str]:
        return frozenset([one for one in uuids if is_unused(self.readings[one]) and not awaits_memory(self, one)])

    @property
    def topology(self) -> NodeTopology | None:
        """How its GPUs are connected; None where it has too many of them, or none."""
        return self.topology_cache.of(self.links, self.readings)


def connects_as(before: NodeObservation, after: NodeObservation) -> bool:
    """True when two observations of a node show the same connections between the same GPUs that work."""
    same = before.links == after.links and _working(before) == _working(after)
    return same and (before.problem is None) is (after.problem is None)


def _working(observation: NodeObservation) -> list[str]:
    return [uuid for uuid, one in observation.readings.items() if one.health == "ok"]


def awaits_memory(observation: NodeObservation, uuid: str) -> bool:
    """True when a process without a lease has left the GPU, and its memory is not back yet."""
    watch = observation.gpus.get(uuid)
    return watch is not None and watch.memory_awaited


def is_unused(reading: GpuReading) -> bool:
    """True when a reading shows a GPU that works and that nothing uses but bystanders."""
    return (
        reading.health == "ok"
        and reading.compute_mode is not ComputeMode.PROHIBITED
        and not reading.hidden_use
        and (not reading.processes or all(process.bystander for process in reading.processes))
    )


@dataclass(frozen=True, slots=True)
class GpuRemoved:
    """A GPU that no lease holds and its node no longer shows."""

    uuid: str


@dataclass(frozen=True, slots=True)
class NodeRemoved:
    """A node that has reported nothing for very long, and that nothing refers to."""

    name: str


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a lease ends unless it is renewed, on the monotonic clock. In memory only; None takes it away."""

    lease_id: str
    at_s: float | None


@dataclass(frozen=True, slots=True)
class NotBefore:
    """A queued lease that takes part in the queue only from this moment on. In memory only: after a restart at once."""

    lease_id: str
    at_s: float | None
    """On the monotonic clock; None when that moment has come."""


@dataclass(frozen=True, slots=True)
class DependencyMet:
    """A job no longer waits for another job or array, see `core.dependencies`. In memory only: after a restart it
    follows from which jobs have not ended."""

    job_id: str
    """The job that waited."""
    name: str
    """What it waited for."""


@dataclass(frozen=True, slots=True)
class BypassCounts:
    """How many times newer requests have bypassed waiting ones, see `core.backfill`; a restart counts from 0."""

    times: tuple[tuple[str, int], ...]
    """(lease id, how many times)."""
    at_s: float
    """When, on the monotonic clock."""
    within: LimitKind | None = None
    """For requests of the same user or group that used up its limit, see `core.user_order`: whose limit that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """An Idempotency-Key and what was made for it."""

    key: str
    fingerprint: str
    """Of the method, path and body."""
    result_id: str
    """Id of the lease or job."""
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRecord:
    """The budget of a bearer token, and the GPU time that was held with it, see `core.token_budgets`."""

    token_id: str
    budget: Budget
    day: date
    """The day, in UTC, that `used_s` is of."""
    used_s: float = 0.0
    """GPU-seconds held on that day, up to `counted_at`."""
    counted_at: datetime
    """Up to when they are counted."""
    counted_at_s: float | None = field(default=None, compare=False)
    """The same on the monotonic clock; None for a record of an earlier daemon process."""


@dataclass(frozen=True, slots=True)
class BudgetRemoved:
    """A budget of a token that was not used for days."""

    token_id: str


@dataclass(frozen=True, slots=True)
class KeyRemoved:
    """An Idempotency-Key that is too old to matter."""

    key: str


Change = (
    LeaseRecord
    | JobRecord
    | GpuRecord
    | NodeRecord
    | NodeObservation
    | GpuRemoved
    | NodeRemoved
    | Deadline
    | NotBefore
    | GangTimes
    | DependencyMet
    | BypassCounts
    | OrderChange
    | KeyRecord
    | KeyRemoved
    | BudgetRecord
    | BudgetRemoved
    | LimitRecord
    | LimitRemoved
    | GpuTimeRecord
    | GpuTimeRemoved
    | CalendarChange
    | ReclaimNotice
    | Event
)
