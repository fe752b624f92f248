"""The ledger: who holds what, and what the hardware last showed."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import field

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Event, JobState, Lease, LeaseState, NodeMode
from gpulease_protocol.node_protocol import LeaseOwner
from gpulease_protocol.reservations import Reservation
from gpulease_server.core.calendar import Calendar, ReservationRemoved
from gpulease_server.core.due_leases import DueLeases
from gpulease_server.core.fleet import Fleet
from gpulease_server.core.footprint import job_bytes, lease_bytes
from gpulease_server.core.gang_records import GangTimes
from gpulease_server.core.job_index import JobIndex
from gpulease_server.core.lease_index import count_for_token, put_watch
from gpulease_server.core.limit_index import add
from gpulease_server.core.limit_records import GpuTimeRecord, GpuTimeRemoved, LimitRecord, LimitRemoved
from gpulease_server.core.order_records import (
    GroupUsage,
    Overtakes,
    PlacesKept,
    RanAhead,
    UsageRecord,
    UsageRemoved,
    UsageSteps,
)
from gpulease_server.core.preemption_records import Preemption, PreemptionRemoved, goes_first, is_preemptible
from gpulease_server.core.reclaim_records import ReclaimIndex, ReclaimNotice
from gpulease_server.core.records import (
    BudgetRecord,
    BudgetRemoved,
    BypassCounts,
    Change,
    Deadline,
    DependencyMet,
    GpuRecord,
    GpuRemoved,
    JobRecord,
    KeyRecord,
    KeyRemoved,
    LeaseRecord,
    NodeObservation,
    NodeRecord,
    NodeRemoved,
    NotBefore,
)
from gpulease_server.core.request_queue import RequestQueue

MAX_ENDED_IN_MEMORY = 1000
"""Ended leases, and ended jobs, kept in memory; older ones are in the database only."""
MAX_ENDED_BYTES = 64 * 2**20
"""Memory of the ended leases, and of the ended jobs, that are kept; where these are large, fewer are kept."""


@dataclass
class Ledger(RequestQueue):
    """All of it, by id. Changed by `apply` alone. The writer keeps one to decide on; a second one, that only ever sees
    what is committed, answers the readers."""

    gpus: dict[str, GpuRecord] = field(default_factory=dict)
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    node_observations: dict[str, NodeObservation] = field(default_factory=dict)
    """By node, in the order of their last reports."""
    unreported: dict[str, None] = field(default_factory=dict)
    """Names of the nodes that have not reported to this process."""
    out_of_use: dict[str, None] = field(default_factory=dict)
    """Names of the nodes that an administrator has taken out of use."""
    deadlines: dict[str, float] = field(default_factory=dict)
    unclaimed: set[str] = field(default_factory=set)
    """Ids of leases that were granted without telling anyone, and that their holders have not asked about since."""
    keys: dict[str, KeyRecord] = field(default_factory=dict)
    draining_since: dict[str, float] = field(default_factory=dict)
    """By UUID: a reading that shows the GPU clean must have begun after this."""
    keys_known_since: dict[str, float] = field(default_factory=dict)
    """When each key became known to this process; in memory only, so that a jump of the wall clock forgets none."""
    live_jobs: dict[str, JobRecord] = field(default_factory=dict)
    """Jobs that are not final."""
    ended_leases: dict[str, int] = field(default_factory=dict)
    """Ids of ended leases still in memory, oldest first, and the memory of each."""
    ended_jobs: dict[str, int] = field(default_factory=dict)
    """Ids of final jobs still in memory, oldest first, and the memory of each."""
    ended_bytes: Counter[str] = field(default_factory=Counter)
    """Sums of both: `leases` and `jobs`."""
    gpus_of_token: Counter[int] = field(default_factory=Counter)
    """By token, how many GPUs were last granted with it."""
    last_leases: dict[int, str] = field(default_factory=dict)
    """By token, ids of ended leases that would have left memory, were they not the last one of a GPU."""
    watched_owners: dict[str, dict[LeaseOwner, dict[str, None]]] = field(default_factory=dict)
    """By node, the owners to watch there, and the leases of each that have not ended."""
    silent_s: dict[str, float] = field(default_factory=dict)
    """By node: its seconds of silence while the daemon ran. In memory only: a restart counts them from 0."""
    budgets: dict[str, BudgetRecord] = field(default_factory=dict)
    """By id of a bearer token."""
    leases_of_tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    """By id of a bearer token: its leases that have not ended, and how many GPUs each holds."""
    fleet: Fleet = field(default_factory=Fleet)
    """GPUs and leases by node, and what is free."""
    ends_s: dict[str, float] = field(default_factory=dict)
    """By id of an active lease that ends after a declared time: when, on the monotonic clock; before everything while
    that is not known."""
    ends_due: DueLeases = field(default_factory=DueLeases, compare=False)
    """For which of them that has come."""
    calendar: Calendar = field(default_factory=Calendar)
    """What is reserved."""
    preemptible: dict[str, None] = field(default_factory=dict)
    """Ids of the active leases that may be preempted by what was asked for."""
    preemption_looked_s: float = float("-inf")
    """When it was last looked at whether something is to be preempted, on the monotonic clock."""
    reclaims: ReclaimIndex = field(default_factory=ReclaimIndex)
    """Which leases give idle GPUs back."""
    job_index: JobIndex = field(default_factory=JobIndex)
    """Jobs by node and by array."""
    due: DueLeases = field(default_factory=DueLeases, compare=False)
    """Whose deadlines have passed."""
    next_number: int = 1
    next_token: int = 1
    next_seq: int = 1

    def apply(self, change: Change) -> None:
        """Make one change. The most frequent ones come first; each case of a `match` costs as much as all five."""
        if isinstance(change, LeaseRecord):
            self._put_lease(change)
        elif isinstance(change, GpuRecord):
            self._put_gpu(change)
        elif isinstance(change, Event):
            self.next_seq = change.seq + 1
        elif isinstance(change, Deadline):
            self._put_deadline(change)
        elif isinstance(change, UsageRecord):
            self.usage[change.user] = change
        else:
            self._put_rare(change)

    def _put_rare(self, change: Change) -> None:  # noqa: C901, PLR0912 - one case for each
        match change:
            case JobRecord():
                self._put_job(change)
            case NodeRecord():
                self._put_node(change)
            case NodeObservation():
                self._put_observation(change)
            case GpuRemoved():
                self._remove_gpu(change.uuid)
            case NodeRemoved():
                if (node := self.nodes.pop(change.name, None)) is not None:
                    self.fleet.remove_node(node)
                self.node_observations.pop(change.name, None)
                self.unreported.pop(change.name, None)
                self.out_of_use.pop(change.name, None)
                self._find_free(change.name)
                self.silent_s.pop(change.name, None)
            case NotBefore():
                self._put_pause(change)
            case GangTimes():
                self.job_index.put_times(change)
            case DependencyMet():
                self._meet_dependency(change)
            case BypassCounts():
                self._put_bypass_counts(change)
            case (Overtakes() | PlacesKept() | RanAhead() | Preemption() | PreemptionRemoved()) | (
                UsageRemoved() | GroupUsage() | UsageSteps()
            ):
                self._put_order_change(change)
            case BudgetRecord():
                self.budgets[change.token_id] = change
            case BudgetRemoved():
                self.budgets.pop(change.token_id, None)
            case LimitRecord() | LimitRemoved() | GpuTimeRecord() | GpuTimeRemoved():
                self._put_limit_change(change)
            case ReclaimNotice():
                self.reclaims.put_notice(change)
            case Reservation() | ReservationRemoved():
                self.calendar.put(change)
            case KeyRecord():
                self.keys[change.key] = change
            case KeyRemoved():
                self.keys.pop(change.key, None)
                self.keys_known_since.pop(change.key, None)

    def _find_free(self, node: str) -> None:
        """Bring what is free on a node up to date."""
        self.fleet.find_free(node, self.nodes.get(node), self.node_observations.get(node))

    def _put_observation(self, observation: NodeObservation) -> None:
        before = self.node_observations.get(observation.node)
        if before is not None and before.reported_at_s != observation.reported_at_s:
            del self.node_observations[observation.node]  # it becomes the last one
        self.node_observations[observation.node] = observation
        self.unreported.pop(observation.node, None)
        self.fleet.put_observation(before, observation)
        if before is None or before.clear != observation.clear:
            self._find_free(observation.node)

    def _put_node(self, record: NodeRecord) -> None:
        before = self.nodes.get(record.name)
        self.nodes[record.name] = record
        self.fleet.put_node(before, record)
        if record.name not in self.node_observations:
            self.unreported[record.name] = None
        if record.mode is NodeMode.ACTIVE:
            self.out_of_use.pop(record.name, None)
        else:
            self.out_of_use[record.name] = None
        if before is None or before.mode is not record.mode:
            self._find_free(record.name)

    def _remove_gpu(self, uuid: str) -> None:
        gone = self.gpus.pop(uuid, None)
        if gone is not None:
            self._count_token(gone.fencing_token, -1)
            self.fleet.remove_gpu(gone)
            self._find_free(gone.device.node)
            self._forget_run_ahead(gone.lease_id)
        self.draining_since.pop(uuid, None)

    def _put_gpu(self, record: GpuRecord) -> None:
        before = self.gpus.get(record.device.uuid)
        self.gpus[record.device.uuid] = record
        self.fleet.put_gpu(before, record)
        node = record.device.node
        if before is not None and before.device is record.device:
            self.fleet.find_whether_free(record, self.nodes.get(node), self.node_observations.get(node))
        else:
            for name in {(before or record).device.node: None, node: None}:
                self._find_free(name)
        if before is None or before.fencing_token != record.fencing_token:
            self._count_token(record.fencing_token, 1)
            if before is not None:
                self._count_token(before.fencing_token, -1)
        if not record.draining:
            self.draining_since.pop(record.device.uuid, None)
        elif record.drains_since_s is not None:
            self.draining_since[record.device.uuid] = record.drains_since_s
        if before is not None and before.lease_id != record.lease_id:
            self._forget_run_ahead(before.lease_id)

    def _forget_run_ahead(self, lease_id: str | None) -> None:
        """Forget that a lease ran ahead of others once it has ended and all of its GPUs are clean."""
        if lease_id in self.ran_ahead:
            record = self.leases.get(lease_id)
            if record is None or (record.lease.state is LeaseState.ENDED and not self.held_by(record.lease)):
                del self.ran_ahead[lease_id]

    def _count_token(self, token: int, gpus: int) -> None:
        """So many GPUs more, or fewer, were last granted with a token. Its lease may leave memory with the last one."""
        add(self.gpus_of_token, token, gpus)
        if token not in self.gpus_of_token:
            lease_id = self.last_leases.pop(token, None)
            if lease_id is not None:
                self._put_ended_lease(self.leases[lease_id].lease)

    def _put_deadline(self, deadline: Deadline) -> None:
        if deadline.at_s is None:
            self.deadlines.pop(deadline.lease_id, None)
        else:
            self.deadlines[deadline.lease_id] = deadline.at_s
            self.due.push(deadline.lease_id, self.deadlines)

    def _put_lease(self, record: LeaseRecord) -> None:
        lease, before = record.lease, self.leases.get(record.lease.id)
        if before is not None and record.is_renewal_of(before):
            self.leases[lease.id] = record
            self.unclaimed.discard(lease.id)
            return
        is_active, is_ended = lease.state is LeaseState.ACTIVE, lease.state is LeaseState.ENDED
        was_active = before is not None and before.lease.state is LeaseState.ACTIVE
        if before is not None and was_active:
            self.limits.count_active(before.lease, -1)
        if is_active or was_active:
            self._put_active(record, is_active=is_active)
        self.leases[lease.id] = record
        if record.number >= self.next_number:
            self.next_number = record.number + 1
        if (token := lease.fencing_token or 0) >= self.next_token:
            self.next_token = token + 1
        if lease.id in self.queued_bytes or not (is_active or is_ended):
            self._put_waiting(record)
        has_reclaim_rule = lease.demand.reclaim_idle_after_s is not None
        if has_reclaim_rule or record.watched_owner is not None or lease.holder.token_id is not None:
            self.reclaims.put_lease(lease)
            put_watch(self.watched_owners, record)
            count_for_token(self.leases_of_tokens, lease)
        (self.unclaimed.add if is_active and record.renewed_at is None else self.unclaimed.discard)(lease.id)
        if lease.id in self.ended_leases:
            self.ended_bytes["leases"] -= self.ended_leases.pop(lease.id)
        self.last_leases.pop(token, None)
        if is_ended:
            self._forget_run_ahead(lease.id)
            self._put_ended_lease(lease)

    def _put_waiting(self, record: LeaseRecord) -> None:
        """Bring the queue up to date for a lease that waits, or has done so until now."""
        lease, waited = record.lease, record.lease.id in self.queued_bytes
        if lease.state is not LeaseState.QUEUED:
            self._waits_no_more(lease)
        elif not waited:
            self.limits.count_queued(lease.holder, 1)
            self._count_bytes(lease.id, lease.holder.user, lease_bytes(lease))
        self._place_in_queue(record)

    def _put_active(self, record: LeaseRecord, *, is_active: bool) -> None:
        """Know what the user of a lease has that is active, or was so until now; when one that declares a time ends,
        and which ones may be preempted. A lease of a job ends with that."""
        lease, granted_at_s = record.lease, record.granted_at_s
        if is_active:
            self.limits.count_active(lease, 1)
        if is_active and is_preemptible(lease.demand):
            self.preemptible[lease.id] = None
        else:
            self.preemptible.pop(lease.id, None)
        if not is_active:
            self.ends_s.pop(lease.id, None)
        elif lease.demand.time_s is not None and lease.job_id is None and lease.id not in self.ends_s:
            self.put_end(lease.id, (float("-inf") if granted_at_s is None else granted_at_s) + lease.demand.time_s)

    def put_end(self, lease_id: str, at_s: float) -> None:
        """Note when the declared time of an active lease ends."""
        self.ends_s[lease_id] = at_s
        self.ends_due.push(lease_id, self.ends_s)

    def withdraw(self, record: LeaseRecord) -> None:
        """Take back a request that was not recorded."""
        del self.queue[bisect.bisect_left(self.queue, (record.arrival, record.lease.id))]
        self.demand_classes.remove(record)
        self._waits_no_more(record.lease)
        put_watch(self.watched_owners, record, withdrawn=True)
        count_for_token(self.leases_of_tokens, record.lease, withdrawn=True)
        del self.leases[record.lease.id]

    def _put_ended_lease(self, lease: Lease) -> None:
        """Keep an ended lease, and let the oldest go. One that a GPU needs stays: it drains, or could be revived."""
        self.ended_leases[lease.id] = size_bytes = lease_bytes(lease)
        self.ended_bytes["leases"] += size_bytes
        while len(self.ended_leases) > MAX_ENDED_IN_MEMORY or self.ended_bytes["leases"] > MAX_ENDED_BYTES:
            oldest = next(iter(self.ended_leases))
            self.ended_bytes["leases"] -= self.ended_leases.pop(oldest)
            token = self.leases[oldest].lease.fencing_token
            if token is not None and token in self.gpus_of_token:
                self.last_leases[token] = oldest
            else:
                del self.leases[oldest]

    def _put_job(self, record: JobRecord) -> None:
        before = self.jobs.get(record.job.id)
        self.jobs[record.job.id] = record
        self.job_index.put(before, record)
        if before is None and record.job.array_at_most is not None and record.job.lease_id in self.leases:
            self._classify(self.leases[record.job.lease_id])
        if before is None and record.job.after and record.job.state is JobState.QUEUED:
            self._wait_for_jobs(record)
        elif record.job.id in self.unmet and record.job.state is not JobState.QUEUED:
            for name in list(self.unmet[record.job.id]):
                self._meet_dependency(DependencyMet(record.job.id, name))
        self.next_number = max(self.next_number, record.number + 1)
        if (waits := record.job.state is JobState.QUEUED) is not (record.job.id in self.queued_bytes):
            self._count_bytes(record.job.id, record.job.user, job_bytes(record.spec, record.job) if waits else 0)
        if not record.job.state.final:
            self.live_jobs[record.job.id] = record
            if goes_first(record.job) and record.job.lease_id in self.queued_bytes:
                self.go_first.setdefault(record.job.lease_id, 0)
            return
        self.live_jobs.pop(record.job.id, None)
        size_bytes = job_bytes(record.spec, record.job)
        self.ended_bytes["jobs"] += size_bytes - self.ended_jobs.pop(record.job.id, 0)
        self.ended_jobs[record.job.id] = size_bytes
        while len(self.ended_jobs) > MAX_ENDED_IN_MEMORY or self.ended_bytes["jobs"] > MAX_ENDED_BYTES:
            oldest = next(iter(self.ended_jobs))
            self.ended_bytes["jobs"] -= self.ended_jobs.pop(oldest)
            del self.jobs[oldest]

    def _wait_for_jobs(self, record: JobRecord) -> None:
        """Take a new job out of the queue if a job of its `after` has not ended."""
        job = record.job
        if not (unmet := {one.job: None for one in job.after if self.is_live(one.job)}):
            return
        self.unmet[job.id] = unmet
        for one in job.after:
            if one.job in unmet:
                self.dependents.setdefault((one.job, one.when), {})[job.id] = None
        self.waiting_for_jobs[job.lease_id] = None
        self.waiting_for_jobs_by_user[job.user] += 1
        if job.lease_id in self.leases:
            self._place_in_queue(self.leases[job.lease_id])

    def _meet_dependency(self, met: DependencyMet) -> None:
        record, unmet = self.jobs[met.job_id], self.unmet[met.job_id]
        when = next(one.when for one in record.job.after if one.job == met.name)
        waiting = self.dependents[met.name, when]
        del waiting[met.job_id], unmet[met.name]
        if not waiting:
            del self.dependents[met.name, when]
        if not unmet:
            del self.unmet[met.job_id], self.waiting_for_jobs[record.job.lease_id]
            self.waiting_for_jobs_by_user[record.job.user] -= 1
            if not self.waiting_for_jobs_by_user[record.job.user]:
                del self.waiting_for_jobs_by_user[record.job.user]
            self._place_in_queue(self.leases[record.job.lease_id])

    def gpus_on(self, node: str) -> list[GpuRecord]:
        """The GPUs of a node."""
        return list(self.fleet.gpus_of_node.get(node, {}).values())

    def is_live(self, name: str) -> bool:
        """True for a job that has not ended, and for an array with such a job."""
        return name in self.live_jobs or name in self.job_index.live_in_array

    def held_by(self, lease: Lease) -> list[GpuRecord]:
        """GPUs that an active lease holds, or that drain of an ended one."""
        records = (self.gpus.get(device.uuid) for device in lease.gpus)
        return [record for record in records if record is not None and record.lease_id == lease.id]
