"""Attacks of a job's user on the worker and supervisor: for privileges, for information, or to cause damage."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpulease_protocol.host import log_files
from gpulease_worker.jobs import failure_cause, job_records, user_accounts
from tests.worker.build import furnished, order, python, spec, supervising, until
from tests.worker.play import Worker, play
from tests.worker.strangers import ROOT, STRANGER, end_of, log_of, passable, refused

CAUSE = "Root Cause (first observed failure):\n"


@pytest.fixture
def public() -> Iterator[Path]:
    with passable() as directory:
        yield directory


def test_a_job_keeps_no_privileges_of_root(public: Path) -> None:
    score = Path("/proc/self/oom_score_adj")
    before = score.read_text()
    with suppress(PermissionError):  # in a container root may not
        score.write_text("-500")  # as a service may have it
    try:
        script = "grep -E '^Cap(Inh|Prm|Eff|Amb)' /proc/self/status; cat /proc/self/oom_score_adj; ls /proc/self/fd"
        report = end_of(public, "sh", "-c", script)
    finally:
        score.write_text(before)
    if not ROOT:
        assert refused(report)
        return
    lines = log_of(report).splitlines()
    assert [line.split()[1] for line in lines[:4]] == ["0" * 16] * 4
    assert lines[4] == "0"
    # Standard streams, and the one with which ls reads the directory.
    assert lines[5:] == ["0", "1", "2", "3"]


def test_a_submission_cannot_raise_its_limits_through_root(public: Path) -> None:
    report = end_of(public, "sh", "-c", "ulimit -Hr", limits={"rtprio": (99, 99)})
    if not ROOT:
        assert refused(report)
        return
    # dash has no -r: prlimit says the same.
    report = end_of(public / "again", "grep", "realtime priority", "/proc/self/limits", limits={"rtprio": (99, 99)})
    assert log_of(report).split()[-2:] == ["0", "0"]


def test_a_user_unknown_to_the_node_gets_no_group_with_the_same_number() -> None:
    assert user_accounts.account_of(STRANGER).gid == user_accounts.NO_GROUP
    assert user_accounts.account_of(STRANGER, 7).gid == 7


@pytest.mark.parametrize("closed", ["secret.py", "no-such.py"])
def test_no_error_reveals_what_is_in_a_directory_closed_to_the_user(public: Path, closed: str) -> None:
    hidden = public / "hidden"
    hidden.mkdir(mode=0o700)
    (hidden / "secret.py").touch(mode=0o755)
    report = end_of(public, str(hidden / closed))
    if not ROOT:
        assert refused(report)
        return
    assert report.reason == (
        f"The program {str(hidden / closed)!r} was not found in {public}/jobs/j/work, or is not executable."
    )


def test_another_users_file_under_a_logs_name_is_neither_read_nor_written(tmp_path: Path) -> None:
    if not ROOT:
        (tmp_path / "own").write_text("mine")
        assert log_files.tail(tmp_path, "own", size_bytes=9) == "mine"
        return
    secret = tmp_path / "secret"
    secret.write_text("root's own")
    logs = tmp_path / "logs"
    logs.mkdir()
    os.chown(logs, STRANGER, STRANGER)
    os.link(secret, logs / "launcher.log")  # possible with fs.protected_hardlinks=0
    assert log_files.tail(logs, "launcher.log", size_bytes=100) == ""
    with pytest.raises(FileNotFoundError, match="not a regular file of the directory's owner"):
        log_files.open_beneath(logs, "launcher.log", flags=os.O_WRONLY | os.O_APPEND)


def test_a_log_that_its_user_has_removed_is_the_reason(tmp_path: Path) -> None:
    directory = furnished(tmp_path / "j", order("j", spec("true")))
    if ROOT:
        os.chown(directory / job_records.LOGS, STRANGER, STRANGER)  # what root creates there again is not that user's
    else:
        (directory / job_records.LOGS).rmdir()
    with supervising(directory) as supervisor:
        assert supervisor.wait(60) == 0
    end = job_records.read(directory, job_records.EXIT, job_records.ExitRecord)
    assert end is not None
    expected = (
        "launcher.log in .* is not a regular file of the directory's owner" if ROOT else "No such file or directory"
    )
    assert re.fullmatch(f"Its log cannot be written: {expected}\\.", end.reason or "")


def test_nothing_is_imported_from_the_directory_in_which_a_worker_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap"
    (trap / "gpulease_worker").mkdir(parents=True)
    for name in ("gpulease_worker/__init__.py", "select.py", "subprocess.py"):
        (trap / name).write_text(f"open({str(trap / 'sprung')!r}, 'w')")
    monkeypatch.chdir(trap)
    report = end_of(tmp_path, *python("-c", "print('ran')"), uid=os.geteuid(), working_directory=str(tmp_path))
    assert (report.exit_code, log_of(report)) == (0, "ran\n")
    assert not (trap / "sprung").exists()


@pytest.mark.parametrize(
    ("printed", "code"),
    [
        (CAUSE + "  rank: 1 (local_rank: 1)\n  exitcode: 7 (pid: 9)\n  error_file: <N/A>\n", 7),
        (CAUSE + "  rank: 1\n  exitcode: -9\n", 137),
        # A number that no database takes, a rank that is no number, and one that Python refuses to read.
        (CAUSE + "  rank: 1\n  exitcode: 99999999999999999999999999\n", 3),
        (CAUSE + "  rank: x\n  exitcode: 1\n", 3),
        (CAUSE + f"  rank: {'9' * 5000}\n  exitcode: {'1' * 5000}\n", 3),
        (CAUSE * 1500, 3),
        ((CAUSE + "rank: 1\n" * 20 + "exitcode: 1\n" * 20 + " " * 500) * 60, 1),
        (CAUSE + "rank:" + " " * 60_000 + "\n" + CAUSE + "rank: 1 exitcode: 1 " * 2000, 3),
    ],
)
def test_a_forged_torchrun_summary_is_parsed_fast_and_within_limits(tmp_path: Path, printed: str, code: int) -> None:
    (tmp_path / "launcher.log").write_text(printed)
    begun = time.process_time()
    assert failure_cause.first_failure(tmp_path, 3).code == code
    assert time.process_time() - begun < 5.0


@pytest.mark.parametrize(
    "message",
    [
        "[" * 100_000,
        json.dumps({"message": {"extraInfo": {"py_callstack": "Error: \ud800 \0 end"}}}),
        json.dumps({"message": {"extraInfo": {"py_callstack": 5}}}),
        '{"message": ' + "9" * 6000 + "}",
    ],
    ids=["deep", "half a surrogate", "no text", "a long number"],
)
def test_an_error_file_cannot_break_the_report_of_the_end(tmp_path: Path, message: str) -> None:
    (tmp_path / "error.json").write_text(message)
    summary = f"{CAUSE}  rank: 0\n  exitcode: 1\n  error_file: {tmp_path}/error.json\n"
    (tmp_path / "launcher.log").write_text(summary)
    failed = failure_cause.first_failure(tmp_path, 1)
    assert failed.code == 1
    assert failed.traceback in (None, "Error: ? ? end")
    failed.reason.encode()


def test_a_directory_tree_of_any_depth_is_removed_with_its_job(public: Path) -> None:
    dig = "import os\nfor _ in range(1200):\n os.mkdir('d')\n os.chdir('d')"

    async def story(worker: Worker) -> None:
        for name, script in (("deep", dig), ("next", "")):
            await worker.end_of(order(name, spec(*python("-c", script)), uid=os.geteuid()))
            worker.jobs.reconcile([])

    play(public, story, keep=1)
    until(lambda: [path.name for path in (public / "jobs").iterdir()] == ["next"], "the directory is gone")


def test_an_unfinished_removal_is_finished_by_the_next_worker(tmp_path: Path) -> None:
    left = tmp_path / "jobs" / ".gone-j"
    (left / job_records.LOGS).mkdir(parents=True)

    async def story(_: Worker) -> None:
        pass

    play(tmp_path, story)
    until(lambda: not left.exists(), "the directory is gone")
