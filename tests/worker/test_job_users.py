"""The user that a job runs as: its rights are that user's, and no others."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_protocol.host import log_files
from gpulease_protocol.model import Launcher
from gpulease_worker.jobs import resource_limits, user_accounts
from tests.worker.build import python
from tests.worker.strangers import ANYONE, ROOT, STRANGER, end_of, in_a_process, log_of, passable, refused


@pytest.fixture
def public() -> Iterator[Path]:
    with passable() as directory:
        yield directory


def test_a_job_runs_with_its_users_groups_umask_limits_and_directory(public: Path) -> None:
    script = (
        'id -u; id -g; id -G; umask; ulimit -n; echo "$USER $HOME"; touch here && stat -c "%u %a" here; '
        "test -r ../order.json && echo LEAK; ls .. 2>/dev/null && echo LISTED; true"
    )
    report = end_of(public, "sh", "-c", script, umask=0o027, limits={"nofile": (64, 128)})
    if not ROOT:
        assert refused(report)
        return
    assert report.reason is None, report
    assert log_of(report).splitlines() == [
        *("54321", "54321", "54321", "0027", "64", "54321 /", "54321 640"),
    ]


def test_a_directory_closed_to_the_user_is_the_reason_although_root_may_enter(public: Path) -> None:
    closed = public / "closed"
    closed.mkdir(mode=0o700)
    report = end_of(public, "true", working_directory=str(closed))
    if not ROOT:
        assert refused(report)
        return
    assert report.exit_code is None
    assert report.reason == f"The working directory {closed} cannot be entered by 54321: Permission denied."


def test_a_script_unreadable_to_the_user_is_the_reason(public: Path) -> None:
    script = public / "train.py"
    script.write_text("print(1)")
    script.chmod(0o600)
    interpreter = public / "python"
    # An interpreter that every user can start, and that answers as Python would.
    interpreter.write_text('#!/bin/sh\ncat "$3" > /dev/null 2>&1 || { echo "script Permission denied"; exit 1; }\n')
    interpreter.chmod(0o755)
    report = end_of(
        public, "train.py", launcher=Launcher.FABRIC, interpreter=str(interpreter), working_directory=str(public)
    )
    if not ROOT:
        assert refused(report)
        return
    assert report.reason == f"The script 'train.py' cannot be read in {public}: Permission denied."


def test_links_in_a_users_log_directory_are_not_followed(public: Path) -> None:
    secret = public / "secret"
    secret.write_text("root's own")
    secret.chmod(0o600)
    # At its end the job puts links where root will look: at its log, at a rank's log, at torchrun's directory.
    script = (
        f"cd ../logs && rm -f launcher.log rank-0.log && ln -s {secret} launcher.log && ln -s {secret} rank-0.log "
        f"&& ln -s {public} torchrun; exit 3"
    )
    report = end_of(public, "sh", "-c", script)
    if not ROOT:
        assert refused(report)
        return
    assert (report.exit_code, report.reason) == (3, "The command exited with code 3.")
    assert report.log_directory is not None
    logs = Path(report.log_directory)
    assert (logs / "launcher.log").is_symlink()
    assert log_of(report) == ""
    with pytest.raises(OSError):
        log_files.open_beneath(logs, "rank-0.log", flags=os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with pytest.raises(OSError):
        log_files.open_beneath(logs, "torchrun", "secret")
    with pytest.raises(ValueError, match="not the name of a file"):
        log_files.open_beneath(logs, "..", "order.json")
    assert secret.read_text() == "root's own"


def test_a_fifo_in_place_of_a_log_blocks_no_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "launcher.log")
    assert log_files.tail(tmp_path, "launcher.log", size_bytes=100) == ""


@pytest.mark.parametrize(
    ("uid", "own", "words"),
    [
        (1000, 1000, None),
        (1000, 0, None),
        (0, STRANGER, "It was submitted by root, and the worker of this node runs as 54321."),
        (None, 0, "host has no user of the name under which it was submitted"),
        (None, 1000, "host has no user of the name under which it was submitted"),
    ],
)
def test_only_a_worker_as_root_runs_other_users_jobs(uid: int | None, own: int, words: str | None) -> None:
    said = user_accounts.reason_to_refuse(uid, own)
    assert (said is None) if words is None else (words in str(said))


def refuse_as_an_ordinary_user(directory: str) -> None:
    if ROOT:
        end_of(Path(directory) / "own", "true", uid=0)  # all modules are imported: the user may not read this checkout
        os.chown(directory, ANYONE, -1)
        os.seteuid(ANYONE)
    print(end_of(Path(directory) / "other", "true", uid=STRANGER + 1).reason)


def test_a_worker_that_is_not_root_says_whose_job_it_does_not_run(public: Path) -> None:
    """And not that it may not give away a file of the job's directory."""
    said = in_a_process(refuse_as_an_ordinary_user, str(public))
    own = user_accounts.account_of(ANYONE).name
    assert f"It was submitted by {STRANGER + 1}, and the worker of this node runs as {own}." in said


def test_a_limit_over_the_workers_own_is_capped() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert resource_limits.lower(resource.RLIM_INFINITY, hard) == hard
    assert resource_limits.lower(hard + 5, hard) == hard
    assert resource_limits.lower(7, resource.RLIM_INFINITY) == 7


def test_a_job_of_the_workers_own_user_needs_no_root(tmp_path: Path) -> None:
    report = end_of(tmp_path, *python("-c", "import os; print(os.getuid())"), uid=os.geteuid())
    assert (report.exit_code, log_of(report)) == (0, f"{os.geteuid()}\n")
