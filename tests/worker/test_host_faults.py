"""A worker whose host has no descriptor, thread or space left: it says so, and goes on, with its jobs."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.model import GpuReading
from gpulease_protocol.node_protocol import DesiredState, LeaseOwner, NodeReport
from gpulease_worker import main
from gpulease_worker.gpu_claims import GpuClaims
from gpulease_worker.host_faults import NO_THREAD, HostFaults
from gpulease_worker.loop import WorkerLoop
from gpulease_worker.probe.probe_protocol import Reading
from gpulease_worker.probe.probe_reader import TimedReading
from gpulease_worker.processes.user_names import UserIdCache
from gpulease_worker.settings import WorkerSettings
from tests.worker.build import order, spec

FULL = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
NO_THREADS = RuntimeError(NO_THREAD)


def raises(error: BaseException) -> Callable[..., Any]:
    def fail(*words: object, **members: object) -> Any:
        raise error

    return fail


class Story:
    """A worker's loop whose daemon answers at once, and which reads no GPU."""

    def __init__(self, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = WorkerLoop(WorkerSettings(url="http://127.0.0.1:1", node="n", data_dir=data_dir, simulate="1"))
        self.reports: list[NodeReport] = []
        self.patch = monkeypatch
        self.answer = DesiredState(ticket=1, jobs=(order("job-1", spec("true")),))
        self.followed: list[object] = []
        self.failure: Exception | None = None
        """Of the next reports."""
        monkeypatch.setattr(self.loop, "_send", self._send)
        monkeypatch.setattr(self.loop, "_read", self._read)
        monkeypatch.setattr(self.loop._jobs, "reconcile", lambda orders, _: self.followed.append(orders))

    async def _send(self, report: NodeReport) -> DesiredState:
        if self.failure is not None:
            raise self.failure
        self.reports.append(report)
        return self.answer

    async def _read(self, desired: DesiredState | None) -> TimedReading:
        return TimedReading(Reading(simulated=True), ticket=1)

    def turns(self, count: int = 1) -> list[bool]:
        async def act() -> list[bool]:
            return [await self.loop._turn() for _ in range(count)]

        return asyncio.run(act())

    @property
    def problems(self) -> list[str | None]:
        return [report.problem for report in self.reports]


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    story = Story(tmp_path, monkeypatch)
    yield story
    story.loop._ports.close()


@pytest.mark.parametrize("error", [FULL, NO_THREADS, OSError(errno.EIO, "I/O error")], ids=["files", "threads", "disk"])
def test_a_node_that_cannot_be_read_says_why_and_its_jobs_are_looked_after(
    story: Story, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with story.patch.context() as patch:
        patch.setattr(story.loop, "_read", raises(error))
        assert story.turns(3) == [False] * 3, "it pauses between two attempts"
    assert all(str(error) in (problem or "") for problem in story.problems), story.problems
    assert all(not report.gpus for report in story.reports), "unknown is never free"
    assert story.followed == [story.answer.jobs] * 3
    assert [record.levelname for record in caplog.records].count("ERROR") == 1, "it is logged once"
    assert story.turns() == [True]
    assert story.problems[-1] is None
    assert "go on again" in caplog.text


def test_a_part_of_an_answer_that_fails_keeps_no_other_part_from_being_followed(story: Story) -> None:
    story.answer = DesiredState(ticket=1, jobs=story.answer.jobs, owners=(LeaseOwner(pid=1, start_ticks=1),))
    with story.patch.context() as patch:
        patch.setattr(story.loop._owners, "watch", raises(FULL))
        assert story.turns(2) == [False, False]
    assert story.followed == [story.answer.jobs] * 2
    assert story.problems[0] is None
    assert "Too many open files" in (story.problems[1] or ""), "the next report says so"
    assert story.turns(2) == [True, True]
    assert story.problems[3] is None


def test_a_report_that_cannot_be_sent_is_followed_by_the_next(story: Story) -> None:
    story.failure = OSError(errno.ENOTCONN, "Transport endpoint is not connected")
    assert story.turns(2) == [False, False]
    story.failure = None
    assert story.turns() == [True]
    assert story.problems == [None]


def test_an_error_of_the_program_ends_the_worker(story: Story) -> None:
    story.patch.setattr(story.loop, "_read", raises(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        story.turns()


def test_a_fault_that_goes_and_comes_back_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    faults = HostFaults()
    for problem in (True, True, False, True):
        if problem:
            with faults.noted("reading"):
                raise FULL
        assert faults.end_turn(faults.take()) is not problem
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 2


def test_a_fault_is_logged_once_however_the_numbers_of_its_message_change(caplog: pytest.LogCaptureFixture) -> None:
    faults = HostFaults()
    for pid in (4711, 4712):
        with faults.noted("reading"):
            raise OSError(errno.EMFILE, "Too many open files", f"/proc/{pid}/stat")
        assert f"/proc/{pid}/stat" in str(faults.take())
    with faults.noted("reading"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 2


def test_a_gpu_is_not_claimed_while_there_is_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    claims, name = GpuClaims(), f"GPU-{os.urandom(4).hex()}-0000-0000-0000-000000000000"
    gpus = [GpuReading(uuid=name, node="n", index=0)]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", raises(FULL))
            mine, others = claims.claim(gpus)
        assert (mine, [one.reason for one in others]) == (
            (),
            ["it could not be claimed for this worker: Too many open files"],
        )
        assert [one.uuid for one in claims.claim(gpus)[0]] == [name]
    finally:
        claims.close()


def test_a_user_is_unknown_while_there_is_no_thread_to_look_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    users = UserIdCache()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raises(NO_THREADS))
        assert users.uid_of("root") is None
    assert users.uid_of("root") == 0


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EROFS, "another --data-dir"), (errno.ENOSPC, "Free space"), (errno.EMFILE, "ulimit")]
)
def test_a_data_directory_that_cannot_be_used_at_the_start_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, remedy: str
) -> None:
    settings = WorkerSettings(url="http://127.0.0.1:1", node="n", data_dir=tmp_path, simulate="1")
    with monkeypatch.context() as patch:
        patch.setattr(main, "_lock", raises(OSError(number, os.strerror(number))))
        assert main.run(settings) == 1
    told = capsys.readouterr().err
    assert f"The data directory {tmp_path} cannot be used: [Errno {number}]" in told
    assert remedy in told


def test_an_error_elsewhere_is_none_of_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = WorkerSettings(url="http://127.0.0.1:1", node="n", data_dir=tmp_path, simulate="1")
    monkeypatch.setattr(main, "WorkerLoop", raises(FULL))
    assert main.run(settings) == 1
    told = capsys.readouterr().err
    assert "data directory" not in told
    assert "This host does not let the worker run: [Errno 24] Too many open files" in told
