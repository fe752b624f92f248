"""Elastic jobs take further nodes that are free, by the rules of any grant, and never before a request that waits."""

from __future__ import annotations

import pytest

from gpulease_protocol.model import GpuState, JobState
from gpulease_protocol.node_protocol import RunState
from gpulease_server.core import elastic_growth, eligibility
from gpulease_server.core.elastic_growth import CHANGES, GROW_AFTER_S, pause_s
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant, LeaseRecord
from tests.core.build import World, gpu
from tests.core.test_elastic_jobs import elastic, kinds, lose, nodes_of, start, stopped
from tests.core.test_gang_jobs import fleet, forgotten, job_of, part


def with_room(user: str | None = None, **what: object) -> tuple[World, str]:
    """An elastic job on two nodes, and a third one that gets free."""
    world = fleet("a", "b", "c")
    for name, value in what.items():
        setattr(world, name, value)
    other = world.lease(2, node="c", user="bob", ttl_s=1000.0)
    job_id = elastic(world, user=user)
    assert nodes_of(world, job_id) == ["a", "b"]
    world.release(other)
    world.report("c")
    return world, job_id


def test_a_node_that_gets_free_is_taken_after_a_while() -> None:
    world, job_id = with_room()
    world.pass_time(GROW_AFTER_S - 2)
    assert job_of(world, job_id).state is JobState.RUNNING
    world.pass_time(4)
    job = job_of(world, job_id)
    assert (job.state, job.reason) == (JobState.STOPPING, "It starts again with node c.")
    assert {world.state(index, "c") for index in range(2)} == {GpuState.LEASED}, "no one else can have them meanwhile"
    world.check()
    stopped(world, job_id)
    assert nodes_of(world, job_id) == ["a", "b", "c"]
    start(world, job_id)
    world.check()
    assert "lease.grown" in kinds(world, job)
    for node in "abc":
        world.jobs[node] = []
    world.cancel(job_id)


def test_a_request_that_waits_comes_first() -> None:
    world, job_id = with_room()
    world.ask(2, nodes=3, ttl_s=1000.0)
    world.pass_time(GROW_AFTER_S + 5)
    assert job_of(world, job_id).state is JobState.RUNNING
    assert {world.state(index, "c") for index in range(2)} == {GpuState.FREE}


@pytest.mark.parametrize(
    ("limited", "state"),
    [(("bob",), JobState.STOPPING), (("ann", "bob"), JobState.RUNNING)],
    ids=["of another group", "of the same group"],
)
def test_a_request_that_its_own_limit_keeps_out_comes_first_only_under_the_same_limit(
    limited: tuple[str, ...], state: JobState
) -> None:
    world, job_id = with_room(user="ann")
    world.limit("lab", "group", members=limited, max_gpus=20)
    world.limit("bob", max_leases=1)
    world.lease(1, node="c", user="bob", ttl_s=1000.0)
    world.ask(1, user="bob", ttl_s=1000.0)
    world.node("d", gpus=2)
    world.pass_time(GROW_AFTER_S + 5)
    assert world.ledger.queue, "one lease is all that bob may have"
    assert job_of(world, job_id).state is state


def test_a_request_that_its_lowered_limit_never_lets_in_stops_no_ones_growth() -> None:
    world, job_id = with_room(user="ann")
    world.node("d", gpus=2)
    world.lease(2, node="d", user="bob", ttl_s=1000.0)
    world.ask(2, nodes=4, ttl_s=1000.0)
    world.limit("ann", max_gpus=6)
    world.pass_time(GROW_AFTER_S + 5)
    assert world.ledger.queue
    assert job_of(world, job_id).state is JobState.STOPPING


def test_a_node_is_taken_only_by_a_recent_reading() -> None:
    world, job_id = with_room()
    world.pass_time(GROW_AFTER_S - 1)
    world.at_s += 1.5
    world.report("a")
    world.report("b")
    world.pass_time(0.5, silent=("c",))
    assert job_of(world, job_id).state is JobState.RUNNING
    assert "c" in world.wanted, "it is asked for one"
    world.report("c")
    world.pass_time(0.5)
    assert job_of(world, job_id).state is JobState.STOPPING


def test_the_limit_of_its_user_holds() -> None:
    world, job_id = with_room(policy=Policy(limits=UserLimits(gpus=5)))
    world.pass_time(GROW_AFTER_S + 5)
    assert job_of(world, job_id).state is JobState.RUNNING


def test_a_node_of_another_model_is_not_taken() -> None:
    world = fleet("a", "b")
    job_id = elastic(world)
    world.node("c", gpus=[gpu(index, "c", name="another") for index in range(2)])
    world.pass_time(GROW_AFTER_S + 5)
    assert job_of(world, job_id).state is JobState.RUNNING


def test_the_lease_has_all_its_gpus_back_after_the_end() -> None:
    world, job_id = with_room()
    world.pass_time(GROW_AFTER_S + 2)
    stopped(world, job_id)
    start(world, job_id)
    lose(world, job_id, "a", "b")
    assert job_of(world, job_id).ended
    world.report("a")
    world.report("b")
    forgotten(world)
    world.pass_time(5)
    assert {world.state(index, node) for index in range(2) for node in "abc"} == {GpuState.FREE}
    world.check()


def test_a_job_whose_nodes_keep_changing_is_stopped_less_and_less_often() -> None:
    world = fleet("a", "b", "c")
    job_id, pauses = elastic(world), []
    for _ in range(CHANGES):
        lose(world, job_id, "a")
        world.jobs["a"] = []
        start(world, job_id)
        pauses.append(pause_s(world.ledger.jobs[job_id]))
        world.pass_time(pauses[-1] - 2)
        assert job_of(world, job_id).state is JobState.RUNNING
        world.pass_time(4)
        stopped(world, job_id)
        start(world, job_id)
    assert pauses == [GROW_AFTER_S, GROW_AFTER_S, 2 * GROW_AFTER_S, 2 * GROW_AFTER_S]


def test_a_job_of_which_a_part_is_done_is_not_stopped_for_a_node() -> None:
    world, job_id = with_room()
    part(world, job_id, "a", RunState.EXITED, exit_code=0)
    world.pass_time(GROW_AFTER_S + 5)
    assert job_of(world, job_id).state is JobState.RUNNING
    part(world, job_id, "b", RunState.EXITED, exit_code=0)
    assert job_of(world, job_id).state is JobState.SUCCEEDED


def joined(world: World, job_id: str) -> str:
    """The node that joins next; it fails and is given back."""
    while job_of(world, job_id).state is JobState.RUNNING:
        world.pass_time(1)
    stopped(world, job_id)
    (node,) = (one.node for one in job_of(world, job_id).members if one.joined_later)
    part(world, job_id, node, RunState.EXITED, reason="The working directory /x does not exist on this node.")
    for other in nodes_of(world, job_id):
        if other != node:
            part(world, job_id, other, RunState.EXITED, exit_code=143, reason="It was stopped.", follows=True)
    world.jobs[node] = []
    start(world, job_id)
    return node


def test_a_node_that_has_joined_and_failed_is_taken_again_after_the_others_only() -> None:
    world, job_id = with_room()
    world.node("d", gpus=4)
    world.node("e", gpus=2)
    assert [joined(world, job_id) for _ in range(3)] == ["c", "e", "d"]
    assert len({joined(world, job_id) for _ in range(3)}) == 3, "each has its turn again"


def test_no_other_gpus_of_a_node_are_taken_while_those_given_back_are_not_clean() -> None:
    world = fleet("a", "b")
    job_id = elastic(world)
    world.node("c", gpus=4)
    assert joined(world, job_id) == "c"
    world.nodes["c"] = [gpu(index, "c", pids=(7,) if index < 2 else ()) for index in range(4)]
    world.pass_time(2 * GROW_AFTER_S)
    assert job_of(world, job_id).state is JobState.RUNNING
    world.nodes["c"] = [gpu(index, "c") for index in range(4)]
    world.pass_time(2)
    assert job_of(world, job_id).state is JobState.STOPPING


def test_while_no_node_is_free_no_one_who_waits_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    world, job_id = with_room(user="ann")
    world.limit("bob", max_leases=1)
    held = world.lease(2, node="c", user="bob", ttl_s=1000.0)
    for number in range(20):
        world.ask(1, user="bob", ttl_s=1000.0, time_s=100.0 + number)
    looked_at: list[str] = []

    def is_eligible(ledger: Ledger, record: LeaseRecord, now: Instant) -> bool:
        looked_at.append(record.lease.id)
        return eligibility.is_eligible(ledger, record, now)

    monkeypatch.setattr(elastic_growth, "is_eligible", is_eligible)
    world.pass_time(GROW_AFTER_S + 5)
    assert (job_of(world, job_id).state, looked_at) == (JobState.RUNNING, [])
    for record in list(world.ledger.queued()):
        world.release(record.lease)
    world.release(held)
    world.report("c")
    world.pass_time(5)
    assert job_of(world, job_id).state is JobState.STOPPING


@pytest.mark.parametrize(("reserved_for", "state"), [("bob", JobState.RUNNING), ("ann", JobState.STOPPING)])
def test_a_node_that_is_reserved_for_others_is_not_taken(reserved_for: str, state: JobState) -> None:
    world, job_id = with_room(user="ann")
    assert world.reserve(node="c", count=1, user=reserved_for) is None
    world.pass_time(GROW_AFTER_S + 5)
    assert job_of(world, job_id).state is state


@pytest.mark.parametrize(
    ("waits", "limited", "state"),
    [
        ({"user": "bob"}, (), JobState.STOPPING),
        ({"user": "bob"}, ("ann", "bob"), JobState.RUNNING),
        ({"user": "bob", "time_s": 600.0}, (), JobState.RUNNING),
        ({"user": "ann"}, (), JobState.RUNNING),
    ],
    ids=["closed to it", "under the same limit", "open for its time", "of the same user"],
)
def test_a_node_that_is_reserved_for_its_user_is_taken_while_only_those_wait_to_whom_it_is_closed(
    waits: dict[str, object], limited: tuple[str, ...], state: JobState
) -> None:
    world, job_id = with_room(user="ann")
    if limited:
        world.limit("lab", "group", members=limited, max_gpus=20)
    assert world.reserve(node="c", user="ann") is None
    world.ask(2, nodes=3, ttl_s=1000.0, **waits)
    world.pass_time(GROW_AFTER_S + 5)
    assert world.ledger.queue
    assert job_of(world, job_id).state is state
