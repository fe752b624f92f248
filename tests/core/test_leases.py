"""A lease's life, as a holder sees it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from gpulease_protocol.errors import (
    IdempotencyMismatch,
    LeaseLost,
    NeverFits,
    NotAllowed,
    NotFound,
    NotNow,
    OverQuota,
    StaleToken,
)
from gpulease_protocol.model import (
    ComputeMode,
    EndReason,
    GpuReading,
    GpuState,
    Lease,
    LeaseState,
    Process,
    ProcessType,
    Selection,
)
from gpulease_server.core.happenings import IdempotencyKey, RenewalRequested, Ticked, WaiterPolled
from gpulease_server.core.ledger import MAX_ENDED_IN_MEMORY
from gpulease_server.core.policy import Policy
from tests.core.build import GIB, World, gpu, uuid


def test_a_request_that_fits_is_granted_whole() -> None:
    world = World().node(gpus=4)
    lease = world.view(world.lease(3))
    assert lease.state is LeaseState.ACTIVE
    assert [device.index for device in lease.gpus] == [0, 1, 2]
    assert lease.env["CUDA_VISIBLE_DEVICES"] == ",".join(uuid(index) for index in range(3))
    assert lease.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert lease.env["GPULEASE_LEASE_TOKEN"] == str(lease.fencing_token)
    assert lease.expires_at is not None
    assert lease.granted_at is not None
    assert (lease.expires_at - lease.granted_at).total_seconds() == 60


@pytest.mark.parametrize(
    "devices", [{"indices": (3, 1)}, {"uuids": (uuid(3), uuid(1))}, {"indices": (3,), "uuids": (uuid(1),)}]
)
def test_listed_gpus_are_granted_in_the_order_of_the_list(devices: dict) -> None:
    lease = World().node(gpus=4).lease(2, selection=Selection.LISTED, **devices)
    assert [device.index for device in lease.gpus] == [3, 1]
    assert lease.env["CUDA_VISIBLE_DEVICES"] == f"{uuid(3)},{uuid(1)}"


def test_no_grant_rests_on_an_old_reading() -> None:
    world = World().node(gpus=1)
    world.at_s += 0.6
    call = world.ask(queue=False)
    assert call not in world.answers, "answered on a reading older than 0.5 s"
    assert "a" in world.wanted
    world.nodes["a"] = [gpu(0, pids=(4242,))]
    world.report()
    assert isinstance(world.answers[call], NotNow)


@pytest.mark.parametrize("wrong", [{"pids": (4242,)}, {"health": "xid:79"}, {"compute_mode": ComputeMode.PROHIBITED}])
def test_no_refusal_rests_on_an_old_reading_either(wrong: dict) -> None:
    world = World().node(gpus=[gpu(0, **wrong)])
    world.at_s += 0.6
    call = world.ask(queue=False)
    assert call not in world.answers, "refused on a reading older than 0.5 s"
    assert "a" in world.wanted
    world.nodes["a"] = [gpu(0)]
    world.report()
    answer = world.answers[call]
    assert isinstance(answer, Lease)
    assert answer.state is LeaseState.ACTIVE


def test_what_a_reading_cannot_change_is_refused_at_once() -> None:
    world = World().node(gpus=2)
    world.lease(1)
    world.at_s += 0.6
    assert isinstance(world.answers[world.ask(2, queue=False)], NotNow)


def test_a_reading_begun_before_it_was_asked_for_does_not_count() -> None:
    world = World().node(gpus=1)
    world.at_s += 1
    call = world.ask()
    world.report(age_s=0.6)
    assert call not in world.answers
    world.report(age_s=0.0)
    assert isinstance(world.answers[call], Lease)


@pytest.mark.parametrize("answers", [False, True], ids=["silent", "always late"])
def test_a_verdict_waits_only_so_long_for_a_recent_reading(answers: bool) -> None:
    world = World().node(gpus=1)
    world.at_s += 1
    refused, waiting = world.ask(queue=False), world.ask()
    for _ in range(22):
        world.at_s += 0.25
        if answers:
            world.report(age_s=0.6)
        world.turn(Ticked(cause="t", since_last_s=0.25))
    assert isinstance(world.answers[refused], NotNow)
    queued = world.answers[waiting]
    assert isinstance(queued, Lease)
    assert queued.state is LeaseState.QUEUED
    codes = [item.code for item in world.answers[refused].extra["explanation"].obstacles]  # type: ignore[union-attr]
    assert codes == ["unread" if answers else "unknown"]


@pytest.mark.parametrize(
    ("reading", "state"),
    [
        (gpu(0, pids=(4242,)), GpuState.FOREIGN),
        (gpu(0, hidden_use=True, memory_used_bytes=20 * GIB), GpuState.FOREIGN),
        (gpu(0, compute_mode=ComputeMode.PROHIBITED), GpuState.PROHIBITED),
        (gpu(0, health="lost"), GpuState.UNHEALTHY),
        (gpu(0, health="xid:79"), GpuState.UNHEALTHY),
    ],
)
def test_a_gpu_in_such_a_state_is_not_granted(reading: GpuReading, state: GpuState) -> None:
    world = World().node(gpus=[reading])
    assert world.state() is state
    refused = world.answers[world.ask(queue=False)]
    assert isinstance(refused, NotNow)
    assert refused.extra["explanation"].obstacles[0].code == state.value


def test_the_explanation_names_holder_process_and_place_in_the_queue() -> None:
    world = World().node(gpus=[gpu(0), gpu(1, pids=(4242,))])
    first = world.lease(1)
    waiting = world.lease(2)
    assert world.position(waiting) == 1
    refused = world.answers[world.ask(1, queue=False)]
    assert isinstance(refused, NotNow)
    assert first.id in refused.detail
    assert "pid 4242" in refused.detail
    assert "user ann" in refused.detail


@pytest.mark.parametrize(
    "what",
    [
        {"count": 5},
        {"count": 1, "node": "elsewhere"},
        {"count": 1, "gpu_model": "A100"},
        {"count": 1, "min_free_memory_bytes": 81 * GIB},
        {"count": 1, "selection": Selection.LISTED, "indices": (7,)},
        {"count": 1, "among": ("GPU-none",)},
    ],
)
def test_a_demand_that_no_node_can_meet_never_fits(what: dict) -> None:
    world = World().node(gpus=4)
    refused = world.answers[world.ask(**what)]
    assert isinstance(refused, NeverFits)
    assert refused.extra["explanation"].verdict == "never"
    assert not world.ledger.leases


def test_before_any_node_has_reported_a_request_waits() -> None:
    world = World()
    call = world.ask(99)
    answer = world.answers[call]
    assert isinstance(answer, Lease)
    assert answer.state is LeaseState.QUEUED


def test_memory_in_use_counts_against_the_memory_asked_for() -> None:
    world = World().node(gpus=[gpu(0, memory_used_bytes=70 * GIB), gpu(1, memory_used_bytes=None), gpu(2)])
    assert [device.index for device in world.lease(1, min_free_memory_bytes=20 * GIB).gpus] == [2]
    assert isinstance(world.answers[world.ask(queue=False, min_free_memory_bytes=20 * GIB)], NotNow)


@pytest.mark.parametrize(
    ("what", "indices"),
    [
        ({"selection": Selection.ALL}, [0, 1, 2, 3]),
        ({"selection": Selection.AUTO}, [0, 1, 2, 3]),
        ({"selection": Selection.LISTED, "count": 2, "indices": (3, 1)}, [3, 1]),
        ({"selection": Selection.LISTED, "count": 1, "uuids": (uuid(2),)}, [2]),
        ({"count": 2, "among": (uuid(1), uuid(3))}, [1, 3]),
    ],
)
def test_which_gpus_a_demand_gets(what: dict, indices: list[int]) -> None:
    lease = World().node(gpus=4).lease(**{"count": 1, **what})
    assert [device.index for device in lease.gpus] == indices


def test_auto_takes_what_is_free_and_all_waits_for_every_one() -> None:
    world = World().node(gpus=4)
    world.lease(1)
    assert world.lease(selection=Selection.ALL).state is LeaseState.QUEUED
    world = World().node(gpus=4)
    world.lease(1)
    assert len(world.lease(selection=Selection.AUTO).gpus) == 3


def test_a_gang_is_never_split_over_nodes_and_fills_the_fuller_node_first() -> None:
    world = World().node("a", gpus=4).node("b", gpus=2)
    assert {device.node for device in world.lease(2).gpus} == {"b"}
    assert {device.node for device in world.lease(3).gpus} == {"a"}
    assert world.lease(2).state is LeaseState.QUEUED
    assert {device.node for device in world.lease(1, selection=Selection.AUTO, node="a").gpus} == {"a"}


def test_first_come_first_served() -> None:
    world = World(policy=Policy(max_bypass=0)).node(gpus=4)
    held = world.lease(3)
    big, small = world.lease(2), world.lease(1)
    assert (world.position(big), world.position(small)) == (1, 2)
    assert small.state is LeaseState.QUEUED, "a newer request took the GPU that an older waits for"
    world.release(held)
    world.report()
    assert world.now_of(big).state is LeaseState.ACTIVE
    assert world.now_of(small).state is LeaseState.ACTIVE
    assert (world.now_of(big).fencing_token or 0) < (world.now_of(small).fencing_token or 0)


def test_a_newer_request_gets_what_no_older_can_use() -> None:
    world = World().node(gpus=2)
    world.lease(selection=Selection.LISTED, indices=(1,))
    assert world.lease(selection=Selection.LISTED, indices=(1,)).state is LeaseState.QUEUED
    assert world.lease(1).state is LeaseState.ACTIVE


def test_requests_of_one_turn_get_different_gpus() -> None:
    world = World().node(gpus=2)
    world.at_s += 1
    calls = [world.ask(queue=False) for _ in range(3)]
    world.report()
    answers = [world.answers[call] for call in calls]
    assert sum(isinstance(answer, Lease) for answer in answers) == 2
    assert isinstance(answers[2], NotNow)
    world.check()


def test_a_released_gpu_is_granted_only_after_a_reading_begun_after_the_release() -> None:
    world = World().node(gpus=1)
    lease, waiting = world.lease(), world.lease()
    world.at_s += 0.01
    answer = world.release(lease)
    assert isinstance(answer, Lease)
    assert answer.end_reason is EndReason.RELEASED
    assert world.state() is GpuState.DRAINING
    assert "a" in world.wanted, "the node was not asked at once"
    world.report(age_s=0.02)
    assert world.now_of(waiting).state is LeaseState.QUEUED, "granted on a reading from before the release"
    world.report()
    assert world.now_of(waiting).state is LeaseState.ACTIVE


@pytest.mark.parametrize(
    "left", [gpu(0, pids=(77,), lease="lease-1"), gpu(0, pids=(77,)), gpu(0, memory_used_bytes=GIB)]
)
def test_a_gpu_drains_while_anything_of_its_holder_is_left(left: GpuReading) -> None:
    world = World().node(gpus=1)
    lease, waiting = world.lease(), world.lease()
    world.node(gpus=[left])
    world.release(lease)
    world.pass_time(5)
    assert world.state() is GpuState.DRAINING
    assert world.now_of(waiting).state is LeaseState.QUEUED
    world.node(gpus=1)
    assert world.now_of(waiting).state is LeaseState.ACTIVE


def test_a_lease_expires_at_its_ttl_and_not_before() -> None:
    world = World().node(gpus=1)
    lease = world.lease(ttl_s=10)
    world.pass_time(9.75)
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(0.5)
    assert world.now_of(lease).end_reason is EndReason.EXPIRED


def test_a_lease_is_never_said_to_expire_later_than_it_does() -> None:
    """A tenth of a millisecond of difference made a lease end before the time that its holder was told."""
    for tenths in range(10):
        world = World().node(gpus=1)
        lease = world.view(world.lease(ttl_s=10 + tenths / 10_000))
        assert lease.expires_at is not None
        assert lease.granted_at is not None
        assert lease.expires_at - lease.granted_at == timedelta(seconds=10), "the millisecond in which it expires"


def test_a_renewal_gives_a_full_ttl() -> None:
    world = World().node(gpus=1)
    lease = world.lease(ttl_s=10)
    world.pass_time(9)
    assert isinstance(world.renew(lease), Lease)
    world.pass_time(9)
    assert world.now_of(lease).state is LeaseState.ACTIVE


def test_a_late_renewal_revives_with_the_same_token() -> None:
    world = World().node(gpus=1)
    lease = world.lease(ttl_s=1)
    world.pass_time(2)
    revived = world.renew(lease)
    assert isinstance(revived, Lease)
    assert (revived.state, revived.fencing_token) == (LeaseState.ACTIVE, lease.fencing_token)
    assert revived.expires_at is not None
    assert world.state() is GpuState.LEASED
    world.check()


def test_a_late_renewal_is_refused_once_the_gpu_was_granted_again() -> None:
    world = World().node(gpus=1)
    lease = world.lease(ttl_s=1)
    waiting = world.lease(ttl_s=1000)
    world.pass_time(2)
    assert world.now_of(waiting).state is LeaseState.ACTIVE
    assert isinstance(world.renew(lease), LeaseLost)
    world.release(world.now_of(waiting))
    world.report()
    assert isinstance(world.renew(lease), LeaseLost), "revived although someone held the GPU in between"


def test_a_released_lease_is_not_revived() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    world.release(lease)
    assert isinstance(world.renew(lease), LeaseLost)


def test_only_the_right_token_acts_on_a_lease() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    assert isinstance(world.renew(lease, token=99), StaleToken)
    assert isinstance(world.release(lease, token=99), StaleToken)
    assert world.now_of(lease).state is LeaseState.ACTIVE


def test_releasing_twice_is_answered_the_same_twice() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    assert world.release(lease) == world.release(lease)


def test_an_unknown_lease_is_not_found() -> None:
    assert isinstance(World().turn(RenewalRequested(cause="c", lease_id="lease-x", fencing_token=1))[0], NotFound)


def test_a_queued_lease_can_be_cancelled_by_its_holder() -> None:
    world = World().node(gpus=1)
    world.lease()
    waiting = world.lease()
    answer = world.release(waiting)
    assert isinstance(answer, Lease)
    assert answer.end_reason is EndReason.CANCELLED
    assert not world.ledger.queue


def test_a_queued_lease_lives_while_someone_waits_for_it() -> None:
    world = World().node(gpus=1)
    world.lease(ttl_s=1000)
    waiting = world.lease(ttl_s=2)
    for _ in range(4):
        world.pass_time(1)
        world.turn(WaiterPolled(cause="poll", lease_id=waiting.id))
    assert world.now_of(waiting).state is LeaseState.QUEUED
    world.pass_time(3)
    assert world.now_of(waiting).end_reason is EndReason.HOLDER_DIED


def test_renewing_a_request_that_waits_changes_nothing_but_its_sign_of_life() -> None:
    world = World().node(gpus=1)
    world.lease(count=1)
    waiting = world.lease(count=1)
    before, places = world.ledger.leases[waiting.id], list(world.ledger.queue)
    world.at_s += 1.0
    world.renew(waiting)
    after = world.ledger.leases[waiting.id]
    assert after.renewed_at == world.now.at
    assert after.is_renewal_of(before)
    assert not replace(after, place=7).is_renewal_of(before), "it has another place in the queue"
    assert world.ledger.queue == places
    world.check_indexes()


def test_time_in_which_the_daemon_heard_no_one_is_given_back() -> None:
    world = World().node(gpus=1)
    lease = world.lease(ttl_s=10)
    world.at_s += 60
    world.turn(Ticked(cause="tick", since_last_s=60, stalled_s=60))
    assert world.now_of(lease).state is LeaseState.ACTIVE
    world.pass_time(10.5)
    assert world.now_of(lease).end_reason is EndReason.EXPIRED


def test_a_tick_that_is_late_because_a_commit_was_slow_gives_no_one_time() -> None:
    world = World().node(gpus=1)
    lease = world.lease(ttl_s=10)
    world.at_s += 60
    world.turn(Ticked(cause="tick", since_last_s=60))
    assert world.now_of(lease).end_reason is EndReason.EXPIRED


def test_ports_of_leases_on_one_host_differ() -> None:
    """Also when both nodes are simulated on one host, and when something else listens already."""
    world = World(host="h").node("a", gpus=200).node("b", gpus=200)
    world.ports_in_use = tuple(range(21000, 22990, 2))
    world.report("a")
    leases = [world.lease() for _ in range(400)]
    ports = {int(lease.env["MASTER_PORT"]) for lease in leases}
    assert len(ports) == 400, "two leases would meet on one MASTER_PORT"
    assert not ports & set(world.ports_in_use)


def test_the_queue_is_bounded() -> None:
    world = World(policy=Policy(max_queued=1)).node(gpus=1)
    world.lease()
    world.lease()
    assert isinstance(world.answers[world.ask()], OverQuota)


def test_the_same_key_and_request_get_the_same_lease() -> None:
    world = World().node(gpus=4)
    key = IdempotencyKey(key="k", fingerprint="f")
    first, second = world.lease(key=key), world.lease(key=key)
    assert first.id == second.id
    assert isinstance(world.answers[world.ask(key=IdempotencyKey(key="k", fingerprint="other"))], IdempotencyMismatch)
    assert len(world.ledger.leases) == 1


def test_a_key_sent_again_before_the_verdict_joins_it() -> None:
    world = World().node(gpus=4)
    world.at_s += 1
    key = IdempotencyKey(key="k", fingerprint="f")
    calls = [world.ask(key=key), world.ask(key=key)]
    world.report()
    first, second = (world.answers[call] for call in calls)
    assert first == second


def test_a_job_lease_is_not_released_by_hand() -> None:
    world = World().node(gpus=1)
    job = world.ledger.jobs[world.submit()].job
    lease = world.ledger.leases[job.lease_id].lease
    assert isinstance(world.release(lease), NotAllowed)


def test_a_headless_renderer_of_the_former_holder_keeps_its_gpu_draining() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    renderer = Process(pid=7, type=ProcessType.GRAPHICS, lease_id=lease.id)
    world.node(gpus=[replace(gpu(0), processes=(renderer,))])
    world.release(lease)
    world.pass_time(1)
    assert world.state() is GpuState.DRAINING


@pytest.mark.parametrize("health", ["lost", "reset_required", "processes_unknown", "xid:79"])
def test_no_one_can_say_that_an_unhealthy_gpu_is_clean(health: str) -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    world.node(gpus=[gpu(0, health=health)])
    world.release(lease)
    world.pass_time(1)
    assert world.ledger.gpus[uuid(0)].draining
    world.node(gpus=1)
    assert world.state() is GpuState.FREE


def test_a_request_goes_to_the_node_whose_reading_is_fresh() -> None:
    world = World().node("a", gpus=1).node("b", gpus=1)
    world.at_s += 0.6
    world.report("b")
    answer = world.answers[world.ask(queue=False)]
    assert isinstance(answer, Lease)
    assert answer.gpus[0].node == "b"


def test_a_node_that_is_always_late_delays_no_request_without_bound() -> None:
    world = World().node("a", gpus=2).node("b", gpus=1)
    world.lease(1, node="b")
    world.at_s += 1
    call = world.ask(queue=False)
    for _ in range(24):
        world.at_s += 0.25
        world.report("a", age_s=0.6)
        world.turn(Ticked(cause="t", since_last_s=0.25))
    assert isinstance(world.answers[call], NotNow)


def test_a_draining_gpu_that_is_gone_is_forgotten_and_holds_no_one_up() -> None:
    world = World(policy=Policy(gone_after_s=2.0)).node(gpus=2)
    lease = world.lease(selection=Selection.LISTED, indices=(0,))
    world.node(gpus=[gpu(1)])
    world.release(lease)
    world.pass_time(3)
    assert set(world.ledger.gpus) == {uuid(1)}
    assert isinstance(world.answers[world.ask(2)], NeverFits)


def test_a_renewal_does_not_revive_over_a_foreign_process() -> None:
    world = World().node(gpus=1)
    lease = world.lease(ttl_s=1)
    world.pass_time(2)
    world.node(gpus=[gpu(0, pids=(9,))])
    assert isinstance(world.renew(lease), LeaseLost)


def test_a_renewal_does_not_revive_a_port_that_went_to_another() -> None:
    world = World().node(gpus=2)
    lease = world.lease(ttl_s=1)
    world.pass_time(2)
    other = world.lease(selection=Selection.LISTED, indices=(1,))
    record = world.ledger.leases[other.id]
    world.ledger.apply(replace(record, port=world.ledger.leases[lease.id].port))
    assert isinstance(world.renew(lease), LeaseLost)


def test_more_leases_than_are_kept_can_end_at_once() -> None:
    world = World().node(gpus=MAX_ENDED_IN_MEMORY + 2)
    leases = [world.lease() for _ in range(MAX_ENDED_IN_MEMORY + 2)]
    for lease in leases:
        assert isinstance(world.release(lease), Lease)
    world.check()


def test_an_expired_lease_is_not_forgotten_while_it_might_revive() -> None:
    world = World().node(gpus=2)
    expired = world.lease(ttl_s=1, selection=Selection.LISTED, indices=(0,))
    world.pass_time(2)
    for _ in range(MAX_ENDED_IN_MEMORY + 1):
        world.report()
        world.release(world.lease(selection=Selection.LISTED, indices=(1,)))
    assert isinstance(world.renew(expired), Lease)


def test_a_key_is_remembered_for_as_long_as_its_lease_lives() -> None:
    """Ranks that torchrun starts again after days ask by it for the lease that they still have."""
    world = World(policy=Policy(key_lifetime_s=2)).node()
    key = IdempotencyKey(key="k", fingerprint="f")
    first = world.lease(key=key)
    world.pass_time(5)
    assert world.lease(key=key).id == first.id
    world.release(first)
    world.pass_time(5)
    assert world.lease(key=key).id != first.id


def test_a_key_outlives_a_jump_of_the_wall_clock() -> None:
    world = World().node(gpus=2)
    first = world.lease(key=IdempotencyKey(key="k", fingerprint="f"))
    world.wall_jump_s = 48 * 3600.0
    world.pass_time(1)
    assert world.lease(key=IdempotencyKey(key="k", fingerprint="f")).id == first.id


def test_a_key_from_before_a_restart_is_forgotten_too_after_its_lifetime_and_not_sooner() -> None:
    world = World(policy=Policy(key_lifetime_s=5)).node()
    key = IdempotencyKey(key="k", fingerprint="f")
    first = world.lease(key=key)
    world.release(first)
    world.ledger.keys_known_since.clear()  # what a new process reads from the database is only the key
    world.at_s = 1.0
    world.wall_jump_s = 3600.0
    world.pass_time(4)
    assert world.lease(key=key).id == first.id
    world.pass_time(2)
    assert world.lease(key=key).id != first.id, "remembered forever"


def test_what_can_run_now_is_granted_although_the_queue_is_full() -> None:
    world = World(policy=Policy(max_queued=1)).node(gpus=2)
    first = {"selection": Selection.LISTED, "indices": (0,)}
    world.lease(**first)
    world.lease(**first)
    assert isinstance(world.answers[world.ask(**first)], OverQuota)
    assert isinstance(world.answers[world.ask(queue=False)], Lease)
