"""Elastic jobs: they start on the nodes that are free, go on without one that is lost, and with it when it is back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gpulease_protocol.model import GpuState, Job, JobAttempt, JobState, LeaseState, NodeMode
from gpulease_protocol.node_protocol import RunState
from gpulease_server.core.elastic_growth import GROW_AFTER_S
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.gang_run import FENCE_S, ORIGIN_S, REACH_S, SILENT_S
from gpulease_server.core.job import MAX_HISTORY, kept_history
from gpulease_server.core.node import desired_state
from tests.core.build import NOON, World
from tests.core.test_gang_jobs import fleet, forgotten, job_of, order, part, prepared

STOPPED = "It was stopped on request."


def nodes_of(world: World, job_id: str) -> list[str]:
    return [one.node for one in job_of(world, job_id).members]


def start(world: World, job_id: str) -> None:
    """Every node of the job prepares and runs its part."""
    nodes = nodes_of(world, job_id)
    prepared(world, job_id, *nodes)
    for node in nodes:
        part(world, job_id, node, RunState.RUNNING)
    assert job_of(world, job_id).state is JobState.RUNNING


def elastic(world: World, least: int = 2, most: int = 3, **what: Any) -> str:
    """An elastic job that runs on all nodes that it may have."""
    job_id = world.submit(2, nodes=least, max_nodes=most, **what)
    start(world, job_id)
    return job_id


def lose(world: World, job_id: str, *gone: str) -> None:
    """These hosts die: the supervisors of the others notice it and end their parts; then nothing is heard for long."""
    for node in nodes_of(world, job_id):
        if node not in gone:
            said = f"Node {gone[0]} can no longer be reached from node {node}: no answer."
            part(world, job_id, node, RunState.EXITED, exit_code=143, reason=said, follows=True)
    world.pass_time(FENCE_S + ORIGIN_S + 5, silent=gone)


def stopped(world: World, job_id: str) -> None:
    """Every part has been told to stop, with the grace period of its user, and has."""
    for node in nodes_of(world, job_id):
        told = order(world, job_id, node)
        assert (told.stop, told.grace_s) == (True, 35.0)
    for node in nodes_of(world, job_id):
        part(world, job_id, node, RunState.EXITED, exit_code=143, reason=STOPPED, follows=True)


def kinds(world: World, job: Job) -> list[str]:
    return [one.kind for one in world.changes if getattr(one, "job_id", None) == job.id and hasattr(one, "kind")]


@pytest.mark.parametrize(("there", "gets"), [("ab", "ab"), ("abc", "abc"), ("abcde", "abc")])
def test_it_starts_on_as_many_nodes_as_are_free(there: str, gets: str) -> None:
    world = fleet(*there)
    job_id = world.submit(2, nodes=2, max_nodes=3)
    assert nodes_of(world, job_id) == list(gets)
    member = world.ledger.leases[job_of(world, job_id).lease_id].lease.members[0]
    assert member.env["NNODES"] == str(len(gets))
    world.check()


def test_it_waits_while_fewer_are_free_and_none_of_those_is_its_own() -> None:
    world = fleet("a", "b", "c")
    one = world.lease(2, nodes=2)
    job_id = world.submit(2, nodes=2, max_nodes=3)
    assert job_of(world, job_id).state is JobState.QUEUED
    assert {world.state(index, "c") for index in range(2)} == {GpuState.FREE}
    world.release(one)
    world.report("a")
    assert nodes_of(world, job_id) == ["a", "c"], "those of b are not clean yet"


def test_each_attempt_under_one_lease_has_what_is_left_of_its_time() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world, timeout_s=1000)
    assert order(world, job_id, "b").spec.timeout_s == 1000
    for gone, left_s in (("a", 400.0), ("b", 1.0)):
        world.at_s += 600.0 - (FENCE_S + ORIGIN_S + 5)
        for node in "abc":
            world.report(node)
        lose(world, job_id, gone)
        told = order(world, job_id, "c")
        assert told.spec.timeout_s == pytest.approx(left_s, abs=10.0)
        world.pass_time(3.0, silent=("a", "b"))
        assert order(world, job_id, "c").spec == told.spec, "the same for each exchange"
        start(world, job_id)
    assert world.ledger.jobs[job_id].spec.timeout_s == 1000, "another lease of it has all of it"


def test_who_waits_is_told_when_the_time_of_its_lease_is_over_not_a_whole_time_after_its_last_start() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world, timeout_s=1000)
    world.at_s += 600.0
    for node in "abc":
        world.report(node)
    lose(world, job_id, "a")
    world.pass_time(3.0, silent=("a",))
    start(world, job_id)
    waits = world.ledger.leases[world.lease(2, user="bob", node="c").id]
    told = explain(world.ledger, waits, world.now, world.policy).obstacles
    granted_at = world.ledger.leases[job_of(world, job_id).lease_id].lease.granted_at
    assert granted_at is not None
    assert {one.until and one.until < granted_at + timedelta(seconds=1060) for one in told if one.node == "c"} == {True}


def test_nodes_with_old_readings_are_read_and_not_left_out() -> None:
    world = fleet("a", "b", "c")
    world.at_s += 1
    world.report("a")
    world.report("b")
    job_id = world.submit(2, nodes=2, max_nodes=3)
    assert nodes_of(world, job_id) == ["a", "b", "c"]


def test_it_does_not_wait_for_a_node_with_readings_that_are_always_too_old() -> None:
    world = fleet("a", "b")
    world.node("c", gpus=2, report=False)
    world.report("c", age_s=2.0)
    world.answer_wanted = lambda: None  # type: ignore[method-assign]
    job_id = world.submit(2, nodes=2, max_nodes=3)
    for _ in range(40):
        world.pass_time(0.25, silent=("c",))
        world.report("c", age_s=2.0)
    assert nodes_of(world, job_id) == ["a", "b"]


def test_a_lost_node_shrinks_it_and_no_gpu_of_that_is_granted() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    before = job_of(world, job_id)
    port = world.ledger.leases[before.lease_id].port
    lose(world, job_id, "a")
    job = job_of(world, job_id)
    assert (job.state, job.attempts, job.lease_id) == (JobState.STARTING, 2, before.lease_id)
    assert nodes_of(world, job_id) == ["b", "c"]
    assert job.reason == "It goes on without node a, on 2 of at most 3."
    assert [one.regrouped for one in job.attempt_history] == [True]
    assert "job.shrunk" in kinds(world, job)
    assert {world.state(index, "a") for index in range(2)} == {GpuState.UNKNOWN}
    lease = world.ledger.leases[job.lease_id]
    assert {world.ledger.gpus[device.uuid].lease_id for device in lease.lease.gpus} == {job.lease_id}
    assert lease.port != port
    first, second = order(world, job_id, "b"), order(world, job_id, "c")
    assert (first.gang.rank, second.gang.rank, first.gang.nodes) == (0, 1, ("b", "c"))
    assert (second.env["MASTER_ADDR"], second.env["NODE_RANK"], second.env["NNODES"]) == ("10.0.0.98", "1", "2")
    assert order(world, job_id, "a") is None
    world.check()
    start(world, job_id)
    for node in "bc":
        part(world, job_id, node, RunState.EXITED, exit_code=0)
    assert job_of(world, job_id).state is JobState.SUCCEEDED


def test_the_next_attempt_never_begins_before_the_lost_part_must_have_ended() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    for node in "ab":
        part(world, job_id, node, RunState.EXITED, exit_code=143, reason="no answer", follows=True)
    world.pass_time(FENCE_S - 1, silent=("c",))
    assert (job_of(world, job_id).attempts, job_of(world, job_id).state) == (1, JobState.STOPPING)


def test_a_node_that_is_back_takes_part_again_after_a_while() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    lose(world, job_id, "c")
    start(world, job_id)
    world.pass_time(GROW_AFTER_S + 5, silent=("c",))
    assert job_of(world, job_id).state is JobState.RUNNING, "stopped for a node that is away"
    world.jobs["c"] = []
    world.pass_time(1)
    job = job_of(world, job_id)
    assert (job.state, job.reason) == (JobState.STOPPING, "It starts again with node c.")
    stopped(world, job_id)
    job = job_of(world, job_id)
    assert (nodes_of(world, job_id), job.attempts, job.state) == (["a", "b", "c"], 3, JobState.STARTING)
    assert job.reason == "It goes on with node c, on 3 of at most 3."
    assert [one.joined_later for one in job.members] == [False, False, True]
    assert "job.grown" in kinds(world, job)
    start(world, job_id)
    world.pass_time(2 * GROW_AFTER_S)
    assert job_of(world, job_id).attempts == 3
    world.check()


def test_a_node_that_is_back_too_soon_waits_for_the_others_to_have_a_checkpoint() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    lose(world, job_id, "c")
    world.jobs["c"] = []
    start(world, job_id)
    world.pass_time(GROW_AFTER_S - 2)
    assert job_of(world, job_id).state is JobState.RUNNING
    world.pass_time(4)
    assert job_of(world, job_id).state is JobState.STOPPING


@pytest.mark.parametrize("ends", ["not prepared", "its rank fails"])
def test_a_node_that_fails_after_it_has_joined_is_given_back_and_the_others_go_on(ends: str) -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    lose(world, job_id, "c")
    start(world, job_id)
    world.jobs["c"] = []
    world.pass_time(GROW_AFTER_S + 2)
    stopped(world, job_id)
    prepared(world, job_id, "a", "b")
    code, said = (None, "The working directory /x does not exist on this node.") if ends == "not prepared" else (1, "x")
    if ends == "its rank fails":
        start(world, job_id)
    part(world, job_id, "c", RunState.EXITED, exit_code=code, reason=said)
    for node in "ab":
        part(world, job_id, node, RunState.EXITED, exit_code=143, reason=STOPPED, follows=True)
    job = job_of(world, job_id)
    assert (nodes_of(world, job_id), job.state, job.attempts) == (["a", "b"], JobState.STARTING, 4)
    told = [(one.state, one.job_id) for one in desired_state(world.ledger, "c", 1).leases]
    assert told == [(LeaseState.ENDED, None)], "its worker reads them, and ends nothing of the job that goes on"
    world.jobs["c"] = []
    world.report("c")
    world.report("c")
    assert {world.state(index, "c") for index in range(2)} == {GpuState.FREE}
    start(world, job_id)
    world.pass_time(GROW_AFTER_S - 2)
    assert job_of(world, job_id).attempts == 4
    world.check()


def test_a_node_that_joins_does_not_lead_so_that_the_others_go_on_if_it_cannot_be_reached() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    lose(world, job_id, "a")
    start(world, job_id)
    world.jobs["a"] = []
    world.pass_time(GROW_AFTER_S + 2)
    stopped(world, job_id)
    assert nodes_of(world, job_id) == ["b", "c", "a"]
    assert order(world, job_id, "a").env["MASTER_ADDR"] == "10.0.0.98"
    world.check()
    prepared(world, job_id, "b", "c")
    part(world, job_id, "a", RunState.STARTING, reason="Node a cannot reach node b.")
    world.pass_time(REACH_S + 1)
    for node in "abc":
        part(world, job_id, node, RunState.EXITED, exit_code=143, reason=STOPPED, follows=True)
    assert (nodes_of(world, job_id), job_of(world, job_id).state) == (["b", "c"], JobState.STARTING)


def test_a_program_that_fails_ends_it_as_any_other_job() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    part(world, job_id, "b", RunState.EXITED, exit_code=1, reason="Rank 2 failed first.")
    for node in "ac":
        part(world, job_id, node, RunState.EXITED, exit_code=143, reason=STOPPED, follows=True)
    job = job_of(world, job_id)
    assert (job.state, job.exit_code) == (JobState.FAILED, 1)
    forgotten(world)
    assert {world.state(index, node) for index in range(2) for node in "abc"} == {GpuState.FREE}


@pytest.mark.parametrize(("retries", "state"), [(0, JobState.LOST), (1, JobState.QUEUED)])
def test_with_fewer_nodes_than_it_needs_the_attempt_is_lost(retries: int, state: JobState) -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world, retries=retries)
    lose(world, job_id, "a")
    lease_id = job_of(world, job_id).lease_id
    start(world, job_id)
    lose(world, job_id, "b", "a")
    job = job_of(world, job_id)
    assert job.state is state
    assert world.ledger.leases[lease_id].lease.state is LeaseState.ENDED
    if retries:
        assert job.attempts == 2
        assert job.lease_id == f"{lease_id}r3"
    world.check()


def test_it_can_be_cancelled_while_it_is_stopped_for_a_node() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    lose(world, job_id, "c")
    start(world, job_id)
    world.jobs["c"] = []
    world.pass_time(GROW_AFTER_S + 2)
    assert (job_of(world, job_id).reason or "").startswith("It starts again with")
    world.cancel(job_id)
    assert job_of(world, job_id).reason == "cancelled"
    for node in "ab":
        part(world, job_id, node, RunState.EXITED, exit_code=0, reason=STOPPED)
    assert job_of(world, job_id).state is not JobState.STARTING
    assert job_of(world, job_id).ended


def test_it_has_succeeded_if_it_was_done_before_it_heard_of_the_stop() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    lose(world, job_id, "c")
    start(world, job_id)
    world.jobs["c"] = []
    world.pass_time(GROW_AFTER_S + 2)
    for node in "ab":
        part(world, job_id, node, RunState.EXITED, exit_code=0)
    assert job_of(world, job_id).state is JobState.SUCCEEDED


def test_a_program_that_ends_well_when_it_is_stopped_goes_on() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    lose(world, job_id, "c")
    start(world, job_id)
    world.jobs["c"] = []
    world.pass_time(GROW_AFTER_S + 2)
    for node in "ab":
        part(world, job_id, node, RunState.EXITED, exit_code=0, reason=STOPPED)
    assert (job_of(world, job_id).state, nodes_of(world, job_id)) == (JobState.STARTING, ["a", "b", "c"])


def test_a_killed_supervisor_starts_all_again_on_the_same_nodes() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    part(world, job_id, "b", RunState.EXITED, reason="The job's supervisor died; its processes were killed.")
    for node in "ac":
        part(world, job_id, node, RunState.EXITED, exit_code=143, follows=True)
    job = job_of(world, job_id)
    assert (nodes_of(world, job_id), job.state) == (["a", "b", "c"], JobState.STARTING)
    assert job.reason == "It goes on with the same nodes, on 3 of at most 3."


def test_a_fence_that_one_node_has_reached_is_no_failure_of_the_program() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world, fence_s=60)
    said = "No daemon has answered this node for 60 s, which is the job's fence (fence_s)."
    part(world, job_id, "b", RunState.EXITED, exit_code=143, reason=said, fence_reached=True)
    for node in "ac":
        part(world, job_id, node, RunState.EXITED, exit_code=143, follows=True)
    job = job_of(world, job_id)
    assert (job.state, job.attempts, nodes_of(world, job_id)) == (JobState.STARTING, 2, ["a", "b", "c"])


def test_a_node_that_has_lost_its_record_takes_no_part_in_the_next_attempt_but_joins_later() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    world.jobs["c"] = []
    world.report("c")
    for node in "ab":
        part(world, job_id, node, RunState.EXITED, exit_code=143, follows=True)
    assert (nodes_of(world, job_id), job_of(world, job_id).attempts) == (["a", "b"], 2)
    start(world, job_id)
    world.pass_time(GROW_AFTER_S + 2)
    stopped(world, job_id)
    assert nodes_of(world, job_id) == ["a", "b", "c"]


def restart(world: World) -> None:
    """The daemon restarts: what the nodes have reported, and how long anything has lasted, is not known any more."""
    world.lose_reports()
    world.ledger.job_index.gang_times.clear()


def test_an_attempt_that_ends_while_the_daemon_restarts_goes_on_with_all_its_nodes() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    part(world, job_id, "c", RunState.EXITED, reason="The job's supervisor died; its processes were killed.")
    part(world, job_id, "a", RunState.EXITED, exit_code=143, follows=True)
    restart(world)
    part(world, job_id, "b", RunState.EXITED, exit_code=143, follows=True)
    world.pass_time(1, silent=("a", "c"))
    assert (job_of(world, job_id).state, job_of(world, job_id).attempts) == (JobState.STOPPING, 1)
    world.pass_time(1)
    assert (nodes_of(world, job_id), job_of(world, job_id).attempts) == (["a", "b", "c"], 2)
    world.check()


@pytest.mark.parametrize(("silent", "goes_on"), [("c", "ab"), ("", "abc")])
def test_a_stop_for_a_node_while_the_daemon_restarts_ends_with_the_nodes_that_report(silent: str, goes_on: str) -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    lose(world, job_id, "c")
    start(world, job_id)
    world.jobs["c"] = []
    world.pass_time(GROW_AFTER_S + 2)
    part(world, job_id, "a", RunState.EXITED, exit_code=143, reason=STOPPED, follows=True)
    restart(world)
    part(world, job_id, "b", RunState.EXITED, exit_code=143, reason=STOPPED, follows=True)
    world.pass_time(1, silent=("a", "c"))
    assert (job_of(world, job_id).state, job_of(world, job_id).attempts) == (JobState.STOPPING, 2)
    world.pass_time(SILENT_S, silent=tuple(silent))
    assert (nodes_of(world, job_id), job_of(world, job_id).attempts) == (list(goes_on), 3)


def test_a_node_that_is_forgotten_while_it_takes_no_part_leaves_the_lease() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    lose(world, job_id, "c")
    start(world, job_id)
    assert world.forget("c") is None
    del world.nodes["c"]
    lease = world.ledger.leases[job_of(world, job_id).lease_id].lease
    assert [one.node for one in lease.members] == ["a", "b"]
    assert {device.node for device in lease.gpus} == {"a", "b"}
    world.check()
    world.node("c", gpus=2)
    assert len(world.lease(2).gpus) == 2, "the GPUs of a new host of that name are anyone's"
    world.pass_time(GROW_AFTER_S + 5)
    assert job_of(world, job_id).attempts == 2


def test_a_forgotten_node_shrinks_it() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    world.pass_time(5, silent=("c",))
    assert world.forget("c") is None
    del world.nodes["c"]
    for node in "ab":
        part(world, job_id, node, RunState.EXITED, exit_code=143, follows=True)
    assert nodes_of(world, job_id) == ["a", "b"]
    world.check()


def test_a_node_that_is_drained_meanwhile_does_not_take_part_again() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    lose(world, job_id, "c")
    start(world, job_id)
    world.set_mode(NodeMode.DRAINING, "c")
    world.jobs["c"] = []
    world.pass_time(GROW_AFTER_S + 5)
    assert job_of(world, job_id).attempts == 2


@pytest.mark.parametrize(("retries", "state"), [(0, JobState.FAILED), (1, JobState.QUEUED)])
def test_a_program_that_fails_just_as_it_is_stopped_for_a_node_has_failed(retries: int, state: JobState) -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world, retries=retries)
    lose(world, job_id, "c")
    start(world, job_id)
    world.jobs["c"] = []
    world.pass_time(GROW_AFTER_S + 2)
    part(world, job_id, "b", RunState.EXITED, exit_code=1, reason="Rank 2 failed first.")
    part(world, job_id, "a", RunState.EXITED, exit_code=143, reason=STOPPED, follows=True)
    job = job_of(world, job_id)
    assert job.state is state
    assert not any(one.node_left for one in job.attempt_history), "it counts"


@pytest.mark.parametrize("mode", [NodeMode.DRAINING, NodeMode.PAUSED])
def test_a_node_that_is_out_of_use_does_not_take_part_in_the_next_attempt(mode: NodeMode) -> None:
    world = fleet("a", "b", "c", "d")
    job_id = elastic(world, most=4)
    world.set_mode(mode, "b", force=True)
    part(world, job_id, "b", RunState.RUNNING)
    lose(world, job_id, "d")
    part(world, job_id, "b", RunState.EXITED, exit_code=143, follows=True)
    assert nodes_of(world, job_id) == ["a", "c"]


def test_a_drained_node_that_runs_it_goes_on_where_there_are_too_few_others() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world)
    world.set_mode(NodeMode.DRAINING, "b")
    lose(world, job_id, "c")
    assert nodes_of(world, job_id) == ["a", "b"]


def test_what_counts_as_no_retry_is_kept_longer_than_changes_of_nodes() -> None:
    def attempt(number: int, **what: bool) -> JobAttempt:
        return JobAttempt(number=number, lease_id="l", ended_at=NOON, **what)

    history: tuple[JobAttempt, ...] = ()
    for number in range(MAX_HISTORY + 10):
        history = kept_history((*history, attempt(number, node_left=number < 3, regrouped=number > 4)))
    assert len(history) == MAX_HISTORY + 1
    assert [one.number for one in history][:6] == [0, 1, 2, 3, 4, 14]
    for number in range(MAX_HISTORY + 10):
        history = kept_history((*history, attempt(100 + number, regrouped=number == 5)))
    assert len(history) == MAX_HISTORY + 1
    assert [one.number for one in history if one.regrouped] == [105], "what its lease had left is counted from it"


def test_losses_of_nodes_use_up_no_retry() -> None:
    world = fleet("a", "b", "c")
    job_id = elastic(world, retries=1)
    lose(world, job_id, "c")
    start(world, job_id)
    part(world, job_id, "b", RunState.EXITED, exit_code=1, reason="Rank 2 failed first.")
    part(world, job_id, "a", RunState.EXITED, exit_code=143, follows=True)
    assert job_of(world, job_id).state is JobState.QUEUED
