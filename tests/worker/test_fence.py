"""A job with a fence ends without an answer of a daemon, whatever becomes of its worker."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulease_protocol.host.process_id import ProcessId, boot_id
from gpulease_protocol.node_protocol import RunState
from gpulease_worker.jobs.fence import FILE, ContactFile, Fence, since_boot_s
from tests.worker.build import number_in, order, spec, until
from tests.worker.play import Worker, play, soon

FENCE_S = 4.0
"""More than a busy machine keeps a process from noting that a daemon answers."""
IGNORES_SIGTERM = "trap '' TERM; echo $$ > {pid}; while :; do sleep 0.1; done"


@contextmanager
def daemons_answer(data_dir: Path) -> Iterator[None]:
    """As a worker notes it, which is not there."""
    contact, enough = ContactFile(data_dir), threading.Event()

    def note() -> None:
        while not enough.wait(0.1):
            contact.note(since_boot_s())

    contact.note(since_boot_s())
    noting = threading.Thread(target=note)
    noting.start()
    try:
        yield
    finally:
        enough.set()
        noting.join()


def alive(pid: int) -> bool:
    return ProcessId.of(pid) is not None


async def noted_pid(pid_file: Path) -> int:
    """The pid that a job's shell writes. The job is running a moment before it does."""
    await soon(lambda: number_in(pid_file), "the shell is up")
    return number_in(pid_file)


def test_a_job_ends_at_its_fence_although_its_worker_is_gone(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    job = order("j", spec("sh", "-c", f"echo $$ > {pid_file}; exec sleep 600", fence_s=FENCE_S))

    async def start(worker: Worker) -> None:
        (report,) = await worker.until([job], RunState.RUNNING)
        assert report.fence_s == FENCE_S
        await noted_pid(pid_file)

    with daemons_answer(tmp_path):
        play(tmp_path, start)  # and the worker is gone
        pid = number_in(pid_file)
        time.sleep(1.1 * FENCE_S)
        assert alive(pid)
    until(lambda: not alive(pid), "it ends by itself")

    async def find(worker: Worker) -> None:
        report = await worker.end_of(job)
        assert report.reason == "No daemon has answered this node for 4 s, which is the job's fence (fence_s)."
        assert report.fence_reached
        assert (report.exit_code, report.timed_out) == (143, False)

    play(tmp_path, find)


def test_a_process_that_ignores_sigterm_is_killed_within_what_the_daemon_waits(
    tmp_path: Path,
) -> None:
    pid_file = tmp_path / "pid"
    job = order("j", spec("sh", "-c", IGNORES_SIGTERM.format(pid=pid_file), fence_s=FENCE_S))

    async def story(worker: Worker) -> None:
        with daemons_answer(tmp_path):
            await worker.until([job], RunState.RUNNING)
            await noted_pid(pid_file)  # and its trap is set
        report = await worker.end_of(job)
        assert report.exit_code == 137
        assert "which is the job's fence" in str(report.reason)

    begun_s = time.monotonic()
    play(tmp_path, story)
    assert not alive(number_in(pid_file))
    assert time.monotonic() - begun_s > FENCE_S


def test_an_order_from_before_the_cut_starts_nothing_past_the_fence(tmp_path: Path) -> None:
    job = order("j", spec("touch", str(tmp_path / "started"), fence_s=FENCE_S))

    async def story(worker: Worker) -> None:
        ContactFile(tmp_path).note(since_boot_s() - FENCE_S)
        report = await worker.end_of(job)
        assert "which is the job's fence" in str(report.reason)
        assert report.exit_code is None
        assert report.fence_reached, "so that it is tried again, which never started"

    play(tmp_path, story)
    assert not (tmp_path / "started").exists()


def test_a_job_without_a_fence_needs_no_contact(tmp_path: Path) -> None:
    async def story(worker: Worker) -> None:
        report = await worker.end_of(order("j", spec("true")))
        assert (report.exit_code, report.fence_s) == (0, None)

    play(tmp_path, story)


@pytest.mark.parametrize(
    "line",
    ["", "nonsense", "{boot}", "{boot} nan", "another-boot {now}", "{boot} {later}", "{boot} {now} more"],
)
def test_a_contact_that_cannot_be_true_is_none(tmp_path: Path, line: str) -> None:
    now_s = since_boot_s()
    (tmp_path / FILE).write_text(line.format(boot=boot_id(), now=now_s - 0.001, later=now_s + 1000))
    assert Fence(tmp_path, 60.0).is_reached()


def test_contact_is_when_the_report_was_sent_and_never_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contact, fence, now_s = ContactFile(tmp_path), Fence(tmp_path, 60.0), since_boot_s()
    monkeypatch.setattr("gpulease_worker.jobs.fence.since_boot_s", lambda: now_s)
    contact.note(now_s - 50)
    assert fence.left_s() == pytest.approx(10.0, abs=0.001)
    contact.note(now_s - 5)
    assert fence.left_s() == pytest.approx(55.0, abs=0.001)
    (tmp_path / FILE).unlink()
    assert fence.left_s() == pytest.approx(55.0, abs=0.001)
    assert 0 < fence.next_look_s() <= 5.0


def test_a_supervisor_that_is_stopped_ends_the_job_once_it_goes_on(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    job = order("j", spec("sh", "-c", f"echo $$ > {pid_file}; exec sleep 600", fence_s=FENCE_S))

    async def story(worker: Worker) -> None:
        with daemons_answer(tmp_path):
            await worker.until([job], RunState.RUNNING)
            supervisor = parent_of(await noted_pid(pid_file))
        os.kill(supervisor, signal.SIGSTOP)
        await asyncio.sleep(FENCE_S)
        os.kill(supervisor, signal.SIGCONT)
        report = await worker.end_of(job)
        assert "which is the job's fence" in str(report.reason)

    play(tmp_path, story)


def parent_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text[text.rindex(")") + 2 :].split()[1])
