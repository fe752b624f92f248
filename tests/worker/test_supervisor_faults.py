"""A supervisor in trouble: a full disk, a process that does not die, an order that it cannot read."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease_worker import processes, records
from tests.worker.build import furnished, living, number_in, order, spec, supervising, until

FULL_FOR = """
real, failures = records.write, []
def write(directory, name, record):
    if name == {name!r} and (name != records.START or record.launcher) and len(failures) < {times}:
        failures.append(name)
        raise OSError(errno.ENOSPC, "No space left on device")
    real(directory, name, record)
records.write = write
"""
"""The disk is full when a record is written, so many times. Of the two of the start it is the one after the launch."""


def full(name: str, times: int) -> str:
    return FULL_FOR.format(name=name, times=times)


def start_of(directory: Path) -> Callable[[], records.Start | None]:
    """The record of the start, once the launcher is in it."""

    def look() -> records.Start | None:
        start = records.read(directory, records.START, records.Start)
        return start if start and start.launcher else None

    return look


def end_of(directory: Path) -> records.Exit:
    end = records.read(directory, records.EXIT, records.Exit)
    assert end is not None, (directory / "supervisor.log").read_text()
    return end


def test_a_job_whose_start_cannot_be_recorded_runs_on_and_is_recorded_later(tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = order("j", spec("sh", "-c", f"until test -e {go}; do sleep 0.01; done; exit 6"))
    directory = furnished(tmp_path / "j", job)
    with supervising(directory, full(records.START, 2)) as supervisor:
        start = until(start_of(directory), "the launcher is on record")
        assert start.launcher is not None
        assert start.launcher.alive()
        assert not (directory / records.EXIT).exists()
        go.touch()
        assert supervisor.wait(60) == 0
    assert (end_of(directory).exit_code, end_of(directory).reason) == (6, "The command exited with code 6.")


def test_what_is_not_yet_the_job_dies_with_the_supervisor_and_never_becomes_it(tmp_path: Path) -> None:
    entering, go, ran = tmp_path / "entering", tmp_path / "go", tmp_path / "ran"
    fault = (
        "from gpulease_worker import entry\n"
        "def look(plan):\n"
        f"    pathlib.Path({str(entering)!r}).write_text(f'{{os.getpid()}}\\n')\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "entry._look = look"
    )
    directory = furnished(tmp_path / "j", order("j", spec("touch", str(ran))))
    with supervising(directory, fault) as supervisor:
        child = until(lambda: number_in(entering), "its process is on the way to its program")
        supervisor.kill()
        supervisor.wait()
        # It has no marker yet: whoever cleans up after the supervisor does not find it.
        until(lambda: processes.Identity.of(child) is None, "it has died with the supervisor")
        go.touch()
    assert not ran.exists()


def test_an_order_to_stop_reaches_a_job_that_does_not_get_to_its_program(tmp_path: Path) -> None:
    entering = tmp_path / "entering"
    fault = (
        "from gpulease_worker import entry\n"
        f"def look(plan):\n    pathlib.Path({str(entering)!r}).write_text('1\\n')\n    time.sleep(600)\n"
        "entry._look = look"
    )
    directory = furnished(tmp_path / "j", order("j", spec("true")))
    with supervising(directory, fault) as supervisor:
        until(lambda: number_in(entering), "its process is on the way to its program")
        supervisor.terminate()
        assert supervisor.wait(60) == 0
    assert (end_of(directory).exit_code, end_of(directory).reason) == (None, "It was stopped before it started.")


def test_a_job_that_does_not_get_to_its_program_in_time_fails(tmp_path: Path) -> None:
    fault = "from gpulease_worker import entry\nentry.BEGIN_S = 0.3\nentry._look = lambda plan: time.sleep(600)"
    directory = furnished(tmp_path / "j", order("j", spec("true")))
    with supervising(directory, fault) as supervisor:
        assert supervisor.wait(60) == 0
    assert str(end_of(directory).reason).startswith("It could not be started within 0.3 s: ")


def test_the_exit_status_is_not_lost_while_the_disk_is_full(tmp_path: Path) -> None:
    directory = furnished(tmp_path / "j", order("j", spec("sh", "-c", "exit 7")))
    with supervising(directory, "supervisor.RECORD_LOOK_S = 0.01" + full(records.EXIT, 5)) as supervisor:
        assert supervisor.wait(60) == 0
    assert end_of(directory).exit_code == 7


def test_a_record_is_written_into_the_room_that_was_reserved_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, flags: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    records.reserve(tmp_path, records.EXIT)
    (room,) = tmp_path.iterdir()
    assert room.stat().st_blocks * 512 >= records.RESERVED_BYTES
    monkeypatch.setattr(records, "_private", full)  # no new file can be made
    end = records.Exit(exit_code=3, ended_at=records.now())
    records.write(tmp_path, records.EXIT, end)
    assert records.read(tmp_path, records.EXIT, records.Exit) == end
    with pytest.raises(OSError, match="No space"):
        records.write(tmp_path, records.STOP, records.Stop(grace_s=1.0))
    assert [path.name for path in tmp_path.iterdir()] == [records.EXIT]


def test_sigterm_without_an_order_on_disk_stops_the_job(tmp_path: Path) -> None:
    directory = furnished(tmp_path / "j", order("j", spec("sleep", "60")))
    with supervising(directory) as supervisor:
        until(start_of(directory), "the launcher is up")
        supervisor.terminate()
        assert supervisor.wait(60) == 0
    assert (end_of(directory).exit_code, end_of(directory).reason) == (143, "It was stopped on request.")


def test_an_order_to_stop_that_cannot_be_read_still_stops_the_job_and_shortens_no_grace_later(tmp_path: Path) -> None:
    note = tmp_path / "up"
    job = order("j", spec("sh", "-c", f"trap 'exit 9' TERM; echo 1 > {note}; while :; do sleep 0.02; done"))
    directory = furnished(tmp_path / "j", job)
    (directory / records.STOP).write_text("{")
    with supervising(directory) as supervisor:
        until(lambda: number_in(note), "the trap is set")
        assert supervisor.poll() is None
        supervisor.terminate()
        assert supervisor.wait(60) == 0
    assert end_of(directory).exit_code == 9


def test_a_launcher_that_may_not_be_told_to_end_does_not_end_the_supervision(tmp_path: Path) -> None:
    fault = "def refuse(pid, number): raise PermissionError(1, 'Operation not permitted')\nos.kill = refuse"
    job = order("j", spec("sleep", "60"))
    directory = furnished(tmp_path / "j", job)
    with supervising(directory, fault) as supervisor:
        until(start_of(directory), "the launcher is up")
        records.write(directory, records.STOP, records.Stop(grace_s=0.1))
        supervisor.terminate()
        assert supervisor.wait(60) == 0
    assert end_of(directory).exit_code == 137
    assert not living(job.lease_id)


def test_a_launcher_that_does_not_die_is_named_and_waited_for(tmp_path: Path) -> None:
    fault = (
        "supervisor.STUCK_AFTER_S = 0.2; processes.send_all = lambda *_: None\n"
        "supervisor.cgroup.make = lambda name: None\n"
        "def refuse(pid, number): raise PermissionError(1, 'Operation not permitted')\nos.kill = refuse"
    )
    directory = furnished(tmp_path / "j", order("j", spec("sleep", "60")))
    with supervising(directory, fault) as supervisor:
        start = until(start_of(directory), "the launcher is up")
        assert start.launcher is not None
        try:
            records.write(directory, records.STOP, records.Stop(grace_s=0.1))
            supervisor.terminate()
            stuck = until(lambda: records.read(directory, records.STUCK, records.Stuck), "it is noted")
            assert supervisor.poll() is None
            assert not (directory / records.EXIT).exists()
        finally:
            os.kill(start.launcher.pid, signal.SIGKILL)
        assert supervisor.wait(60) == 0
    assert stuck.pids == (start.launcher.pid,)
    assert f"{start.launcher.pid} (runs on, perhaps as a user whom this worker may not signal)" in stuck.reason
    assert (end_of(directory).exit_code, end_of(directory).reason) == (137, "It was stopped on request.")
