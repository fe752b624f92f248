"""What `status`, `queue` and `top` make of a host in use, at the widths of terminals. Nothing runs here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease_cli.expected_start import expected_starts
from gpulease_cli.queue_table import queue_rows
from gpulease_cli.snapshot import Snapshot
from gpulease_cli.top_picture import SORT_KEYS, bar, heading, lines
from gpulease_protocol.errors import NotFound, Unavailable
from gpulease_protocol.model import (
    Demand,
    ExpectedBasis,
    GpuState,
    Job,
    LeaseState,
    Liveness,
    Node,
    NodeState,
    Process,
    Selection,
)
from gpulease_protocol.status_table import display_width
from tests.client.test_client_table import GIB, NOW, eight_gpus, gpu, lease

NODE = Node(name="gpubox", state=NodeState.READY, gpu_count=8)


def snapshot(**more: Any) -> Snapshot:
    gpus, leases, jobs = eight_gpus()
    shown = [
        Process(pid=4242, user="bob", command="python train.py " + "--long " * 40, memory_bytes=GIB, lease_id="L-1")
    ]
    gpus[0] = replace(gpus[0], processes=tuple(shown), temperature_c=61.0, power_w=412.0)
    gpus[1] = replace(gpus[1], processes=tuple(shown))
    known: dict[str, Any] = {
        "gpus": tuple(gpus),
        "leases": tuple(leases),
        "jobs": tuple(jobs),
        "nodes": (NODE,),
        "at": NOW,
    }
    return Snapshot(**(known | more))


@pytest.mark.parametrize("width", [40, 80, 100, 160, 250])
@pytest.mark.parametrize("sort", SORT_KEYS)
def test_top_fits_the_terminal(width: int, sort: str) -> None:
    drawn = [*heading(snapshot(), "", sort, width), *lines(snapshot(), sort, width)]
    assert max(map(display_width, drawn)) <= width
    text = "\n".join(drawn)
    assert "2 of 8 GPUs free" in text
    assert text.count("4242") == 1, "a process on two GPUs is one line"
    assert "0-1" in text
    if width >= 160:
        assert "pid 1681 ends" in text
        assert "412W" in text


def test_the_keys_are_named_at_80_columns_and_what_is_wrong_is_said_over_the_last_picture() -> None:
    simulated = snapshot(nodes=(replace(NODE, simulated=True),))
    assert heading(simulated, "", "memory", 79)[0].endswith("s: memory  q: quit")
    away = heading(snapshot(), "No daemon answers.", "gpu", 79)
    assert away[1].endswith("No daemon answers. Trying again.")
    assert heading(None, "No daemon answers.", "gpu", 79)[1] == "No daemon answers."


def test_gpus_are_sorted_by_what_was_asked_for() -> None:
    def first(sort: str) -> list[str]:
        return [line.split()[0] for line in lines(snapshot(), sort, 160)[1:4]]

    assert first("gpu") == ["0", "1", "2"]
    assert first("util") == ["0", "1", "2"]
    assert first("user") == ["2", "0", "1"]  # ada, bob, eve


@pytest.mark.parametrize(
    ("ratio", "drawn"), [(0.0, "····"), (1.0, "████"), (0.5, "██··"), (0.53, "██▏·"), (None, "?   "), (7.0, "████")]
)
def test_a_bar(ratio: float | None, drawn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding="utf-8"))
    assert bar(ratio, 4) == drawn


def test_a_bar_without_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding="ascii"))
    assert bar(0.5, 9) == "|####...."


def job(name: str, lease_id: str, timeout_s: float | None, **more: Any) -> Job:
    (model,) = eight_gpus()[2]
    return replace(model, id=f"job-{name}", name=name, lease_id=lease_id, timeout_s=timeout_s, **more)


def held(name: str, hours: float = 1.0) -> Any:
    return lease(
        name, LeaseState.ACTIVE, liveness=Liveness.JOB, granted_at=NOW - timedelta(hours=hours), job_id=f"job-{name}"
    )


def starts(
    *waiting: Any, limits: tuple[float | None, ...], gpus: Any = None, jobs: tuple[Job, ...] = ()
) -> dict[str, str]:
    """What is said to those who wait, where each GPU is held by a job with this time limit that began an hour ago."""
    names = [f"L-{index}" for index in range(len(limits))]
    gpus = gpus or [gpu(index, GpuState.LEASED, lease_id=name) for index, name in enumerate(names)]
    running = [job(f"run{name}", name, limit) for name, limit in zip(names, limits, strict=True)]
    return expected_starts(gpus, [held(name) for name in names], [*running, *jobs], waiting, NOW)


def waits(name: str, count: int = 1, **more: Any) -> Any:
    return lease(name, LeaseState.QUEUED, position=1, demand=Demand(count=count, **more))


def test_a_start_is_the_one_that_the_daemon_expects() -> None:
    declared = {"expected_at": NOW + timedelta(hours=1, minutes=59), "expected_basis": ExpectedBasis.DECLARED}
    newer = {"expected_at": NOW + timedelta(minutes=5), "expected_basis": "a word of a newer daemon"}
    queue = [replace(waits(f"Q-{at}"), **what) for at, what in enumerate((declared, newer, {}))]
    assert starts(*queue, limits=(7200,)) == {"Q-0": "in about 1h 59m", "Q-1": "in about 5m"}


def test_a_start_by_history_is_a_range() -> None:
    def between(from_s: float, until_s: float) -> dict[str, Any]:
        from_at, until = (NOW + timedelta(seconds=one_s) for one_s in (from_s, until_s))
        by = {"expected_basis": ExpectedBasis.HISTORY, "expected_samples": 38}
        return {"expected_from": from_at, "expected_until": until, **by}

    queue = [replace(waits(f"Q-{at}"), **what) for at, what in enumerate((between(600, 12_000), between(-30, 90), {}))]
    assert starts(*queue, limits=(7200,)) == {"Q-0": "in 10m to 3h 20m", "Q-1": "within 1m 30s"}


def test_without_a_limit_it_is_said_who_is_in_the_way_longest() -> None:
    said = starts(waits("Q-1", 2), limits=(7200, None))["Q-1"]
    assert said.endswith("for 1h, no end declared")
    assert "job runL-1" in said
    ending = replace(held("L-1"), preempt_at=NOW + timedelta(minutes=1))
    in_use = [gpu(0, GpuState.LEASED, lease_id="L-1")]
    assert expected_starts(in_use, [ending], [], [waits("Q-1", 2)], NOW) == {}, "it ends for others"


def test_no_one_is_said_to_be_in_the_way_of_a_request_for_which_enough_gpus_are_free() -> None:
    """A limit keeps it out, or a reservation."""
    held_for = gpu(1, reserved_for="Q-1")
    others = gpu(2, reserved_for="Q-2")
    gpus = [gpu(0, GpuState.LEASED, lease_id="L-0"), held_for, others]
    assert starts(waits("Q-1", 1), limits=(None,), gpus=gpus) == {}
    assert starts(waits("Q-1", 2), limits=(None,), gpus=gpus)["Q-1"].endswith("no end declared")


class Read(tuple[Any, ...]):
    """Counts how many times it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        return super().__iter__()


def test_the_queue_goes_through_gpus_and_jobs_as_often_for_many_who_wait_as_for_few() -> None:
    times = set()
    for waiting in (2, 50):
        leases = tuple(waits(f"lease-{number}", 9) for number in range(waiting))
        gpus, jobs = Read(eight_gpus()[0]), Read([job(one.id, one.id, None) for one in leases])
        assert len(queue_rows(snapshot(gpus=gpus, leases=leases, jobs=jobs), short=False)) == waiting
        times.add((gpus.times, jobs.times))
    assert len(times) == 1, times


def test_nothing_is_said_of_requests_for_certain_gpus() -> None:
    for more in ({"gpu_model": "H100"}, {"selection": Selection.LISTED, "indices": (0,)}, {"min_free_memory_bytes": 1}):
        assert starts(waits("Q-1", **more), limits=(None,)) == {}
    several = [gpu(0, GpuState.LEASED, lease_id="L-0"), gpu(0, GpuState.LEASED, node="b", lease_id="L-1")]
    assert starts(waits("Q-1"), limits=(None, None), gpus=several) == {}


def test_a_job_at_the_limit_of_its_array_waits_for_that() -> None:
    array = {"array_id": "array-1", "array_at_most": 1}
    running, queued = job("first", "L-9", None, **array), job("second", "Q-1", None, state="queued", **array)
    assert starts(waits("Q-1"), limits=(7200,), jobs=(running, queued)) == {"Q-1": "its array runs 1 at once"}


def test_a_job_that_waits_for_other_jobs_is_after_them() -> None:
    assert starts(replace(waits("Q-1"), position=None), limits=(7200,)) == {"Q-1": "after other jobs"}


class FullDisk:
    """A daemon that cannot record anything, so that it takes no reports either."""

    as_of = None

    def gpus(self) -> tuple[Any, ...]:
        return (gpu(0, GpuState.UNKNOWN, reason="node a has been silent for over 3 s"),)

    def leases(self, states: Any) -> tuple[Any, ...]:
        return ()

    jobs = leases

    def nodes(self) -> tuple[Node, ...]:
        return (replace(NODE, state=NodeState.UNKNOWN, reason="node a has been silent for over 3 s"),)

    def reservations(self) -> tuple[Any, ...]:
        raise NotFound("There is no such address.")  # as an older daemon says

    def ready(self) -> None:
        raise Unavailable("Not ready: database or disk is full")


def test_a_full_disk_is_named_and_not_only_the_node_that_seems_silent() -> None:
    shown = Snapshot.fetch(FullDisk())  # type: ignore[arg-type]
    assert shown.table(80).startswith("Not ready: database or disk is full\n\nGPU  ")
    assert "disk is full" in heading(shown, "", "gpu", 80)[1]
