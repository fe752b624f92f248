"""A job's user mounts a file system of their own in the job's directory, which never answers: who asks it hangs."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulease_protocol.host import log_files
from gpulease_worker.jobs import directory_removal, failure_cause, user_mounts
from gpulease_worker.jobs.directory_removal import DirectoryRemover
from gpulease_worker.jobs.log_size_limit import LogSizeLimiter
from tests.hanging_filesystem import MNT_DETACH, hanging, in_time, is_mounted, libc
from tests.worker.build import until

USER = 54321
ANY = re.compile(".*")
MS_BIND = 4096
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts and detaches")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A job's log directory, with something to read."""
    made = tmp_path / "job" / "logs"
    made.mkdir(parents=True)
    (made / "launcher.log").write_text("said\n")
    (made / "mine").mkdir()
    (made / "rank-1.log").mkdir()
    return made


@pytest.fixture(params=["", "mine", "rank-1.log"], ids=["the directory", "one in it", "a log"])
def mounted(request: pytest.FixtureRequest, logs: Path) -> Iterator[str]:
    """What the user has mounted something on, in the log directory."""
    with hanging(logs / request.param, user=USER, mute=True):
        yield request.param


def refusal(call: Callable[[], object]) -> int | None:
    """The number of the error that a call raises in time; None for no error."""

    def attempt() -> int | None:
        try:
            call()
        except OSError as error:
            return error.errno
        return None

    return in_time(attempt)


def test_no_log_is_read_through_a_users_mount(logs: Path, mounted: str) -> None:
    for parts in ([mounted] if mounted else ["launcher.log"]), [mounted or "mine", "error.json"]:
        assert refusal(lambda parts=parts: log_files.open_beneath(logs, *parts)) == errno.EXDEV
        assert refusal(lambda parts=parts: log_files.open_beneath(logs, *parts, flags=os.O_RDWR)) == errno.EXDEV
    assert refusal(lambda: log_files.stat_beneath(logs, mounted or "launcher.log")) == errno.EXDEV
    assert refusal(lambda: log_files.names_in(logs, ANY)) == (None if mounted else errno.EXDEV)
    assert refusal(lambda: dict(log_files.statuses_in(logs, ANY))) == (None if mounted else errno.EXDEV)
    assert refusal(lambda: log_files.open_directory(logs)) == (None if mounted else errno.EXDEV)


def test_beside_a_users_mount_the_logs_are_read(logs: Path, mounted: str) -> None:
    said = in_time(lambda: log_files.tail(logs, "launcher.log", size_bytes=100))
    assert said == ("said\n" if mounted else "")


def test_a_supervisor_does_not_ask_a_users_mount(logs: Path, mounted: str) -> None:
    summary = f"Root Cause (first observed failure):\n  rank: 1\n  exitcode: 7\n  error_file: {logs}/mine/error.json\n"
    if mounted:
        (logs / "launcher.log").write_text(summary)
    assert in_time(lambda: failure_cause.first_failure(logs, 3)).code == (7 if mounted else 3)
    errors: list[str] = []
    in_time(LogSizeLimiter(logs, 4096, os.getuid(), errors.append).finish)
    assert errors == []


def job_directories(place: Path, number: int) -> list[Path]:
    """Directories of jobs that are to be removed."""
    made = [place / f".gone-{index}" for index in range(number)]
    for directory in made:
        (directory / "work" / "deep").mkdir(parents=True)
        (directory / "work" / "deep" / "file").write_text("output")
    return made


@contextmanager
def bound(source: Path, place: Path) -> Iterator[None]:
    """A directory that can be seen at another place as well."""
    place.mkdir(exist_ok=True)
    assert libc.mount(os.fsencode(source), os.fsencode(place), b"none", MS_BIND, None) == 0
    try:
        yield
    finally:
        libc.umount2(os.fsencode(place), MNT_DETACH)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """What must not be removed."""
    made = tmp_path / "kept"
    made.mkdir()
    (made / "file").write_text("kept")
    return made


def test_a_directory_in_which_its_user_has_mounted_a_mute_file_system_is_removed(tmp_path: Path) -> None:
    first, second = job_directories(tmp_path, 2)
    with hanging(first / "work" / "deep", user=USER, mute=True):
        remover = DirectoryRemover()
        for directory in (first, second):
            remover.put(directory)
        until(lambda: not first.exists() and not second.exists(), "both are removed")


@pytest.mark.parametrize("mute", [True, False], ids=["what hangs", "what does not"])
def test_a_user_who_mounts_while_the_directory_is_removed_holds_up_nothing(
    tmp_path: Path, mute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []

    def look_too_early(directory: Path) -> int:
        looks.append(directory)
        return 0 if len(looks) == 1 else user_mounts.detach_beneath(directory)

    monkeypatch.setattr(directory_removal, "detach_beneath", look_too_early)
    monkeypatch.setattr(directory_removal, "CHECK_S", 0.2)
    first, second = job_directories(tmp_path, 2)
    with hanging(first / "work" / "deep", user=USER, mute=mute):
        remover = DirectoryRemover()
        for directory in (first, second):
            remover.put(directory)
        until(lambda: not first.exists() and not second.exists(), "both are removed")
        assert len(looks) > 2, "it was looked at again"


@ROOT_ONLY
def test_a_removal_that_cannot_be_ended_is_named_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directory_removal, "detach_beneath", lambda _: 0)
    for name in ("CHECK_S", "TURN_S", "END_S"):
        monkeypatch.setattr(directory_removal, name, 0.5)
    first, second = job_directories(tmp_path, 2)
    with hanging(first / "work" / "deep", user=USER, mute=True):
        remover = DirectoryRemover()
        for directory in (first, second):
            remover.put(directory)
        until(lambda: not second.exists(), "the other is removed")
        assert [record.message for record in caplog.records] == [
            f"{first} is not removed, and stays until a worker starts again: rm hangs in the kernel, and SIGKILL does"
            " not end it"
        ]


@ROOT_ONLY
@pytest.mark.parametrize("detached", [True, False])
def test_what_is_mounted_in_a_directory_is_not_removed_with_it(
    tmp_path: Path, kept: Path, detached: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not detached:
        monkeypatch.setattr(directory_removal, "detach_beneath", lambda _: 0)
    first, second = job_directories(tmp_path, 2)
    tmpfs = tmp_path / "another"
    tmpfs.mkdir()
    assert libc.mount(b"tests", os.fsencode(tmpfs), b"tmpfs", 0, b"size=64k") == 0
    (tmpfs / "file").write_text("kept")
    try:
        with bound(tmpfs, first / "work" / "deep"):
            remover = DirectoryRemover()
            for directory in (first, second):
                remover.put(directory)
            until(lambda: not second.exists(), "the other is removed")
            assert (tmpfs / "file").read_text() == "kept"
            assert first.exists() is not detached
            assert [record.message.split(":")[0] for record in caplog.records] == (
                [] if detached else [f"{first} is not removed, and stays until a worker starts again"]
            )
    finally:
        libc.umount2(os.fsencode(tmpfs), MNT_DETACH)


@ROOT_ONLY
def test_every_mount_beneath_a_directory_is_detached_and_none_beside_it(tmp_path: Path, kept: Path) -> None:
    (directory,) = job_directories(tmp_path, 1)
    odd = directory / "work" / "a name\twith\\odd\ncharacters"
    with (
        bound(kept, odd),
        bound(kept, odd),
        bound(kept, directory / "work" / "deep"),
        bound(kept, tmp_path / ".gone-0x"),
    ):
        assert user_mounts.detach_beneath(directory) == 3
        assert user_mounts.mounts_beneath(os.fsencode(directory)) == []
        assert is_mounted(tmp_path / ".gone-0x")
        assert user_mounts.detach_beneath(directory) == 0


@ROOT_ONLY
def test_a_link_in_place_of_a_directory_leads_root_to_no_other_mount(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user exchanges a directory for a link after root has read where something is mounted."""
    (directory,) = job_directories(tmp_path, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (directory / "work" / "link").symlink_to(outside)
    (directory / "work" / "mount").symlink_to(outside / "mount")
    for path in (b"work/link/mount", b"work/mount"):
        monkeypatch.setattr(user_mounts, "mounts_beneath", lambda _, path=path: [(1, path, False)])
        with bound(kept, outside / "mount"):
            user_mounts.detach_beneath(directory)
            assert is_mounted(outside / "mount"), path
