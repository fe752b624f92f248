"""Ticks come only when something may be due, and nothing happens later for it.

Each story is told twice: with a tick every 0.25 s, and with those alone that `next_tick_s` asks for. In all tests of
the core `World.turn` checks that a tick which was not due has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.model import EndReason, Event, GpuState, JobState, NodeMode
from gpulease_server.core.happenings import IdempotencyKey, Ticked
from gpulease_server.core.next_tick import AT_ONCE, NEVER, next_tick_s
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import KeyRemoved
from tests.core.build import World

POLICY = Policy(node_lost_after_s=20.0, key_lifetime_s=15.0)
STEP_S = 0.25


class Daemon(World):
    """A world whose time passes with a tick every `STEP_S`, or only with those that are due."""

    sleeps = False
    ticks = 0

    def pass_time(self, seconds: float, *, silent: tuple[str, ...] = ()) -> None:
        """Let time pass; all nodes report once a second, but for the silent ones."""
        last_s = self.at_s
        for step in range(int(seconds / STEP_S)):
            self.at_s += STEP_S
            for name in self.nodes:
                if name not in silent and step % 4 == 0:
                    self.report(name)
            if not self.sleeps or next_tick_s(self.ledger, self.pending, self.policy) <= self.at_s:
                self.ticks += 1
                self.turn(Ticked(cause="tick", since_last_s=self.at_s - last_s))
                last_s = self.at_s

    def happened(self) -> list[tuple[str, float | None]]:
        """All events and forgotten keys, with their times."""
        found = [one for one in self.changes if isinstance(one, (Event, KeyRemoved))]
        return [(one.kind, one.at.timestamp()) if isinstance(one, Event) else ("key.removed", None) for one in found]


def a_lease_expires(world: Daemon) -> bool:
    lease = world.lease(ttl_s=5.3)
    world.pass_time(8)
    return world.now_of(lease).end_reason is EndReason.EXPIRED


def a_client_that_waited_is_gone(world: Daemon) -> bool:
    world.lease(8, ttl_s=100)
    waits = world.lease(1, ttl_s=5.0)
    assert next_tick_s(world.ledger, world.pending, world.policy) == AT_ONCE, "its turn may come with time alone"
    world.pass_time(8)
    return world.now_of(waits).end_reason is EndReason.HOLDER_DIED


def a_node_falls_silent(world: Daemon) -> bool:
    world.pass_time(8, silent=("a",))
    return "node.unknown" in dict(world.happened())


def a_node_is_silent_for_good(world: Daemon) -> bool:
    lease = world.lease(ttl_s=20.0)
    world.pass_time(5, silent=("a",))
    world.pass_time(5)
    world.pass_time(19, silent=("a",))
    was_lost = "node.lost" in dict(world.happened())
    world.pass_time(8, silent=("a",))
    return not was_lost and world.now_of(lease).end_reason is not None


def a_node_is_paused(world: Daemon) -> bool:
    world.set_mode(NodeMode.PAUSED)
    world.pass_time(2)
    world.pass_time(8, silent=("a",))
    return world.state() is GpuState.UNKNOWN


def a_lease_lasts_as_long_as_its_token_allows(world: Daemon) -> bool:
    lease = world.lease(ttl_s=1000.0, token="t", budget=Budget(max_lease_s=6.0))
    world.pass_time(8)
    return world.now_of(lease).end_reason is EndReason.BUDGET_SPENT


def a_key_is_forgotten(world: Daemon) -> bool:
    world.release(world.lease(key=IdempotencyKey(key="key", fingerprint="body")))
    world.pass_time(20)
    return not world.ledger.keys


def a_job_is_tried_again_after_a_pause(world: Daemon) -> bool:
    job_id = world.submit(retries=1)
    world.ended(job_id, code=1)
    world.pass_time(4)
    return world.ledger.jobs[job_id].job.state is JobState.STARTING


STORIES = [
    a_lease_expires,
    a_client_that_waited_is_gone,
    a_node_falls_silent,
    a_node_is_silent_for_good,
    a_node_is_paused,
    a_lease_lasts_as_long_as_its_token_allows,
    a_key_is_forgotten,
    a_job_is_tried_again_after_a_pause,
]


@pytest.mark.parametrize("story", STORIES)
def test_everything_happens_at_the_same_time_as_with_a_tick_every_quarter_of_a_second(
    story: Callable[[Daemon], bool],
) -> None:
    always, due = Daemon(policy=POLICY), Daemon(policy=POLICY)
    due.sleeps = True
    for world in (always, due):
        world.node()
        assert story(world)
    assert due.happened() == always.happened()


def test_a_host_on_which_nothing_happens_has_no_ticks() -> None:
    world = Daemon(policy=POLICY).node()
    assert isinstance(world, Daemon)
    world.sleeps = True
    world.pass_time(20)
    assert world.ticks == 0
    world.lease(ttl_s=30.0)
    world.pass_time(20)
    assert world.ticks == 0, "the deadline has not come"
    world.pass_time(30)
    assert 1 <= world.ticks <= 2


def test_a_daemon_without_nodes_sleeps_forever_and_one_that_waits_for_a_node_does_not() -> None:
    world = World()
    assert next_tick_s(world.ledger, world.pending, world.policy) == NEVER
    world.node()
    world.lose_reports()
    assert next_tick_s(world.ledger, world.pending, world.policy) == AT_ONCE
