"""Random days with preemption, restarts, limits, commits and GPUs that fail, as those see them who end or start."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pytest

from gpulease_protocol.model import Event, JobState, LeaseState, Priority
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_server.core.happenings import Ticked, WaiterPolled
from gpulease_server.core.job_orders import job_order
from gpulease_server.core.policy import Policy
from gpulease_server.core.preempted_gpus import preemptions_under_way
from gpulease_server.runtime.outage import copy_ledger
from tests.core.build import World, gpu, uuid
from tests.core.test_preemption import NOTICE_S, RULES, preempt_at
from tests.core.test_preemption_failures import restart

NODES = {"a": 4, "b": 2}
TTL_S = 30.0


@dataclass
class Day:
    """Users, hosts and an administrator who do what the seed decides, once in a second."""

    seed: int
    world: World = field(default_factory=lambda: World(policy=Policy(**RULES, retained_memory_s=1.0, max_bypass=2)))
    told: dict[str, tuple[float, datetime]] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    stopped: dict[str, float] = field(default_factory=dict)
    sick: dict[str, float] = field(default_factory=dict)
    failed_s: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.disk = random.Random(self.seed)
        for name, gpus in NODES.items():
            self.world.node(name, gpus=gpus)

    def decide(self) -> None:
        here, draw, what = self.world, self.draw, self.draw.random()
        queued = [here.ledger.leases[lease_id].lease for _, lease_id in here.ledger.queue]
        if what < 0.12 and len(queued) < 6:
            is_scavenge = draw.random() < 0.6
            priority = Priority.SCAVENGE if is_scavenge else Priority.NORMAL
            asked: dict[str, Any] = {"priority": priority, "user": draw.choice(["ada", "bob"])}
            count = draw.choice([1, 1, 2] if is_scavenge else [1, 2, 3, 4])
            here.submit(count, **asked) if draw.random() < 0.4 else here.ask(count, ttl_s=TTL_S, **asked)
            here.answer_wanted()
        elif what < 0.13:
            here.limit(draw.choice(["ada", "bob"]), **draw.choice([{}, {"max_gpus": 3}]))
        elif what < 0.14 or (what > 0.95 and here.ledger.preemptions):
            restart(here, draw.choice([0.1, 5.0, 100.0]))
            here.turn(Ticked(cause=f"first-{here.at_s}", since_last_s=0.25, stalled_s=0.0))
        elif what < 0.15:
            failing = draw.choice(list(here.ledger.gpus))
            self.sick[failing], self.failed_s[failing] = here.at_s + 10.0, here.at_s
        elif what < 0.16 and queued and queued[0].job_id is None:
            here.release(queued[0])

    def hosts(self) -> None:
        here = self.world
        for name, gpus in NODES.items():
            here.jobs[name] = []
            health = ["lost" if self.sick.get(uuid(at, name), 0.0) > here.at_s else "ok" for at in range(gpus)]
            here.nodes[name] = [gpu(at, name, health=health[at]) for at in range(gpus)]
            for job_id in here.ledger.job_index.of_node.get(name, ()):
                order = job_order(here.ledger, here.ledger.jobs[job_id], name, simulated=False)
                if order.stop or self.draw.random() < 0.005:
                    self.stopped.setdefault(order.lease_id, here.at_s + self.draw.uniform(0.0, NOTICE_S - 2.0))
                ends = here.at_s >= self.stopped.get(order.lease_id, float("inf"))
                report = JobReport(job_id=job_id, attempt=order.attempt, state=RunState.RUNNING, started_at=here.now.at)
                ended = {"state": RunState.EXITED, "exit_code": 0, "reason": "It was stopped." if order.stop else None}
                here.jobs[name].append(replace(report, **ended) if ends else report)
            here.report(name)

    def users(self) -> None:
        here = self.world
        for record in list(here.ledger.leases.values()):
            lease = record.lease
            if lease.job_id is None and lease.state is LeaseState.QUEUED and lease.id not in here.pending:
                here.turn(WaiterPolled(cause="poll", lease_id=lease.id))
            elif lease.job_id is None and lease.state is LeaseState.ACTIVE:
                ends = self.draw.random() < (0.001 if lease.demand.priority is Priority.SCAVENGE else 0.02)
                here.release(lease) if ends else here.renew(lease)

    def tick(self) -> None:
        """A turn of the clock alone. Where its commit fails nothing of it has happened: the daemon reads its ledger
        again, and no one hears of what it had decided."""
        here, ticked = self.world, Ticked(cause=f"tick-{self.world.at_s}", since_last_s=1.0, stalled_s=0.0)
        committed, seen = copy_ledger(here.ledger), len(here.changes)
        is_settled = not here.pending
        here.turn(ticked)
        lost = [one.kind for one in here.changes[seen:] if isinstance(one, Event) and "preempt" in one.kind]
        if lost and is_settled and self.disk.random() < 0.5:
            self.counts["lost turns"] += 1
            del here.changes[seen:]
            here.ledger = committed
            restart(here)
            here.turn(replace(ticked, cause=f"again-{here.at_s}"))

    def step(self) -> None:
        here, seen = self.world, len(self.world.changes)
        soon = replace(here.now, mono_s=here.at_s + 2.0)
        held = {one.lease_id: one.gpus for one, _ in preemptions_under_way(here.ledger, soon, here.policy)}
        free = {found for found, record in here.ledger.gpus.items() if record.lease_id is None}
        here.at_s += 1.0
        self.decide()
        self.hosts()
        self.tick()
        self.users()
        here.answer_wanted()
        for event in [one for one in here.changes[seen:] if isinstance(one, Event)]:
            self.judge(event, held, free)
        for waits in [waits for waits, at_s in self.ended.items() if here.at_s > at_s + 5.0]:
            del self.ended[waits]
            self.starts(waits)
        self.places |= {one.lease.id: one.arrival for one in here.ledger.leases.values()}
        for lease_id, (_, moment) in self.told.items():
            lease = here.ledger.leases[lease_id].lease
            if lease.state is LeaseState.ACTIVE:
                assert preempt_at(here, lease) in (moment, None), "the moment is never moved"

    def judge(self, event: Event, held: dict[str, tuple[str, ...]], free: set[str]) -> None:
        here, lease_id = self.world, event.lease_id or ""
        lease = here.ledger.leases[lease_id].lease if lease_id in here.ledger.leases else None
        if event.kind == "lease.granted":
            for waits, gpus in held.items():
                withdrawn = waits in here.ledger.preemptions and not here.ledger.preemptions[waits].gpus
                still = here.ledger.leases[waits].lease.state is LeaseState.QUEUED and not withdrawn
                assert not still or waits == lease_id or free.isdisjoint({*gpus} & {*event.gpus}), "held for another"
        elif event.kind == "lease.preempting" and lease is not None and event.job_id is None:
            self.told[lease_id] = here.at_s, preempt_at(here, lease)
        elif event.kind == "lease.preempted" and event.job_id is None:
            told_s, _ = self.told.pop(lease_id)
            assert here.at_s - told_s >= TTL_S
            self.ended[(event.reason or "").split()[1]] = here.at_s
        elif event.kind == "job.preempted":
            job = here.ledger.jobs[event.job_id or ""].job
            assert here.ledger.leases[lease_id].arrival == self.places[job.attempt_history[-1].lease_id]
            assert job.preempted <= 2
        self.counts[event.kind] += 1

    def starts(self, waits: str) -> None:
        """Its GPUs are its own soon after leases have ended for a request, unless one of them fails."""
        here = self.world
        gpus = here.ledger.preemptions[waits].gpus if waits in here.ledger.preemptions else ()
        has_failed = any(self.failed_s.get(one, 0.0) > here.at_s - 20.0 for one in gpus)
        stops = any(one.job.state is JobState.STOPPING for one in here.ledger.live_jobs.values())
        waits_on = here.ledger.leases[waits].lease.state is LeaseState.QUEUED
        assert not waits_on or has_failed or stops, f"{waits} has not started"


@pytest.mark.parametrize("seed", [7, 8, 13])
def test_who_ends_and_who_starts_have_what_was_promised(seed: int) -> None:
    day = Day(seed)
    for _ in range(500):
        day.step()
    day.world.check()
    assert day.counts["lease.preempted"] > 1
    assert day.counts["lost turns"] > 1
