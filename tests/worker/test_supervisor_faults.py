"""A supervisor facing faults: a full disk, an unkillable process, an unreadable order."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease_protocol.host.process_id import ProcessId
from gpulease_worker.jobs import job_records
from tests.worker.build import furnished, living, number_in, order, spec, supervising, until

FULL_FOR = """
real, failures = job_records.write, []
def write(directory, name, record, **options):
    if name == {name!r} and (name != job_records.START or record.launcher) and len(failures) < {times}:
        failures.append(name)
        raise OSError(errno.ENOSPC, "No space left on device")
    real(directory, name, record, **options)
job_records.write = write
"""
"""The disk is full when a record is written, so many times. Of the two of the start it is the one after the launch."""


def full(name: str, times: int) -> str:
    return FULL_FOR.format(name=name, times=times)


def start_of(directory: Path) -> Callable[[], job_records.StartRecord | None]:
    """The record of the start, once the launcher is in it."""

    def look() -> job_records.StartRecord | None:
        start = job_records.read(directory, job_records.START, job_records.StartRecord)
        return start if start and start.launcher else None

    return look


def end_of(directory: Path) -> job_records.ExitRecord:
    end = job_records.read(directory, job_records.EXIT, job_records.ExitRecord)
    assert end is not None, (directory / "supervisor.log").read_text()
    return end


def test_a_start_that_cannot_be_recorded_at_once_is_recorded_later(tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = order("j", spec("sh", "-c", f"until test -e {go}; do sleep 0.01; done; exit 6"))
    directory = furnished(tmp_path / "j", job)
    with supervising(directory, full(job_records.START, 2)) as supervisor:
        start = until(start_of(directory), "the launcher is on record")
        assert start.launcher is not None
        assert start.launcher.alive()
        assert not (directory / job_records.EXIT).exists()
        go.touch()
        assert supervisor.wait(60) == 0
    assert (end_of(directory).exit_code, end_of(directory).reason) == (6, "The command exited with code 6.")


def test_a_process_before_exec_dies_with_the_supervisor(tmp_path: Path) -> None:
    entering, go, ran = tmp_path / "entering", tmp_path / "go", tmp_path / "ran"
    fault = (
        "def check_paths(plan):\n"
        f"    pathlib.Path({str(entering)!r}).write_text(f'{{os.getpid()}}\\n')\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "spawn._check_paths = check_paths"
    )
    directory = furnished(tmp_path / "j", order("j", spec("touch", str(ran))))
    with supervising(directory, fault) as supervisor:
        child = until(lambda: number_in(entering), "its process is on the way to its program")
        supervisor.kill()
        supervisor.wait()
        # It has no marker yet, so a cleanup after the supervisor does not find it.
        until(lambda: ProcessId.of(child) is None, "it has died with the supervisor")
        go.touch()
    assert not ran.exists()


def test_a_stop_reaches_a_job_that_hangs_before_exec(tmp_path: Path) -> None:
    entering = tmp_path / "entering"
    fault = (
        f"def check_paths(plan):\n    pathlib.Path({str(entering)!r}).write_text('1\\n')\n    time.sleep(600)\n"
        "spawn._check_paths = check_paths"
    )
    directory = furnished(tmp_path / "j", order("j", spec("true")))
    with supervising(directory, fault) as supervisor:
        until(lambda: number_in(entering), "its process is on the way to its program")
        supervisor.terminate()
        assert supervisor.wait(60) == 0
    assert (end_of(directory).exit_code, end_of(directory).reason) == (None, "It was stopped before it started.")


def test_a_job_that_does_not_reach_exec_in_time_fails(tmp_path: Path) -> None:
    fault = "spawn.EXEC_S = 0.3\nspawn._check_paths = lambda plan: time.sleep(600)"
    directory = furnished(tmp_path / "j", order("j", spec("true")))
    with supervising(directory, fault) as supervisor:
        assert supervisor.wait(60) == 0
    assert str(end_of(directory).reason).startswith("It could not be started within 0.3 s: ")


def test_the_exit_status_is_not_lost_while_the_disk_is_full(tmp_path: Path) -> None:
    directory = furnished(tmp_path / "j", order("j", spec("sh", "-c", "exit 7")))
    with supervising(directory, "job_records.RETRY_S = 0.01" + full(job_records.EXIT, 5)) as supervisor:
        assert supervisor.wait(60) == 0
    assert end_of(directory).exit_code == 7


def test_the_exit_status_is_not_lost_while_the_file_system_does_not_answer(tmp_path: Path) -> None:
    directory = furnished(tmp_path / "j", order("j", spec("sh", "-c", "exit 7")))
    stale = (
        "\ndef stat(*_, **__):\n    pathlib.Path.stat = real\n    raise OSError(errno.ESTALE, 'Stale file handle')\n"
        "real, write = pathlib.Path.stat, supervisor.job_records.write\n"
        "def failing(directory, name, *rest, **more):\n"
        f"    if name == {job_records.EXIT!r}:\n"
        "        supervisor.job_records.write, pathlib.Path.stat = write, stat\n"
        "        raise OSError(errno.ESTALE, 'Stale file handle')\n"
        "    write(directory, name, *rest, **more)\n"
        "supervisor.job_records.write = failing"
    )
    with supervising(directory, "job_records.RETRY_S = 0.01" + stale) as supervisor:
        assert supervisor.wait(60) == 0
    assert end_of(directory).exit_code == 7


UNREAD_FOR = """
job_records.RETRY_S = 0.01
real, failures = {where}, []
def failing(*arguments, **more):
    if {of!r} in str(arguments[0]) and len(failures) < 3:
        failures.append(arguments)
        raise OSError(errno.EIO, "Input/output error")
    return real(*arguments, **more)
{where} = failing
"""
"""A file of the job cannot be opened for a moment."""


@pytest.mark.parametrize(
    ("where", "of"), [("os.open", job_records.LOCK), ("pathlib.Path.read_text", job_records.ORDER)]
)
def test_a_job_starts_although_its_directory_cannot_be_read_for_a_moment(tmp_path: Path, where: str, of: str) -> None:
    directory = furnished(tmp_path / "j", order("j", spec("sh", "-c", "exit 7")))
    with supervising(directory, UNREAD_FOR.format(where=where, of=f"/{of}")) as supervisor:
        assert supervisor.wait(60) == 0
    assert end_of(directory).exit_code == 7


@pytest.mark.parametrize("order_on_disk", ["{", None])
def test_a_job_with_a_broken_order_or_none_is_given_up_at_once(tmp_path: Path, order_on_disk: str | None) -> None:
    directory = furnished(tmp_path / "j", order("j", spec("true")))
    (directory / job_records.ORDER).unlink()
    if order_on_disk is not None:
        (directory / job_records.ORDER).write_text(order_on_disk)
    with supervising(directory, "job_records.DEADLINE_S = 1e6") as supervisor:
        assert supervisor.wait(60) == 1


def test_a_stop_ends_the_wait_for_a_directory_that_cannot_be_read(tmp_path: Path) -> None:
    directory = furnished(tmp_path / "j", order("j", spec("true")))
    tried = tmp_path / "tried"
    fault = (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\njob_records.RETRY_S = 0.01\n"
        "def failing(*_):\n"
        f"    pathlib.Path({str(tried)!r}).write_text('1\\n')\n    raise OSError(errno.EIO, 'Input/output error')\n"
        "job_records.lock = failing"
    )
    with supervising(directory, fault) as supervisor:
        until(lambda: number_in(tried), "it has tried to take the lock")
        supervisor.terminate()
        assert supervisor.wait(60) == 1


def test_a_supervisor_ends_with_its_job_where_the_directory_was_removed(tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = order("j", spec("sh", "-c", f"until test -e {go}; do sleep 0.01; done"))
    directory = furnished(tmp_path / "j", job)
    with supervising(directory) as supervisor:
        until(start_of(directory), "the launcher is up")
        shutil.rmtree(directory)
        go.touch()
        assert supervisor.wait(30) == 0


def test_a_record_is_written_into_its_reserved_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, flags: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    job_records.reserve(tmp_path, job_records.EXIT)
    (room,) = tmp_path.iterdir()
    assert room.stat().st_blocks * 512 >= job_records.RESERVED_BYTES
    monkeypatch.setattr(job_records, "_private", full)  # no new file can be made
    end = job_records.ExitRecord(exit_code=3, ended_at=job_records.now())
    job_records.write(tmp_path, job_records.EXIT, end)
    assert job_records.read(tmp_path, job_records.EXIT, job_records.ExitRecord) == end
    with pytest.raises(OSError, match="No space"):
        job_records.write(tmp_path, job_records.STOP, job_records.StopRecord(grace_s=1.0))
    assert [path.name for path in tmp_path.iterdir()] == [job_records.EXIT]


def test_sigterm_without_an_order_on_disk_stops_the_job(tmp_path: Path) -> None:
    directory = furnished(tmp_path / "j", order("j", spec("sleep", "60")))
    with supervising(directory) as supervisor:
        until(start_of(directory), "the launcher is up")
        supervisor.terminate()
        assert supervisor.wait(60) == 0
    assert (end_of(directory).exit_code, end_of(directory).reason) == (143, "It was stopped on request.")


def test_an_unreadable_stop_record_still_stops_the_job(tmp_path: Path) -> None:
    note = tmp_path / "up"
    job = order("j", spec("sh", "-c", f"trap 'exit 9' TERM; echo 1 > {note}; while :; do sleep 0.02; done"))
    directory = furnished(tmp_path / "j", job)
    (directory / job_records.STOP).write_text("{")
    with supervising(directory) as supervisor:
        until(lambda: number_in(note), "the trap is set")
        assert supervisor.poll() is None
        supervisor.terminate()
        assert supervisor.wait(60) == 0
    assert end_of(directory).exit_code == 9


def test_a_launcher_that_cannot_be_signalled_does_not_end_the_supervision(tmp_path: Path) -> None:
    fault = "def refuse(pid, number): raise PermissionError(1, 'Operation not permitted')\nos.kill = refuse"
    job = order("j", spec("sleep", "60"))
    directory = furnished(tmp_path / "j", job)
    with supervising(directory, fault) as supervisor:
        until(start_of(directory), "the launcher is up")
        job_records.write(directory, job_records.STOP, job_records.StopRecord(grace_s=0.1))
        supervisor.terminate()
        assert supervisor.wait(60) == 0
    assert end_of(directory).exit_code == 137
    assert not living(job.lease_id)


def test_an_unkillable_launcher_is_reported_and_awaited(tmp_path: Path) -> None:
    fault = (
        "supervisor.UNKILLABLE_AFTER_S = 0.2; process_tree.signal_all = lambda *_: None\n"
        "supervisor.cgroup.create = lambda *_: None\n"
        "def refuse(pid, number): raise PermissionError(1, 'Operation not permitted')\nos.kill = refuse"
    )
    directory = furnished(tmp_path / "j", order("j", spec("sleep", "60")))
    with supervising(directory, fault) as supervisor:
        start = until(start_of(directory), "the launcher is up")
        assert start.launcher is not None
        try:
            job_records.write(directory, job_records.STOP, job_records.StopRecord(grace_s=0.1))
            supervisor.terminate()
            unkillable = until(
                lambda: job_records.read(directory, job_records.UNKILLABLE, job_records.UnkillableRecord), "it is noted"
            )
            assert supervisor.poll() is None
            assert not (directory / job_records.EXIT).exists()
        finally:
            os.kill(start.launcher.pid, signal.SIGKILL)
        assert supervisor.wait(60) == 0
    assert unkillable.pids == (start.launcher.pid,)
    assert f"{start.launcher.pid} (runs on, perhaps as a user whom this worker may not signal)" in unkillable.reason
    assert (end_of(directory).exit_code, end_of(directory).reason) == (137, "It was stopped on request.")


@pytest.mark.parametrize("ends", ["exec sleep 600", "trap 'exit 3' TERM; sleep 600 & wait"], ids=["it dies", "exit 3"])
def test_a_job_has_not_failed_where_sigterm_to_all_processes_reaches_it_before_its_supervisor(
    tmp_path: Path, ends: str
) -> None:
    directory = furnished(tmp_path / "j", order("j", spec("sh", "-c", ends)))
    with supervising(directory, "supervisor.job_end.SIGTERM_TO_ALL_S = 60.0") as supervisor:
        launcher = until(start_of(directory), "the launcher is on record").launcher
        assert launcher is not None
        until(lambda: has_begun(launcher.pid), "it sleeps")
        os.kill(launcher.pid, signal.SIGTERM)
        until(lambda: not launcher.alive() and not Path(f"/proc/{launcher.pid}").exists(), "it is reaped")
        supervisor.terminate()
        assert supervisor.wait(30) == 0
    assert (end_of(directory).stopped, end_of(directory).reason) == (True, "It was stopped on request.")


def has_begun(pid: int) -> bool:
    """True once it executes `sleep`, or has a child that does."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(Path(f"/proc/{one}/comm").read_text() == "sleep\n" for one in (pid, *children))
