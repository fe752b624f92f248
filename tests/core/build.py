"""Short builders, and a small world in which a test plays daemon, node and clock."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from gpulease_protocol.budgets import Budget
from gpulease_protocol.limits import LimitKind, Limits
from gpulease_protocol.model import (
    Demand,
    Event,
    Gpu,
    GpuReading,
    GpuState,
    Holder,
    JobDependency,
    JobSpec,
    JobState,
    Lease,
    LeaseState,
    Liveness,
    NodeMode,
    Priority,
    Process,
)
from gpulease_protocol.node_protocol import (
    ClaimedGpu,
    JobReport,
    LeaseOwner,
    NodeReport,
    OwnerReport,
    OwnerState,
    RunState,
)
from gpulease_server.core.decide import decide
from gpulease_server.core.demand_classes import ClassKey, rank_of
from gpulease_server.core.footprint import job_bytes, lease_bytes
from gpulease_server.core.gpu import state_of
from gpulease_server.core.gpu_state import state_by_report
from gpulease_server.core.happenings import (
    CancelRequested,
    CordonRequested,
    Happening,
    IdempotencyKey,
    JobSubmitted,
    LeaseRequested,
    LimitsChanged,
    NodeForgetRequested,
    NodeModeRequested,
    NodeReported,
    ReleaseRequested,
    RenewalRequested,
    ReservationCancelled,
    ReservationRequested,
    SubmittedJob,
    Ticked,
)
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import LimitKey
from gpulease_server.core.next_tick import next_tick_s
from gpulease_server.core.pending import PendingRequests
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import GpuList, lease_view
from gpulease_server.core.queue import settle
from gpulease_server.core.records import Change, GpuRecord, Instant, WatchedOwner
from gpulease_server.core.turn import Answer, Turn

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
GIB = 2**30


def uuid(index: int, node: str = "a") -> str:
    """The UUID of GPU `index` of a node of these tests."""
    return f"GPU-{ord(node[0]):08x}-0000-0000-0000-{index:012x}"


def gpu(
    index: int, node: str = "a", *, pids: tuple[int, ...] = (), lease: str | None = None, **what: Any
) -> GpuReading:
    """A reading of a GPU of 80 GiB; `pids` are processes on it, of `lease` or of none. No other process has it open."""
    reading: dict[str, Any] = {
        "memory_total_bytes": 80 * GIB,
        "memory_used_bytes": 0,
        "name": "NVIDIA H100",
        "opened_by": (),
        "unreadable_processes": 0,
        "processes": tuple(Process(pid=pid, lease_id=lease) for pid in pids),
    }
    return GpuReading(uuid=uuid(index, node), node=node, index=index, **reading | what)


def gpu_views(world: World) -> list[Gpu]:
    """Every GPU as it is shown, by node and index."""
    gpus = GpuList(world.ledger, world.now, world.policy)
    return [gpus.view(gpu) for gpu in gpus.records()]


def watch_of(pid: int, node: str = "a") -> WatchedOwner:
    """A process that a node's worker can watch."""
    return WatchedOwner(node=node, realm="here", owner=LeaseOwner(pid=pid, start_ticks=100 + pid))


@dataclass
class World:
    """A ledger, a clock that only the test moves, and nodes whose readings only the test changes."""

    policy: Policy = field(default_factory=Policy)
    ledger: Ledger = field(default_factory=Ledger)
    at_s: float = 1000.0
    wall_jump_s: float = 0.0
    """How far the wall clock is off."""
    nodes: dict[str, list[GpuReading]] = field(default_factory=dict)
    jobs: dict[str, list[JobReport]] = field(default_factory=dict)
    pending: PendingRequests = field(default_factory=PendingRequests)
    wanted: dict[str, float] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    shown: dict[str, list[tuple[float, float, GpuReading]]] = field(default_factory=dict)
    """By UUID, every reading: when it arrived, when it was begun, what it showed."""
    host: str | None = None
    """Host of every node; each is a host of its own when None."""
    addresses: dict[str, str | None] = field(default_factory=dict)
    """The address of each node that has another one than 10.0.0.x."""
    ports_in_use: tuple[int, ...] = ()
    ports_reserved: tuple[int, ...] = ()
    claimed: dict[str, tuple[ClaimedGpu, ...]] = field(default_factory=dict)
    """By node: GPUs that another daemon's worker has."""
    owners: dict[int, OwnerState] = field(default_factory=dict)
    """What node `a` sees of each owner that it was told to watch, by pid; one that is missing is not watched yet."""
    realm: str | None = "here"
    """Boot and pid namespace of the nodes' workers."""
    ids: Any = field(default_factory=lambda: itertools.count(1))

    @property
    def now(self) -> Instant:
        return Instant(at=NOON + timedelta(seconds=self.at_s + self.wall_jump_s), mono_s=self.at_s)

    def turn(self, *happenings: Happening) -> list[Answer]:
        """One turn; the answers to these happenings, `None` where there is none yet."""
        turn = Turn(self.ledger, self.now, self.policy, self.pending, self.wanted)
        is_tick = all(isinstance(happening, Ticked) and not happening.stalled_s for happening in happenings)
        is_due = not is_tick or next_tick_s(self.ledger, self.pending, self.policy) <= self.at_s
        before = (dict(self.ledger.silent_s), list(self.ledger.keys_known_since.items()))
        for happening in happenings:
            decide(turn, happening)
        settle(turn)
        if not is_due:
            assert not turn.changes, "a tick that was not due has changed something"
            assert before == (self.ledger.silent_s, list(self.ledger.keys_known_since.items()))
        self.changes += turn.changes
        self.answers |= dict(turn.answers)
        return [self.answers.get(happening.cause) for happening in happenings]

    def node(self, name: str = "a", *, gpus: int | list[GpuReading] = 8, report: bool = True) -> World:
        """Add or change a node."""
        self.nodes[name] = [gpu(index, name) for index in range(gpus)] if isinstance(gpus, int) else gpus
        if report:
            self.report(name)
        return self

    def report(
        self,
        name: str = "a",
        *,
        age_s: float = 0.0,
        problem: str | None = None,
        worker: str = "w",
        reread: tuple[int, ...] = (),
        begun_s: float | None = None,
        partial: bool = False,
        **what: Any,
    ) -> Answer:
        """A millisecond on, the node sends its full view, of a reading begun `age_s` ago; or of one begun `begun_s` ago
        that read only these GPUs again, the rest being `age_s` old. `partial`: it sends nothing but those."""
        self.at_s += 0.001
        report = NodeReport(
            worker_id=worker,
            host=self.host or name,
            problem=problem,
            reread=tuple(uuid(index, name) for index in reread),
            partial=partial,
            address=self.addresses.get(name, f"10.0.0.{ord(name[0])}"),
            interface="eth0",
            **{"takes_gangs": True} | what,
            gpus=()
            if problem
            else tuple(one for index, one in enumerate(self.nodes[name]) if not partial or index in reread),
            claimed_elsewhere=() if problem else self.claimed.get(name, ()),
            jobs=tuple(self.jobs.get(name, ())),
            ports_in_use=self.ports_in_use,
            ports_reserved=self.ports_reserved,
            realm=self.realm,
            owners=tuple(
                OwnerReport(owner=one, state=self.owners[one.pid])
                for one in self.ledger.watched_owners.get(name, ())
                if one.pid in self.owners
            ),
        )
        for reading in report.gpus:
            self.shown.setdefault(reading.uuid, []).append((self.at_s, self.at_s - age_s, reading))
        cause = f"report-{next(self.ids)}"
        begun_at_s = None if begun_s is None else self.at_s - begun_s
        observed_at_s = self.at_s - age_s
        return self.turn(
            NodeReported(cause=cause, node=name, report=report, observed_at_s=observed_at_s, begun_at_s=begun_at_s)
        )[0]

    def ask(
        self,
        count: int = 1,
        *,
        queue: bool = True,
        ttl_s: float = 60.0,
        key: IdempotencyKey | None = None,
        owner: int | None = None,
        user: str = "ann",
        label: str = "",
        token: str | None = None,
        budget: Budget | None = None,
        **what: Any,
    ) -> str:
        """Ask for GPUs; the call's id, whose answer is in `answers` once there is a verdict. `owner` is the pid of a
        process that node `a` can watch."""
        number = next(self.ids)
        demand = Demand(count=count, **what)
        self.turn(
            LeaseRequested(
                cause=f"ask-{number}",
                lease_id=f"lease-{number}",
                demand=demand,
                holder=Holder(user=user, owner_pid=owner, label=label, token_id=token),
                budget=budget,
                ttl_s=ttl_s,
                queue=queue,
                key=key,
                watched_owner=None if owner is None else watch_of(owner),
            )
        )
        return f"ask-{number}"

    def lease(self, count: int = 1, **what: Any) -> Lease:
        """Ask for GPUs; every node that is asked for a reading gives one. The lease as it was answered."""
        call = self.ask(count, **what)
        self.answer_wanted()
        answer = self.answers[call]
        assert isinstance(answer, Lease), answer
        return answer

    def answer_wanted(self) -> None:
        """Every node that owes a reading and exists gives it."""
        for name in [name for name in self.wanted if name in self.nodes]:
            self.report(name)

    def submit(
        self,
        gpus: int = 1,
        *,
        after: Mapping[str, Literal["succeeded", "ended"]] | None = None,
        user: str | None = None,
        token: str | None = None,
        budget: Budget | None = None,
        nodes: int = 1,
        max_nodes: int | None = None,
        **what: Any,
    ) -> str:
        """Submit a job, after others if need be; its id. The answer is that of `submit-` and its number."""
        number = next(self.ids)
        spec = JobSpec(command=("train.py",), gpus=gpus, nodes=nodes, max_nodes=max_nodes, **what)
        waits = tuple(JobDependency(job=name, when=when) for name, when in (after or {}).items())
        self.turn(
            JobSubmitted(
                cause=f"submit-{number}",
                jobs=(SubmittedJob(job_id=f"job-{number}", lease_id=f"lease-{number}", spec=spec),),
                name="",
                demand=Demand(
                    count=gpus,
                    nodes=nodes,
                    max_nodes=max_nodes,
                    time_s=spec.timeout_s,
                    priority=spec.priority,
                    preemptible=spec.preemptible,
                ),
                holder=Holder(user=user, token_id=token),
                budget=budget,
                after=waits,
                after_live=frozenset(one.job for one in waits if self.ledger.is_live(one.job)),
            )
        )
        self.answer_wanted()
        return f"job-{number}"

    def run_job(self, job_id: str, node: str = "a") -> None:
        """The node starts the last attempt of a job now, beside the others that it has."""
        attempt = self.ledger.jobs[job_id].job.attempts
        running = JobReport(job_id=job_id, attempt=attempt, state=RunState.RUNNING, started_at=self.now.at)
        self.jobs[node] = [*(one for one in self.jobs.get(node, []) if one.job_id != job_id), running]
        self.report(node)

    def events(self, kind: str) -> list[Event]:
        """The events of one kind so far."""
        return [one for one in self.changes if isinstance(one, Event) and one.kind == kind]

    def ended(self, job_id: str, code: int = 0, node: str = "a") -> None:
        """The worker reports the end of a job's last attempt, and then a clean GPU."""
        attempt = self.ledger.jobs[job_id].job.attempts
        report = JobReport(
            job_id=job_id, attempt=attempt, state=RunState.EXITED, exit_code=code, started_at=self.now.at
        )
        self.jobs[node] = [report]
        self.report(node)
        self.jobs[node] = []
        self.report(node)

    def limit(self, name: str, kind: str = "user", *, members: tuple[str, ...] = (), **numbers: Any) -> Answer:
        """An administrator sets limits; without numbers and members they are removed."""
        limits = Limits(**numbers) if numbers or members else None
        key, cause = LimitKey(LimitKind(kind), name), f"limit-{next(self.ids)}"
        return self.turn(LimitsChanged(cause=cause, key=key, limits=limits, members=members, by="root"))[0]

    def reserve(
        self, *gpus: str, after_s: float = 3600.0, for_s: float = 3600.0, user: str | None = None, **what: Any
    ) -> Answer:
        """An administrator reserves these GPUs, or a `count` of a `node`; the id is `reservation-` and its number."""
        number, from_at = next(self.ids), self.now.at + timedelta(seconds=after_s)
        return self.turn(
            ReservationRequested(
                cause=f"reserve-{number}",
                reservation_id=f"reservation-{number}",
                uuids=gpus,
                from_at=from_at,
                to_at=from_at + timedelta(seconds=for_s),
                user=user,
                by="root",
                **what,
            )
        )[0]

    def unreserve(self, reservation_id: str) -> Answer:
        cancelled = ReservationCancelled(cause=f"unreserve-{next(self.ids)}", reservation_id=reservation_id, by="root")
        return self.turn(cancelled)[0]

    def renew(self, lease: Lease, token: int | None = None) -> Answer:
        cause = f"renew-{next(self.ids)}"
        return self.turn(
            RenewalRequested(
                cause=cause, lease_id=lease.id, fencing_token=lease.fencing_token if token is None else token
            )
        )[0]

    def release(self, lease: Lease, token: int | None = None) -> Answer:
        cause = f"release-{next(self.ids)}"
        return self.turn(
            ReleaseRequested(
                cause=cause, lease_id=lease.id, fencing_token=lease.fencing_token if token is None else token
            )
        )[0]

    def revoke(self, lease: Lease, token: int | None = None, by: str = "root") -> Answer:
        cause = f"revoke-{next(self.ids)}"
        return self.turn(ReleaseRequested(cause=cause, lease_id=lease.id, fencing_token=token, revoked_by=by))[0]

    def set_mode(self, mode: NodeMode, node: str = "a", *, force: bool = False, reason: str | None = None) -> Answer:
        asked = NodeModeRequested(
            cause=f"mode-{next(self.ids)}", node=node, mode=mode, force=force, reason=reason, by="root"
        )
        return self.turn(asked)[0]

    def forget(self, node: str = "a") -> Answer:
        return self.turn(NodeForgetRequested(cause=f"forget-{next(self.ids)}", node=node, by="root"))[0]

    def cordon(self, index: int = 0, node: str = "a", *, cordoned: bool = True) -> Answer:
        cause = f"cordon-{next(self.ids)}"
        return self.turn(CordonRequested(cause=cause, uuid=uuid(index, node), cordoned=cordoned))[0]

    def cancel(self, job_id: str) -> Answer:
        return self.turn(CancelRequested(cause=f"cancel-{next(self.ids)}", job_id=job_id, grace_s=1.0))[0]

    def pass_time(self, seconds: float, *, silent: tuple[str, ...] = (), stalled_s: float = 0.0) -> None:
        """Let time pass in ticks of 0.25 s; the nodes go on reporting, but for the silent ones."""
        until_s = self.at_s + seconds
        while self.at_s < until_s:
            step_s = min(0.25, until_s - self.at_s)
            self.at_s += step_s
            for name in self.nodes:
                if name not in silent:
                    self.report(name)
            ticked = Ticked(cause=f"tick-{next(self.ids)}", since_last_s=step_s + stalled_s, stalled_s=stalled_s)
            self.turn(ticked)
            stalled_s = 0.0

    def state(self, index: int = 0, node: str = "a") -> GpuState:
        return state_of(self.ledger, self.ledger.gpus[uuid(index, node)], self.now, self.policy)

    def now_of(self, lease: Lease) -> Lease:
        """The lease as the ledger has it now."""
        return self.ledger.leases[lease.id].lease

    def view(self, lease: Lease) -> Lease:
        """The lease as its holder is shown it now."""
        return lease_view(self.ledger, self.ledger.leases[lease.id], self.now, self.policy)

    def position(self, lease: Lease) -> int | None:
        """The place in the queue that its holder is shown."""
        return self.view(lease).position

    def lose_reports(self) -> None:
        """Nothing of what the nodes have reported is known any more, as after a restart."""
        self.ledger.node_observations.clear()
        for node in list(self.ledger.nodes.values()):
            self.ledger.apply(node)
            self.ledger._find_free(node.name)

    def check(self) -> None:
        """What must hold after every turn, computed from the records alone."""
        holding: dict[str, str] = {}
        watched: dict[str, dict[LeaseOwner, dict[str, None]]] = {}
        for record in self.ledger.leases.values():
            process = record.lease.liveness is Liveness.PROCESS and record.lease.state is not LeaseState.ENDED
            if process and record.watched_owner is not None:
                leases = watched.setdefault(record.watched_owner.node, {}).setdefault(record.watched_owner.owner, {})
                leases[record.lease.id] = None
        assert watched == {node: owners for node, owners in self.ledger.watched_owners.items() if owners}
        for record in self.ledger.leases.values():
            lease = record.lease
            if lease.state is LeaseState.ACTIVE:
                uuids = [device.uuid for device in lease.gpus]
                on_node = Counter(device.node for device in lease.gpus)
                assert len(set(uuids)) == len(uuids), f"{lease.id} names a GPU twice"
                demand = lease.demand
                most = demand.max_nodes or demand.nodes
                assert demand.nodes <= len(on_node) <= most, f"{lease.id} is on {len(on_node)} nodes"
                assert min(on_node.values()) >= lease.demand.count, f"{lease.id} is not granted whole"
                assert [one.node for one in lease.members] == (list(on_node) if lease.demand.nodes > 1 else [])
                for held in uuids:
                    assert held not in holding, f"{held} is in {holding[held]} and {lease.id}"
                    holding[held] = lease.id
                    known = self.ledger.gpus.get(held)
                    if known is None:  # the lease of a gang lasts until the other nodes have stopped their parts
                        assert demand.nodes > 1, f"{lease.id} has a GPU that was forgotten"
                        continue
                    assert known.lease_id == lease.id
                    assert not known.draining
            elif lease.state is LeaseState.QUEUED:
                assert not lease.gpus
                assert lease.fencing_token is None
        for record_gpu in self.ledger.gpus.values():
            if record_gpu.lease_id is not None and not record_gpu.draining:
                assert holding.get(record_gpu.device.uuid) == record_gpu.lease_id
        self.check_dependencies()
        waiting_ids = [*(lease_id for _, lease_id in self.ledger.queue), *self.ledger.waiting_for_jobs]
        holders = [self.ledger.leases[lease_id].lease.holder for lease_id in waiting_ids]
        waiting = Counter(key for holder in holders for key in self.ledger.limits.keys_of(holder))
        assert waiting == self.ledger.limits.queued
        sizes = {lease_id: lease_bytes(self.ledger.leases[lease_id].lease) for lease_id in waiting_ids}
        jobs = [record for record in self.ledger.live_jobs.values() if record.job.state is JobState.QUEUED]
        assert (
            sizes | {record.job.id: job_bytes(record.spec, record.job) for record in jobs} == self.ledger.queued_bytes
        )
        assert self.ledger.queued_bytes_by_user.total() == sum(self.ledger.queued_bytes.values())
        assert Counter(record.fencing_token for record in self.ledger.gpus.values()) == self.ledger.gpus_of_token
        assert set(self.ledger.last_leases) <= set(self.ledger.gpus_of_token)
        tokens = [record.lease.fencing_token for record in self.ledger.leases.values() if record.lease.fencing_token]
        assert len(set(tokens)) == len(tokens), "a token was given twice"
        self.check_indexes()

    def check_indexes(self) -> None:
        """Each index of the ledger, counted again from the records."""
        ledger = self.ledger
        nodes: dict[str, dict[str, GpuRecord]] = {}
        holders: dict[str, Counter[str]] = {}
        for uuid, record in ledger.gpus.items():
            nodes.setdefault(record.device.node, {})[uuid] = record
            if record.lease_id is not None:
                holders.setdefault(record.device.node, Counter())[record.lease_id] += 1
        assert nodes == ledger.fleet.gpus_of_node
        assert holders == ledger.fleet.holders_of_node
        unheld: dict[str, dict[str, GpuRecord]] = {}
        for uuid, record in ledger.gpus.items():
            if record.lease_id is None:
                unheld.setdefault(record.device.node, {})[uuid] = record
        assert unheld == ledger.fleet.unheld
        free: dict[str, list[tuple[int, str]]] = {}
        for uuid, record in ledger.gpus.items():
            node = record.device.node
            if state_by_report(record, ledger.node_observations.get(node), ledger.nodes.get(node)) is GpuState.FREE:
                free.setdefault(node, []).append((record.device.index, uuid))
        assert {node: tuple(uuid for _, uuid in sorted(found)) for node, found in free.items()} == ledger.fleet.free
        assert ledger.fleet.free_gpus == {uuid for found in free.values() for _, uuid in found}
        numbers: dict[int, list[str]] = {}
        for node, found in sorted(free.items()):
            numbers.setdefault(len(found), []).append(node)
        assert numbers == ledger.fleet.nodes_by_free
        self.check_classes()
        self.check_counts()

    def check_classes(self) -> None:
        """The queue by what is asked for."""
        ledger, found = self.ledger, dict[ClassKey, list[tuple[int, str]]]()
        for place in ledger.queue:
            lease = ledger.leases[place[1]].lease
            if lease.id in ledger.not_before:
                continue
            job = ledger.jobs.get(lease.job_id or "")
            array_id = job.job.array_id if job is not None and job.job.array_at_most is not None else None
            token_id = lease.holder.token_id
            apart = ledger.demand_classes.apart
            told_apart = apart is None or lease.holder.user in apart or token_id is not None
            told_apart = told_apart or lease.demand.priority is Priority.INTERACTIVE
            told_apart = told_apart or (ledger.demand_classes.timed_apart and lease.demand.time_s is not None)
            user = lease.holder.user if told_apart else None
            found.setdefault(ClassKey(lease.demand, user, token_id, array_id), []).append(place)
        classes = ledger.demand_classes.classes
        assert found == {key: members.places for key, members in classes.items()}
        assert ledger.demand_classes.class_of == {
            lease_id: members for members in classes.values() for _, lease_id in members.places
        }
        heads = sorted((*ledger.demand_classes.group_of(key.demand, key.user), *found[key][0]) for key in found)
        assert heads == [head for head, _, _ in ledger.demand_classes.heads]
        assert all(classes[members.key] is members for _, _, members in ledger.demand_classes.heads)
        of_user: dict[str | None, list[ClassKey]] = {}
        of_demand: dict[Demand, list[ClassKey]] = {}
        for key in classes:
            of_user.setdefault(key.user, []).append(key)
            of_demand.setdefault(key.demand, []).append(key)
        alike = ledger.demand_classes.of_demand
        assert of_demand == {demand: [one.key for one in some] for demand, some in alike.items()}
        assert of_user == {user: [one.key for one in some] for user, some in ledger.demand_classes.of_user.items()}
        for members in classes.values():
            for bypassed, counts in (
                (members.bypassed, ledger.bypasses),
                *((members.bypassed_within[kind], found) for kind, found in ledger.limit_bypasses.items()),
            ):
                known = [counts[lease_id] for _, lease_id in bypassed.places]
                assert bypassed.places == [place for place in members.places if place[1] in counts]
                assert all(times <= bypassed.most_times and since_s >= bypassed.first_s for times, since_s in known)
        pausing: dict[tuple[int, str | None], list[tuple[int, str]]] = {}
        for place in (one for one in ledger.queue if one[1] in ledger.not_before):
            lease = ledger.leases[place[1]].lease
            pausing.setdefault((rank_of(lease.demand), lease.holder.user), []).append(place)
        assert pausing == ledger.paused
        paused = {(until_s, lease_id) for lease_id, until_s in ledger.not_before.items()}
        assert paused <= set(ledger.demand_classes.pauses)

    def check_counts(self) -> None:
        """The rest of `check_indexes`."""
        ledger = self.ledger
        assert set(ledger.unreported) == ledger.nodes.keys() - ledger.node_observations.keys()
        assert set(ledger.out_of_use) == {one.name for one in ledger.nodes.values() if one.mode is not NodeMode.ACTIVE}
        reported = [one.reported_at_s for one in ledger.node_observations.values()]
        assert reported == sorted(reported)
        hosts: dict[str, dict[str, None]] = {}
        for node in ledger.nodes.values():
            hosts.setdefault(node.host, {})[node.name] = None
        assert hosts == ledger.fleet.nodes_of_host
        active = [one.lease for one in ledger.leases.values() if one.lease.state is LeaseState.ACTIVE]
        index = ledger.limits
        assert Counter(key for lease in active for key in index.keys_of_lease(lease)) == index.leases
        held = Counter(key for lease in active for _ in lease.gpus for key in index.keys_of_lease(lease))
        assert held == index.gpus
        limits = [one for one in index.records.values() if one.limits.limits_grants]
        limited = {user for one in limits for user in one.members}
        assert index.limited_users == limited | {one.name for one in limits if one.kind is LimitKind.USER}
        assert index.group_of == {user: one.name for one in index.records.values() for user in one.members}
        jobs = [record.job for record in ledger.live_jobs.values()]
        running = Counter(job.array_id for job in jobs if job.array_id and job.state is not JobState.QUEUED)
        assert running == ledger.job_index.running_in_array
        there: dict[str, dict[str, None]] = {}
        for job in jobs:
            for node_name in dict.fromkeys(one.node for one in job.gpus):
                there.setdefault(node_name, {})[job.id] = None
        assert there == ledger.job_index.of_node
        assert {(at_s, lease_id) for lease_id, at_s in ledger.deadlines.items()} <= set(ledger.due.heap)

    def check_dependencies(self) -> None:
        """What jobs wait for, computed from the jobs alone: see `core.dependencies`."""
        live = self.ledger.live_jobs.values()
        arrays = Counter(record.job.array_id for record in live if record.job.array_id is not None)
        assert arrays == self.ledger.job_index.live_in_array
        queued = [record for record in live if record.job.state is JobState.QUEUED and record.job.after]
        unmet = {
            record.job.id: {one.job: None for one in record.job.after if self.ledger.is_live(one.job)}
            for record in queued
        }
        unmet = {job_id: names for job_id, names in unmet.items() if names}
        assert unmet == self.ledger.unmet
        dependents: dict[tuple[str, str], dict[str, None]] = {}
        for job_id, names in unmet.items():
            for one in self.ledger.jobs[job_id].job.after:
                if one.job in names:
                    dependents.setdefault((one.job, one.when), {})[job_id] = None
        assert dependents == self.ledger.dependents
        waiting = {self.ledger.jobs[job_id].job.lease_id for job_id in unmet}
        assert waiting == set(self.ledger.waiting_for_jobs)
        users = Counter(self.ledger.jobs[job_id].job.user for job_id in unmet)
        assert users == self.ledger.waiting_for_jobs_by_user
        in_queue = {lease_id for _, lease_id in self.ledger.queue}
        everyone = {one.lease.id for one in self.ledger.leases.values() if one.lease.state is LeaseState.QUEUED}
        assert in_queue | waiting == everyone
        assert not in_queue & waiting
        assert self.ledger.queue == sorted((self.ledger.leases[one].arrival, one) for one in in_queue)
