"""Hundreds of gangs of one to four nodes among other requests, with nodes that fall silent, are lost and come back: all
or none, no deadlock, and every request is served."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from gpulease_protocol.model import Event, Lease, LeaseState
from gpulease_server.core.policy import Policy
from tests.core.build import World

pytestmark = pytest.mark.xdist_group("gang storms")
"""In one process, so that a storm is run once for all tests."""

LOST_AFTER_S = 2.0
NODES = {"a": 4, "b": 2, "c": 2, "d": 2, "e": 2, "f": 1}
ROUNDS = 400
"""Until then a bounded queue is served, once nothing fails any more."""


@dataclass
class Storm:
    """Requests, releases and failures in an order that the seed decides."""

    seed: int
    world: World = field(default_factory=lambda: World(policy=Policy(max_bypass=2, node_lost_after_s=LOST_AFTER_S)))
    silent: dict[str, float] = field(default_factory=dict)
    """Nodes that say nothing, and until when."""
    asked: Counter[int] = field(default_factory=Counter)
    """How many requests there were, by number of nodes."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        for name, gpus in NODES.items():
            self.world.node(name, gpus=gpus)

    def ask(self) -> None:
        nodes = self.draw.choice([1, 1, 2, 2, 3, 4])
        count = self.draw.choice([1, 1, 2]) if nodes > 1 else self.draw.choice([1, 2, 4])
        self.asked[nodes] += 1
        self.world.ask(count, nodes=nodes, ttl_s=1000.0, user=self.draw.choice(["ann", "bob"]))

    def active(self) -> list[Lease]:
        return [one.lease for one in self.world.ledger.leases.values() if one.lease.state is LeaseState.ACTIVE]

    def release(self) -> None:
        """A holder gives back, unless it is on a node that is silent."""
        reached = [one for one in self.active() if not any(gpu.node in self.silent for gpu in one.gpus)]
        if reached:
            self.world.release(self.draw.choice(reached))

    def fail(self) -> None:
        """A node falls silent: for a moment, or until it is lost and longer."""
        name = self.draw.choice(list(NODES))
        self.silent[name] = self.world.at_s + self.draw.choice([0.5, 6.0, 15.0])

    def go_on(self, seconds: float) -> None:
        """Time passes; the nodes that are not silent report, also what they are asked for."""
        world = self.world
        self.silent = {name: until_s for name, until_s in self.silent.items() if until_s > world.at_s}
        world.pass_time(seconds, silent=tuple(self.silent))
        for name in [name for name in world.wanted if name not in self.silent]:
            world.report(name)
        world.check()

    def run(self, requests: int) -> None:
        while self.asked.total() < requests:
            for _ in range(self.draw.choice([0, 1, 3])):
                if len(self.world.ledger.queue) < 12:
                    self.ask()
            for _ in range(self.draw.choice([0, 0, 1, 2])):
                self.release()
            if self.draw.random() < 0.1:
                self.fail()
            self.go_on(self.draw.choice([0.05, 0.3]))

    def calm_down(self) -> int:
        """Nothing fails and nothing is asked for any more, and what is held is given back. In how many rounds all are
        served."""
        self.silent.clear()
        for number in range(ROUNDS):
            if not self.world.ledger.queue:
                return number
            self.release()
            self.go_on(0.3)
        raise AssertionError(f"{[one.lease.demand for one in self.world.ledger.queued()]} wait forever")


@functools.cache
def stormy(seed: int) -> Storm:
    storm = Storm(seed)
    storm.run(requests=150)
    return storm


@pytest.mark.parametrize("seed", range(6))
def test_hundreds_of_gangs_are_served_whole(seed: int) -> None:
    storm = stormy(seed)
    assert storm.calm_down() < ROUNDS
    events = [one for one in storm.world.changes if isinstance(one, Event)]
    granted = {one.lease_id: set(one.gpus) for one in events if one.kind == "lease.granted"}
    assert len(granted) == storm.asked.total(), "every request is served"
    for one in events:
        if one.kind == "lease.ended":
            assert set(one.gpus) == granted[one.lease_id], "a gang ends everywhere at once"


def test_the_storms_have_what_a_gang_could_get_wrong() -> None:
    kinds: Counter[str] = Counter()
    asked: Counter[int] = Counter()
    for seed in range(6):
        storm = stormy(seed)
        asked += storm.asked
        events = [one for one in storm.world.changes if isinstance(one, Event)]
        kinds += Counter(f"{one.kind} {one.reason if one.kind == 'lease.ended' else ''}".strip() for one in events)
    assert sum(number for nodes, number in asked.items() if nodes > 1) > 500
    assert set(asked) == {1, 2, 3, 4}
    assert min(kinds["lease.queued"], kinds["node.unknown"]) > 50
    assert kinds["lease.ended node_lost"] > 5
