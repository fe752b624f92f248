"""What a worker sees of owners decides on their leases at once; what no one sees decides nothing."""

from __future__ import annotations

from typing import Any

import pytest

from gpulease_protocol.errors import InvalidRequest, LeaseLost
from gpulease_protocol.model import EndReason, Event, GpuState, Lease, LeaseState, Liveness
from gpulease_protocol.node_protocol import JUST_STARTED, MAX_OWNERS, OwnerState
from gpulease_server.core.happenings import AnswerLost, Ticked, WaiterPolled
from gpulease_server.core.liveness import ANSWER_LOST_S
from gpulease_server.core.node import desired_state
from gpulease_server.core.presentation import lease_view
from tests.core.build import World

ANN, BEN = 7, 8
ALIVE, GONE, UNKNOWN = OwnerState.ALIVE, OwnerState.GONE, OwnerState.UNKNOWN


def kinds(world: World, lease: Lease) -> list[str]:
    """The kinds of a lease's events."""
    return [change.kind for change in world.changes if isinstance(change, Event) and change.lease_id == lease.id]


def test_a_dead_owner_ends_its_lease_at_once_and_its_gpus_drain() -> None:
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


def test_a_dead_waiter_leaves_the_queue_before_the_same_report_frees_its_gpus() -> None:
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
def test_a_living_owner_that_never_renews_keeps_its_lease_while_it_is_seen(ttl_s: float) -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN, ttl_s=ttl_s)
    world.owners[ANN] = ALIVE
    world.report()
    for _ in range(80):
        world.at_s += 1.0
        world.report()
        world.turn(Ticked(cause="tick", since_last_s=0.25))
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(max(ttl_s, world.policy.silence_s) + 60, silent=("a",))
    assert world.now_of(lease).state is LeaseState.ACTIVE, "nothing is gained by its end: its GPUs are unknown"
    view = lease_view(world.ledger, world.ledger.leases[lease.id], world.now, world.policy)
    assert view.expires_at is None, "no moment is known"
    assert view.problems == ("GPU 0 of a is unknown: node a has been silent for over 3 s.",)
    world.owners[ANN] = GONE
    world.report()
    assert world.now_of(lease).end_reason is EndReason.HOLDER_DIED


@pytest.mark.parametrize("renewed_after_s", [None, 0.5])
def test_a_holder_loses_nothing_when_its_worker_falls_silent_before_it_has_seen_it(
    renewed_after_s: float | None,
) -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN, ttl_s=2.0)
    if renewed_after_s is not None:
        world.pass_time(renewed_after_s, silent=("a",))
        world.renew(lease)
    world.pass_time(90, silent=("a",))
    assert world.now_of(lease).state is LeaseState.ACTIVE, "its worker may find its owner alive"
    world.pass_time(7)
    assert world.now_of(lease).end_reason is EndReason.EXPIRED, "it has not"


@pytest.mark.parametrize("ttl_s", [1.0, 60.0])
@pytest.mark.parametrize("worker", ["w", "another"])
def test_a_worker_that_was_away_has_time_to_look_before_its_leases_can_expire(worker: str, ttl_s: float) -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN, ttl_s=ttl_s)
    world.owners[ANN] = ALIVE
    world.report()
    del world.owners[ANN]
    world.pass_time(90, silent=("a",))
    world.report(problem=JUST_STARTED, worker=worker)
    world.turn(Ticked(cause="tick", since_last_s=0.25))
    assert world.now_of(lease).state is LeaseState.ACTIVE, "its worker was not even told of the owner yet"
    world.owners[ANN] = ALIVE
    world.report(worker=worker)
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.owners[ANN] = GONE
    world.report(worker=worker)
    assert world.now_of(lease).end_reason is EndReason.HOLDER_DIED


def test_an_owner_that_a_worker_never_finds_again_does_not_keep_its_lease() -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN, ttl_s=5.0)
    world.owners[ANN] = ALIVE
    world.report()
    del world.owners[ANN]
    world.pass_time(90, silent=("a",))
    world.pass_time(5.5)
    assert world.now_of(lease).end_reason is EndReason.EXPIRED


def test_a_restarted_daemon_keeps_the_lease_of_a_watched_owner_until_its_worker_reports() -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN, ttl_s=5.0)
    world.ledger.node_observations.clear()  # a restart
    world.pass_time(60, silent=("a",))
    assert world.now_of(lease).state is LeaseState.ACTIVE


def test_a_silent_worker_keeps_no_request_in_the_queue_and_no_lease_by_heartbeat() -> None:
    world = World().node(gpus=1)
    holder = world.lease(1, ttl_s=5.0)
    waiter = world.lease(1, owner=ANN, ttl_s=5.0)
    world.pass_time(6, silent=("a",))
    assert world.now_of(holder).end_reason is EndReason.EXPIRED
    assert world.now_of(waiter).end_reason is EndReason.HOLDER_DIED


def test_a_silent_worker_keeps_no_lease_whose_owner_it_could_not_watch() -> None:
    world = World().node(gpus=1)
    world.owners[ANN] = UNKNOWN
    lease = world.lease(1, owner=ANN, ttl_s=5.0)
    world.report()
    assert world.now_of(lease).liveness is Liveness.HEARTBEAT
    world.pass_time(6, silent=("a",))
    assert world.now_of(lease).end_reason is EndReason.EXPIRED


def wait_for(world: World, lease: Lease, seconds: float) -> None:
    """The holder long-polls for so long."""
    until_s = world.at_s + seconds
    while world.at_s < until_s:
        world.turn(WaiterPolled(cause="poll", lease_id=lease.id))
        world.pass_time(0.5)


def test_in_the_queue_only_waiting_keeps_a_request() -> None:
    """Who presses Ctrl-C in a notebook or in front of curl lives on, and must not wait behind it."""
    world = World().node(gpus=1)
    world.owners |= {ANN: ALIVE, BEN: ALIVE}
    world.lease(1, ttl_s=1000)
    waits, gave_up = world.lease(1, owner=ANN, ttl_s=2), world.lease(1, owner=BEN, ttl_s=2)
    wait_for(world, waits, 10)
    assert world.now_of(waits).state is LeaseState.QUEUED
    assert world.now_of(gave_up).end_reason is EndReason.HOLDER_DIED
    assert "lease.granted" not in kinds(world, gave_up)
    world.pass_time(2.5)
    assert world.now_of(waits).state is LeaseState.ENDED


def test_a_renewal_keeps_a_request_in_the_queue() -> None:
    world = World().node(gpus=1)
    world.owners[ANN] = ALIVE
    world.lease(1, ttl_s=1000)
    waiter = world.lease(1, owner=ANN, ttl_s=2)
    world.pass_time(1.5)
    world.renew(waiter)
    world.pass_time(1.5)
    assert world.now_of(waiter).state is LeaseState.QUEUED


def granted_out_of_the_queue(world: World, **what: Any) -> Lease:
    world.owners[ANN] = ALIVE
    holder = world.lease(1, ttl_s=1000)
    waiter = world.lease(1, owner=ANN, **what)
    world.release(holder)
    world.report()
    assert world.now_of(waiter).state is LeaseState.ACTIVE
    return waiter


def test_a_grant_that_no_one_asks_about_ends_although_its_owner_lives() -> None:
    world = World().node(gpus=1)
    lease = granted_out_of_the_queue(world, ttl_s=5)
    world.pass_time(4)
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(1.5)
    assert world.now_of(lease).end_reason is EndReason.EXPIRED
    assert not world.ledger.unclaimed
    world.report()
    assert world.state() is GpuState.FREE


def test_a_grant_of_which_its_holder_was_told_lasts_as_long_as_its_owner() -> None:
    world = World().node(gpus=1)
    lease = granted_out_of_the_queue(world, ttl_s=5)
    world.pass_time(4)
    world.renew(world.now_of(lease))
    world.pass_time(60)
    assert world.now_of(lease).state is LeaseState.ACTIVE
    before = world.ledger.deadlines[lease.id]
    world.at_s += 0.1
    world.turn(WaiterPolled(cause="poll", lease_id=lease.id))
    assert world.ledger.deadlines[lease.id] == before, "a look at a lease that is held is no renewal"


def test_a_poll_that_is_decided_after_the_grant_tells_no_one_of_it() -> None:
    world = World().node(gpus=1)
    lease = granted_out_of_the_queue(world, ttl_s=5)
    world.turn(WaiterPolled(cause="poll", lease_id=lease.id))
    world.pass_time(60)
    assert world.now_of(lease).end_reason is EndReason.EXPIRED


def test_a_grant_at_once_is_known_to_its_holder() -> None:
    world = World().node(gpus=1)
    world.owners[ANN] = ALIVE
    lease = world.lease(1, owner=ANN, ttl_s=2)
    world.pass_time(30)
    assert world.now_of(lease).state is LeaseState.ACTIVE


@pytest.mark.parametrize("heard", [False, True])
def test_a_grant_at_once_of_which_no_one_was_told_ends_although_its_owner_lives(heard: bool) -> None:
    world = World().node(gpus=1)
    world.owners[ANN] = ALIVE
    lease = world.lease(1, owner=ANN, ttl_s=5)
    world.at_s += 0.1
    if heard:
        world.renew(lease)
    world.turn(AnswerLost(cause="lost", lease_id=lease.id))
    world.pass_time(4)
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(60)
    assert world.now_of(lease).end_reason is (None if heard else EndReason.EXPIRED)
    world.turn(AnswerLost(cause="lost", lease_id=lease.id), AnswerLost(cause="lost", lease_id="lease-0"))


def test_a_waiter_that_dies_is_gone_at_once() -> None:
    world = World().node(gpus=1)
    world.owners[ANN] = ALIVE
    world.lease(1, ttl_s=1000)
    waiter = world.lease(1, owner=ANN, ttl_s=1000)
    world.owners[ANN] = GONE
    world.turn(WaiterPolled(cause="poll", lease_id=waiter.id))
    world.report()
    assert world.now_of(waiter).end_reason is EndReason.HOLDER_DIED


def test_what_is_seen_writes_no_row() -> None:
    world = World().node(gpus=1)
    world.lease(1, owner=ANN)
    world.owners[ANN] = ALIVE
    world.report()
    world.changes.clear()
    world.pass_time(10)
    assert {type(change).__name__ for change in world.changes} == {"NodeObservation", "Deadline"}


def test_a_renewal_never_shortens_what_a_sight_has_given() -> None:
    world = World().node(gpus=1)
    lease = world.lease(1, owner=ANN, ttl_s=0.5)
    world.owners[ANN] = ALIVE
    world.report()
    before = world.ledger.deadlines[lease.id]
    world.renew(lease)
    assert world.ledger.deadlines[lease.id] >= before


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


def test_the_start_of_a_worker_that_is_reported_once_more_does_not_hide_its_silence() -> None:
    """A proxy repeated it: the node counted as heard, and the lease expired beside a silent worker."""
    world = World().node(gpus=1)
    world.owners[ANN] = ALIVE
    world.report(problem=JUST_STARTED)
    world.report()
    lease = world.lease(1, owner=ANN, ttl_s=2)
    world.at_s += 2.5
    world.report(problem=JUST_STARTED)
    assert world.ledger.node_observations["a"].problem is None
    world.at_s += 2.5
    world.turn(Ticked(cause="tick", since_last_s=0.1))
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
    users = ("ann", "bob", "cho", "dai")
    for pid in range(1, MAX_OWNERS + 1):
        assert world.lease(1, owner=pid, user=users[pid % 4]).liveness is Liveness.PROCESS
    assert world.lease(1, owner=MAX_OWNERS + 1, user="eve").liveness is Liveness.HEARTBEAT
    assert world.lease(1, owner=5, user=users[1]).liveness is Liveness.PROCESS, "he is watched already"
    assert len(desired_state(world.ledger, "a", 0).owners) == MAX_OWNERS


def test_very_many_processes_of_one_user_leave_room_to_watch_those_of_others() -> None:
    """A shell that is not watched loses its GPUs when its `ttl_s` has passed."""
    world = World().node(gpus=1)
    lives = [world.lease(1, owner=pid, user="eve").liveness for pid in range(1, MAX_OWNERS + 1)]
    assert lives.count(Liveness.PROCESS) == MAX_OWNERS // 4
    assert lives[-1] is Liveness.HEARTBEAT
    assert world.lease(1, owner=MAX_OWNERS + 1, user="ada").liveness is Liveness.PROCESS


def test_only_an_end_against_the_holders_will_is_a_loss() -> None:
    world = World().node(gpus=1)
    released = world.lease(1)
    world.release(released)
    world.report()
    expired = world.lease(1, ttl_s=1)
    world.pass_time(2)
    assert "lease.lost" not in kinds(world, released)
    assert kinds(world, expired).count("lease.lost") == 1


def test_a_living_owner_keeps_its_lease_while_its_worker_waits_for_a_slow_driver() -> None:
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


def test_an_owner_is_told_to_the_nodes_of_its_realm_and_to_no_other() -> None:
    """A pid means nothing in another boot or pid namespace, whatever the host is called."""
    world = World().node("a", gpus=1).node("b", gpus=1)
    first, second = world.lease(1, owner=ANN), world.lease(1, owner=ANN)
    nodes = {world.now_of(lease).gpus[0].node for lease in (first, second)}
    assert nodes == {"a", "b"}, "one lease on each"
    told = {node: desired_state(world.ledger, node, 0).leases[0] for node in nodes}
    assert [(one.owner_pid, one.owner_start_ticks) for one in told.values()] == [(ANN, 100 + ANN)] * 2
    world.realm = "elsewhere"
    world.report("b")
    assert desired_state(world.ledger, "b", 0).leases[0].owner_pid is None
    assert desired_state(world.ledger, "a", 0).leases[0].owner_pid == ANN


def leave(world: World, lease: Lease) -> None:
    """The client that waits for a lease goes away."""
    wait_for(world, lease, 5)
    world.turn(AnswerLost(cause="lost", lease_id=lease.id))


@pytest.mark.parametrize("owner", [None, ANN], ids=["by heartbeat", "by its process"])
def test_a_client_that_goes_away_keeps_its_place_for_a_minute_whatever_its_ttl(owner: int | None) -> None:
    """`gpulease acquire` leases for hours. Killed in the queue, it kept its place for as long."""
    world = World().node(gpus=1)
    world.owners[ANN] = ALIVE
    world.lease(1, ttl_s=3600)
    waiter = world.lease(1, owner=owner, ttl_s=300)
    leave(world, waiter)
    world.pass_time(ANSWER_LOST_S - 2)
    assert world.now_of(waiter).state is LeaseState.QUEUED
    world.pass_time(3)
    assert world.now_of(waiter).end_reason is EndReason.HOLDER_DIED


@pytest.mark.parametrize("come_back", ["poll", "renew"])
def test_a_client_that_comes_back_within_a_minute_has_its_whole_ttl(come_back: str) -> None:
    world = World().node(gpus=1)
    world.lease(1, ttl_s=3600)
    waiter = world.lease(1, ttl_s=300)
    leave(world, waiter)
    world.pass_time(50)
    if come_back == "poll":
        world.turn(WaiterPolled(cause="poll", lease_id=waiter.id))
    else:
        world.renew(waiter)
    world.pass_time(290)
    assert world.now_of(waiter).state is LeaseState.QUEUED


def test_what_is_granted_to_a_client_that_has_gone_away_is_free_again_after_a_minute() -> None:
    world = World().node(gpus=1)
    holder = world.lease(1, ttl_s=3600)
    waiter = world.lease(1, ttl_s=300)
    leave(world, waiter)
    world.pass_time(30)
    world.release(holder)
    world.report()
    assert world.now_of(waiter).state is LeaseState.ACTIVE
    world.pass_time(ANSWER_LOST_S - 2)
    assert world.now_of(waiter).state is LeaseState.ACTIVE, "time to ask about it"
    world.pass_time(3)
    assert world.now_of(waiter).end_reason is EndReason.EXPIRED


def test_what_is_granted_as_its_client_goes_away_is_free_again_after_a_minute() -> None:
    world = World().node(gpus=1)
    holder = world.lease(1, ttl_s=3600)
    waiter = world.lease(1, ttl_s=300)
    world.release(holder)
    world.report()
    assert world.now_of(waiter).state is LeaseState.ACTIVE
    world.turn(AnswerLost(cause="lost", lease_id=waiter.id))
    world.pass_time(ANSWER_LOST_S + 1)
    assert world.now_of(waiter).end_reason is EndReason.EXPIRED


def test_what_is_granted_to_one_who_asks_now_and_then_is_theirs_for_the_ttl() -> None:
    world = World().node(gpus=1)
    holder = world.lease(1, ttl_s=3600)
    asks_now_and_then = world.lease(1, ttl_s=300)
    world.pass_time(200)
    world.release(holder)
    world.report()
    world.pass_time(290)
    assert world.now_of(asks_now_and_then).state is LeaseState.ACTIVE
    world.pass_time(20)
    assert world.now_of(asks_now_and_then).end_reason is EndReason.EXPIRED
