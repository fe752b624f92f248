"""An elastic job while hosts die, are cut off, come back and are forgotten: its attempts never overlap, other requests
are served beside it, and it runs on all of its nodes once nothing fails any more."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from gpulease_protocol.model import Event, JobState
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_server.core.elastic_growth import pause_s
from gpulease_server.core.policy import Policy
from tests.core.build import World
from tests.core.test_gang_jobs import job_of, order

NODES = ("a", "b", "c", "d", "e")
STEP_S = 0.5
LINK_LOST_S = (9.0, 17.0)
"""When the parts of an attempt have ended after a host was lost: at the latest after 9 s, 3 s and 5 s."""


@dataclass
class Part:
    """What a node has of one attempt."""

    others: tuple[str, ...]
    report: JobReport
    ends_at_s: float | None = None
    """When it ends because it has lost another."""

    @property
    def is_alive(self) -> bool:
        return self.report.state is RunState.RUNNING


@dataclass
class Hosts:
    """A job, and workers and supervisors that do with it what the real ones do."""

    seed: int
    world: World = field(default_factory=lambda: World(policy=Policy(node_lost_after_s=120.0)))
    parts: dict[tuple[str, int], Part] = field(default_factory=dict)
    """By node and attempt."""
    away: dict[str, float] = field(default_factory=dict)
    """Hosts that are dead or cut off, and until when."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        for name in NODES:
            self.world.node(name, gpus=2)
        self.job_id = self.world.submit(2, nodes=2, max_nodes=4, retries=100)

    def fail(self) -> None:
        """A host dies, or is cut off."""
        name = self.draw.choice([one for one in NODES if one not in self.away])
        self.away[name] = self.world.at_s + self.draw.choice([3.0, 20.0, 70.0, 130.0])
        if self.draw.random() < 0.5:
            self.parts = {key: part for key, part in self.parts.items() if key[0] != name}
        for (node, _), part in self.parts.items():
            if part.ends_at_s is None and (node == name or name in part.others):
                latest = LINK_LOST_S[1] if node == name else self.draw.uniform(*LINK_LOST_S)
                part.ends_at_s = self.world.at_s + latest

    def follow(self, node: str) -> None:
        """The worker does what the daemon has ordered, and reports it."""
        ordered = order(self.world, self.job_id, node)
        for key in [key for key in self.parts if key[0] == node]:
            if ordered is None or key[1] != ordered.attempt:
                del self.parts[key]
        if ordered is not None:
            key = (node, ordered.attempt)
            report = JobReport(
                job_id=self.job_id, attempt=ordered.attempt, state=RunState.STARTING, log_directory="/logs"
            )
            part = self.parts.setdefault(key, Part(ordered.gang.nodes, report))
            if part.report.state is not RunState.EXITED:
                state = RunState.RUNNING if ordered.go or part.is_alive else RunState.PREPARED
                part.report = JobReport(job_id=self.job_id, attempt=key[1], state=state, log_directory="/logs")
                if ordered.stop:
                    self.end(part)
        self.world.jobs[node] = [part.report for key, part in self.parts.items() if key[0] == node]

    def end(self, part: Part) -> None:
        part.report = JobReport(
            job_id=self.job_id,
            attempt=part.report.attempt,
            state=RunState.EXITED,
            exit_code=143,
            reason="It was stopped on request.",
            follows=True,
            log_directory="/logs",
        )

    def step(self) -> None:
        world = self.world
        self.away = {name: until_s for name, until_s in self.away.items() if until_s > world.at_s}
        for part in self.parts.values():
            if part.ends_at_s is not None and world.at_s >= part.ends_at_s and part.report.state is not RunState.EXITED:
                self.end(part)
        for node in NODES:
            if node not in self.away and node in world.nodes:
                self.follow(node)
        world.pass_time(STEP_S, silent=tuple(self.away))
        for name in [name for name in world.wanted if name not in self.away]:
            world.report(name)
        alive = {attempt for (_, attempt), part in self.parts.items() if part.is_alive}
        assert len(alive) <= 1, f"attempts {alive} run at once"
        world.check()

    @property
    def nodes(self) -> set[str]:
        return {one.node for one in job_of(self.world, self.job_id).members}


@pytest.mark.parametrize("seed", range(8))
def test_attempts_never_overlap_and_it_runs_on_all_of_its_nodes_in_the_end(seed: int) -> None:
    hosts = Hosts(seed)
    world = hosts.world
    for _ in range(600):
        if len(hosts.away) < 2 and hosts.draw.random() < 0.05:
            hosts.fail()
        if hosts.draw.random() < 0.02:
            world.ask(hosts.draw.choice([1, 2]), ttl_s=20.0)
        hosts.step()
    hosts.away.clear()
    calm_s = 120 + 2 * pause_s(world.ledger.jobs[hosts.job_id])
    for _ in range(int(calm_s / STEP_S)):
        hosts.step()
    job = job_of(world, hosts.job_id)
    lease = world.ledger.leases[job.lease_id].lease
    assert job.state is JobState.RUNNING, job
    assert hosts.nodes == {one.node for one in lease.members}
    assert not world.ledger.queue, "others are served beside it"


def test_the_storms_have_what_could_go_wrong() -> None:
    kinds: set[str] = set()
    for seed in range(3):
        hosts = Hosts(seed)
        for _ in range(500):
            if len(hosts.away) < 2 and hosts.draw.random() < 0.05:
                hosts.fail()
            hosts.step()
        kinds |= {one.kind for one in hosts.world.changes if isinstance(one, Event)}
    assert {"job.shrunk", "job.grown", "job.retried"} <= kinds
