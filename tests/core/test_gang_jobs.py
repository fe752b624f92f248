"""Jobs on several nodes: prepared together, started together, ended together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpulease_protocol.job_fence import certain_after_s
from gpulease_protocol.model import GpuState, Job, JobState, LeaseState, PartState
from gpulease_protocol.node_protocol import JobOrder, JobReport, RunState
from gpulease_server.core.gang_run import FENCE_S, ORIGIN_S, REACH_S, SILENT_S
from gpulease_server.core.node import desired_state
from gpulease_server.core.policy import Policy
from tests.core.build import World

LOGS = "/d/jobs/j/logs"
OTHERS = "The other nodes are being stopped."


def fleet(*nodes: str, gpus: int = 2, **what: Any) -> World:
    world = World()
    for name in nodes:
        world.node(name, gpus=gpus, report=False)
        world.report(name, **what)
    return world


def job_of(world: World, job_id: str) -> Job:
    return world.ledger.jobs[job_id].job


def order(world: World, job_id: str, node: str) -> JobOrder | None:
    return next((one for one in desired_state(world.ledger, node, 1).jobs if one.job_id == job_id), None)


def part(world: World, job_id: str, node: str, state: RunState, **what: Any) -> None:
    """A node reports its part, and goes on doing so."""
    attempt = job_of(world, job_id).attempts
    world.jobs[node] = [JobReport(job_id=job_id, attempt=attempt, state=state, log_directory=LOGS, **what)]
    world.report(node)


def prepared(world: World, job_id: str, *nodes: str) -> None:
    for node in nodes:
        part(world, job_id, node, RunState.PREPARED)


def running(world: World, **what: Any) -> str:
    """A job whose parts run on all nodes of the world."""
    job_id = world.submit(2, nodes=len(world.nodes), **what)
    prepared(world, job_id, *world.nodes)
    for node in world.nodes:
        part(world, job_id, node, RunState.RUNNING)
    assert job_of(world, job_id).state is JobState.RUNNING
    return job_id


def states(job: Job) -> list[PartState]:
    return [one.state for one in job.members]


def forgotten(world: World) -> None:
    """The workers drop what is no longer ordered, and all GPUs are seen clean."""
    for node in world.nodes:
        world.jobs[node] = []
    for node in world.nodes:
        world.report(node)


def test_each_node_is_told_its_part_and_none_may_go_before_all_are_prepared() -> None:
    world = fleet("a", "b")
    job_id = world.submit(2, nodes=2)
    first, second = (order(world, job_id, node) for node in "ab")
    assert first is not None
    assert second is not None
    assert (first.gang, second.gang) == (
        replace(second.gang, rank=0),
        replace(first.gang, rank=1),
    )
    assert first.gang.nodes == ("a", "b")
    assert first.gang.addresses == ("10.0.0.97", "10.0.0.98")
    assert (first.env["MASTER_ADDR"], first.env["MASTER_PORT"]) == ("10.0.0.97", second.env["MASTER_PORT"])
    assert {first.gpus, second.gpus} == {tuple(one.uuid for one in world.nodes[node]) for node in "ab"}
    for node, done in (("b", False), ("a", True)):
        prepared(world, job_id, node)
        assert [order(world, job_id, one).go for one in "ab"] == [done, done]
    assert states(job_of(world, job_id)) == [PartState.PREPARED] * 2


def test_a_job_runs_once_all_parts_do_and_has_succeeded_once_all_have() -> None:
    world = fleet("a", "b")
    job_id = world.submit(2, nodes=2)
    prepared(world, job_id, "a", "b")
    part(world, job_id, "a", RunState.RUNNING)
    assert job_of(world, job_id).state is JobState.STARTING
    part(world, job_id, "b", RunState.RUNNING)
    assert job_of(world, job_id).state is JobState.RUNNING
    part(world, job_id, "b", RunState.EXITED, exit_code=0)
    assert (job_of(world, job_id).state, order(world, job_id, "a").stop) == (JobState.RUNNING, False)
    part(world, job_id, "a", RunState.EXITED, exit_code=0)
    assert (job_of(world, job_id).state, job_of(world, job_id).exit_code) == (JobState.SUCCEEDED, 0)
    forgotten(world)
    assert {world.state(index, node) for index in range(2) for node in "ab"} == {GpuState.FREE}


def test_the_first_failure_stops_the_others_and_is_what_the_job_says() -> None:
    world = fleet("a", "b", "c")
    job_id = running(world)
    part(
        world,
        job_id,
        "b",
        RunState.EXITED,
        exit_code=7,
        reason="Rank 3 failed first: it exited with code 7.",
        traceback="tb",
    )
    stops = [(order(world, job_id, node).stop, order(world, job_id, node).grace_s) for node in "ac"]
    assert stops == [(True, 5.0)] * 2
    said = "On node b: Rank 3 failed first: it exited with code 7."
    assert (job_of(world, job_id).state, job_of(world, job_id).reason) == (JobState.STOPPING, f"{said} {OTHERS}")
    for node in "ac":
        part(world, job_id, node, RunState.EXITED, exit_code=143, reason="It was stopped on request.", follows=True)
    job = job_of(world, job_id)
    assert (job.state, job.exit_code, job.reason, job.traceback) == (JobState.FAILED, 7, said, "tb")
    assert [one.failure for one in job.members] == [2, 1, 3]


def test_a_part_that_is_stopped_because_of_another_is_told_why_unless_its_user_cancels() -> None:
    world = fleet("a", "b")
    job_id = running(world)
    part(world, job_id, "b", RunState.EXITED, exit_code=3, reason="Exit code 3.")
    told = order(world, job_id, "a")
    assert told is not None
    assert (told.stop, told.failure) == (True, "On node b: Exit code 3.")
    world.cancel(job_id)
    told = order(world, job_id, "a")
    assert told is not None
    assert (told.stop, told.failure) == (True, None)


def test_a_part_that_only_followed_lets_the_other_say_first_what_happened() -> None:
    world = fleet("a", "b")
    job_id = running(world)
    part(world, job_id, "a", RunState.EXITED, exit_code=1, reason="Rank 0: connection closed by peer.", follows=True)
    assert not order(world, job_id, "b").stop
    part(world, job_id, "b", RunState.EXITED, exit_code=137, reason="Rank 2 failed first: it was ended by SIGKILL.")
    job = job_of(world, job_id)
    assert (job.state, job.exit_code) == (JobState.FAILED, 137)
    assert job.reason == "On node b: Rank 2 failed first: it was ended by SIGKILL."


def test_if_no_other_says_what_happened_all_are_stopped_all_the_same() -> None:
    world = fleet("a", "b")
    job_id = running(world)
    part(world, job_id, "a", RunState.EXITED, exit_code=1, reason="Rank 0: connection closed by peer.", follows=True)
    world.pass_time(ORIGIN_S + 1)
    assert order(world, job_id, "b").stop
    part(world, job_id, "b", RunState.EXITED, exit_code=143, follows=True)
    job = job_of(world, job_id)
    assert (job.state, job.exit_code, job.reason) == (
        JobState.FAILED,
        1,
        "On node a: Rank 0: connection closed by peer.",
    )


def test_a_node_that_is_not_prepared_in_time_is_named_and_the_start_is_given_up() -> None:
    world, reason = fleet("a", "b", "c"), "Node c was not prepared within 60 s."
    job_id = world.submit(2, nodes=3)
    prepared(world, job_id, "a", "b")
    part(world, job_id, "c", RunState.STARTING)
    world.pass_time(59)
    assert not order(world, job_id, "a").stop
    world.pass_time(2)
    assert [order(world, job_id, node).stop for node in "abc"] == [True] * 3
    assert job_of(world, job_id).reason == f"{reason} {OTHERS}"
    for node in "ab":
        part(world, job_id, node, RunState.EXITED, reason="It was stopped before it started.", follows=True)
    world.pass_time(FENCE_S + 2)
    assert job_of(world, job_id).state is JobState.STOPPING, "ended while a part of it may run"
    part(world, job_id, "c", RunState.EXITED, reason="It was stopped before it started.", follows=True)
    assert (job_of(world, job_id).state, job_of(world, job_id).reason) == (JobState.FAILED, reason)


def test_a_node_that_falls_silent_before_the_start_is_named_within_seconds() -> None:
    world, reason = fleet("a", "b"), f"Node b did not answer for {SILENT_S:g} s."
    job_id = world.submit(2, nodes=2)
    prepared(world, job_id, "a")
    world.pass_time(SILENT_S - 1, silent=("b",))
    assert not order(world, job_id, "a").stop
    world.pass_time(2, silent=("b",))
    assert job_of(world, job_id).reason == f"{reason} {OTHERS}"
    part(world, job_id, "a", RunState.EXITED, reason="It was stopped before it started.", follows=True)
    world.pass_time(FENCE_S + 2, silent=("b",))
    assert (job_of(world, job_id).state, job_of(world, job_id).reason) == (JobState.LOST, reason)


def test_a_node_that_cannot_reach_the_leader_ends_the_start_within_seconds() -> None:
    world, said = fleet("a", "b"), "Node b cannot reach node a at 10.0.0.97:21000: no route to host."
    job_id = world.submit(2, nodes=2)
    part(world, job_id, "b", RunState.STARTING, reason=said)
    world.pass_time(REACH_S + 5)
    assert not order(world, job_id, "a").stop, "nothing listens there before the leader is prepared"
    prepared(world, job_id, "a")
    world.pass_time(REACH_S + 1)
    assert job_of(world, job_id).reason == f"{said} {OTHERS}"


def test_a_start_that_was_given_up_is_tried_again_with_another_lease() -> None:
    world = fleet("a", "b")
    job_id = world.submit(2, nodes=2, retries=1)
    lease_id = job_of(world, job_id).lease_id
    part(world, job_id, "a", RunState.EXITED, reason="Port 21000 of node a cannot be used for the rendezvous: in use.")
    part(world, job_id, "b", RunState.EXITED, reason="It was stopped before it started.", follows=True)
    assert (job_of(world, job_id).state, job_of(world, job_id).members) == (JobState.QUEUED, ())
    forgotten(world)
    world.pass_time(4)
    job = job_of(world, job_id)
    assert (job.state, job.attempts) == (JobState.STARTING, 2)
    assert world.ledger.leases[lease_id].lease.state is LeaseState.ENDED
    assert order(world, job_id, "a").env["MASTER_PORT"] != world.ledger.leases[lease_id].lease.env["MASTER_PORT"]
    assert not order(world, job_id, "a").go, "the go of the first attempt counts for no other"
    assert [one.failure for one in job.members] == [None, None]


def test_a_dead_host_is_counted_out_once_its_part_must_have_ended_and_the_job_is_tried_elsewhere() -> None:
    world = fleet("a", "b")
    job_id, lost = running(world, retries=1), "Node b (10.0.0.98) can no longer be reached from node a: no answer."
    world.node("c", gpus=2)
    world.pass_time(9, silent=("b",))
    assert job_of(world, job_id).state is JobState.RUNNING, "silence alone ends nothing"
    part(world, job_id, "a", RunState.EXITED, exit_code=1, reason=lost, follows=True)
    world.pass_time(ORIGIN_S + FENCE_S - 1, silent=("b",))
    assert job_of(world, job_id).state is JobState.STOPPING
    world.pass_time(4, silent=("b",))
    job = job_of(world, job_id)
    assert job.attempt_history[0].reason == f"Node b is silent. {lost}"
    world.jobs["a"] = []
    world.pass_time(5, silent=("b",))
    job = job_of(world, job_id)
    assert (job.state, [one.node for one in job.members]) == (JobState.STARTING, ["a", "c"])
    assert world.state(0, "b") is GpuState.UNKNOWN


def test_a_silent_worker_ends_nothing_while_the_parts_go_on() -> None:
    world = fleet("a", "b")
    job_id = running(world)
    world.pass_time(300, silent=("b",))
    world.report("b")
    assert (job_of(world, job_id).state, states(job_of(world, job_id))) == (JobState.RUNNING, [PartState.RUNNING] * 2)


def test_a_part_that_its_worker_has_lost_ends_all() -> None:
    world = fleet("a", "b")
    job_id = running(world)
    world.jobs["b"] = []
    world.report("b", worker="another")
    assert order(world, job_id, "a").stop is False, "the report of a second worker is refused"
    world.pass_time(4, silent=("b",))
    world.report("b", worker="another")
    assert order(world, job_id, "a").stop
    part(world, job_id, "a", RunState.EXITED, exit_code=143, follows=True)
    job = job_of(world, job_id)
    assert (job.state, job.reason) == (JobState.LOST, "The worker of node b has lost its record of the job.")


def test_cancelling_stops_all_parts_with_the_grace_of_the_user() -> None:
    world = fleet("a", "b")
    job_id = running(world)
    world.cancel(job_id)
    assert [(order(world, job_id, node).stop, order(world, job_id, node).grace_s) for node in "ab"] == [(True, 1.0)] * 2
    part(world, job_id, "a", RunState.EXITED, exit_code=143, reason="It was stopped on request.", follows=True)
    assert job_of(world, job_id).state is JobState.STOPPING
    part(world, job_id, "b", RunState.EXITED, exit_code=143, reason="It was stopped on request.", follows=True)
    assert (job_of(world, job_id).state, job_of(world, job_id).reason) == (JobState.CANCELLED, "cancelled")


def test_parts_that_have_saved_what_they_had_when_they_were_cancelled_have_not_succeeded() -> None:
    world = fleet("a", "b")
    job_id = running(world)
    part(world, job_id, "a", RunState.EXITED, exit_code=0)
    world.cancel(job_id)
    part(world, job_id, "b", RunState.EXITED, exit_code=0, reason="It was stopped on request.", follows=True)
    assert (job_of(world, job_id).state, job_of(world, job_id).reason) == (JobState.CANCELLED, "cancelled")


def test_cancelling_before_any_node_has_taken_its_part_up_ends_it_at_once() -> None:
    world = fleet("a", "b")
    job_id = world.submit(2, nodes=2)
    world.cancel(job_id)
    for node in "ab":
        world.report(node)
    assert job_of(world, job_id).state is JobState.CANCELLED


def test_a_time_limit_is_told_as_such() -> None:
    world = fleet("a", "b")
    job_id = running(world, timeout_s=60.0, retries=3)
    part(world, job_id, "a", RunState.EXITED, exit_code=143, timed_out=True, reason="It ran longer than 60 s.")
    part(world, job_id, "b", RunState.EXITED, exit_code=143, timed_out=True, reason="It ran longer than 60 s.")
    assert job_of(world, job_id).state is JobState.TIMED_OUT


def test_forgetting_a_node_ends_the_parts_of_the_others_first() -> None:
    world = fleet("a", "b")
    job_id = running(world, retries=1)
    world.pass_time(5, silent=("b",))
    assert world.forget("b") is None
    job = job_of(world, job_id)
    assert (job.state, states(job)) == (JobState.STOPPING, [PartState.RUNNING, PartState.LOST])
    assert world.ledger.leases[job.lease_id].lease.state is LeaseState.ACTIVE
    world.check()
    del world.nodes["b"]
    part(world, job_id, "a", RunState.EXITED, exit_code=143, follows=True)
    job = job_of(world, job_id)
    assert (job.state, job.attempts) == (JobState.QUEUED, 1)
    assert "node b was forgotten" in str(job.reason)


def test_a_worker_of_an_older_version_is_never_given_a_part() -> None:
    world = fleet("a", "b", takes_gangs=False)
    job_id = world.submit(2, nodes=2)
    assert [order(world, job_id, node) for node in "ab"] == [None, None]


def test_a_start_goes_on_where_it_was_after_the_daemon_was_stopped() -> None:
    world = fleet("a", "b")
    job_id = world.submit(2, nodes=2)
    prepared(world, job_id, "a")
    world.pass_time(50)
    world.at_s += 600
    world.pass_time(1, stalled_s=600)
    assert not order(world, job_id, "a").stop
    prepared(world, job_id, "b")
    assert order(world, job_id, "a").go


def test_a_silent_part_counts_as_ended_only_so_long_after_the_last_of_the_others() -> None:
    world = fleet("a", "b", "c")
    job_id = running(world, retries=1)
    part(world, job_id, "a", RunState.EXITED, exit_code=1)
    part(world, job_id, "b", RunState.RUNNING, unkillable=(77,))
    world.pass_time(3 * FENCE_S, silent=("c",))
    assert job_of(world, job_id).state is JobState.STOPPING, "what is connected with c still runs"
    part(world, job_id, "b", RunState.EXITED, exit_code=137, follows=True)
    world.pass_time(FENCE_S - 1, silent=("c",))
    assert job_of(world, job_id).state is JobState.STOPPING
    world.pass_time(2, silent=("c",))
    assert (job_of(world, job_id).state, job_of(world, job_id).attempts) == (JobState.QUEUED, 1)


def told_of(world: World) -> list[str | None]:
    return [one.node for one in world.events("job.stuck")]


def test_processes_that_do_not_die_are_told_of_once_for_each_node_and_shown_of_all_of_them() -> None:
    world = fleet("a", "b", "c")
    job_id = running(world)
    part(world, job_id, "c", RunState.EXITED, exit_code=1)
    for _ in range(3):
        part(world, job_id, "b", RunState.RUNNING, unkillable=(8,), reason="8 hangs")
        part(world, job_id, "a", RunState.RUNNING, unkillable=(7,), reason="7 hangs")
    assert job_of(world, job_id).reason == "on node a: 7 hangs; on node b: 8 hangs"
    assert told_of(world) == ["b", "a"]
    part(world, job_id, "a", RunState.EXITED, exit_code=137, follows=True)
    part(world, job_id, "b", RunState.RUNNING, unkillable=(8,), reason="8 runs on")
    assert job_of(world, job_id).reason == "on node b: 8 runs on"
    assert told_of(world) == ["b", "a"]


def test_a_node_that_is_silent_for_good_ends_with_the_others_and_not_before() -> None:
    world = fleet("a", "b")
    world.policy = Policy(node_lost_after_s=100.0)
    job_id = running(world, retries=1)
    world.pass_time(99, silent=("b",))
    assert not order(world, job_id, "a").stop
    world.pass_time(5, silent=("b",))
    assert order(world, job_id, "a").stop
    part(world, job_id, "a", RunState.EXITED, exit_code=143, follows=True)
    assert job_of(world, job_id).state is JobState.STOPPING, "b was never told"
    world.pass_time(FENCE_S + 1, silent=("b",))
    job = job_of(world, job_id)
    assert (job.state, job.attempt_history[0].reason) == (JobState.QUEUED, "node b has been silent for over 100 s.")


def test_if_all_nodes_are_silent_for_good_the_job_is_not_tried_again() -> None:
    world = fleet("a", "b")
    world.policy = Policy(node_lost_after_s=100.0)
    job_id = running(world, retries=1)
    world.node("c", gpus=2).node("d", gpus=2)
    world.pass_time(120, silent=("a", "b"))
    job = job_of(world, job_id)
    assert (job.state, job.attempts) == (JobState.LOST, 1), "its parts are connected with each other, and go on"
    assert "how the job ended is not known" in str(job.reason)


def test_a_cancelled_job_whose_nodes_are_all_silent_has_not_ended() -> None:
    world = fleet("a", "b")
    job_id = running(world)
    world.pass_time(5, silent=("a", "b"))
    world.cancel(job_id)
    world.pass_time(3 * FENCE_S, silent=("a", "b"))
    assert job_of(world, job_id).state is JobState.STOPPING
    for node in "ab":
        part(world, job_id, node, RunState.EXITED, exit_code=143, follows=True)
    assert job_of(world, job_id).state is JobState.CANCELLED


def test_a_fence_that_all_nodes_keep_lets_the_job_be_tried_again_although_all_are_silent() -> None:
    world, fence_s = fleet("a", "b"), 60.0
    job_id = world.submit(2, nodes=2, retries=1, fence_s=fence_s)
    prepared(world, job_id, "a", "b")
    for node in "ab":
        part(world, job_id, node, RunState.RUNNING, fence_s=fence_s)
    assert [one.fenced for one in job_of(world, job_id).members] == [True, True]
    world.node("c", gpus=2).node("d", gpus=2)
    for node in "cd":
        world.report(node)
    world.pass_time(certain_after_s(fence_s) - 1, silent=("a", "b"))
    assert job_of(world, job_id).state is JobState.RUNNING, "it may still run"
    world.pass_time(10, silent=("a", "b"))
    job = job_of(world, job_id)
    assert (job.state, [one.node for one in job.members]) == (JobState.STARTING, ["c", "d"])
    assert "the job's fence is 60 s" in str(job.attempt_history[0].reason)
    assert [one.fenced for one in job.members] == [False, False], "the fence of the first attempt counts for no other"


def test_a_fence_that_one_of_two_silent_nodes_has_not_confirmed_lets_nothing_be_tried_again() -> None:
    world, fence_s = fleet("a", "b"), 60.0
    job_id = world.submit(2, nodes=2, retries=1, fence_s=fence_s)
    prepared(world, job_id, "a", "b")
    part(world, job_id, "a", RunState.RUNNING, fence_s=fence_s)
    part(world, job_id, "b", RunState.RUNNING)
    world.node("c", gpus=2).node("d", gpus=2)
    world.pass_time(certain_after_s(fence_s) + 10, silent=("a", "b"))
    assert job_of(world, job_id).attempts == 1


def test_nothing_is_known_of_a_silent_part_after_one_that_has_ended_well() -> None:
    world = fleet("a", "b")
    world.policy = Policy(node_lost_after_s=200.0)
    job_id = running(world, retries=1)
    part(world, job_id, "a", RunState.EXITED, exit_code=0)
    world.cancel(job_id)
    world.pass_time(100, silent=("b",))
    assert job_of(world, job_id).state is JobState.STOPPING, "the end of a is not missed, so b goes on"
    world.pass_time(120, silent=("b",))
    assert job_of(world, job_id).state is JobState.LOST


def test_without_the_leader_a_silent_part_learns_of_no_other() -> None:
    world = fleet("a", "b", "c")
    world.policy = Policy(node_lost_after_s=200.0)
    job_id = running(world, retries=1)
    part(world, job_id, "a", RunState.EXITED, exit_code=0)
    part(world, job_id, "b", RunState.EXITED, exit_code=7)
    world.pass_time(150, silent=("c",))
    assert job_of(world, job_id).state is JobState.STOPPING
    world.pass_time(100, silent=("c",))
    assert (job_of(world, job_id).state, job_of(world, job_id).attempts) == (JobState.LOST, 1)
