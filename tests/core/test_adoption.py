"""A process that already runs on GPUs becomes the holder of a lease on them, or is told what is in the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.errors import GpuleaseError, InUse, InvalidRequest, NotAllowed, NotNow, OverQuota
from gpulease_protocol.model import (
    Demand,
    EndReason,
    Event,
    GpuState,
    Holder,
    Lease,
    LeaseState,
    Liveness,
    NodeMode,
    Process,
)
from gpulease_protocol.node_protocol import OwnerState
from gpulease_server.core.happenings import LeaseRequested
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.node import desired_state
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Adoption
from tests.core.build import World, gpu, watch_of

PID, RANK, STRANGER = 7, 8, 9


def adoption(world: World, pid: int = PID, *below: int, user: str | None = None, **what: Any) -> LeaseRequested:
    """The request to adopt a process of ann's, with those below it; `user`: whose the node must show it to be."""
    number = next(world.ids)
    return LeaseRequested(
        cause=f"ask-{number}",
        lease_id=f"lease-{number}",
        demand=Demand(),
        holder=Holder(user="ann", owner_pid=pid),
        ttl_s=60.0,
        queue=False,
        watched_owner=watch_of(pid),
        adoption=Adoption(pids=frozenset({pid, *below}), user=user),
        **what,
    )


def adopt(world: World, pid: int = PID, *below: int, **what: Any) -> Lease | GpuleaseError:
    """The verdict, once the node has read."""
    request = adoption(world, pid, *below, **what)
    assert world.turn(request) == [None], "no reading since the request"
    world.answer_wanted()
    world.check()
    answer = world.answers[request.cause]
    assert isinstance(answer, Lease | GpuleaseError)
    assert not world.pending
    return answer


def used_by(*pids: int, **what: Any) -> World:
    """A node with two GPUs, of which the first is used by these processes."""
    return World().node(gpus=[gpu(0, pids=pids, **what), gpu(1)])


def test_the_process_has_every_gpu_that_it_and_those_below_it_use_and_no_other() -> None:
    world = World().node(gpus=[gpu(0, pids=(PID,)), gpu(1), gpu(2, pids=(RANK, PID))])
    assert world.state(0) is GpuState.FOREIGN
    lease = adopt(world, PID, RANK)
    assert isinstance(lease, Lease)
    assert [one.index for one in lease.gpus] == [0, 2]
    assert (lease.state, lease.liveness, lease.demand.count) == (LeaseState.ACTIVE, Liveness.PROCESS, 2)
    assert [world.state(index) for index in range(3)] == [GpuState.LEASED, GpuState.FREE, GpuState.LEASED]
    (granted,) = world.events("lease.granted")
    assert granted.reason == "adopted process 7"
    state = desired_state(world.ledger, "a", 0)
    assert [(one.owner_pid, one.owner_start_ticks) for one in state.leases] == [(PID, 107)]
    assert [one.pid for one in state.owners] == [PID]


def test_it_is_within_the_budget_of_the_token_that_it_is_asked_for_with() -> None:
    world = World().node(gpus=[gpu(0, pids=(PID,)), gpu(1, pids=(PID,))])
    budget = Budget(max_gpus=1)
    request = replace(adoption(world, budget=budget), holder=Holder(user="ann", owner_pid=PID, token_id="t"))
    world.turn(request)
    world.answer_wanted()
    refused = world.answers[request.cause]
    assert isinstance(refused, OverQuota)
    assert refused.status == 422
    assert "token t may have 1 at a time" in refused.detail
    assert not world.ledger.leases_of_tokens


def test_it_ends_with_the_process_and_its_gpu_is_free_when_that_is_off_it() -> None:
    world = used_by(PID)
    lease = adopt(world)
    assert isinstance(lease, Lease)
    world.nodes["a"][0] = gpu(0, pids=(PID,), lease=lease.id)
    world.owners[PID] = OwnerState.ALIVE
    world.pass_time(5)
    assert world.now_of(lease).state is LeaseState.ACTIVE
    assert "gpu.conflict" not in [one.kind for one in world.changes if isinstance(one, Event)]
    world.owners[PID] = OwnerState.GONE
    world.report()
    assert world.now_of(lease).end_reason is EndReason.HOLDER_DIED
    assert world.state() is GpuState.DRAINING
    world.nodes["a"][0] = gpu(0)
    world.report()
    assert world.state() is GpuState.FREE


def test_a_released_one_leaves_a_gpu_that_drains_until_the_process_has_ended() -> None:
    world = used_by(PID)
    lease = adopt(world)
    assert isinstance(lease, Lease)
    world.release(lease)
    world.report()
    assert world.state() is GpuState.DRAINING
    refused = adopt(world)
    assert isinstance(refused, NotNow)
    assert f"drains after {lease.id}" in refused.detail


@pytest.mark.parametrize("older_first", [True, False])
def test_a_grant_and_an_adoption_in_one_turn_never_meet_on_a_gpu(older_first: bool) -> None:
    """The process started on a GPU that the last reading showed free, and both are asked for before the next."""
    world = World().node(gpus=1)
    world.at_s += 0.6
    request = adoption(world)
    calls = [lambda: world.ask(1), lambda: world.turn(request)]
    asked = [call() for call in (calls if older_first else calls[::-1])]
    call = asked[0] if older_first else asked[1]
    world.nodes["a"][0] = gpu(0, pids=(PID,))
    world.answer_wanted()
    world.check()
    granted, adopted = world.answers[call], world.answers[request.cause]
    assert isinstance(adopted, Lease)
    assert isinstance(granted, Lease)
    assert (adopted.state, granted.state) == (LeaseState.ACTIVE, LeaseState.QUEUED)


def test_a_gpu_that_was_granted_before_the_process_was_seen_is_not_adopted() -> None:
    world = World().node(gpus=1)
    held = world.lease(1)
    world.nodes["a"][0] = gpu(0, pids=(PID,))
    refused = adopt(world)
    assert isinstance(refused, NotNow)
    assert f"leased to ann ({held.id}), and process 7 is a stranger on it" in refused.detail


def test_two_adoptions_of_one_process_make_one_lease() -> None:
    world = used_by(PID)
    first, second = adoption(world), adoption(world)
    world.turn(first, second)
    world.answer_wanted()
    world.check()
    lease, refused = world.answers[first.cause], world.answers[second.cause]
    assert isinstance(lease, Lease)
    assert isinstance(refused, InUse)
    assert f"Process 7 holds {lease.id} already" in refused.detail


def test_no_adoption_rests_on_a_reading_begun_before_it_was_asked_for() -> None:
    world = used_by(PID)
    request = adoption(world)
    world.turn(request)
    assert "a" in world.wanted, "its node is asked at once"
    world.report(age_s=1.0)
    assert request.cause not in world.answers
    world.nodes["a"][0] = gpu(0)
    world.report()
    refused = world.answers[request.cause]
    assert isinstance(refused, NotNow)
    assert "uses no GPU" in refused.detail


def test_a_node_that_does_not_read_in_time_leads_to_a_refusal() -> None:
    world = used_by(PID)
    request = adoption(world)
    world.turn(request)
    for _ in range(30):
        world.at_s += 0.25
        world.report(age_s=world.at_s - 1000.0)
    refused = world.answers[request.cause]
    assert isinstance(refused, NotNow)
    assert "did not read its GPUs in time" in refused.detail
    assert not world.ledger.queue
    world.check()


REFUSED: dict[str, tuple[dict[str, Any], type[GpuleaseError], str]] = {
    "it uses no GPU": ({"pids": ()}, NotNow, "Process 7 uses no GPU of node a"),
    "someone else's process is there too": ({"pids": (PID, STRANGER)}, NotNow, "GPU 0 of a is used by pid 9, too"),
    "its GPU is unhealthy": ({"pids": (PID,), "health": "lost"}, NotNow, "GPU 0 of a is unhealthy"),
    "other processes may be hidden": ({"pids": (PID,), "hidden_use": True}, NotNow, "not only in use by process 7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_in_the_way_is_named(case: str) -> None:
    what, kind, why = REFUSED[case]
    world = World().node(gpus=[gpu(0, **what), gpu(1)])
    refused = adopt(world)
    assert isinstance(refused, kind)
    assert why in refused.detail
    assert refused.remedy
    assert world.ledger.leases == {}


def test_one_gpu_that_is_shared_keeps_it_from_all() -> None:
    world = World().node(gpus=[gpu(0, pids=(PID,)), gpu(1, pids=(PID, STRANGER))])
    assert isinstance(adopt(world), NotNow)
    assert [world.state(index) for index in range(2)] == [GpuState.FOREIGN] * 2


@pytest.mark.parametrize("mode", [NodeMode.DRAINING, NodeMode.PAUSED])
def test_a_node_out_of_use_adopts_nothing(mode: NodeMode) -> None:
    world = used_by(PID)
    world.set_mode(mode)
    request = adoption(world)
    world.turn(request)
    world.report()
    assert isinstance(world.answers[request.cause], NotNow)


def test_a_process_under_a_lease_needs_no_other() -> None:
    world = World().node(gpus=2)
    lease = world.lease(1)
    world.nodes["a"] = [gpu(0, pids=(PID,), lease=lease.id), gpu(1)]
    refused = adopt(world)
    assert isinstance(refused, InUse)
    assert f"Process 7 works under {lease.id} already" in refused.detail


def test_an_owner_of_a_lease_that_took_a_further_gpu_releases_first() -> None:
    world = World().node(gpus=2)
    lease = world.lease(1, owner=PID)
    world.nodes["a"][1] = gpu(1, pids=(PID,))
    refused = adopt(world)
    assert isinstance(refused, InUse)
    assert f"holds {lease.id} already" in refused.detail


def test_on_another_host_the_node_must_show_it_to_be_the_callers() -> None:
    def of(user: str) -> World:
        process = Process(pid=PID, user=user)
        return World().node(gpus=[replace(gpu(0), processes=(process,))])

    assert isinstance(adopt(of("ann"), user="ann"), Lease)
    refused = adopt(of("bob"), user="ann")
    assert isinstance(refused, NotAllowed)
    assert "belongs to user bob, and you are ann" in refused.detail


def test_a_limit_of_the_user_counts() -> None:
    world = World(policy=Policy(limits=UserLimits(gpus=1))).node(gpus=[gpu(0), gpu(1, pids=(PID,))])
    lease = world.lease(1)
    refused = adopt(world)
    assert isinstance(refused, OverQuota)
    assert refused.status == 429
    assert "the limit is 1 at a time" in refused.detail
    world.release(lease)
    world.report()
    assert isinstance(adopt(world), Lease)


def test_a_process_that_uses_more_than_a_limit_allows_is_refused_for_good() -> None:
    world = World(policy=Policy(limits=UserLimits(gpus=1))).node(gpus=[gpu(0, pids=(PID,)), gpu(1, pids=(PID,))])
    refused = adopt(world)
    assert isinstance(refused, OverQuota)
    assert refused.status == 422
    assert "The request is for 2 GPUs, and user ann may have 1 at a time" in refused.detail
    assert "wait" not in refused.detail


def test_a_process_that_ends_before_the_verdict_leaves_nothing() -> None:
    world = used_by(PID)
    request = adoption(world)
    world.turn(request)
    world.owners[PID] = OwnerState.GONE
    world.report()
    assert isinstance(world.answers[request.cause], InvalidRequest)
    assert world.ledger.leases == {}
    world.check()


def test_what_waits_in_the_queue_keeps_its_place_and_gets_its_gpu_afterwards() -> None:
    world = used_by(PID)
    waiting = world.lease(2)
    assert waiting.state is LeaseState.QUEUED
    lease = adopt(world)
    assert isinstance(lease, Lease)
    world.owners[PID] = OwnerState.GONE
    world.nodes["a"][0] = gpu(0)
    world.report()
    world.report()
    assert world.now_of(waiting).state is LeaseState.ACTIVE


def test_a_process_on_a_gpu_that_is_reserved_for_others_is_not_adopted() -> None:
    world = used_by(PID)
    assert world.reserve(world.nodes["a"][0].uuid, user="bob") is None
    refused = adopt(world)
    assert isinstance(refused, NotNow)
    assert "GPU 0 of a is reserved for others" in str(refused)
    world.unreserve(next(iter(world.ledger.calendar.entries)))
    assert isinstance(adopt(world), Lease)
