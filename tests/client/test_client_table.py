from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from gpulease_protocol.model import (
    Activity,
    Demand,
    Gpu,
    GpuState,
    Holder,
    Job,
    JobAttempt,
    JobState,
    Launcher,
    Lease,
    LeaseState,
    Liveness,
    Node,
    NodeState,
)
from gpulease_protocol.reservations import Reservation
from gpulease_protocol.status_table import align_columns, format_duration, render_status, short_model

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
GIB = 1024**3
ADA = Holder(user="ada", label="night\x1b[31mrun")


def gpu(index: int, state: GpuState = GpuState.FREE, node: str = "a", **more: object) -> Gpu:
    return Gpu(uuid=f"GPU-{node}{index}", node=node, index=index, name="NVIDIA H100 80GB HBM3", state=state, **more)  # type: ignore[arg-type]


def lease(name: str, state: LeaseState, **more: object) -> Lease:
    known: dict[str, object] = {
        "id": name,
        "holder": ADA,
        "demand": Demand(count=2),
        "ttl_s": 60,
        "liveness": Liveness.HEARTBEAT,
        "created_at": NOW - timedelta(seconds=65),
    }
    return Lease(state=state, **(known | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("notice", "shown"),
    [
        ({"preempt_at": NOW + timedelta(seconds=59), "reclaim_at": NOW + timedelta(minutes=5)}, "preempted in 59s"),
        ({"reclaim_at": NOW + timedelta(minutes=5)}, "taken back in 5m 00s"),
        ({}, "pid 1681 ends"),
        ({"ends_at": NOW + timedelta(hours=2)}, "in at most 2h 00m"),
    ],
)
def test_a_lease_that_ends_for_others_says_when(notice: dict[str, datetime], shown: str) -> None:
    holder = Holder(user="eve", owner_pid=1681)
    held = lease("L-2", LeaseState.ACTIVE, holder=holder, liveness=Liveness.PROCESS, expires_at=NOW, **notice)
    used = gpu(1, GpuState.LEASED, activity=Activity.ACTIVE, lease_id="L-2", holder=holder)
    first = render_status([used], [held], [], NOW).splitlines()[1]
    assert first.endswith(f"  {shown}"), first


def test_a_job_that_goes_on_with_other_nodes_ends_when_the_time_of_its_lease_is_over() -> None:
    earlier = JobAttempt(number=1, lease_id="L-1", regrouped=True, ended_at=NOW - timedelta(minutes=10))
    elastic = Job(
        id="J-1",
        state=JobState.RUNNING,
        lease_id="L-1",
        launcher=Launcher.TORCHRUN,
        command=("train.py",),
        created_at=NOW - timedelta(hours=21),
        started_at=NOW - timedelta(minutes=9),
        timeout_s=24 * 3600.0,
        attempt_history=(earlier,),
    )
    granted = {"granted_at": NOW - timedelta(hours=20), "liveness": Liveness.JOB, "job_id": "J-1"}
    used = gpu(1, GpuState.LEASED, activity=Activity.ACTIVE, lease_id="L-1", holder=ADA)
    first = render_status([used], [lease("L-1", LeaseState.ACTIVE, **granted)], [elastic], NOW).splitlines()[1]
    assert first.endswith("  in at most 4h 01m"), first


def eight_gpus() -> tuple[list[Gpu], list[Lease], list[Job]]:
    """A host in use, with long names."""
    bob = Holder(user="bob", label="bobs-long-training-run")
    eve = Holder(user="eve", owner_pid=1681, label="notebook")
    memory = {"memory_used_bytes": 12 * GIB, "memory_total_bytes": 80 * GIB, "utilization_ratio": 1.0}
    left = "Being cleaned after L-0 (user ann): pid 4242 of ann (python train.py) is left"
    gpus = [
        gpu(0, GpuState.LEASED, activity=Activity.ACTIVE, lease_id="L-1", holder=bob, **memory),
        gpu(1, GpuState.LEASED, activity=Activity.IDLE, lease_id="L-2", holder=eve, **memory),
        gpu(2, GpuState.LEASED, activity=Activity.STARTING, lease_id="L-3", holder=ADA),
        gpu(3, GpuState.DRAINING, reason=left),
        gpu(4, GpuState.CORDONED, reason="Cordoned by an administrator"),
        gpu(5, GpuState.CORDONED, reason="Cordoned by an administrator"),
        gpu(6),
        gpu(7),
    ]
    gpus[1] = replace(gpus[1], last_busy_at=NOW - timedelta(minutes=12))
    leases = [
        lease("L-1", LeaseState.ACTIVE, holder=bob, liveness=Liveness.JOB, job_id="J-1"),
        lease("L-2", LeaseState.ACTIVE, holder=eve, liveness=Liveness.PROCESS, expires_at=NOW + timedelta(seconds=59)),
        lease("L-3", LeaseState.ACTIVE, granted_at=NOW - timedelta(hours=2), expires_at=NOW + timedelta(minutes=90)),
        lease("lease-3e1f8e2a3b70f12d", LeaseState.QUEUED, position=1, demand=Demand(count=4, gpu_model="H100")),
    ]
    job = Job(
        id="J-1",
        name="bobs-long-training-run",
        state=JobState.RUNNING,
        lease_id="L-1",
        launcher=Launcher.PLAIN,
        command=("x",),
        timeout_s=7200,
        started_at=NOW - timedelta(hours=1),
        created_at=NOW,
    )
    return gpus, leases, [job]


def test_the_table_has_who_and_until_when_and_below_it_why_others_are_not_free() -> None:
    assert render_status(*eight_gpus(), NOW) == (
        "GPU  NAME       MEMORY         UTIL  STATE              HOLDER                          UNTIL\n"
        "0    H100 80GB  12.0/80.0 GiB  100%  leased (active)    bob job bobs-long-training-run  in at most 1h 00m\n"
        "1    H100 80GB  12.0/80.0 GiB  100%  leased (idle 12m)  eve (notebook)                  pid 1681 ends\n"
        "2    H100 80GB  ?/? GiB        ?     leased (unused)    ada (night?[31mrun)             in 1h 30m\n"
        "3    H100 80GB  ?/? GiB        ?     draining           -                               -\n"
        "4    H100 80GB  ?/? GiB        ?     cordoned           -                               -\n"
        "5    H100 80GB  ?/? GiB        ?     cordoned           -                               -\n"
        "6    H100 80GB  ?/? GiB        ?     free               -                               -\n"
        "7    H100 80GB  ?/? GiB        ?     free               -                               -\n"
        "GPU 3: Being cleaned after L-0 (user ann): pid 4242 of ann (python train.py) is left\n"
        "GPUs 4-5: Cordoned by an administrator\n"
        "\n"
        "QUEUE  WHO                  WANTS                        WAITING  LEASE\n"
        "1      ada (night?[31mrun)  4 GPUs, model contains H100  1m 05s   lease-3e1f8e2a3b70f12d\n"
        "\n"
        "2 of 8 GPUs free, 1 waiting\n"
    )


def test_on_a_narrow_terminal_it_loses_what_matters_least() -> None:
    assert render_status(*eight_gpus(), NOW, width=80) == (
        "GPU  MEMORY         UTIL  STATE              HOLDER            UNTIL\n"
        "0    12.0/80.0 GiB  100%  leased (active)    bob job bobs-lo…  in at most 1h 00m\n"
        "1    12.0/80.0 GiB  100%  leased (idle 12m)  eve (notebook)    pid 1681 ends\n"
        "2    ?/? GiB        ?     leased (unused)    ada (night?[31m…  in 1h 30m\n"
        "3    ?/? GiB        ?     draining           -                 -\n"
        "4    ?/? GiB        ?     cordoned           -                 -\n"
        "5    ?/? GiB        ?     cordoned           -                 -\n"
        "6    ?/? GiB        ?     free               -                 -\n"
        "7    ?/? GiB        ?     free               -                 -\n"
        "GPU 3: Being cleaned after L-0 (user ann): pid 4242 of ann (python train.py) is\n"
        "  left\n"
        "GPUs 4-5: Cordoned by an administrator\n"
        "\n"
        "QUEUE  WHO                  WANTS                        WAITING  LEASE\n"
        "1      ada (night?[31mrun)  4 GPUs, model contains H100  1m 05s   lease-3e1f8e2a\n"
        "\n"
        "2 of 8 GPUs free, 1 waiting\n"
    )


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = render_status(*eight_gpus(), NOW, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(" leased" in line for line in lines) == 3


def test_characters_of_two_columns_are_counted_as_two() -> None:
    rows = [("訓練實驗", "x"), ("abc", "y")]
    assert align_columns(("NAME", "N"), rows).splitlines() == ["NAME      N", "訓練實驗  x", "abc       y"]
    narrow = align_columns(("NAME", "N"), rows, 8, cut={"NAME": 4})
    assert narrow.splitlines() == ["NAME   N", "訓練…  x", "abc    y"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        (None, "?"),
    ],
)
def test_a_model_has_a_short_name(name: str | None, short: str) -> None:
    assert short_model(name) == short


def test_totals_say_which_node_is_simulated() -> None:
    node = Node(name="a", state=NodeState.READY, gpu_count=1, simulated=True)
    assert render_status([gpu(0)], [], [], NOW, [node]).endswith("\n1 of 1 GPU free, 0 waiting (a: simulated)\n")


def test_nodes_are_named_only_if_there_are_several() -> None:
    assert render_status([gpu(0), gpu(0, node="b")], [], [], NOW).startswith("NODE  GPU")


def test_an_unknown_node_says_why_and_its_gpus_keep_their_holders() -> None:
    node = Node(name="a", state=NodeState.UNKNOWN, reason="the probe hangs", gpu_count=1)
    shown = render_status([gpu(0, GpuState.UNKNOWN, holder=ADA, reason="is unknown")], [], [], NOW, [node])
    assert "Node a is unknown: the probe hangs" in shown
    assert "ada" in shown


def test_what_is_said_of_a_silent_node_is_not_said_again_of_its_gpus() -> None:
    node = Node(name="a", state=NodeState.UNKNOWN, reason="node a has been silent", gpu_count=2)
    gpus = [
        gpu(0, GpuState.UNKNOWN, reason="Unknown: node a has been silent"),
        gpu(1, GpuState.UNKNOWN, reason="Unknown: its node no longer shows it"),
    ]
    shown = render_status(gpus, [], [], NOW, [node])
    assert "GPU 1: Unknown: its node no longer shows it\nNode a is unknown: node a has been silent\n" in shown
    assert shown.count("silent") == 1


def reserved(name: str, indices: str, begins_h: float, lasts_h: float, node: str = "a", **whom: str) -> Reservation:
    from_at = NOW + timedelta(hours=begins_h)
    gpus = tuple(gpu(int(index), node=node) for index in indices)
    return Reservation(
        id=name, gpus=gpus, from_at=from_at, to_at=from_at + timedelta(hours=lasts_h), made_at=NOW, **whom
    )


def test_what_is_reserved_now_and_next_is_told_of_each_node() -> None:
    entries = [
        reserved("over", "0", -3, 2, user="eve"),
        reserved("now", "012", -1, 3, user="ada"),
        reserved("next", "01", 5, 8, group="vision"),
        reserved("later", "0", 50, 1, user="bob"),
        reserved("elsewhere", "0", 26, 1, node="b", user="bob"),
    ]
    shown = render_status([gpu(0), gpu(0, node="b")], [], [], NOW, reservations=entries)
    assert "Reserved on a: GPUs 0-2 for ada for another 2h 00m; GPUs 0-1 for @vision in 5h 00m, for 8h 00m\n" in shown
    assert "Reserved on b: GPU 0 for bob in 1d 2h, for 1h 00m\n" in shown
    alone = render_status([gpu(0)], [], [], NOW, reservations=entries[:2])
    assert "Reserved: GPUs 0-2 for ada for another 2h 00m\n" in alone


@pytest.mark.parametrize("width", [40, 80])
def test_reservations_take_few_lines_that_fit_the_terminal(width: int) -> None:
    nodes = [f"node-{number:02}" for number in range(12)]
    entries = [
        reserved(f"r{number}", "01234567", -1, 2 + number, node=node, group="a-group-with-a-long-name")
        for node in nodes
        for number in range(6)
    ]
    shown = render_status([gpu(0, node=node) for node in nodes], [], [], NOW, width=width, reservations=entries)
    assert max(map(len, shown.splitlines())) <= width
    assert "3 more" in shown
    assert "Reserved on 4 more nodes" in shown


def test_without_gpus_it_says_so() -> None:
    assert render_status([], [], [], NOW).startswith("No GPUs are known: no worker has reported. On the host with the")
    empty, away = (
        Node(name="a", state=NodeState.READY, gpu_count=0),
        Node(name="b", state=NodeState.UNKNOWN, reason="silent", gpu_count=0),
    )
    assert render_status([], [], [], NOW, [empty]) == "No GPUs are known. There are none on a.\n"
    assert render_status([], [], [], NOW, [away]) == "No GPUs are known.\nNode b is unknown: silent\n"


def test_lengths_of_time_are_told_in_two_units() -> None:
    assert [format_duration(length) for length in (-1, 5.9, 65, 3700, 90000)] == [
        "0s",
        "5s",
        "1m 05s",
        "1h 01m",
        "1d 1h",
    ]


def test_a_job_that_waits_for_other_jobs_stands_behind_the_queue() -> None:
    later = lease("lease-later", LeaseState.QUEUED, position=None)
    text = render_status([gpu(0)], [later, lease("lease-first", LeaseState.QUEUED, position=1)], [], now=NOW)
    assert text.index("lease-first") < text.index("lease-later")
