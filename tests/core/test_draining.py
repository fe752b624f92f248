"""When a GPU whose lease ended is clean: no one listed, no one has it open, memory back."""

from __future__ import annotations

import pytest

from gpulease_protocol.model import GpuReading, GpuState, Lease, LeaseState, Process
from gpulease_protocol.node_protocol import NodeReport
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.happenings import NodeReported
from gpulease_server.core.node import desired_state
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import gpu_view
from tests.core.build import GIB, World, gpu, uuid


def drained(reading: GpuReading, *, before: GpuReading | None = None) -> tuple[World, Lease]:
    """A world in which a lease, `MINE`, has ended, and its GPU was seen like this since."""
    world = World().node(gpus=[before or gpu(0)])
    lease = world.lease()
    world.release(lease)
    return world.node(gpus=[reading]), lease


def told(world: World, kind: str) -> list[str | None]:
    return [change.reason for change in world.changes if getattr(change, "kind", "") == kind]


def reason(world: World) -> str:
    return gpu_view(world.ledger, world.ledger.gpus[uuid(0)], world.now, world.policy).reason or ""


MINE = "lease-2"
LEFT = Process(pid=9, user="ann", command="python train.py", lease_id=MINE)
STRANGER = Process(pid=7, user="bob", command="python notebook.py")


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (gpu(0, processes=(LEFT,)), "pid 9 of ann (python train.py) is still running"),
        (gpu(0, opened_by=(LEFT,)), "its device file is kept open by pid 9 of ann (python train.py) of that lease"),
        (
            gpu(0, processes=(Process(pid=8),), opened_by=(LEFT, STRANGER)),
            ": pid 8 is still running; its device file is kept open by pid 9 of ann (python train.py) of that lease",
        ),
        (gpu(0, opened_by=(LEFT,), memory_used_bytes=3 * GIB), "its device file is kept open by pid 9 of ann"),
        (
            gpu(0, opened_by=(STRANGER,), memory_used_bytes=3 * GIB),
            "no process is left, but 3.0 GiB of memory is in use",
        ),
        (gpu(0, memory_used_bytes=3 * GIB), "no process is left, but 3.0 GiB of memory is in use, 0.0 GiB while it"),
        (gpu(0, memory_used_bytes=None), "no process is left, but an unknown amount of memory is in use"),
        (gpu(0, opened_by=None), "open device files are still being checked"),
        (gpu(0, processes=(Process(pid=8, lease_id="another"),)), "pid 8 is still running"),
    ],
)
def test_a_gpu_drains_until_nothing_is_left_in_any_of_the_three_senses(reading: GpuReading, words: str) -> None:
    world, lease = drained(reading)
    for _ in range(3):
        world.report()
    assert world.state() is GpuState.DRAINING
    assert reason(world).startswith(f"Being cleaned after {lease.id} (user ann)")
    assert words in reason(world)
    world.node(gpus=1)
    assert world.state() is GpuState.FREE
    assert told(world, "gpu.clean") == [None]


@pytest.mark.parametrize(
    "opener",
    [
        Process(pid=9, command="/usr/bin/nvidia-persistenced --verbose"),
        Process(pid=9, command="/usr/bin/python3 /usr/bin/gpustat -i"),
        Process(pid=9, command="/usr/bin/python3 -u -m nvitop"),
        Process(pid=9, command="/usr/lib/xorg/Xorg vt2"),
        Process(pid=9, command="/usr/bin/nv-fabricmanager -c /usr/share/nvidia/nvswitch/fabricmanager.cfg"),
        Process(pid=9, command="/opt/datadog-agent/bin/agent/agent run -p /opt/datadog-agent/run/agent.pid"),
        Process(pid=9, command="/usr/bin/python3 -m glances"),
        Process(pid=9, command="nvidia-cuda-mps-server"),
    ],
)
def test_a_monitor_or_desktop_that_has_the_device_open_keeps_it_from_no_one(opener: Process) -> None:
    world, _ = drained(gpu(0, opened_by=(opener,)))
    assert world.state() is GpuState.FREE


def test_a_name_that_says_nothing_by_itself_is_known_by_its_place() -> None:
    world, _ = drained(gpu(0, opened_by=(Process(pid=9, command="/home/ann/rl/agent run"),)))
    assert world.state() is GpuState.DRAINING


def test_a_lost_gpu_that_shows_nothing_is_not_clean() -> None:
    world, _ = drained(gpu(0, health="lost"))
    assert world.ledger.gpus[uuid(0)].draining
    world.node(gpus=[gpu(0, health="processes_unknown")])
    assert world.ledger.gpus[uuid(0)].draining


@pytest.mark.parametrize(
    ("unreadable", "one", "note"),
    [
        (0, None, None),
        (12, None, "the open files of 12 processes could not be read"),
        (1, 9, "the open files of 1 process could not be read, such as pid 9 of ann (agent)"),
        (None, None, "its device file is not known, so open files were not checked"),
    ],
)
def test_what_no_one_could_look_at_is_said_when_the_gpu_is_freed(
    unreadable: int | None, one: int | None, note: str | None
) -> None:
    process = None if one is None else Process(pid=one, user="ann", command="agent")
    world, _ = drained(gpu(0, unreadable_processes=unreadable, unreadable_process=process))
    assert told(world, "gpu.clean") == [note]


def test_the_baseline_is_learnt_while_the_gpu_is_free_and_one_odd_reading_does_not_spoil_it() -> None:
    world = World().node(gpus=[gpu(0, memory_used_bytes=2 * GIB)])
    world.pass_time(5)
    world.node(gpus=[gpu(0, memory_used_bytes=30 * GIB)])  # a process that is not listed yet, or whose memory lags
    lease = world.lease()
    assert world.ledger.gpus[uuid(0)].baseline_bytes == 2 * GIB
    world.release(lease)
    world.report()
    assert world.state() is GpuState.DRAINING
    world.node(gpus=[gpu(0, memory_used_bytes=2 * GIB + 2**20)])
    assert world.state() is GpuState.FREE


def test_an_odd_reading_counts_once_however_often_news_of_jobs_repeats_it() -> None:
    world = World().node(gpus=[gpu(0, memory_used_bytes=2 * GIB)])
    world.pass_time(5)
    world.node(gpus=[gpu(0, memory_used_bytes=30 * GIB)])
    observed_at_s = world.ledger.node_observations["a"].observed_at_s
    report = NodeReport(worker_id="w", host="a", gpus=tuple(world.nodes["a"]), repeated=True)
    for number in range(9):
        again = NodeReported(cause=f"news-{number}", node="a", report=report, observed_at_s=observed_at_s)
        world.turn(again)
    world.lease()
    assert world.ledger.gpus[uuid(0)].baseline_bytes == 2 * GIB


def test_a_repeated_reading_is_as_old_as_it_is() -> None:
    world = World().node(gpus=1)
    observed_at_s = world.ledger.node_observations["a"].observed_at_s
    world.at_s += 10
    report = NodeReport(worker_id="w", host="a", gpus=tuple(world.nodes["a"]), repeated=True)
    world.turn(NodeReported(cause="news", node="a", report=report, observed_at_s=observed_at_s))
    assert world.ledger.node_observations["a"].observed_at_s == observed_at_s
    call = world.ask()
    assert call not in world.answers
    assert "a" in world.wanted, "it is asked for a reading first"


def test_the_memory_of_processes_that_cannot_be_seen_is_not_that_of_a_free_gpu() -> None:
    """In a container, where memory alone tells that something of a holder is left."""
    world = World().node(gpus=[gpu(0, memory_used_bytes=40 * GIB, hidden_use=True)])
    world.pass_time(5)
    world.node(gpus=1)
    lease = world.lease()
    assert world.ledger.gpus[uuid(0)].baseline_bytes == 0
    world.release(lease)
    world.node(gpus=[gpu(0, memory_used_bytes=39 * GIB, hidden_use=True)])
    assert world.state() is GpuState.DRAINING
    assert lease.id in reason(world)


def test_the_baseline_follows_a_desktop_that_takes_more_while_the_gpu_is_free() -> None:
    world = World().node(gpus=[gpu(0)])
    world.release(world.lease())
    world.report()
    world.node(gpus=[gpu(0, memory_used_bytes=GIB)])
    world.pass_time(5)
    world.lease()
    assert world.ledger.gpus[uuid(0)].baseline_bytes == GIB


def test_what_each_lease_leaves_within_the_tolerance_does_not_add_up() -> None:
    world, used = World().node(gpus=[gpu(0)]), 0
    for _ in range(3):
        lease = world.lease()
        used += world.policy.memory_tolerance_bytes // 2
        world.node(gpus=[gpu(0, memory_used_bytes=used)])
        world.release(lease)
        world.report()
    assert world.state() is GpuState.DRAINING, "a leak was taken for the way the GPU is"


def test_memory_that_the_driver_retains_does_not_block_forever() -> None:
    world, _ = drained(gpu(0, memory_used_bytes=9 * GIB))
    world.pass_time(20)
    world.node(gpus=[gpu(0, memory_used_bytes=5 * GIB)])  # still falling: the wait begins again
    world.pass_time(29)
    assert world.state() is GpuState.DRAINING
    world.pass_time(2)
    assert world.state() is GpuState.FREE
    assert told(world, "gpu.clean") == ["memory retained by the driver: 5.0 GiB"]
    lease = world.lease()
    assert world.ledger.gpus[uuid(0)].baseline_bytes == 5 * GIB
    world.release(lease)
    world.report()
    assert world.state() is GpuState.FREE, "the baseline was not learned again"


@pytest.mark.parametrize("left", [gpu(0, processes=(LEFT,)), gpu(0, opened_by=(LEFT,)), gpu(0, opened_by=None)])
def test_retained_memory_is_waited_for_only_once_no_one_is_left(left: GpuReading) -> None:
    world, _ = drained(left)
    world.pass_time(60)
    world.node(gpus=[gpu(0, memory_used_bytes=9 * GIB)])
    world.pass_time(29)
    assert world.state() is GpuState.DRAINING
    world.pass_time(2)
    assert world.state() is GpuState.FREE


def test_retained_memory_is_waited_for_also_where_not_every_reading_has_looked_who_has_the_gpu_open() -> None:
    retained = {"memory_used_bytes": 9 * GIB}
    world, _ = drained(gpu(0, **retained))
    for _ in range(16):
        world.node(gpus=[gpu(0, opened_by=None, **retained)])
        world.pass_time(1)
        world.node(gpus=[gpu(0, **retained)])
        world.pass_time(1)
    assert world.state() is GpuState.FREE


def test_a_strangers_open_device_file_delays_a_clean_gpu_for_a_while_and_is_named_when_it_is_freed() -> None:
    world, lease = drained(gpu(0, opened_by=(STRANGER,)))
    assert world.state() is GpuState.DRAINING
    said = (
        f"Being cleaned after {lease.id} (user ann): nothing of that lease is left; pid 7 of bob (python notebook.py)"
    )
    assert reason(world) == f"{said} has its device file open, which delays it by at most 30 s"
    world.pass_time(29)
    assert world.state() is GpuState.DRAINING
    world.pass_time(2)
    assert world.state() is GpuState.FREE
    assert told(world, "gpu.clean") == ["device file still open by pid 7 of bob (python notebook.py)"]
    assert told(world, "gpu.leftover") == [], "a stranger is nothing that the lease has left"


def test_a_gpu_is_free_at_once_when_the_stranger_closes_its_device_file() -> None:
    world, _ = drained(gpu(0, opened_by=(STRANGER,)))
    world.pass_time(5)
    world.node(gpus=1)
    assert world.state() is GpuState.FREE
    assert told(world, "gpu.clean") == [None]


def test_a_stream_of_new_strangers_delays_no_longer_than_one_that_stays() -> None:
    world, _ = drained(gpu(0, opened_by=(STRANGER,)))
    for pid in range(100, 129):
        world.node(gpus=[gpu(0, opened_by=(Process(pid=pid),))])
        world.pass_time(1)
        assert world.state() is GpuState.DRAINING
    many = tuple(Process(pid=pid) for pid in range(201, 207))
    world.node(gpus=[gpu(0, opened_by=many)])
    world.pass_time(2)
    assert world.state() is GpuState.FREE
    assert told(world, "gpu.clean") == ["device file still open by pid 201, pid 202, pid 203, pid 204 and 2 more"]


@pytest.mark.parametrize("same", [True, False], ids=["one stranger", "another one each time"])
def test_a_stranger_who_opens_and_closes_the_device_every_second_delays_within_the_bound(same: bool) -> None:
    """Each reading that could free the GPU shows it open again; who it is can be read meanwhile and afterwards."""
    world, _ = drained(gpu(0, opened_by=(STRANGER,)))
    waiting = world.ask(1)
    begun_s = world.at_s
    while world.state() is GpuState.DRAINING:
        pid = 7 if same else int(world.at_s * 10)
        eve = Process(pid=pid, user="eve", command="python open.py")
        world.node(gpus=[gpu(0, opened_by=(eve,))])
        if world.state() is GpuState.DRAINING:
            (request,) = (lease for lease in world.ledger.leases.values() if lease.lease.state is LeaseState.QUEUED)
            said = explain(world.ledger, request, world.now, world.policy).sentence
            assert (
                f"pid {pid} of eve (python open.py) has its device file open, which delays it by at most 30 s" in said
            )
        world.pass_time(1)
        assert world.at_s - begun_s <= world.policy.retained_memory_s + 2
    (clean,) = told(world, "gpu.clean")
    assert clean is not None
    assert clean.endswith("of eve (python open.py)")
    assert isinstance(world.answers[waiting], Lease)
    assert world.state() is GpuState.LEASED


def test_a_stranger_who_is_listed_on_the_gpu_is_named_while_it_drains_and_once_it_is_free() -> None:
    """No lease gets a GPU that a process computes on; an administrator is told whose it is."""
    eve = Process(pid=7, user="eve", command="python mine.py")
    world, _ = drained(gpu(0, processes=(eve,)))
    world.pass_time(120)
    assert world.state() is GpuState.DRAINING
    assert "pid 7 of eve (python mine.py) is still running" in reason(world)
    assert told(world, "gpu.leftover") == ["left behind: pid 7 of eve (python mine.py)"]
    world.node(gpus=[gpu(0)])
    world.node(gpus=[gpu(0, processes=(eve,))])
    assert world.state() is GpuState.FOREIGN
    assert "pid 7 of eve (python mine.py)" in reason(world)


def test_a_strangers_delay_is_not_lengthened_by_memory_that_comes_and_goes() -> None:
    """As that of a browser on a GPU that drives a screen."""
    world, _ = drained(gpu(0, opened_by=(STRANGER,)))
    for _ in range(15):
        world.node(gpus=[gpu(0, opened_by=(STRANGER,), memory_used_bytes=GIB)])
        world.pass_time(1)
        world.node(gpus=[gpu(0, opened_by=(STRANGER,))])
        world.pass_time(1)
    assert world.state() is GpuState.FREE


@pytest.mark.parametrize("back", [LEFT, None], ids=["by an open file", "by a listed process"])
def test_a_stranger_delays_again_when_the_lease_is_seen_on_the_gpu_again(back: Process | None) -> None:
    world, _ = drained(gpu(0, opened_by=(STRANGER,)))
    world.pass_time(20)
    again = gpu(0, opened_by=(STRANGER, back)) if back else gpu(0, opened_by=(STRANGER,), processes=(LEFT,))
    world.node(gpus=[again])
    world.pass_time(60)
    assert world.state() is GpuState.DRAINING, "what is the lease's own keeps it without limit"
    world.node(gpus=[gpu(0, opened_by=(STRANGER,))])
    world.pass_time(29)
    assert world.state() is GpuState.DRAINING
    world.pass_time(2)
    assert world.state() is GpuState.FREE


def test_while_memory_is_not_back_a_stranger_counts_until_it_falls_no_further() -> None:
    world, _ = drained(gpu(0, opened_by=(STRANGER,), memory_used_bytes=9 * GIB))
    world.pass_time(20)
    world.node(gpus=[gpu(0, opened_by=(STRANGER,), memory_used_bytes=5 * GIB)])
    world.pass_time(29)
    assert world.state() is GpuState.DRAINING
    world.pass_time(2)
    assert world.state() is GpuState.FREE
    notes = "device file still open by pid 7 of bob (python notebook.py); memory retained by the driver: 5.0 GiB"
    assert told(world, "gpu.clean") == [notes]


def test_what_a_worker_of_an_earlier_version_says_of_other_leases_delays_and_does_not_keep() -> None:
    world, _ = drained(gpu(0, opened_by=(Process(pid=7, lease_id="another"),)))
    world.pass_time(31)
    assert world.state() is GpuState.FREE


def test_what_a_user_left_behind_is_told_once_for_each_change_and_not_while_it_may_be_ending() -> None:
    world, lease = drained(gpu(0, processes=(LEFT,)))
    assert told(world, "gpu.leftover") == []
    world.pass_time(5)
    assert told(world, "gpu.leftover") == ["left behind: pid 9 of ann (python train.py)"]
    world.node(gpus=[gpu(0, opened_by=(Process(pid=10, lease_id=MINE), STRANGER))])
    world.pass_time(5)
    assert told(world, "gpu.leftover")[1:] == ["left behind: pid 10"], "a stranger is not the lease's"
    event = next(change for change in world.changes if getattr(change, "kind", "") == "gpu.leftover")
    assert (event.lease_id, event.gpus, event.node) == (lease.id, (uuid(0),), "a")


def test_a_lease_that_revives_and_ends_again_waits_again_for_retained_memory() -> None:
    world = World().node(gpus=1)
    lease = world.lease(ttl_s=1.0)
    world.node(gpus=[gpu(0, memory_used_bytes=9 * GIB)])
    world.pass_time(25)
    assert world.state() is GpuState.DRAINING
    world.renew(lease)
    assert world.state() is GpuState.LEASED
    world.release(lease)
    world.pass_time(20)
    assert world.state() is GpuState.DRAINING


def test_a_reading_that_was_overtaken_on_its_way_is_not_gone_by() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    world.release(lease)
    world.report()
    world.report(problem="hung")
    world.report(age_s=0.4)
    waiting = world.lease()
    assert waiting.state is LeaseState.QUEUED, "granted on a reading from before the end of the last lease"
    world.report()
    assert world.now_of(waiting).state is LeaseState.ACTIVE


def test_the_node_is_told_whose_lease_it_is_only_where_the_pid_means_something() -> None:
    world = World(host="here").node(gpus=1)
    world.lease()
    (told_lease,) = desired_state(world.ledger, "a", 1).leases
    assert (told_lease.owner_pid, told_lease.job_id) == (None, None)


def test_a_draining_gpu_that_is_not_shown_for_a_while_drains_on_when_it_is_back() -> None:
    world, lease = drained(gpu(0, processes=(LEFT,)))
    for _ in range(2):
        world.node(gpus=[])
        world.pass_time(5)
        assert world.state() is GpuState.UNKNOWN
        waiting = world.lease()
        assert waiting.state is LeaseState.QUEUED
        world.node(gpus=[gpu(0, opened_by=(LEFT,))])  # its process list is empty by now
        assert world.state() is GpuState.DRAINING
        assert world.now_of(waiting).state is LeaseState.QUEUED, "granted while what the former holder left has it open"
        assert f"cleaned after {lease.id}" in reason(world)
        world.release(waiting)
    world.node(gpus=1)
    assert world.state() is GpuState.FREE


def test_a_draining_gpu_that_was_taken_out_is_forgotten_in_the_end() -> None:
    world, lease = drained(gpu(0, processes=(LEFT,)))
    world.policy = Policy(gone_after_s=5.0)
    world.node(gpus=[])
    world.pass_time(4)
    world.node(gpus=[gpu(0, processes=(LEFT,))])
    world.node(gpus=[])
    world.pass_time(4)
    assert told(world, "gpu.gone") == [], "counted from the first time that it was missing"
    world.pass_time(2)
    assert told(world, "gpu.gone") == [None]
    assert not world.ledger.gpus
    assert lease.id not in {item.id for item in desired_state(world.ledger, "a", 1).leases}
