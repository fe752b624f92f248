"""What a worker sees of owners decides on their leases at once; what nobody sees decides nothing."""

from __future__ import annotations

import pytest

from gpulease.errors import InvalidRequest, LeaseLost
from gpulease.exchange import MAX_OWNERS, OwnerState
from gpulease.model import EndReason, Event, GpuState, Lease, LeaseState, Liveness
from gpulease_server.core.happenings import Ticked
from gpulease_server.core.node import desired_state

from .build import World

ANN, BEN = 7, 8
ALIVE, GONE, UNKNOWN = OwnerState.ALIVE, OwnerState.GONE, OwnerState.UNKNOWN


def kinds(world: World, lease: Lease) -> list[str]:
    """The kinds of a lease's events."""
    return [change.kind for change in world.changes if isinstance(change, Event) and change.lease_id == lease.id]


def test_a_dead_owner_ends_his_lease_at_once_and_its_gpus_drain() -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN, ttl_s=300)
    assert lease.liveness is Liveness.PROCESS
    world.owners[ANN] = GONE
    world.report()
    assert world.now_of(lease).end_reason is EndReason.HOLDER_DIED
    assert world.state() is GpuState.DRAINING
    assert kinds(world, lease)[-2:] == ["lease.ended", "lease.lost"]
    assert isinstance(world.renew(lease), LeaseLost), "who is dead does not come back"
    world.report()
    assert world.state() is GpuState.FREE


def test_one_death_ends_every_lease_of_that_owner_and_no_other() -> None:
    world = World().node(gpus=3)
    first, second, other = world.lease(1, owner=ANN), world.lease(1, owner=ANN), world.lease(1, owner=BEN)
    assert len(desired_state(world.ledger, "a", 0).owners) == 2
    world.owners |= {ANN: GONE, BEN: ALIVE}
    world.report()
    assert [world.now_of(one).state for one in (first, second, other)] == ["ended", "ended", "active"]
    assert [one.pid for one in desired_state(world.ledger, "a", 0).owners] == [BEN]


def test_a_dead_waiter_leaves_the_queue_before_the_same_report_frees_what_he_waits_for() -> None:
    world = World().node(gpus=1)
    holder = world.lease(1)
    waiter, next_one = world.lease(1, owner=ANN, ttl_s=300), world.lease(1)
    assert waiter.state is LeaseState.QUEUED
    world.release(holder)
    world.owners[ANN] = GONE
    world.report()
    assert "lease.granted" not in kinds(world, waiter)
    assert "lease.lost" not in kinds(world, waiter), "he had none to lose"
    assert world.now_of(waiter).end_reason is EndReason.HOLDER_DIED
    assert world.now_of(next_one).state is LeaseState.ACTIVE


def test_a_request_whose_owner_dies_before_its_verdict_leaves_nothing() -> None:
    world = World().node(gpus=2)
    first = world.lease(1, owner=ANN)
    world.at_s += 0.6
    call = world.ask(1, owner=ANN)
    assert call not in world.answers
    world.owners[ANN] = GONE
    world.report()
    assert isinstance(world.answers[call], InvalidRequest)
    assert list(world.ledger.leases) == [first.id]
    assert not world.ledger.queue
    assert not world.pending
    world.check()


@pytest.mark.parametrize("ttl_s", [0.5, 2.0, 60.0])
def test_a_living_owner_who_never_renews_keeps_his_lease_for_as_long_as_he_is_seen(ttl_s: float) -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN, ttl_s=ttl_s)
    world.owners[ANN] = ALIVE
    world.report()
    for _ in range(80):
        world.at_s += 1.0
        world.report()
        world.turn(Ticked(cause="tick", since_last_s=0.25))
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(max(ttl_s, world.policy.silence_s) + 0.5, silent=("a",))
    assert world.now_of(lease).end_reason is EndReason.EXPIRED, "where no worker reports, time decides"


def test_a_queued_owner_who_is_seen_alive_keeps_his_place() -> None:
    world = World().node(gpus=1)
    world.owners[ANN] = ALIVE
    holder = world.lease(1, ttl_s=1000)
    waiter = world.lease(1, owner=ANN, ttl_s=2)
    world.pass_time(30)
    assert world.now_of(waiter).state is LeaseState.QUEUED
    world.release(holder)
    world.report()
    assert world.now_of(waiter).state is LeaseState.ACTIVE


def test_what_is_seen_writes_no_row() -> None:
    world = World().node(gpus=1)
    world.lease(1, owner=ANN)
    world.owners[ANN] = ALIVE
    world.report()
    world.changes.clear()
    world.pass_time(10)
    assert {type(change).__name__ for change in world.changes} == {"Sighting", "Deadline"}


def test_a_renewal_never_shortens_what_a_sight_has_given() -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN, ttl_s=0.5)
    world.owners[ANN] = ALIVE
    world.report()
    before = world.ledger.deadlines[lease.id]
    world.renew(lease)
    assert world.ledger.deadlines[lease.id] == before


def test_a_report_that_does_not_name_the_owner_decides_nothing() -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN, ttl_s=5)
    before = world.ledger.deadlines[lease.id]
    world.report()
    assert world.ledger.deadlines[lease.id] == before
    assert world.now_of(lease).liveness is Liveness.PROCESS
    world.pass_time(6)
    assert world.now_of(lease).end_reason is EndReason.EXPIRED


def test_a_report_that_was_overtaken_decides_nothing() -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN)
    world.owners[ANN] = ALIVE
    world.report()
    world.owners[ANN] = GONE
    world.report(age_s=3.0)
    assert world.now_of(lease).state is LeaseState.ACTIVE


@pytest.mark.parametrize("why", ["cannot be watched", "another boot or pid namespace"])
def test_an_owner_whom_its_worker_cannot_see_must_renew_from_then_on(why: str) -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN, ttl_s=5)
    if why == "cannot be watched":
        world.owners[ANN] = UNKNOWN
    else:
        world.realm, world.owners[ANN] = "elsewhere", GONE
    world.report()
    assert (world.now_of(lease).state, world.now_of(lease).liveness) == (LeaseState.ACTIVE, Liveness.HEARTBEAT)
    assert "lease.unwatched" in kinds(world, lease)
    world.realm, world.owners[ANN] = "here", ALIVE
    assert not desired_state(world.ledger, "a", 0).owners
    world.pass_time(4)
    world.renew(lease)
    world.pass_time(4)
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(2)
    assert world.now_of(lease).end_reason is EndReason.EXPIRED


def test_a_worker_that_cannot_say_where_it_sees_processes_decides_nothing() -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN)
    world.realm, world.owners[ANN] = None, GONE
    world.report()
    assert world.now_of(lease).state is LeaseState.ACTIVE


def test_a_probe_that_hangs_hides_no_death() -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN)
    world.owners[ANN] = GONE
    world.report(problem="hung")
    assert world.now_of(lease).end_reason is EndReason.HOLDER_DIED


def test_another_node_has_no_say_in_whose_owner_lives() -> None:
    world = World().node("a", gpus=1).node("b", gpus=1)
    lease = world.lease(1, owner=ANN)
    world.owners[ANN] = GONE
    world.report("b")
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.report("a")
    assert world.now_of(lease).state is LeaseState.ENDED


def test_beyond_so_many_owners_a_worker_is_told_of_no_more() -> None:
    world = World().node(gpus=1)
    world.lease(1, owner=1)
    for pid in range(2, MAX_OWNERS + 1):
        assert world.lease(1, owner=pid).liveness is Liveness.PROCESS
    assert world.lease(1, owner=MAX_OWNERS + 1).liveness is Liveness.HEARTBEAT
    assert world.lease(1, owner=5).liveness is Liveness.PROCESS, "he is watched already"
    assert len(desired_state(world.ledger, "a", 0).owners) == MAX_OWNERS


def test_only_an_end_against_the_holders_will_is_a_loss() -> None:
    world = World().node(gpus=1)
    released = world.lease(1)
    world.release(released)
    world.report()
    expired = world.lease(1, ttl_s=1)
    world.pass_time(2)
    assert "lease.lost" not in kinds(world, released)
    assert kinds(world, expired).count("lease.lost") == 1


def test_a_living_owner_keeps_his_lease_while_his_worker_waits_for_a_slow_driver() -> None:
    """With `--probe-deadline-s 10` a worker may say nothing for over 11 s, and counts as heard all the while."""
    world = World().node(gpus=1)
    world.report(reading_limit_s=10.0, hold_s=1.0)
    world.owners[ANN] = ALIVE
    lease = world.lease(1, owner=ANN, ttl_s=5)
    for _ in range(3):
        world.report(reading_limit_s=10.0, hold_s=1.0, problem="the driver is busy")
        for _ in range(44):
            world.at_s += 0.25
            world.turn(Ticked(cause="t", since_last_s=0.25))
        assert world.now_of(lease).state is LeaseState.ACTIVE
    world.at_s += 1
    world.turn(Ticked(cause="t", since_last_s=1.0))
    assert world.now_of(lease).end_reason is EndReason.EXPIRED
