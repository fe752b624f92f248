"""Jobs while their worker fails: it dies half-way, its disk is full, it has no file descriptor or thread left."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.node_protocol import JobOrder, JobReport, RunState
from gpulease_worker.jobs import job_records, supervisor_start, supervisor_watch
from gpulease_worker.processes import lease_claims
from tests.worker.build import furnished, kill, living, number_in, order, spec, supervising, under, until
from tests.worker.play import Worker, play, soon

SLOW = """
real = job_records.write


def write(directory, name, record, **options):
    if name == job_records.START and not record.launcher:
        (directory / "about-to-start").touch()
        end = time.monotonic() + 60
        while not (directory / "go").exists() and time.monotonic() < end:
            time.sleep(0.01)
    real(directory, name, record, **options)
job_records.write = write
"""
"""A supervisor that holds the lock and has not yet written its record: a slow disk, a loaded machine."""


@pytest.fixture
def started_here(tmp_path: Path) -> Callable[[], set[ProcessId]]:
    """The living supervisors that workers of this test have started: not what those start, and nothing of others."""

    def is_supervisor(pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            return process.ppid() == os.getpid() and str(tmp_path / "jobs") in " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            return False

    return lambda: {one for one in process_tree.descendants(os.getpid()) if is_supervisor(one.pid)}


def noting(note: Path, *, ignore: str = "") -> JobOrder:
    """A job that notes its start and stays, though not forever should the test fail."""
    stay = "n=0; while test $n -lt 2000; do n=$((n+1)); sleep 0.02; done"
    return order("j", spec("sh", "-c", f"trap '{ignore}' TERM; echo $$ >> {note}; {stay}"))


def stopped(job: JobOrder, grace_s: float = 1.0) -> JobOrder:
    return order(job.job_id, job.spec, lease=job.lease_id, stop=True, grace_s=grace_s)


def starts(note: Path) -> int:
    return len(note.read_text().splitlines()) if note.exists() else 0


def failing(real: Callable[..., Any], when: Callable[..., bool], times: int, number: int) -> Callable[..., Any]:
    """A function that fails so many times with an errno where a condition is true of its arguments."""
    failures: list[int] = []

    def call(*words: Any, **members: Any) -> Any:
        if len(failures) < times and when(*words, **members):
            failures.append(number)
            raise OSError(number, os.strerror(number))
        return real(*words, **members)

    return call


def states(worker: Worker) -> list[RunState]:
    return [report.state for report in worker.jobs.reports()]


@contextmanager
def stopped_at_once() -> Iterator[list[ProcessId]]:
    """A process that is started meanwhile is stopped before it has done anything; later searches miss it."""
    found: list[ProcessId] = []

    def start(program: Any, words: Any, environ: Any, **members: Any) -> int:
        if supervisor_start.SUPERVISOR not in words:
            return real(program, words, environ, **members)
        # It stops itself: a signal from here might come late.
        stopping = ["sh", "-c", 'kill -STOP $$; exec "$0" "$@"', program, *words[1:]]
        pid = real("/bin/sh", stopping, environ, **members)
        state = Path(f"/proc/{pid}/stat")
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "it has stopped")
        identity = ProcessId.of(pid)
        assert identity is not None
        found.append(identity)
        return pid

    real = os.posix_spawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor_start.os, "posix_spawn", start)
        yield found


def test_a_supervisor_with_the_lock_and_no_record_yet_keeps_its_job(tmp_path: Path) -> None:
    note = tmp_path / "starts"
    job = noting(note)
    directory = furnished(tmp_path / "jobs" / "j", job)

    async def story(worker: Worker) -> None:
        with supervising(directory, SLOW) as first:
            await soon((directory / "about-to-start").exists, "it has the lock")
            for _ in range(3):
                worker.jobs.reconcile([job])
                assert states(worker) == [RunState.STARTING]
            (directory / "go").touch()
            await worker.until([job], RunState.RUNNING)
            start = job_records.read(directory, job_records.START, job_records.StartRecord)
            assert start is not None
            assert start.supervisor.pid == first.pid
            report = await worker.end_of(stopped(job, 0.1))
            assert report.reason == "It was stopped on request."
        assert starts(note) <= 1
        assert not living(job.lease_id)

    play(tmp_path, story)


def test_the_end_of_a_second_supervisor_is_not_the_end_of_the_job(tmp_path: Path) -> None:
    note = tmp_path / "starts"
    job = noting(note)

    async def story(worker: Worker) -> None:
        with stopped_at_once() as started:
            worker.jobs.reconcile([job])  # starts a supervisor, which does not get as far as the lock
        (first,) = started
        directory = tmp_path / "jobs" / "j"
        with supervising(directory, SLOW) as second:
            await soon((directory / "about-to-start").exists, "another has the lock")
            os.kill(first.pid, signal.SIGCONT)
            await soon(lambda: not first.alive(), "the first finds the lock taken and ends")
            (directory / "go").touch()
            await worker.until([job], RunState.RUNNING)
            kill(until(lambda: number_in(note), "it is up"))
            report = await worker.end_of(job)
            assert report.exit_code == 137
            assert second.wait(60) == 0
        assert starts(note) == 1

    play(tmp_path, story)


def test_a_job_that_started_unnoticed_is_not_killed(tmp_path: Path, started_here) -> None:
    note = tmp_path / "starts"
    job = noting(note)

    async def story(worker: Worker) -> None:
        worker.jobs.reconcile([job])
        (supervisor,) = until(started_here, "its command line can be read")
        os.kill(supervisor.pid, signal.SIGSTOP)
        worker.jobs.close()
        again = Worker(tmp_path)
        os.kill(supervisor.pid, signal.SIGCONT)
        pid = until(lambda: number_in(note), "it is up")
        await again.until([job], RunState.RUNNING)
        assert ProcessId.of(pid) is not None
        report = await again.end_of(stopped(job, 0.1))
        assert report.reason == "It was stopped on request."
        assert starts(note) == 1
        with pytest.raises(ProcessLookupError):  # the next worker has reaped it
            os.kill(supervisor.pid, 0)

    play(tmp_path, story)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_job_that_another_supervisor_is_about_to_start_is_stopped(tmp_path: Path, ordered: bool) -> None:
    job = order("j", spec("sleep", "60"))
    directory = furnished(tmp_path / "jobs" / "j", job)

    async def story(worker: Worker) -> None:
        orders = [stopped(job)] if ordered else []
        with supervising(directory, SLOW) as supervisor:
            await soon((directory / "about-to-start").exists, "it has the lock")
            worker.jobs.reconcile(orders)
            assert states(worker) == [RunState.STARTING]
            (directory / "go").touch()
            await soon(lambda: worker.jobs.reconcile(orders) or supervisor.poll() is not None, "it has ended")
            assert supervisor.wait(60) == 0
        end = job_records.read(directory, job_records.EXIT, job_records.ExitRecord)
        assert end is not None
        # The order comes when its start is recorded: before the launch or after it, and both are right.
        ends = [(143, "It was stopped on request."), (None, "It was stopped before it started.")]
        assert (end.exit_code, end.reason) in ends
        assert not living(job.lease_id)

    play(tmp_path, story)


def test_an_end_recorded_by_a_worker_keeps_a_late_supervisor_from_launching(tmp_path: Path) -> None:
    note = tmp_path / "starts"
    job = noting(note)
    directory = furnished(tmp_path / "jobs" / "j", job)

    async def story(worker: Worker) -> None:
        report = await worker.end_of(stopped(job))
        assert report.reason == "It was stopped before it started."
        with supervising(directory) as late:
            assert late.wait(60) == 0
        assert starts(note) == 0

    play(tmp_path, story)


def test_an_end_that_cannot_be_recorded_keeps_a_late_supervisor_from_launching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "starts"
    job = noting(note)
    directory = furnished(tmp_path / "jobs" / "j", job)
    full = failing(job_records.write, lambda _, name, __: name == job_records.EXIT, 2, errno.ENOSPC)
    monkeypatch.setattr(job_records, "write", full)

    async def story(worker: Worker) -> None:
        worker.jobs.reconcile([stopped(job)])
        assert states(worker) == [RunState.EXITED]
        assert not (directory / job_records.EXIT).exists()
        with supervising(directory) as late:
            assert late.wait(60) == 0
        worker.jobs.reconcile([])
        assert states(worker) == [RunState.EXITED], "not forgotten as long as it might be launched"
        worker.jobs.reconcile([])
        assert states(worker) == []
        assert (directory / job_records.EXIT).exists()
        assert starts(note) == 0

    play(tmp_path, story)


def test_a_supervisor_that_cannot_be_watched_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started_here
) -> None:
    note = tmp_path / "starts"
    job = noting(note)

    async def story(worker: Worker) -> None:
        monkeypatch.setattr(os, "pidfd_open", failing(os.pidfd_open, lambda *_: True, 1, errno.EMFILE))
        worker.jobs.reconcile([job])
        assert started_here() == set(), "the unwatched one is gone"
        await worker.until([job], RunState.RUNNING)
        until(lambda: number_in(note), "it is up")
        kill(number_in(note))
        assert (await worker.end_of(job)).exit_code == 137
        assert starts(note) == 1

    play(tmp_path, story)


def test_a_stop_that_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = noting(tmp_path / "up", ignore=":")
    full = failing(job_records.write, lambda _, name, __: name == job_records.STOP, 1, errno.ENOSPC)
    monkeypatch.setattr(job_records, "write", full)

    async def story(worker: Worker) -> None:
        await worker.until([job], RunState.RUNNING)
        until(lambda: number_in(tmp_path / "up"), "it ignores SIGTERM")
        begun = time.monotonic()
        worker.jobs.reconcile([stopped(job, 0.1)])
        assert not (tmp_path / "jobs" / "j" / job_records.STOP).exists()
        report = await worker.end_of(stopped(job, 0.1))
        assert (report.exit_code, report.reason) == (137, "It was stopped on request.")
        assert time.monotonic() - begun < 20, "after the grace of the order, not the default one of 35 s"

    play(tmp_path, story)


def test_a_stop_takes_effect_although_the_disk_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = order("j", spec("sleep", "60"))
    full = failing(job_records.write, lambda _, name, __: name == job_records.STOP, 10**6, errno.ENOSPC)
    monkeypatch.setattr(job_records, "write", full)

    async def story(worker: Worker) -> None:
        await worker.until([job], RunState.RUNNING)
        assert (await worker.end_of(stopped(job))).reason == "It was stopped on request."

    play(tmp_path, story)


def test_a_job_that_cannot_be_marked_as_forgotten_blocks_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = order("j", spec("true")), order("other", spec("true"))
    full = failing(Path.touch, lambda path, *_, **__: path.name == job_records.FORGOTTEN, 10**6, errno.ENOSPC)

    async def story(worker: Worker) -> None:
        await worker.end_of(job)
        monkeypatch.setattr(Path, "touch", full)
        await worker.end_of(other)
        again = Worker(tmp_path)
        assert {report.job_id for report in again.jobs.reports()} == {"j", "other"}
        again.jobs.reconcile([])
        assert again.jobs.reports() == ()

    play(tmp_path, story)


@pytest.mark.parametrize("name", [job_records.ORDER, job_records.START])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_job_with_a_temporarily_unreadable_record_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ordered: bool
) -> None:
    note = tmp_path / "starts"
    job = noting(note)
    real = job_records.read

    def unreadable(directory: Path, asked: str, kind: Any) -> Any:
        if asked == name:
            raise ValueError(f"{asked} cannot be read: [Errno 5] Input/output error")
        return real(directory, asked, kind)

    async def story(worker: Worker) -> None:
        await worker.until([job], RunState.RUNNING)
        pid = until(lambda: number_in(note), "it is up")
        worker.jobs.close()
        monkeypatch.setattr(job_records, "read", unreadable)
        again = Worker(tmp_path)
        for _ in range(3):
            assert states(again) != [RunState.EXITED]
            assert len(states(again)) == 1, "it is reported all the while"
            again.jobs.reconcile([job] if ordered else [])
        if ordered:
            assert ProcessId.of(pid) is not None
        monkeypatch.setattr(job_records, "read", real)
        if ordered:
            await again.until([job], RunState.RUNNING)
            assert ProcessId.of(pid) is not None
        await soon(lambda: again.jobs.reconcile([]) or not again.jobs.reports(), "it is stopped and forgotten")
        assert not living(job.lease_id)
        assert starts(note) == 1

    play(tmp_path, story)


@pytest.mark.parametrize("content", ["{", "[" * 100_000], ids=["cut off", "nested deeply"])
def test_a_job_with_an_unreadable_record_is_given_up_without_a_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(supervisor_watch, "UNREADABLE_S", 0.0)
    job = noting(tmp_path / "starts")
    directory = furnished(tmp_path / "jobs" / "j", job)
    (directory / job_records.START).write_text(content)
    lock = job_records.lock(directory)
    assert lock is not None

    async def story(worker: Worker) -> None:
        with under(job.lease_id) as left:
            worker.jobs.reconcile([job])
            assert states(worker) == [RunState.STARTING]
            assert left.poll() is None
            os.close(lock)
            report = await worker.end_of(job)
            assert left.wait(30) == -signal.SIGKILL
        assert report.reason is not None
        assert "start.json cannot be read" in report.reason

    play(tmp_path, story)


@pytest.mark.parametrize("gone", ["j", "."], ids=["the job's directory", "all jobs"])
def test_a_job_of_which_the_directory_is_gone_ends_with_its_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    monkeypatch.setattr(supervisor_watch, "UNREADABLE_S", 60.0 if gone == "j" else 0.1)

    async def story(worker: Worker) -> None:
        job = noting(tmp_path / "starts")
        await worker.until([job], RunState.RUNNING)
        shutil.rmtree(tmp_path / "jobs" / gone)
        kill(until(lambda: number_in(tmp_path / "starts"), "it is up"))
        if gone == ".":
            (supervisor,) = (job.start.supervisor for job in worker.jobs._jobs.values() if job.start)
            kill(supervisor.pid)  # it would try for a minute: the file system may only be away
        reason = (await worker.end_of(job)).reason or ""
        assert ("was removed" if gone == "j" else "No such file or directory") in reason
        assert not living(job.lease_id)
        worker.jobs.reconcile([])
        assert worker.jobs.reports() == ()

    play(tmp_path, story)


def test_a_job_of_a_dead_supervisor_ends_although_the_file_system_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_watch, "UNREADABLE_S", 0.0)

    async def story(worker: Worker) -> None:
        job = noting(tmp_path / "starts")
        await worker.until([job], RunState.RUNNING)
        start = job_records.read(tmp_path / "jobs" / "j", job_records.START, job_records.StartRecord)
        assert start is not None
        monkeypatch.setattr(job_records, "lock", failing(job_records.lock, lambda _: True, 10**6, errno.EROFS))
        kill(start.supervisor.pid)
        assert "Read-only file system" in ((await worker.end_of(job)).reason or "")
        assert not living(job.lease_id)

    play(tmp_path, story)


def test_the_end_of_a_job_is_noticed_although_the_parent_ignores_sigchld(tmp_path: Path) -> None:
    reports: list[JobReport] = []

    async def story(worker: Worker) -> None:
        reports.append(await worker.end_of(order("j", spec("sh", "-c", "exit 3"))))

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        play(tmp_path, story)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert [report.exit_code for report in reports] == [3]


def test_a_worker_ends_without_waiting_for_unkillable_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = order("j", spec("sh", "-c", "sleep 60 & wait"))  # the shell dies with its supervisor, and the other stays
    killing = threading.Event()
    monkeypatch.setenv("GPULEASE_CGROUPS", "off")  # a cgroup would be killed as one
    monkeypatch.setattr(process_tree, "signal_all", lambda *_: killing.set())  # it hangs in the kernel

    async def story(worker: Worker) -> None:
        await worker.until([job], RunState.RUNNING)
        start = job_records.read(tmp_path / "jobs" / "j", job_records.START, job_records.StartRecord)
        assert start is not None
        until(lambda: len(living(job.lease_id)) == 2, "it is up")
        kill(start.supervisor.pid)
        await soon(killing.is_set, "it is being killed")

    play(tmp_path, story)  # ends when the threads have ended
    told = time.monotonic()
    assert not (tmp_path / "jobs" / "j" / job_records.EXIT).exists(), "its end is unknown yet"
    monkeypatch.undo()
    left = lease_claims.kill_claimants(job.lease_id, os.getuid(), 30)
    assert not left
    assert time.monotonic() - told < 30


def test_without_a_thread_left_jobs_are_started_one_by_one_and_others_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def story(worker: Worker) -> None:
        running = noting(tmp_path / "starts")
        await worker.until([running], RunState.RUNNING)
        new = [order(name, spec("sleep", "60")) for name in ("k", "l")]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            worker.jobs.reconcile([stopped(running), *new])
            worker.jobs.reconcile([stopped(running), *new])
        assert {report.job_id for report in worker.jobs.reports()} == {"j", "k", "l"}
        await worker.end_of(stopped(running))

    play(tmp_path, story)


def test_errors_of_a_job_that_come_again_with_each_answer_are_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = noting(tmp_path / "starts")

    def full(*words: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def story(worker: Worker) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(supervisor_watch.SupervisorStarter, "start", full)
            for _ in range(5):
                worker.jobs.reconcile([job])
            worker.jobs.reconcile([stopped(job)])
        assert [report.state for report in worker.jobs.reports()] == [RunState.EXITED]

    play(tmp_path, story)
    assert starts(tmp_path / "starts") == 0
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["job j: The worker cannot run it: [Errno 24] Too many open files."]


def test_what_a_dead_supervisor_left_is_ended_although_there_is_no_thread_for_that_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    async def no_thread(*words: object) -> object:
        if not refused:
            refused.append(words)
            raise RuntimeError("can't start new thread")
        return await to_thread(*words)

    async def story(worker: Worker) -> None:
        job = noting(tmp_path / "starts")
        await worker.until([job], RunState.RUNNING)
        start = job_records.read(tmp_path / "jobs" / "j", job_records.START, job_records.StartRecord)
        assert start is not None
        kill(start.supervisor.pid)
        report = await worker.end_of(job)
        assert "supervisor died" in (report.reason or "")
        assert not living(job.lease_id)

    to_thread: Callable[..., Any] = asyncio.to_thread
    monkeypatch.setattr(asyncio, "to_thread", no_thread)
    monkeypatch.setattr(supervisor_watch, "UNKILLABLE_ROUND_S", 0.01)
    play(tmp_path, story)
    assert refused
