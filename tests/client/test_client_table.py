from __future__ import annotations

from datetime import UTC, datetime, timedelta

from gpulease_protocol.model import (
    Activity,
    Demand,
    Gpu,
    GpuState,
    Holder,
    Job,
    JobState,
    Launcher,
    Lease,
    LeaseState,
    Liveness,
    Node,
    NodeState,
)
from gpulease_protocol.status_table import format_duration, render_status

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
GIB = 1024**3
ADA = Holder(user="ada", label="night\x1b[31mrun")


def gpu(index: int, state: GpuState = GpuState.FREE, node: str = "a", **more: object) -> Gpu:
    return Gpu(uuid=f"GPU-{node}{index}", node=node, index=index, name="NVIDIA H100", state=state, **more)  # type: ignore[arg-type]


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


def test_gpus_and_queue_are_in_aligned_columns() -> None:
    gpus = [
        gpu(1, memory_used_bytes=None, memory_total_bytes=80 * GIB, utilization_ratio=None),
        gpu(
            0,
            GpuState.LEASED,
            activity=Activity.ACTIVE,
            lease_id="L-1",
            holder=ADA,
            memory_used_bytes=2 * GIB,
            memory_total_bytes=80 * GIB,
            utilization_ratio=0.5,
        ),
        gpu(2, GpuState.FOREIGN, reason="is used by pid 4242"),
    ]
    leases = [
        lease("L-1", LeaseState.ACTIVE, expires_at=NOW + timedelta(minutes=90)),
        lease("L-3", LeaseState.QUEUED, position=2, demand=Demand(gpu_model="H100", node="a")),
        lease("L-2", LeaseState.QUEUED, position=1, holder=Holder(user="bob"), job_id="J-2"),
    ]
    job = Job(
        id="J-2",
        name="resnet",
        state=JobState.QUEUED,
        lease_id="L-2",
        launcher=Launcher.PLAIN,
        command=("x",),
        created_at=NOW,
    )
    assert render_status(gpus, leases, [job], NOW) == (
        "GPU  NAME         MEMORY          UTIL  STATE            HOLDER               UNTIL      WHY NOT FREE\n"
        "0    NVIDIA H100  2.0 / 80.0 GiB  50%   leased (active)  ada (night?[31mrun)  in 1h 30m\n"
        "1    NVIDIA H100  ? / 80.0 GiB    ?     free             -                    -\n"
        "2    NVIDIA H100  ? / ? GiB       ?     foreign          -                    -          is used by pid 4242\n"
        "\n"
        "QUEUE  WHO                  WANTS                            WAITING  LEASE\n"
        "1      bob job resnet       2 GPUs                           1m 05s   L-2\n"
        "2      ada (night?[31mrun)  1 GPU on a, model contains H100  1m 05s   L-3\n"
    )


def test_nodes_are_named_only_if_there_are_several() -> None:
    assert render_status([gpu(0), gpu(0, node="b")], [], [], NOW).startswith("NODE  GPU")


def test_an_unknown_node_says_why_and_its_gpus_keep_their_holders() -> None:
    node = Node(name="a", state=NodeState.UNKNOWN, reason="the probe hangs", gpu_count=1)
    shown = render_status([gpu(0, GpuState.UNKNOWN, holder=ADA, reason="is unknown")], [], [], NOW, [node])
    assert "Node a is unknown: the probe hangs" in shown
    assert "ada" in shown


def test_without_gpus_it_says_so() -> None:
    assert render_status([], [], [], NOW).startswith("No GPUs are known: no worker has reported yet. Start one")
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
