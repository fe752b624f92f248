"""Promises 1 and 2 (and 3, 5, 8) under whatever can happen in whatever order.

The machine below plays clients, nodes, processes on GPUs and the clock, and after every step compares the ledger with a
model that knows nothing of its code: it reads only the events and the readings that were given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.model import Event, Lease, LeaseState, Selection
from gpulease_protocol.node_protocol import JobReport, OwnerState, RunState
from tests.core.build import NOON, World, gpu, uuid

COUNTS = st.integers(1, 5)


class Machine(RuleBasedStateMachine):
    """Two nodes of four and two GPUs; everything else is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.leases: list[Lease] = []
        self.seen = 0
        self.held: dict[str, str] = {}
        self.ended_at: dict[str, float] = {}
        self.tokens: list[int] = []

    @initialize()
    def start(self) -> None:
        self.world.nodes = {"a": [gpu(index, "a") for index in range(4)], "b": [gpu(index, "b") for index in range(2)]}
        self.report("a", 0.0)
        self.report("b", 0.0)

    @rule(
        count=COUNTS,
        queue=st.booleans(),
        ttl_s=st.sampled_from([0.4, 2.0, 100.0]),
        auto=st.booleans(),
        owner=st.sampled_from([None, None, 1, 2, 3]),
    )
    def ask(self, count: int, queue: bool, ttl_s: float, auto: bool, owner: int | None = None) -> None:
        what: dict[str, Any] = {"selection": Selection.AUTO} if auto else {}
        if owner is not None and self.world.owners.get(owner) is OwnerState.GONE:
            owner = None  # who is gone asks for nothing
        self.world.ask(count, queue=queue, ttl_s=ttl_s, owner=owner, **what)

    @rule(pid=st.sampled_from([1, 2, 3]), state=st.sampled_from(OwnerState))
    def owner(self, pid: int, state: OwnerState) -> None:
        if self.world.owners.get(pid) is not OwnerState.GONE:
            self.world.owners[pid] = state

    @rule(node=st.sampled_from("ab"), index=st.integers(0, 3))
    def ask_for_one(self, node: str, index: int) -> None:
        self.world.ask(1, selection=Selection.LISTED, uuids=(uuid(index, node),))

    @rule(count=st.integers(1, 3), queue=st.booleans())
    def ask_for_a_gang(self, count: int, queue: bool) -> None:
        self.world.ask(count, nodes=2, queue=queue)

    @rule(count=COUNTS)
    def submit(self, count: int) -> None:
        number = len(self.world.ledger.jobs)
        self.world.submit(count)
        assert len(self.world.ledger.jobs) in (number, number + 1)

    @rule(node=st.sampled_from("ab"), age_s=st.sampled_from([0.0, 0.1, 0.6, 3.0]))
    def report(self, node: str, age_s: float) -> None:
        self.world.report(node, age_s=age_s)

    @rule(node=st.sampled_from("ab"))
    def probe_hangs(self, node: str) -> None:
        self.world.report(node, problem="hung")

    @rule(node=st.sampled_from("ab"), index=st.integers(0, 3), pids=st.sampled_from([(), (7,)]))
    def process(self, node: str, index: int, pids: tuple[int, ...]) -> None:
        readings = self.world.nodes[node]
        if index < len(readings):
            readings[index] = replace(readings[index], processes=gpu(0, pids=pids).processes)

    @precondition(lambda self: self.world.ledger.leases)
    @rule(data=st.data(), what=st.sampled_from(["renew", "release", "wrong token"]))
    def act(self, data: st.DataObject, what: str) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.world.ledger.leases)))
        lease = self.world.ledger.leases[lease_id].lease
        if what == "renew":
            self.world.renew(lease)
        elif what == "release":
            self.world.release(lease)
        else:
            assert isinstance(self.world.release(lease, token=10**9), GpuleaseError)
            assert self.world.ledger.leases[lease_id].lease == lease

    @precondition(lambda self: self.world.ledger.live_jobs)
    @rule(data=st.data(), what=st.sampled_from(["runs", "exits", "cancel"]))
    def job(self, data: st.DataObject, what: str) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.world.ledger.live_jobs)))
        gpus = self.world.ledger.jobs[job_id].job.gpus
        if what == "cancel" or not gpus:
            self.world.cancel(job_id)
            return
        state = RunState.RUNNING if what == "runs" else RunState.EXITED
        known = [item for item in self.world.jobs.get(gpus[0].node, []) if item.job_id != job_id]
        exit_code = 0 if what == "exits" else None
        self.world.jobs[gpus[0].node] = [*known, JobReport(job_id=job_id, state=state, exit_code=exit_code)]

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds, silent=("a", "b"))

    @invariant()
    def promises_hold(self) -> None:
        self.world.check()
        for change in self.world.changes[self.seen :]:
            if isinstance(change, Event):
                self.follow(change)
        self.seen = len(self.world.changes)

    def follow(self, event: Event) -> None:
        """The model: who holds which GPU, by the events alone; and what was read before each grant."""
        if event.kind == "lease.ended" and event.reason == "holder_died" and event.fencing_token is not None:
            owner = self.world.ledger.leases[event.lease_id or ""].lease.holder.owner_pid
            assert owner is not None
            assert self.world.owners[owner] is OwnerState.GONE, "taken from a holder that no one saw die"
        if event.kind in ("lease.granted", "lease.revived"):
            for held in event.gpus:
                assert held not in self.held, f"{held} granted to {event.lease_id} while {self.held[held]} has it"
                self.held[held] = event.lease_id or ""
        if event.kind == "lease.granted":
            assert event.fencing_token is not None
            assert event.fencing_token > max(self.tokens, default=0)
            self.tokens.append(event.fencing_token)
            for held in event.gpus:
                at_s = (event.at - NOON).total_seconds()
                arrived = [item for item in self.world.shown[held] if item[0] <= at_s + 1e-5]
                _, read_at, reading = max(arrived, key=lambda item: item[1])
                assert at_s - read_at <= 0.5 + 1e-5, "granted on an old reading"
                assert not reading.processes, "granted while someone is on it"
                assert read_at > self.ended_at.get(held, 0.0) - 1e-5, "granted without a look after the holder before"
        if event.kind == "lease.ended":
            for held in event.gpus:
                if self.held.get(held) == event.lease_id:
                    del self.held[held]
                    self.ended_at[held] = (event.at - NOON).total_seconds()

    @invariant()
    def no_request_waits_for_what_is_free(self) -> None:
        """First come first served leaves no GPU idle that the first in the queue could have."""
        first = next(self.world.ledger.queued(), None)
        if first is None or first.lease.id in self.world.pending or first.lease.demand.selection is not Selection.COUNT:
            return
        if first.lease.demand.nodes > 1:
            return  # no two nodes report at the same moment here
        if any(
            since_s > self.world.at_s - self.world.policy.reading_deadline_s for since_s in self.world.wanted.values()
        ):
            return  # a fuller node was asked for a reading; the first in the queue waits for that, and not for long
        for name in "ab":
            sighting = self.world.ledger.node_observations.get(name)
            if sighting is None or sighting.observed_at_s != self.world.at_s or sighting.problem:
                continue
            free = [
                record
                for record in self.world.ledger.gpus.values()
                if record.device.node == name
                and record.lease_id is None
                and not sighting.readings[record.device.uuid].processes
            ]
            assert len(free) < first.lease.demand.count, "the first in the queue waits for free GPUs"


TestPromises = Machine.TestCase
TestPromises.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_machine_reaches_grants_queues_and_revivals() -> None:
    """The model is useless if the machine never gets anywhere: a fixed walk shows that it does."""
    machine = Machine()
    machine.start()
    machine.ask(4, True, 0.4, False)
    machine.ask(2, True, 100.0, False)
    machine.ask(5, True, 100.0, False)
    machine.report("a", 0.0)
    machine.report("b", 0.0)
    machine.time_passes(1.0)
    machine.promises_hold()
    states = [record.lease.state for record in machine.world.ledger.leases.values()]
    assert states.count(LeaseState.ENDED) == 1
    assert states.count(LeaseState.ACTIVE) == 1
