"""A worker in an allocation: when that ends, and which GPUs it was given."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from pathlib import Path

import pytest

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.launchers import strip_launcher_variables, strip_reserved_variables
from gpulease_protocol.model import GpuLink, GpuReading
from gpulease_protocol.slurm_duration import parse_slurm_duration
from gpulease_worker import allocation as allocations
from gpulease_worker.allocation import ProcessAllocation, SlurmAllocation, grace_within
from gpulease_worker.loop import WorkerLoop
from gpulease_worker.probe.simulation import idle_gpus
from gpulease_worker.settings import WorkerSettings
from gpulease_worker.shown_gpus import ShownGpus

UUIDS = [gpu.uuid for gpu in idle_gpus(8, "n")]
NO_SUCH_JOB = "slurm_load_jobs error: Invalid job id specified"


def gpus(count: int = 8, *, minors: list[int] | None = None) -> list[GpuReading]:
    """Readings of GPUs of a host, whose device files have these numbers."""
    return [
        GpuReading(uuid=UUIDS[index], node="n", index=index, minor_number=None if minors is None else minors[index])
        for index in range(count)
    ]


def indices(shown: tuple[GpuReading, ...]) -> list[int]:
    return [gpu.index for gpu in shown]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4:30", 270.0),
        ("1:00:00", 3600.0),
        ("2-00:00:01", 172801.0),
        ("0:00", 0.0),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_durations_of_slurm_are_read(text: str, seconds: float | None) -> None:
    assert parse_slurm_duration(text) == seconds


def taken(*answers: tuple[int | None, str]) -> SlurmAllocation:
    allocation = SlurmAllocation("7", 60.0, 60.0, lambda grace_s: None)
    for code, output in answers:
        allocation.take(code, output, 1000.0)
    return allocation


class TestEnds:
    def test_jobs_may_run_until_the_time_for_leaving(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("time.monotonic", lambda: 1000.0)
        assert taken((0, "RUNNING|1:00:00\n")).available_s() == 3540.0
        assert taken((0, "RUNNING|0:30\n")).available_s() == 0.0
        assert taken((0, "RUNNING|UNLIMITED\n")).available_s() is None

    def test_a_scheduler_that_is_away_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("time.monotonic", lambda: 1000.0)
        away = (1, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
        allocation = taken((0, "RUNNING|1:00:00"), *[away] * 5, (None, "squeue did not answer within 20 s"))
        assert allocation.available_s() == 3540.0
        assert not allocation.has_ended

    @pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "NODE_FAIL", "TIMEOUT", "PENDING", "PREEMPTED"])
    def test_an_allocation_that_has_ended_was_seen_so_twice(self, state: str) -> None:
        assert not taken((0, f"{state}|0:00")).has_ended
        assert taken((0, f"{state}|0:00"), (0, f"{state}|0:00")).has_ended
        assert not taken((0, f"{state}|0:00"), (0, "RUNNING|1:00"), (0, f"{state}|0:00")).has_ended

    def test_so_has_one_that_the_scheduler_does_not_know(self) -> None:
        assert taken((1, NO_SUCH_JOB), (1, NO_SUCH_JOB)).has_ended

    def test_it_is_looked_at_again_at_once_when_the_daemon_refuses_the_worker(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker that outlives its allocation ends within seconds, and not at the next of its looks."""
        answers = [(0, "RUNNING|1:00:00"), (1, NO_SUCH_JOB), (1, NO_SUCH_JOB)]
        monkeypatch.setattr(allocations, "AGAIN_S", 0.01)
        left: list[float | None] = []

        async def ask(_: SlurmAllocation) -> tuple[int | None, str]:
            if len(answers) == 3:
                asyncio.get_running_loop().call_soon(allocation.look_soon)
            return answers.pop(0)

        monkeypatch.setattr(SlurmAllocation, "_ask", ask)
        allocation = SlurmAllocation("7", 3600.0, 60.0, left.append)
        asyncio.run(asyncio.wait_for(allocation.watch(), 60))
        assert left == [allocations.LOST_GRACE_S]

    @pytest.mark.parametrize("leave_s", [1.0, 10.0, 60.0, 3600.0])
    def test_jobs_have_a_grace_period_within_the_time_for_leaving(self, leave_s: float) -> None:
        assert 0 < grace_within(leave_s) < leave_s
        assert grace_within(leave_s) <= 35.0


def test_a_uuid_that_the_host_does_not_have_is_named_once_and_again_after_it_was_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shown = ShownGpus(f"{UUIDS[0].upper()},{UUIDS[2]}", {})
    assert indices(shown.of(gpus(2))) == [0], "in whatever case it was typed"
    assert indices(shown.of(gpus(2))) == [0]
    assert [record.message for record in caplog.records] == [
        f"this host has no GPU {UUIDS[2]}, which was given to this worker; it has 0 {UUIDS[0]}, 1 {UUIDS[1]}"
    ]
    assert indices(shown.of(gpus(3))) == [0, 2]
    assert len(caplog.records) == 1
    shown.of(gpus(2))
    assert len(caplog.records) == 2, "it was lost"


def test_what_leaves_already_leaves_sooner_when_its_allocation_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graces: list[float] = []
    settings = WorkerSettings(url="http://127.0.0.1:1", node="n", data_dir=tmp_path, simulate="1", leave_s=60.0)

    async def play() -> None:
        worker = WorkerLoop(settings)
        monkeypatch.setattr(worker._jobs, "leave", graces.append)
        for grace_s in (None, None, allocations.LOST_GRACE_S, 10.0, None):
            worker.leave(grace_s)

    asyncio.run(play())
    assert graces == [35.0, allocations.LOST_GRACE_S]


def test_an_allocation_of_processes_ends_with_the_first_of_them() -> None:
    first, second = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    left: list[float | None] = []

    async def play() -> None:
        watching = asyncio.create_task(ProcessAllocation((first.pid, second.pid), left.append).watch())
        await asyncio.sleep(0)
        assert not watching.done()
        second.kill()
        await asyncio.wait_for(watching, 60)

    try:
        asyncio.run(play())
        assert left == [allocations.LOST_GRACE_S]
        second.wait()
        asyncio.run(ProcessAllocation((first.pid, second.pid), left.append).watch())  # it has ended already
        assert len(left) == 2
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize(
    ("refused_s", "leaves"),
    [
        ((0.0,), False),
        ((0.0, 2.0, 4.0), False),
        ((0.0, 2.0, 4.0, 5.5), True),
        ((0.0, 4.0, 30.0, 34.0), False),
        ((0.0, 4.0, 30.0, 34.0, 35.5), True),
    ],
)
def test_a_worker_whose_token_is_refused_for_seconds_has_no_allocation_any_more(
    monkeypatch: pytest.MonkeyPatch, refused_s: tuple[float, ...], leaves: bool
) -> None:
    """As where the GCS of Ray has given up a raylet that lives on. Its jobs are tried elsewhere soon."""
    left: list[float | None] = []

    async def play() -> None:
        allocation = ProcessAllocation((os.getpid(),), left.append)
        for now_s in refused_s:
            with monkeypatch.context() as clock:
                clock.setattr("time.monotonic", lambda now_s=now_s: 1000.0 + now_s)
                allocation.look_soon()
        watching = asyncio.create_task(allocation.watch())
        for _ in range(5):
            await asyncio.sleep(0)
        watching.cancel()

    asyncio.run(play())
    assert left == ([allocations.LOST_GRACE_S] if leaves else [])


def test_an_allocation_that_cannot_be_watched_for_want_of_descriptors_is_watched_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[float | None] = []
    refused, real = [], os.pidfd_open

    def pidfd_open(pid: int, flags: int = 0) -> int:
        if len(refused) < 2:
            refused.append(pid)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    monkeypatch.setattr(allocations, "AGAIN_S", 0.01)
    with subprocess.Popen(["sleep", "600"]) as engine:
        engine.kill()
        asyncio.run(asyncio.wait_for(ProcessAllocation((engine.pid,), left.append).watch(), 60))
    assert left == [allocations.LOST_GRACE_S]


@pytest.mark.parametrize("text", ["ray", "pid:", "pid:x", "pid:1,", "slurm:7"])
def test_an_unknown_kind_of_allocation_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not known"):
        _ = WorkerSettings(allocation=text).allocation_pids


class TestShownGpus:
    def test_all_unless_some_were_given(self) -> None:
        assert indices(ShownGpus(None, {}).of(gpus())) == list(range(8))

    def test_indices_ranges_and_uuids_as_they_are_listed_here(self) -> None:
        assert indices(ShownGpus(f"0-2,5,{UUIDS[7]}", {}).of(gpus(minors=[7, 6, 5, 4, 3, 2, 1, 0]))) == [0, 1, 2, 5, 7]

    @pytest.mark.parametrize("text", ["x", "1;2", "GPU", "-1", "0-"])
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidRequest, match="neither a UUID nor a number"):
            ShownGpus(text, {})

    def test_an_allocation_counts_device_files(self) -> None:
        shown = ShownGpus(None, {"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "6,7"})
        assert indices(shown.of(gpus(minors=[7, 6, 5, 4, 3, 2, 1, 0]))) == [6, 7]

    def test_where_it_can_open_no_others_they_are_these(self) -> None:
        shown = ShownGpus(None, {"SLURM_JOB_GPUS": "4,5"})
        assert indices(shown.of(gpus(2, minors=[4, 5]))) == [0, 1]
        assert indices(ShownGpus(None, {"CUDA_VISIBLE_DEVICES": "0,1"}).of(gpus(2, minors=[4, 5]))) == [0, 1]

    def test_what_was_given_by_hand_comes_before_the_allocation(self) -> None:
        assert indices(ShownGpus("3", {"SLURM_JOB_GPUS": "0,1"}).of(gpus())) == [3]

    def test_the_same_gpus_stay_when_another_is_lost(self) -> None:
        shown = ShownGpus("1,2", {})
        assert indices(shown.of(gpus())) == [1, 2]
        renumbered = [GpuReading(uuid=UUIDS[place], node="n", index=place - 1) for place in range(1, 8)]
        assert [gpu.uuid for gpu in shown.of(renumbered)] == [UUIDS[1], UUIDS[2]]

    def test_links_to_gpus_that_are_not_shown_are_left_out(self) -> None:
        shown = ShownGpus("0,1", {})
        links = [GpuLink(first=UUIDS[0], second=UUIDS[place], path="nvlink") for place in (1, 2)]
        assert shown.links_between(shown.of(gpus()), links) == (links[0],)


def test_nothing_of_an_allocation_reaches_a_job() -> None:
    of_slurm = dict.fromkeys(("SLURM_JOB_ID", "SLURM_NTASKS", "SLURMD_NODENAME", "PMI_RANK", "PMIX_RANK"), "1")
    assert strip_launcher_variables(of_slurm | {"HOME": "/"}) == {"HOME": "/"}
    assert strip_reserved_variables(of_slurm | {"HOME": "/"}) == {"HOME": "/"}
