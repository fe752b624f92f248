"""Nodes of an elastic job that are silent for a few seconds, or cannot read their GPUs, just as an attempt ends: a busy
host, a worker that is replaced, a daemon that was stopped. The job waits for them, for a while."""

from __future__ import annotations

import pytest

from gpulease_protocol.model import JobState
from gpulease_protocol.node_protocol import RunState
from gpulease_server.core.elastic_growth import GROW_AFTER_S
from gpulease_server.core.gang_run import FENCE_S, SILENT_S
from tests.core.build import World
from tests.core.test_elastic_jobs import elastic, lose, nodes_of, start, stopped
from tests.core.test_gang_jobs import fleet, job_of, part

LATE_S = 5.0
"""Longer than a node may be silent before it counts as that."""


def stopped_for(node: str, *nodes: str) -> tuple[World, str]:
    """An elastic job on `nodes` that is stopped for another one, which is back."""
    world = fleet(*nodes, node)
    job_id = elastic(world)
    lose(world, job_id, node)
    start(world, job_id)
    world.jobs[node] = []
    world.pass_time(GROW_AFTER_S + 2)
    assert job_of(world, job_id).state is JobState.STOPPING
    return world, job_id


def attempt(world: World, job_id: str) -> tuple[int, JobState, list[str]]:
    job = job_of(world, job_id)
    return job.attempts, job.state, nodes_of(world, job_id)


def test_a_node_that_is_late_as_the_others_have_stopped_for_it_takes_part() -> None:
    world, job_id = stopped_for("c", "a", "b")
    world.pass_time(LATE_S, silent=("c",))
    stopped(world, job_id)
    world.pass_time(1, silent=("c",))
    assert attempt(world, job_id) == (2, JobState.STOPPING, ["a", "b"])
    world.pass_time(1)
    assert attempt(world, job_id) == (3, JobState.STARTING, ["a", "b", "c"]), "the stop was for nothing"
    world.check()


def test_a_node_whose_gpus_cannot_be_read_for_a_moment_takes_part() -> None:
    world, job_id = stopped_for("c", "a", "b")
    world.report("c", problem="the driver did not answer within 2 s")
    stopped(world, job_id)
    assert attempt(world, job_id) == (2, JobState.STOPPING, ["a", "b"])
    world.report("c")
    world.pass_time(1)
    assert attempt(world, job_id) == (3, JobState.STARTING, ["a", "b", "c"])


@pytest.mark.parametrize("problem", [None, "the driver did not answer within 2 s"])
def test_the_others_wait_for_a_while_only(problem: str | None) -> None:
    world, job_id = stopped_for("c", "a", "b")
    world.pass_time(LATE_S, silent=("c",))
    if problem is not None:
        world.report("c", problem=problem)
    stopped(world, job_id)
    until_s = world.at_s + SILENT_S + 1
    while world.at_s < until_s:
        world.pass_time(0.25, silent=("c",))
        if problem is not None:
            world.report("c", problem=problem)
    assert attempt(world, job_id) == (3, JobState.STARTING, ["a", "b"])
    assert job_of(world, job_id).attempt_history[-1].reason == "The node it was stopped for is away again."


def test_no_one_waits_for_a_node_that_has_been_away_for_long() -> None:
    world = fleet("a", "b", "c", "d")
    job_id = elastic(world, most=4)
    lose(world, job_id, "c", "d")
    start(world, job_id)
    world.jobs["d"] = []
    world.pass_time(GROW_AFTER_S + 2, silent=("c",))
    stopped(world, job_id)
    assert attempt(world, job_id) == (3, JobState.STARTING, ["a", "b", "d"])


def test_a_node_that_has_taken_part_and_is_late_is_no_lost_one() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    for node in "ab":
        said = f"Node c can no longer be reached from node {node}: no answer."
        part(world, job_id, node, RunState.EXITED, exit_code=143, reason=said, follows=True)
    world.pass_time(FENCE_S - 2, silent=("c",))
    world.pass_time(LATE_S + 1, silent=("b", "c"))  # the part on c must have ended by now
    assert attempt(world, job_id) == (1, JobState.STOPPING, ["a", "b", "c"]), "two are enough, and both are there"
    world.pass_time(1, silent=("c",))
    assert attempt(world, job_id) == (2, JobState.STARTING, ["a", "b"])


def test_all_nodes_count_as_late_after_the_daemon_was_stopped() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    part(world, job_id, "c", RunState.EXITED, reason="The job's supervisor died; its processes were killed.")
    part(world, job_id, "a", RunState.EXITED, exit_code=143, follows=True)
    world.at_s += 3600
    part(world, job_id, "b", RunState.EXITED, exit_code=143, follows=True)
    world.pass_time(0.25, silent=("a", "b", "c"), stalled_s=3600.0)
    assert attempt(world, job_id) == (1, JobState.STOPPING, ["a", "b", "c"])
    world.pass_time(1)
    assert attempt(world, job_id) == (2, JobState.STARTING, ["a", "b", "c"])


def test_it_can_be_cancelled_while_it_waits() -> None:
    world, job_id = stopped_for("c", "a", "b")
    world.pass_time(LATE_S, silent=("c",))
    stopped(world, job_id)
    world.cancel(job_id)
    world.pass_time(0.5, silent=("c",))
    assert job_of(world, job_id).state is JobState.CANCELLED


def test_a_node_that_is_forgotten_while_it_is_waited_for_takes_no_part() -> None:
    world, job_id = stopped_for("c", "a", "b")
    world.pass_time(LATE_S, silent=("c",))
    stopped(world, job_id)
    assert world.forget("c") is None
    del world.nodes["c"]
    world.pass_time(0.5)
    assert attempt(world, job_id) == (3, JobState.STARTING, ["a", "b"])
    world.check()
