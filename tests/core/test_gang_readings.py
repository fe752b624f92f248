"""Gangs on nodes whose readings take seconds: they are read at the same time, and granted within a few readings."""

from __future__ import annotations

import random

import pytest

from gpulease_protocol.model import LeaseState
from gpulease_server.core.gang_readings import nodes_to_ask
from gpulease_server.core.happenings import Ticked
from gpulease_server.core.turn import Turn
from tests.core.build import World

STEP_S, TICK_S, OWN_S = 0.05, 0.2, 5.0
"""Of the played time; between two ticks; between the beginnings of two readings that no one asked for."""


class Nodes:
    """Workers that take so long for a reading, more or less, one reading at a time."""

    def __init__(self, took_s: tuple[float, ...], seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World()
        self.took_s = dict(zip("abcdefgh", took_s, strict=False))
        self.reading: dict[str, tuple[float, float]] = {}
        """By node: when it was begun and when it ends."""
        self.own_at_s: dict[str, float] = {}
        for node in self.took_s:
            self.world.node(node, gpus=1)
        self.world.at_s += 3
        for node, seconds in self.took_s.items():  # each is somewhere in the middle of one
            self.begin(node, self.world.at_s - self.random.uniform(0.0, seconds))

    def begin(self, node: str, at_s: float) -> None:
        self.reading[node] = at_s, at_s + self.took_s[node] * self.random.uniform(0.9, 1.1)
        self.own_at_s[node] = at_s + OWN_S

    def step(self, at_s: float) -> None:
        """What the workers do until then."""
        for node in self.took_s:
            if node in self.reading and self.reading[node][1] <= at_s:
                begun_s, ended_s = self.reading.pop(node)
                self.world.at_s = max(self.world.at_s, at_s)
                age_s = self.world.at_s + 0.001 - begun_s
                self.world.report(node, age_s=age_s, read_s=ended_s - begun_s, reading_limit_s=6.0)
            if node not in self.reading and (node in self.world.wanted or self.own_at_s[node] <= at_s):
                self.begin(node, max(self.world.at_s, at_s) + 0.003)

    def granted_after_s(self, most_s: float) -> float:
        """How long a gang on all nodes waits; fails after `most_s`."""
        world, begun_s = self.world, self.world.at_s
        lease_id = world.ask(1, nodes=len(self.took_s)).replace("ask", "lease")
        at_s = tick_s = begun_s
        while at_s < begun_s + most_s:
            at_s += STEP_S
            self.step(at_s)
            if at_s >= tick_s:
                tick_s, world.at_s = at_s + TICK_S, max(world.at_s, at_s)
                world.turn(Ticked(cause=f"tick-{at_s}", since_last_s=TICK_S))
            record = world.ledger.leases.get(lease_id)
            if record is not None and record.lease.state is LeaseState.ACTIVE:
                world.check()
                return at_s - begun_s
        raise AssertionError(f"not granted within {most_s:g} s")


@pytest.mark.parametrize(
    "took_s", [(0.3,) * 4, (1.2,) * 5, (2.0,) * 4, (0.05, 1.2, 1.2, 2.0), (1.0, 1.2, 2.0, 3.0)], ids=str
)
def test_it_is_granted_within_a_few_readings_however_long_they_take(took_s: tuple[float, ...]) -> None:
    for seed in range(5):
        Nodes(took_s, seed).granted_after_s(6 * max(took_s))


def asked(took_s: dict[str, float], old: str, *, asked_s: dict[str, float], since_s: float = 1.0) -> list[str]:
    """Who is asked now: nodes that take so long, of which those in `old` have not had a recent reading for `since_s`,
    and some were asked so long ago."""
    world = World()
    for node, seconds in took_s.items():
        world.node(node, gpus=1, report=False).report(node, read_s=seconds, reading_limit_s=9.0)
    world.at_s += world.policy.max_observation_age_s + since_s
    for node, seconds in took_s.items():
        if node not in old:
            world.wanted[node] = world.at_s - seconds - 0.2
            world.report(node, age_s=seconds + 0.1, read_s=seconds, reading_limit_s=9.0)
    requested = {node: world.at_s - seconds for node, seconds in asked_s.items()}
    turn = Turn(world.ledger, world.now, world.policy, requested_readings=requested)
    return sorted(nodes_to_ask(turn, list(old), tuple(world.ledger.gpus.values())))


def test_quick_nodes_are_asked_at_once() -> None:
    assert asked({"a": 0.1, "b": 0.2}, "a", asked_s={"b": 0.1}) == ["a"]


def test_while_a_node_is_asked_no_other_is_that_would_end_later() -> None:
    slow = {"a": 2.0, "b": 2.0}
    assert asked(slow, "ab", asked_s={"b": 1.0}) == []
    assert asked(slow, "ab", asked_s={"b": 2.5}) == [], "it is late, and may answer any moment"
    assert asked(slow, "ab", asked_s={"b": 0.1}) == ["a"], "both end at the same time"
    assert asked(slow, "ab", asked_s={}) == ["a", "b"]


def test_the_quicker_are_asked_later_so_that_they_end_with_the_slowest() -> None:
    unequal = {"a": 3.0, "b": 1.0}
    assert asked(unequal, "ab", asked_s={}) == ["a"]
    assert asked(unequal, "ab", asked_s={"a": 1.0}) == []
    assert asked(unequal, "ab", asked_s={"a": 2.0}) == ["b"]


def test_a_recent_reading_that_would_be_too_old_by_then_is_asked_for_again() -> None:
    assert asked({"a": 2.0, "b": 2.0}, "a", asked_s={}, since_s=9.0) == ["a", "b"]
    assert asked({"a": 0.3, "b": 2.0}, "a", asked_s={}, since_s=9.0) == ["a"], "it is recent for long enough"


def test_a_node_that_others_ask_all_the_time_holds_up_no_gang() -> None:
    assert asked({"a": 2.0, "b": 2.0}, "ab", asked_s={"b": 1.0}, since_s=3.9) == []
    assert asked({"a": 2.0, "b": 2.0}, "ab", asked_s={"b": 1.0}, since_s=4.1) == ["a"]
