"""A node whose name does not come back is forgotten; one that is needed, or only silent for a while, is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpulease_protocol.model import NodeMode
from gpulease_server.core.node_loss import SEEN_INTERVAL_S
from gpulease_server.core.records import NodeRecord
from tests.core.build import World

DAY_S = 24 * 3600.0
LONG_S = 92 * DAY_S


def two() -> World:
    return World().node("a", gpus=1).node("b", gpus=2)


def later(world: World, seconds: float, *, silent: str = "b") -> World:
    """So much later, with the other node still there."""
    world.at_s += seconds
    for name in world.nodes:
        if name != silent:
            world.report(name)
    world.pass_time(0.25, silent=(silent,))
    return world


def test_a_node_that_is_gone_for_long_is_forgotten_with_its_gpus() -> None:
    world = later(two(), LONG_S)
    assert set(world.ledger.nodes) == set(world.ledger.node_observations) == {"a"}
    assert {gpu.device.node for gpu in world.ledger.gpus.values()} == {"a"}
    assert [one.node for one in world.events("node.forgotten")] == ["b"]


def test_one_that_was_silent_for_less_is_not() -> None:
    world = later(two(), LONG_S - 3 * DAY_S)
    assert set(world.ledger.nodes) == {"a", "b"}


def test_one_that_comes_back_is_there_again() -> None:
    world = later(two(), LONG_S).node("b", gpus=2)
    assert world.lease(2).state == "active"


def test_one_that_reports_is_kept_however_long_nothing_else_happens_to_it() -> None:
    world = two()
    for _ in range(100):
        later(world, DAY_S, silent="")
    assert set(world.ledger.nodes) == {"a", "b"}


@pytest.mark.parametrize("need", ["cordon", "drained"])
def test_one_that_something_refers_to_stays(need: str) -> None:
    world = two()
    if need == "cordon":
        world.cordon(0, "b")
    else:
        world.set_mode(NodeMode.DRAINING, "b")
    later(world, LONG_S)
    assert set(world.ledger.nodes) == {"a", "b"}
    assert len(world.ledger.gpus) == 3


def test_one_that_died_with_a_lease_on_it_is_forgotten_although_no_one_will_ever_see_its_gpus_clean() -> None:
    world = two()
    world.lease(2)
    later(world, LONG_S)
    assert set(world.ledger.nodes) == {"a"}
    assert {gpu.device.node for gpu in world.ledger.gpus.values()} == {"a"}
    gone = [one.gpus for one in world.events("gpu.gone")]
    assert len(gone) == 2, "the log must say why they need not be seen clean"


def test_that_it_is_there_is_recorded_once_a_day() -> None:
    world = two()
    world.changes.clear()
    for _ in range(24):
        later(world, SEEN_INTERVAL_S / 24)
    assert [one.name for one in world.changes if isinstance(one, NodeRecord)] == ["a"]


def test_of_one_from_before_this_was_recorded_the_time_begins_now() -> None:
    world = two()
    world.lose_reports()  # a restart
    world.ledger.nodes["b"] = replace(world.ledger.nodes["b"], seen_at=None)
    later(world, 1)
    assert world.ledger.nodes["b"].seen_at is not None
    later(world, LONG_S)
    assert set(world.ledger.nodes) == {"a"}


def test_a_wall_clock_that_jumps_forgets_no_one_who_has_reported() -> None:
    world = two()
    world.wall_jump_s = LONG_S
    later(world, 60)
    assert set(world.ledger.nodes) == {"a", "b"}
