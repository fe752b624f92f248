"""The ledger: who holds what, and what the hardware last showed."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from gpulease.exchange import LeaseOwner
from gpulease.model import Device, Event, GpuLink, GpuReading, Job, JobSpec, Lease, LeaseState, Liveness, NodeMode

ENDED_KEPT = 1000
"""Ended leases, and ended jobs, kept in memory; older ones are in the database only."""


@dataclass(frozen=True, slots=True)
class Instant:
    """One moment on two clocks: for people, and for measuring how long."""

    at: datetime
    """Wall clock, aware UTC."""
    mono_s: float
    """Monotonic clock of this daemon process, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerWatch:
    """The process whose end is the end of a lease, and who sees it."""

    node: str
    """The node whose worker watches it."""
    realm: str
    """Boot and pid namespace in which its pid counts, see `gpulease.owner.realm`."""
    owner: LeaseOwner


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A lease as the ledger keeps it. Its noun leaves `expires_at` and `position` empty; see `core.view`."""

    lease: Lease
    number: int
    """Order of arrival."""
    cause: str
    """Id of the request that asked for it."""
    port: int | None = None
    """`MASTER_PORT`, leased with the GPUs."""
    renewed_at: datetime | None = None
    """Last sign of life, for people; what a worker sees of an owner is not recorded."""
    watched: OwnerWatch | None = None
    """Its owner, where that is known beyond a pid. It is watched while the lease's liveness is `process`."""
    asked_at_s: float = field(default=float("-inf"), compare=False)
    """When it was asked for, on the monotonic clock; before everything for one of an earlier daemon process."""


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
    """User who submitted it, and as whom it runs; None where that could not be told."""
    gid: int | None = None
    """That user's group as of submission; None where that could not be told."""
    cancelled_at: datetime | None = None
    """When somebody first wanted it to end; None while nobody has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRecord:
    """A GPU as the ledger keeps it."""

    device: Device
    lease_id: str | None = None
    """The lease that holds it, or whose remains drain."""
    draining: bool = False
    """True from the end of that lease until the GPU is seen clean."""
    token: int = 0
    """Token of the last grant on it; 0 before the first."""
    baseline_bytes: int | None = None
    """Memory in use while it was free, before the last grant; None where the driver did not tell."""
    cordoned: bool = False
    """True while an administrator has it granted to nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What is known of a node for good."""

    name: str
    host: str
    driver_version: str | None = None
    simulated: bool = False
    mode: NodeMode = NodeMode.ACTIVE
    """What an administrator has made of it."""
    seen_at: datetime | None = None
    """When it last reported, to the day; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWatch:
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
    further."""
    lowest_bytes: int | None = None
    """Least memory in use in that time."""
    clean_since_s: float | None = None
    """When the draining GPU first had no process, nothing of its lease had it open, and its memory was back."""
    missing_since_s: float | None = None
    """Since when its node's readings have not shown the draining GPU."""
    free_bytes: tuple[int, ...] = ()
    """Memory in use in the last readings that showed the GPU free, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A node's last report. Lives in memory only: after a restart every node is unknown until it reports."""

    node: str
    worker_id: str
    reported_at_s: float
    """When the report arrived."""
    observed_at_s: float | None
    """Its reading is not older than this; None where the daemon cannot vouch for any age."""
    reread_at_s: dict[str, float] = field(default_factory=dict)
    """By UUID: the GPUs of which more is known, their last reading is not older than this."""
    newest_s: float = float("-inf")
    """When the last reading that was taken in was begun; nothing is decided on one that was begun before."""
    answers: bool = False
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
    ports_in_use: frozenset[int] = frozenset()
    links: tuple[GpuLink, ...] = ()
    """How its GPUs are connected; empty when there is a problem."""
    watches: dict[str, GpuWatch] = field(default_factory=dict)
    """By UUID; kept while there is a problem."""


@dataclass(frozen=True, slots=True)
class GpuGone:
    """A GPU that nobody holds and its node shows no more."""

    uuid: str


@dataclass(frozen=True, slots=True)
class NodeGone:
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
    at_s: float


@dataclass(frozen=True, slots=True)
class Passed:
    """Waiting requests that younger ones have passed, see `core.bypass`. In memory only: after a restart it is counted
    again."""

    times: tuple[tuple[str, int], ...]
    """(lease id, how often)."""
    at_s: float
    """When, on the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """An Idempotency-Key and what was made for it."""

    key: str
    fingerprint: str
    """Of the method, path and body."""
    made: str
    """Id of the lease or job."""
    at: datetime


@dataclass(frozen=True, slots=True)
class KeyForgotten:
    """An Idempotency-Key that is too old to matter."""

    key: str


Change = (
    LeaseRecord
    | JobRecord
    | GpuRecord
    | NodeRecord
    | Sighting
    | GpuGone
    | NodeGone
    | Deadline
    | NotBefore
    | Passed
    | KeyRecord
    | KeyForgotten
    | Event
)


@dataclass
class Ledger:
    """All of it, by id. Changed by `apply` alone.

    The writer keeps one to decide on; a second one, that only ever sees what is committed, answers the readers.
    """

    leases: dict[str, LeaseRecord] = field(default_factory=dict)
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    gpus: dict[str, GpuRecord] = field(default_factory=dict)
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    sightings: dict[str, Sighting] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    keys: dict[str, KeyRecord] = field(default_factory=dict)
    draining_since: dict[str, float] = field(default_factory=dict)
    """By UUID: a reading that shows the GPU clean must have begun after this."""
    queue: list[tuple[int, str]] = field(default_factory=list)
    """(number, lease id) of queued leases, in order of arrival."""
    waiting: Counter[str | None] = field(default_factory=Counter)
    """By user, how many requests of the queue are his."""
    keys_since: dict[str, float] = field(default_factory=dict)
    """When each key became known to this process; in memory only, so that a jump of the wall clock forgets none."""
    not_before: dict[str, float] = field(default_factory=dict)
    """By lease id: when a queued lease begins to take part in the queue."""
    passed: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By id of a queued lease: how often a younger request has passed it, and when the first one did."""
    recalled: bool = False
    """True once `passed` also has what happened before this process."""
    live_jobs: dict[str, JobRecord] = field(default_factory=dict)
    """Jobs that are not final."""
    ended: dict[str, None] = field(default_factory=dict)
    """Ids of ended leases still in memory, oldest first."""
    ended_jobs: dict[str, None] = field(default_factory=dict)
    """Ids of final jobs still in memory, oldest first."""
    watched: dict[str, dict[LeaseOwner, dict[str, None]]] = field(default_factory=dict)
    """By node, the owners to watch there, and the leases of each that have not ended."""
    next_number: int = 1
    next_token: int = 1
    next_seq: int = 1

    def apply(self, change: Change) -> None:  # noqa: C901, PLR0912 - one case for each
        """Make one change."""
        match change:
            case LeaseRecord():
                self._put_lease(change)
            case JobRecord():
                self._put_job(change)
            case GpuRecord():
                self._put_gpu(change)
            case NodeRecord():
                self.nodes[change.name] = change
            case Sighting():
                self.sightings[change.node] = change
            case GpuGone():
                self.gpus.pop(change.uuid, None)
                self.draining_since.pop(change.uuid, None)
            case NodeGone():
                self.nodes.pop(change.name, None)
                self.sightings.pop(change.name, None)
            case Deadline():
                self._put_deadline(change)
            case NotBefore():
                self.not_before[change.lease_id] = change.at_s
            case Passed():
                self._put_passed(change)
            case KeyRecord():
                self.keys[change.key] = change
            case KeyForgotten():
                self.keys.pop(change.key, None)
                self.keys_since.pop(change.key, None)
            case Event():
                self.next_seq = change.seq + 1

    def _put_gpu(self, record: GpuRecord) -> None:
        self.gpus[record.device.uuid] = record
        if not record.draining:
            self.draining_since.pop(record.device.uuid, None)

    def _put_passed(self, passed: Passed) -> None:
        for lease_id, times in passed.times:
            before, since_s = self.passed.get(lease_id, (0, passed.at_s))
            self.passed[lease_id] = (before + times, since_s)

    def _put_deadline(self, deadline: Deadline) -> None:
        if deadline.at_s is None:
            self.deadlines.pop(deadline.lease_id, None)
        else:
            self.deadlines[deadline.lease_id] = deadline.at_s

    def _put_lease(self, record: LeaseRecord) -> None:
        lease = record.lease
        self.leases[lease.id] = record
        self.next_number = max(self.next_number, record.number + 1)
        self.next_token = max(self.next_token, (lease.token or 0) + 1)
        place = (record.number, lease.id)
        at = bisect.bisect_left(self.queue, place)
        waits = at < len(self.queue) and self.queue[at] == place
        if lease.state is LeaseState.QUEUED and not waits:
            self.queue.insert(at, place)
            self.waiting[lease.holder.user] += 1
        elif lease.state is not LeaseState.QUEUED and waits:
            del self.queue[at]
            self._waits_no_more(lease)
        self._put_watch(record)
        if lease.state is not LeaseState.QUEUED:
            self.not_before.pop(lease.id, None)
            self.passed.pop(lease.id, None)
        self.ended.pop(lease.id, None)
        if lease.state is LeaseState.ENDED:
            self.ended[lease.id] = None
            if len(self.ended) > ENDED_KEPT:
                self._forget_oldest_lease()

    def _put_watch(self, record: LeaseRecord, *, over: bool = False) -> None:
        if record.watched is None:
            return
        owners, owner = self.watched.setdefault(record.watched.node, {}), record.watched.owner
        if not over and record.lease.state is not LeaseState.ENDED and record.lease.liveness is Liveness.PROCESS:
            owners.setdefault(owner, {})[record.lease.id] = None
        elif owner in owners:
            owners[owner].pop(record.lease.id, None)
            if not owners[owner]:
                del owners[owner]

    def withdraw(self, record: LeaseRecord) -> None:
        """Take back a request of which nothing was recorded."""
        self.queue.remove((record.number, record.lease.id))
        self._waits_no_more(record.lease)
        self._put_watch(record, over=True)
        del self.leases[record.lease.id]

    def _waits_no_more(self, lease: Lease) -> None:
        self.waiting[lease.holder.user] -= 1
        if not self.waiting[lease.holder.user]:
            del self.waiting[lease.holder.user]

    def _forget_oldest_lease(self) -> None:
        """Drop the oldest ended lease that is nobody's last: one whose GPU drains, or might revive, is still needed."""
        tokens = {gpu.token for gpu in self.gpus.values()}
        oldest = next((lease_id for lease_id in self.ended if self.leases[lease_id].lease.token not in tokens), None)
        if oldest is not None:
            del self.ended[oldest], self.leases[oldest]

    def _put_job(self, record: JobRecord) -> None:
        self.jobs[record.job.id] = record
        self.next_number = max(self.next_number, record.number + 1)
        if not record.job.state.final:
            self.live_jobs[record.job.id] = record
            return
        self.live_jobs.pop(record.job.id, None)
        self.ended_jobs[record.job.id] = None
        if len(self.ended_jobs) > ENDED_KEPT:
            oldest = next(iter(self.ended_jobs))
            del self.ended_jobs[oldest], self.jobs[oldest]

    def position(self, record: LeaseRecord) -> int | None:
        """Place in the queue, 1 is next; None unless queued."""
        if record.lease.state is not LeaseState.QUEUED:
            return None
        return bisect.bisect_left(self.queue, (record.number, record.lease.id)) + 1

    def queued(self) -> Iterator[LeaseRecord]:
        """Queued leases in order of arrival."""
        return (self.leases[lease_id] for _, lease_id in self.queue)

    def held_by(self, lease: Lease) -> list[GpuRecord]:
        """GPUs that an active lease holds, or that drain of an ended one."""
        records = (self.gpus.get(device.uuid) for device in lease.gpus)
        return [record for record in records if record is not None and record.lease_id == lease.id]
