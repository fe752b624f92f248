"""Jobs with real supervisors and real processes: how they end, and that no process is left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import Launcher
from gpulease_protocol.node_protocol import JobOrder, JobReport, RunState
from gpulease_worker.jobs import job_records, reconciler
from tests.ports import free_port
from tests.worker.build import furnished, kill, living, number_in, order, python, spec, supervising, until
from tests.worker.play import DEADLINE_S, Worker, play, soon

RANK = """
import json, os, sys
import torch, torch.distributed as dist
print("a line on stderr", file=sys.stderr, flush=True)
dist.init_process_group("gloo")
kept = torch.ones(1)
dist.all_reduce(kept)
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "GPULEASE_JOB_ID")
print(json.dumps({name: os.environ[name] for name in names} | {"sum": kept.item()}), flush=True)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""
"""Leaves by os._exit because a process that did a gloo collective may abort when the interpreter ends."""
SECOND_RANK_FAILS = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"


def end_of(data_dir: Path, job: JobOrder) -> JobReport:
    """Run one job to its end."""
    found: list[JobReport] = []

    async def story(worker: Worker) -> None:
        found.append(await worker.end_of(job))

    play(data_dir, story)
    return found[0]


def log_of(report: JobReport, name: str) -> str:
    assert report.log_directory is not None
    return (Path(report.log_directory) / name).read_text()


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("echo out; echo err >&2", 0, None),
        (
            "echo 'RuntimeError: Unexpected error. Error 802: system not yet initialized' >&2; exit 1",
            1,
            "The command exited with code 1. CUDA did not start (error 802): the node's fabric manager is not running, "
            "or has not finished starting.",
        ),
        ("exit 3", 3, "The command exited with code 3."),
        ("exit 200", 200, "The command exited with code 200."),
        ("kill -KILL $$", 137, "The command was ended by SIGKILL (by the kernel if memory was short: see dmesg)."),
        (
            "ulimit -f 1; while echo more; do :; done; kill -XFSZ $$",
            153,
            "The command was ended by SIGXFSZ (a file that it wrote, or its log, reached `ulimit -f`).",
        ),
    ],
)
def test_a_plain_command_reports_its_exit_code(tmp_path: Path, script: str, code: int, reason: str | None) -> None:
    report = end_of(tmp_path, order("j", spec("sh", "-c", script)))
    assert (report.exit_code, report.reason, report.timed_out) == (code, reason, False)
    assert report.started_at is not None
    assert report.ended_at is not None
    assert report.started_at <= report.ended_at
    if code == 0:
        assert log_of(report, "launcher.log") == log_of(report, "rank-0.log") == "out\nerr\n"


def test_a_file_that_is_not_a_program_fails_with_that_reason(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF and nothing more")
    program.chmod(0o755)
    report = end_of(tmp_path / "d", order("j", spec(str(program))))
    assert report.exit_code is None
    assert report.reason is not None
    assert "could not be started: Exec format error" in report.reason


def test_a_job_that_cannot_start_ends_with_the_reason_and_never_starts(tmp_path: Path) -> None:
    report = end_of(tmp_path, order("j", spec("no-such-program")))
    assert report.exit_code is None
    assert report.reason is not None
    assert "'no-such-program' was not found on PATH" in report.reason
    start = job_records.read(tmp_path / "jobs" / "j", job_records.START, job_records.StartRecord)
    assert start is not None
    assert start.launcher is None


def test_torchrun_ranks_get_the_leased_address_and_one_log_file_each(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    port = free_port()
    report = end_of(tmp_path / "d", order("j", spec(str(script), launcher=Launcher.TORCHRUN), port=port))
    assert (report.exit_code, report.reason) == (0, None), log_of(report, "launcher.log")
    for rank in range(2):
        first, second = log_of(report, f"rank-{rank}.log").splitlines()
        assert first == "a line on stderr"
        seen = json.loads(second)
        assert seen.pop("CUDA_VISIBLE_DEVICES").count("GPU-") == 2
        assert seen == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GPULEASE_JOB_ID": "j",
            "sum": 2.0,
        }
        assert f"[default{rank}]:a line on stderr" in log_of(report, "launcher.log")


def test_the_torchrun_rank_that_failed_first_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(SECOND_RANK_FAILS)
    job = order("j", spec(str(script), launcher=Launcher.TORCHRUN), port=free_port())
    report = end_of(tmp_path / "d", job)
    assert (report.exit_code, report.reason) == (7, "Rank 1 failed first: it exited with code 7.")


def test_leftovers_of_a_job_are_dead_before_its_end_is_reported(tmp_path: Path) -> None:
    notes = [tmp_path / "marked", tmp_path / "bare"]
    # Both leave the session; one also ignores SIGTERM, the other also takes the marker off.
    script = (
        f"setsid sh -c 'trap \"\" TERM; echo $$ > {notes[0]}; while :; do sleep 1; done' & "
        f"env -u GPULEASE_LEASE_ID setsid sh -c 'echo $$ > {notes[1]}; exec sleep 60' & "
        f"until test -s {notes[0]} -a -s {notes[1]}; do sleep 0.01; done; exit 5"
    )
    job = order("j", spec("sh", "-c", script))
    report = end_of(tmp_path / "d", job)
    assert report.exit_code == 5
    assert all(ProcessId.of(number_in(note)) is None for note in notes)
    assert not living(job.lease_id)


def test_a_job_that_exceeds_its_timeout_is_stopped_with_that_reason(tmp_path: Path) -> None:
    report = end_of(tmp_path, order("j", spec("sleep", "60", timeout_s=0.3)))
    assert report.timed_out
    assert (report.exit_code, report.reason) == (143, "It ran longer than its time limit of 0.3 s.")


def test_a_stopped_job_may_exit_by_itself_within_the_grace_period(tmp_path: Path) -> None:
    script = "trap 'echo saved; exit 9' TERM; echo up; while :; do sleep 0.02; done"
    job = order("j", spec("sh", "-c", script))

    async def story(worker: Worker) -> None:
        (report,) = await worker.until([job], RunState.RUNNING)
        until(lambda: log_of(report, "launcher.log"), "the trap is set")
        stop = order("j", job.spec, lease=job.lease_id, stop=True, grace_s=30.0)
        report = await worker.end_of(stop)
        assert (report.exit_code, report.reason) == (9, "It was stopped on request.")
        assert log_of(report, "launcher.log") == "up\nsaved\n"

    play(tmp_path, story)


@pytest.mark.parametrize("whom", ["$$", "$PPID"], ids=["itself", "its supervisor"])
def test_a_job_that_sigstop_has_stopped_ends_as_any_other_when_it_is_told_to(tmp_path: Path, whom: str) -> None:
    go = tmp_path / "go"
    script = f"trap 'echo saved; exit 9' TERM; until test -e {go}; do sleep 0.02; done; echo {whom}; kill -STOP {whom}"
    job = order("j", spec("sh", "-c", f"{script}; while :; do sleep 0.02; done"))

    async def story(worker: Worker) -> None:
        (report,) = await worker.until([job], RunState.RUNNING)
        go.touch()
        pid = until(lambda: log_of(report, "launcher.log").strip(), "it says whom it stops")
        state = Path(f"/proc/{pid}/stat")
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
        async with asyncio.timeout(25):
            report = await worker.end_of(order("j", job.spec, lease=job.lease_id, stop=True, grace_s=30.0))
        assert (report.exit_code, report.reason) == (9, "It was stopped on request.")
        assert log_of(report, "launcher.log") == f"{pid}\nsaved\n"

    play(tmp_path, story)


def test_a_job_that_stops_its_supervisor_keeps_its_time_limit(tmp_path: Path) -> None:
    job = order("j", spec("sh", "-c", "kill -STOP $PPID; exec sleep 600", timeout_s=2.0))

    async def story(worker: Worker) -> None:
        def has_ended() -> bool:
            worker.jobs.reconcile([job])
            return worker.jobs.reports()[0].state is RunState.EXITED

        await soon(has_ended, "it has ended")
        (report,) = worker.jobs.reports()
        assert (report.timed_out, report.reason) == (True, "It ran longer than its time limit of 2 s.")

    play(tmp_path, story)


def test_a_job_that_ignores_sigterm_is_killed_and_a_second_stop_shortens_the_grace(tmp_path: Path) -> None:
    job = order("j", spec("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"))

    async def story(worker: Worker) -> None:
        (report,) = await worker.until([job], RunState.RUNNING)
        until(lambda: log_of(report, "launcher.log"), "the trap is set")
        patient = order("j", job.spec, lease=job.lease_id, stop=True, grace_s=3000.0)
        worker.jobs.reconcile([patient])
        assert worker.jobs.reports()[0].state is RunState.RUNNING
        begun = time.monotonic()
        report = await worker.end_of(order("j", job.spec, lease=job.lease_id, stop=True, grace_s=0.2))
        assert report.exit_code == 137
        assert time.monotonic() - begun < 20
        assert not living(job.lease_id)

    play(tmp_path, story)


def test_a_job_with_an_hour_to_stop_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    """With what it leaves: who waits for its GPUs counts on its time limit."""
    script = "trap '' TERM; (trap '' TERM; exec sleep 600) & echo up; while :; do sleep 0.1; done"
    job = order("j", spec("sh", "-c", script, timeout_s=2.0))
    directory = furnished(tmp_path / "jobs" / "j", job)
    with supervising(directory, "supervisor.TIMEOUT_GRACE_S = 0.2") as running:
        log = directory / job_records.LOGS / "launcher.log"
        until(lambda: log.exists() and log.read_text(), "the trap is set")
        job_records.write(directory, job_records.STOP, job_records.StopRecord(grace_s=3600.0))
        assert running.wait(DEADLINE_S) == 0
    assert not living(job.lease_id)


def test_a_job_stopped_before_its_start_never_starts(tmp_path: Path) -> None:
    report = end_of(tmp_path, order("j", spec("true"), stop=True))
    assert (report.exit_code, report.reason) == (None, "It was stopped before it started.")


def test_a_stop_right_after_the_start_is_not_lost(tmp_path: Path) -> None:
    job = order("j", spec("sleep", "60"))

    async def story(worker: Worker) -> None:
        worker.jobs.reconcile([job])
        report = await worker.end_of(order("j", job.spec, lease=job.lease_id, stop=True, grace_s=1.0))
        stopped = (report.exit_code, report.reason)
        assert stopped in ((143, "It was stopped on request."), (None, "It was stopped before it started."))

    play(tmp_path, story)


def test_a_job_no_longer_ordered_is_stopped_and_forgotten_with_its_logs_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = order("j", spec("sh", "-c", "echo up; exec sleep 60"))

    async def story(worker: Worker) -> None:
        (report,) = await worker.until([job], RunState.RUNNING)
        until(lambda: log_of(report, "launcher.log"), "it is up")
        async with asyncio.timeout(DEADLINE_S):
            while worker.jobs.reports():
                worker.changed.clear()
                worker.jobs.reconcile([])
                if worker.jobs.reports() and worker.jobs.reports()[0].state is not RunState.EXITED:
                    await worker.changed.wait()
        assert not living(job.lease_id)
        assert caplog.text.count("its daemon does not know of that: it is ended") == 1
        assert log_of(report, "launcher.log") == "up\n"
        again = Worker(tmp_path)
        assert again.jobs.reports() == ()
        (known,) = await again.until([job], RunState.EXITED)
        assert known.exit_code == 143, "asked for again, it is remembered and not run again"

    play(tmp_path, story)


def test_the_number_of_forgotten_jobs_is_limited(tmp_path: Path) -> None:
    async def over(worker: Worker, name: str) -> None:
        await worker.end_of(order(name, spec("true")))
        worker.jobs.reconcile([])

    def kept() -> list[str]:
        return sorted(path.name for path in (tmp_path / "jobs").iterdir())

    async def story(worker: Worker) -> None:
        for number in range(4):
            await over(worker, f"j{number}")
        until(lambda: kept() == ["j2", "j3"], "the others are removed")
        again = Worker(tmp_path, keep=2)
        await again.until([order("j2", spec("true"))], RunState.EXITED)
        again.jobs.reconcile([])
        await over(again, "j4")
        until(
            lambda: kept() == ["j2", "j4"], "the one that was forgotten longest ago is removed, by the next worker, too"
        )

    play(tmp_path, story, keep=2)


def test_a_job_ordered_again_keeps_its_directory(
    tmp_path: Path,
) -> None:
    again = order("again", spec("true"))

    async def story(worker: Worker) -> None:
        await worker.end_of(again)
        worker.jobs.reconcile([])
        shutil.rmtree(tmp_path / "jobs" / "again")
        await worker.end_of(again)
        for number in range(3):
            await worker.until([again, order(f"j{number}", spec("true"))], RunState.EXITED)
            worker.jobs.reconcile([again])
        until(lambda: not (tmp_path / "jobs" / "j1").exists(), "what is too much is removed")
        assert (tmp_path / "jobs" / "again" / job_records.ORDER).exists()

    play(tmp_path, story, keep=1)


def test_a_worker_that_keeps_fewer_jobs_removes_the_others_gradually(tmp_path: Path) -> None:
    for number in range(2 * reconciler.REMOVED_AT_ONCE + 5):
        directory = tmp_path / "jobs" / f"j{number:03}"
        directory.mkdir(parents=True)
        (directory / job_records.FORGOTTEN).touch()
        os.utime(directory / job_records.FORGOTTEN, ns=(number, number))
    stubborn = tmp_path / "jobs" / ".gone-j000"
    (stubborn / "x").mkdir(parents=True)

    def left() -> list[str]:
        return sorted(path.name for path in (tmp_path / "jobs").glob("j*"))

    async def story(worker: Worker) -> None:
        worker.jobs.reconcile([])
        assert len(left()) in {reconciler.REMOVED_AT_ONCE + 5, reconciler.REMOVED_AT_ONCE + 6}, (
            "one may be in the way of its removal"
        )
        worker.jobs.reconcile([])
        worker.jobs.reconcile([])
        assert [name for name in left() if name != "j000"] == [f"j{2 * reconciler.REMOVED_AT_ONCE + 4:03}"]

    play(tmp_path, story, keep=1)


def test_jobs_are_found_again_and_not_started_twice(tmp_path: Path) -> None:
    note = tmp_path / "starts"
    job = order("j", spec("sh", "-c", f"echo $$ >> {note}; exec sleep 60"))

    async def story(worker: Worker) -> None:
        await worker.until([job], RunState.RUNNING)
        until(lambda: number_in(note), "it is up")
        worker.jobs.close()
        again = Worker(tmp_path)
        (report,) = await again.until([job], RunState.RUNNING)
        assert report.started_at is not None
        kill(number_in(note))
        report = await again.end_of(job)
        assert report.exit_code == 137
        assert len(note.read_text().splitlines()) == 1

    play(tmp_path, story)


def test_a_job_that_ended_without_a_worker_is_reported_by_the_next(tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = order("j", spec("sh", "-c", f"until test -e {go}; do sleep 0.01; done; exit 6"))

    async def story(worker: Worker) -> None:
        await worker.until([job], RunState.RUNNING)
        worker.jobs.close()
        go.touch()
        until((tmp_path / "jobs" / "j" / job_records.EXIT).exists, "the supervisor has recorded the end")
        again = Worker(tmp_path)
        (report,) = again.jobs.reports()
        assert (report.state, report.exit_code) == (RunState.EXITED, 6)

    play(tmp_path, story)


@pytest.mark.parametrize("seen", [True, False])
def test_the_processes_of_a_dead_supervisor_are_killed(tmp_path: Path, seen: bool) -> None:
    job = order("j", spec(*python("-c", "import time; time.sleep(60)")))

    async def story(worker: Worker) -> None:
        await worker.until([job], RunState.RUNNING)
        start = job_records.read(tmp_path / "jobs" / "j", job_records.START, job_records.StartRecord)
        assert start is not None
        if not seen:
            worker.jobs.close()
        until(lambda: living(job.lease_id), "it is up")
        kill(start.supervisor.pid)
        if not seen:
            until(lambda: not start.supervised(), "it is dead")
            worker = Worker(tmp_path)
        report = await worker.end_of(job)
        assert (report.exit_code, report.reason) == (None, "The job's supervisor died; its processes were killed.")
        assert not living(job.lease_id)

    play(tmp_path, story)


def test_a_second_supervisor_of_a_job_does_nothing(tmp_path: Path) -> None:
    note = tmp_path / "starts"
    job = order("j", spec("sh", "-c", f"echo x >> {note}"))
    end_of(tmp_path, job)
    directory = tmp_path / "jobs" / "j"
    (directory / job_records.EXIT).unlink()
    assert subprocess.run(python("-m", "gpulease_worker.jobs.supervisor", str(directory)), check=False).returncode == 0
    assert note.read_text() == "x\n"


@pytest.mark.parametrize("job_id", ["../j", ".hidden", "a/b", ""])
def test_a_job_id_that_is_not_a_plain_name_is_refused(tmp_path: Path, job_id: str) -> None:
    report = end_of(tmp_path / "d", order(job_id, spec("true"), lease="L"))
    assert report.exit_code is None
    assert report.reason is not None
    assert "is not a plain name" in report.reason
    assert list((tmp_path / "d" / "jobs").iterdir()) == []


def test_the_directory_of_a_job_is_private(tmp_path: Path) -> None:
    end_of(tmp_path, order("j", spec("true", environment={"SECRET": "x"})))
    assert (tmp_path / "jobs" / "j").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "jobs" / "j" / job_records.ORDER).stat().st_mode & 0o777 == 0o600


ENDS_DURING_THE_SEARCH = """
import os, time
from gpulease_worker.jobs.supervisor import Supervisor

def search():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return set(), set()

supervisor = Supervisor.__new__(Supervisor)
supervisor._kill_at_s, supervisor._forked, supervisor._statuses = time.monotonic(), set(), {}
supervisor._processes = search
supervisor._sweep()
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("all are reaped")
"""


def test_who_ends_during_the_last_search_is_reaped_and_does_not_count_for_the_users_limit() -> None:
    """After a fork bomb the user could otherwise start no job, until the init of the host had reaped what it left."""
    assert subprocess.run(python("-c", ENDS_DURING_THE_SEARCH), capture_output=True, check=True, text=True).stdout == (
        "all are reaped\n"
    )
