"""Gangs: GPUs on several nodes, all or none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpulease_protocol.errors import NeverFits, NotNow, OverQuota
from gpulease_protocol.model import Demand, EndReason, GpuState, Lease, LeaseState, NodeMode
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from tests.core.build import GIB, World, gpu, uuid


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.check()


def nodes_of(lease: Lease) -> list[str]:
    return [member.node for member in lease.members]


def why(world: World, lease: Lease) -> str:
    return explain(world.ledger, world.ledger.leases[lease.id], world.now, world.policy).sentence


def test_a_gang_gets_so_many_gpus_on_each_of_so_many_nodes(world: World) -> None:
    world.node("a").node("b").node("c")
    lease = world.lease(4, nodes=2)
    assert nodes_of(lease) == ["a", "b"]
    assert [device.uuid for device in lease.gpus] == [uuid(i, node) for node in "ab" for i in range(4)]
    assert [[device.uuid for device in member.gpus] for member in lease.members] == [
        [uuid(i, node) for i in range(4)] for node in "ab"
    ]
    held = [one for one in world.ledger.gpus.values() if one.lease_id == lease.id]
    assert {one.fencing_token for one in held} == {lease.fencing_token}
    assert len(held) == 8


def test_each_member_has_the_environment_of_its_node(world: World) -> None:
    world.addresses = {"a": "10.1.0.1", "b": "10.1.0.2"}
    world.node("a", gpus=2).node("b", gpus=2)
    first, second = world.lease(2, nodes=2).members
    assert (first.rank, first.node, first.address) == (0, "a", "10.1.0.1")
    assert second.env == {
        "CUDA_VISIBLE_DEVICES": f"{uuid(0, 'b')},{uuid(1, 'b')}",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "MASTER_ADDR": "10.1.0.1",
        "MASTER_PORT": first.env["MASTER_PORT"],
        "GPULEASE_LEASE_ID": first.env["GPULEASE_LEASE_ID"],
        "GPULEASE_LEASE_TOKEN": "1",
        "NODE_RANK": "1",
        "NNODES": "2",
        "GPULEASE_NODES": "10.1.0.1,10.1.0.2",
        "GPULEASE_GPUS_PER_NODE": "2",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    assert world.ledger.leases[first.env["GPULEASE_LEASE_ID"]].lease.env == first.env


def test_a_lease_on_one_node_has_no_members_and_its_environment_is_unchanged(world: World) -> None:
    lease = world.node("a").lease(2)
    assert lease.members == ()
    assert lease.env["MASTER_ADDR"] == "127.0.0.1"
    assert "NNODES" not in lease.env


def test_a_gang_takes_the_nodes_that_are_left_with_the_fewest_free_gpus(world: World) -> None:
    world.node("a", gpus=8).node("b", gpus=2).node("c", gpus=4).node("d", gpus=2)
    assert nodes_of(world.lease(2, nodes=2)) == ["b", "d"]
    assert nodes_of(world.lease(2, nodes=2)) == ["a", "c"]


def test_the_gpus_of_a_gang_are_of_one_model(world: World) -> None:
    world.node("a", gpus=[gpu(i, "a", name="NVIDIA A100") for i in range(2)])
    world.node("b", gpus=[gpu(0, "b"), gpu(1, "b", name="NVIDIA A100"), gpu(2, "b", name="NVIDIA A100")])
    world.node("c", gpus=4)
    lease = world.lease(2, nodes=2)
    assert nodes_of(lease) == ["a", "b"]
    assert {device.name for device in lease.gpus} == {"NVIDIA A100"}
    refused = world.answers[world.ask(2, nodes=3)]
    assert isinstance(refused, NeverFits)
    assert "No 3 nodes have 2 GPUs like that each, all of one model; 2 nodes have." in str(refused)


def test_a_gang_waits_whole_and_is_granted_whole(world: World) -> None:
    world.node("a", gpus=2).node("b", gpus=2)
    first = world.lease(1)
    gang = world.lease(2, nodes=2)
    assert gang.state is LeaseState.QUEUED
    assert not gang.gpus
    assert not gang.members
    world.release(first)
    world.answer_wanted()
    assert nodes_of(world.now_of(gang)) == ["a", "b"]


@pytest.mark.parametrize(
    ("nodes", "count", "sentence"), [(3, 4, "2 nodes have"), (2, 9, "no node has"), (3, 8, "1 node has")]
)
def test_what_never_fits_is_refused_with_numbers(world: World, nodes: int, count: int, sentence: str) -> None:
    world.node("a", gpus=8).node("b", gpus=4)
    refused = world.answers[world.ask(count, nodes=nodes)]
    assert isinstance(refused, NeverFits)
    assert f"No {nodes} nodes have {count} GPUs like that each; {sentence}." in str(refused)


def test_the_readings_of_all_nodes_are_asked_for_at_once_and_awaited(world: World) -> None:
    world.node("a", gpus=2).node("b", gpus=2)
    world.at_s += 1
    call = world.ask(2, nodes=2)
    assert set(world.wanted) == {"a", "b"}
    world.report("a")
    assert world.answers.get(call) is None
    world.at_s += 0.1
    world.report("b")
    assert isinstance(world.answers[call], Lease)


def test_slow_readings_of_two_nodes_that_arrive_one_after_the_other_count_together(world: World) -> None:
    # Each takes 0.8 s, which is longer than a reading may be old that was made for no request.
    world.node("a", gpus=2).node("b", gpus=2)
    world.at_s += 1
    call = world.ask(2, nodes=2)
    world.at_s += 0.8
    world.report("a", age_s=0.8, read_s=0.8)
    world.at_s += 0.3
    world.report("b", age_s=0.9, read_s=0.8)
    assert isinstance(world.answers[call], Lease)


def test_a_reading_that_arrived_too_long_ago_is_made_again(world: World) -> None:
    world.node("a", gpus=2).node("b", gpus=2)
    world.at_s += 1
    call = world.ask(2, nodes=2)
    world.report("a")
    world.at_s += 0.6
    world.report("b")
    assert world.answers.get(call) is None
    assert set(world.wanted) == {"a"}
    world.report("a")
    assert isinstance(world.answers[call], Lease)


def test_a_gang_is_not_granted_on_a_node_that_does_not_answer(world: World) -> None:
    world.node("a", gpus=2).node("b", gpus=2)
    world.at_s += 1
    call = world.ask(2, nodes=2)
    for _ in range(14):
        world.at_s += 0.4
        world.report("a")
    answer = world.answers[call]
    assert isinstance(answer, Lease)
    assert answer.state is LeaseState.QUEUED
    world.report("b")
    world.answer_wanted()
    assert nodes_of(world.now_of(answer)) == ["a", "b"]


def test_what_an_old_reading_rules_out_on_one_node_is_read_again_for_the_gang(world: World) -> None:
    world.node("a", gpus=1).node("b", gpus=[gpu(0, "b", pids=(7,))])
    world.at_s += 1
    call = world.ask(1, nodes=2)
    assert set(world.wanted) == {"a", "b"}
    world.node("b", gpus=[gpu(0, "b", memory_used_bytes=0)], report=False)
    world.answer_wanted()
    world.pass_time(1)
    assert isinstance(world.answers[call], Lease)


def test_a_node_without_an_address_takes_no_part_and_explain_says_so(world: World) -> None:
    world.addresses = {"b": None}
    world.node("a", gpus=2).node("b", gpus=2)
    gang = world.lease(2, nodes=2)
    assert gang.state is LeaseState.QUEUED
    assert "Node b has no address at which other nodes reach it; start its worker with --address." in why(world, gang)
    world.addresses = {}
    world.report("b")
    world.answer_wanted()
    assert nodes_of(world.now_of(gang)) == ["a", "b"]


def test_loopback_addresses_serve_nodes_of_one_host_alone(world: World) -> None:
    world.addresses = {"a": "127.0.0.1", "b": "127.0.0.1", "c": "127.0.0.1"}
    world.node("a", gpus=1).node("b", gpus=1)
    assert world.lease(1, nodes=2).state is LeaseState.QUEUED
    shared = World(host="box", addresses=world.addresses)
    lease = shared.node("a", gpus=1).node("b", gpus=1).lease(1, nodes=2)
    assert nodes_of(lease) == ["a", "b"]
    assert lease.env["MASTER_ADDR"] == "127.0.0.1"


def test_explain_tells_of_each_node_whether_it_is_ready(world: World) -> None:
    world.node("a", gpus=2).node("b", gpus=2).node("c", gpus=2).node("d", gpus=1)
    world.lease(1, node="b")
    world.lease(1, node="c")
    gang = world.lease(2, nodes=3)
    found = explain(world.ledger, world.ledger.leases[gang.id], world.now, world.policy)
    assert [(one.node, one.ready) for one in found.nodes] == [("a", True), ("b", False), ("c", False), ("d", False)]
    assert "asked for 2 GPUs on each of 3 nodes" in found.sentence
    assert "1 of 3 nodes are ready: a. Node b has 1 of 2 GPUs." in found.sentence
    assert "GPU 0 of b is held by" in found.sentence
    assert "Node d has fewer than 2 GPUs for it." in found.sentence


def test_two_gangs_never_hold_halves(world: World) -> None:
    # Each needs a whole node of both. Whatever is given back goes to the older one until it is served.
    world.policy = Policy(max_bypass=0)
    world.node("a", gpus=2).node("b", gpus=2)
    singles = [world.lease(1) for _ in range(4)]
    first, second = world.lease(2, nodes=2), world.lease(2, nodes=2)
    for single in (singles[0], singles[2], singles[1]):
        world.release(single)
        world.answer_wanted()
        assert world.lease(1, queue=True).state is LeaseState.QUEUED  # nothing of what is held for the gang
        assert {world.now_of(one).state for one in (first, second)} == {LeaseState.QUEUED}
    world.release(singles[3])
    world.answer_wanted()
    assert nodes_of(world.now_of(first)) == ["a", "b"]
    assert world.now_of(second).state is LeaseState.QUEUED
    world.release(world.now_of(first))
    world.answer_wanted()
    assert nodes_of(world.now_of(second)) == ["a", "b"]


def test_a_gang_that_waits_for_an_absent_node_holds_nothing_on_the_others(world: World) -> None:
    world.policy = Policy(max_bypass=0)
    world.node("a", gpus=2).node("b", gpus=2)
    world.set_mode(NodeMode.DRAINING, "b")
    gang = world.lease(2, nodes=2)
    assert gang.state is LeaseState.QUEUED
    assert world.lease(2).state is LeaseState.ACTIVE


def test_newer_requests_pass_a_gang_at_most_as_often_as_the_bound_says(world: World) -> None:
    world.policy = Policy(max_bypass=3)
    world.node("a", gpus=2).node("b", gpus=2)
    long = world.lease(1, node="b")
    gang = world.lease(2, nodes=2)
    passed = 0
    for _ in range(10):
        single = world.lease(1, node="a")
        if single.state is not LeaseState.ACTIVE:
            break
        passed += 1
        world.release(single)
        world.answer_wanted()
    assert passed == 3
    assert "Held for it: GPU" in why(world, gang)
    world.release(long)
    world.answer_wanted()
    assert world.now_of(gang).state is LeaseState.ACTIVE


def test_a_node_keeps_no_more_for_a_gang_than_that_needs_there(world: World) -> None:
    world.policy = Policy(max_bypass=0)
    world.node("a", gpus=8).node("b", gpus=1)
    world.lease(1, node="b")
    assert world.lease(1, nodes=2).state is LeaseState.QUEUED
    assert world.lease(7, node="a").state is LeaseState.ACTIVE
    assert world.lease(1, node="a").state is LeaseState.QUEUED


def test_the_limit_of_a_user_counts_all_gpus_of_a_gang(world: World) -> None:
    world.policy = Policy(limits=UserLimits(gpus=4))
    world.node("a", gpus=4).node("b", gpus=4)
    refused = world.answers[world.ask(3, nodes=2)]
    assert isinstance(refused, OverQuota)
    assert "The request is for 6 GPUs" in str(refused)
    world.lease(1)
    assert world.lease(2, nodes=2).state is LeaseState.QUEUED
    assert world.lease(2, nodes=2, user="bob").state is LeaseState.ACTIVE


def test_each_node_of_an_ended_gang_drains_by_itself(world: World) -> None:
    world.node("a", gpus=2).node("b", gpus=2)
    lease = world.lease(2, nodes=2)
    world.release(lease)
    assert set(world.wanted) == {"a", "b"}
    world.report("a")
    assert (world.state(0, "a"), world.state(0, "b")) == (GpuState.FREE, GpuState.DRAINING)
    world.report("b")
    assert world.state(0, "b") is GpuState.FREE


def test_the_loss_of_one_node_ends_the_gang_everywhere(world: World) -> None:
    world.policy = Policy(node_lost_after_s=10)
    world.node("a", gpus=2).node("b", gpus=2)
    lease = world.lease(2, nodes=2, ttl_s=3600)
    world.pass_time(15, silent=("b",))
    assert world.now_of(lease).end_reason is EndReason.NODE_LOST
    assert (world.state(0, "a"), world.state(0, "b")) == (GpuState.FREE, GpuState.UNKNOWN)
    assert world.ledger.gpus[uuid(0, "b")].draining
    world.report("b")
    assert world.state(0, "b") is GpuState.FREE


def test_a_gang_of_a_living_holder_survives_the_silence_of_a_node(world: World) -> None:
    world.policy = Policy(node_lost_after_s=10)
    world.node("a", gpus=2).node("b", gpus=2)
    lease = world.lease(2, nodes=2, ttl_s=3600)
    for _ in range(4):
        world.pass_time(5, silent=("b",))
        world.renew(lease)
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.forget("b")
    assert world.now_of(lease).end_reason is EndReason.NODE_LOST


def test_a_gang_revives_only_while_all_of_its_gpus_are_there(world: World) -> None:
    world.node("a", gpus=1).node("b", gpus=1)
    lease = world.lease(1, nodes=2, ttl_s=1)
    world.pass_time(2)
    assert world.now_of(lease).end_reason is EndReason.EXPIRED
    revived = world.renew(lease)
    assert isinstance(revived, Lease)
    assert nodes_of(revived) == ["a", "b"]
    world.pass_time(2)
    world.lease(1, node="b")
    assert not isinstance(world.renew(lease), Lease)
    assert world.state(0, "a") is GpuState.FREE


def test_a_request_that_does_not_wait_is_refused_with_what_each_node_lacks(world: World) -> None:
    world.node("a", gpus=1).node("b", gpus=1)
    world.lease(1)
    call = world.ask(1, nodes=2, queue=False)
    world.answer_wanted()
    refused = world.answers[call]
    assert isinstance(refused, NotNow)
    assert "1 of 2 nodes are ready: b." in str(refused)


def test_memory_and_model_are_asked_of_every_node(world: World) -> None:
    world.node("a", gpus=1).node("b", gpus=[gpu(0, "b", memory_used_bytes=70 * GIB)]).node("c", gpus=1)
    assert nodes_of(world.lease(1, nodes=2, min_free_memory_bytes=40 * GIB, gpu_model="h100")) == ["a", "c"]


def test_what_could_serve_a_gang_is_found_once(world: World) -> None:
    world.node("a", gpus=1).node("b", gpus=1)
    world.lease(1, nodes=2)
    assert set(world.ledger.fleet.candidates) >= {Demand(count=1, nodes=2)}
