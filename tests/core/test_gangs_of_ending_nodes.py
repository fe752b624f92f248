"""Gangs and nodes that end: each node of a gang must be there for as long as was declared."""

from __future__ import annotations

import pytest

from gpulease_protocol.model import Lease, LeaseState
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.policy import Policy
from tests.core.build import World

HOUR_S = 3600.0


def fleet(*names: str, ending: str = "") -> World:
    """Nodes of two GPUs, some of which go in an hour."""
    world = World(policy=Policy(max_observation_age_s=60))
    for name in names:
        world.node(name, gpus=2)
    return report(world, ending)


def report(world: World, ending: str) -> World:
    for name in world.nodes:
        world.report(name, available_s=HOUR_S if name in ending else None)
    return world


def gang(world: World, time_s: float | None = 2 * HOUR_S) -> Lease:
    return world.lease(2, nodes=2, time_s=time_s)


def nodes_of(lease: Lease) -> list[str]:
    return [member.node for member in lease.members]


def test_a_gang_is_placed_on_the_nodes_that_last_as_long_as_it_may() -> None:
    world = fleet("a", "b", "c", ending="b")
    assert nodes_of(gang(world)) == ["a", "c"]
    world.check()


@pytest.mark.parametrize("time_s", [None, HOUR_S / 2])
def test_one_that_ends_sooner_or_says_nothing_takes_them_too(time_s: float | None) -> None:
    assert nodes_of(gang(fleet("a", "b", ending="ab"), time_s)) == ["a", "b"]


def test_one_node_that_goes_too_soon_keeps_a_gang_waiting_and_explain_names_it() -> None:
    world = fleet("a", "b", ending="b")
    for _ in range(3):
        lease = gang(world)
        assert lease.state is LeaseState.QUEUED
    told = explain(world.ledger, world.ledger.leases[lease.id], world.now, world.policy)
    assert told.verdict == "not_now", "the allocation may be made longer, and other nodes may come"
    assert {one.node for one in told.obstacles if one.code == "ends_too_soon"} == {"b"}
    assert [(one.node, one.ready) for one in told.nodes] == [("a", True), ("b", False)]
    assert "1 of 2 nodes are ready: a. Node b goes before this must have ended." in told.sentence
    assert told.sentence.count("Node b goes at ") == 1
    world.check()


def test_a_gang_that_such_a_node_cannot_serve_holds_nothing_on_the_others() -> None:
    world = fleet("a", "b", ending="b")
    assert gang(world).state is LeaseState.QUEUED
    world.at_s += world.policy.max_bypass_s + 1
    report(world, "b")
    for _ in range(world.policy.max_bypass + 5):
        lease = world.lease(2)
        assert lease.state is LeaseState.ACTIVE
        world.release(lease)
        report(world, "b")
    assert nodes_of(gang(world, None)) == ["a", "b"]
    world.check()


def test_what_is_held_for_a_gang_is_held_on_the_nodes_that_last() -> None:
    world = fleet("a", "b", "c", ending="b")
    holding = world.lease(2, node="c")
    waiting = gang(world)
    for _ in range(world.policy.max_bypass):
        world.release(world.lease(2, node="a"))
        report(world, "b")
    assert world.lease(1, node="a").state is LeaseState.QUEUED
    assert world.lease(1, node="b").state is LeaseState.ACTIVE
    world.release(holding)
    report(world, "b")
    assert nodes_of(world.now_of(waiting)) == ["a", "c"]
    world.check()


def test_it_is_granted_when_the_allocation_is_made_longer() -> None:
    world = fleet("a", "b", ending="b")
    waiting = gang(world)
    report(report(world, ""), "")
    assert nodes_of(world.now_of(waiting)) == ["a", "b"]
    world.check()


def test_a_gang_takes_no_part_of_a_node_that_leaves() -> None:
    world = fleet("a", "b", "c")
    world.report("a", leaving=True)
    assert nodes_of(gang(world, None)) == ["b", "c"]
    world.check()
