"""The size limit of log files: what is kept, what a reader finds in place of the rest, what is left alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpulease_protocol.host.log_files import MARK, kept_from
from gpulease_worker.jobs import log_size_limit
from gpulease_worker.jobs.log_size_limit import MARK_EVERY_BYTES, MARKED_BYTES, LogSizeLimiter

MIB = 2**20
BOUND = 2 * MIB


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


@pytest.fixture
def bound(logs: Path, said: list[str]) -> LogSizeLimiter:
    return LogSizeLimiter(logs, BOUND, os.getuid(), said.append)


def fill(path: Path, size_bytes: int) -> bytes:
    """Append lines that say where they are. Returns all of the file as it should be."""
    before = path.stat().st_size if path.exists() else 0
    lines = b"".join(b"%0255d\n" % place for place in range(before, before + size_bytes, 256))
    with path.open("ab") as file:
        file.write(lines)
    return lines


def disk_use(path: Path) -> int:
    return path.stat().st_blocks * 512


def kept(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return kept_from(descriptor, 0)
    finally:
        os.close(descriptor)


def test_the_oldest_part_is_dropped_and_every_byte_keeps_its_offset(
    logs: Path, bound: LogSizeLimiter, said: list[str]
) -> None:
    log = logs / "launcher.log"
    lines = fill(log, 8 * MIB)
    bound.finish()
    assert log.stat().st_size == len(lines)
    assert disk_use(log) <= BOUND + 8192
    assert kept(log) == 6 * MIB
    assert log.read_bytes()[6 * MIB :] == lines[6 * MIB :]
    assert said == []


def test_a_file_within_its_limit_is_complete(logs: Path, bound: LogSizeLimiter) -> None:
    log = logs / "rank-3.log"
    lines = fill(log, BOUND)
    bound.finish()
    assert log.read_bytes() == lines
    assert kept(log) == 0


def test_a_reader_of_lines_finds_a_line_feed_every_16_mib(logs: Path, bound: LogSizeLimiter) -> None:
    log = logs / "rank-0.log"
    for _ in range(5):
        fill(log, 16 * MIB)
        bound.finish()
    assert kept(log) == 78 * MIB, "a mark is no part of what is kept"
    assert disk_use(log) <= BOUND + 8 * 4096
    with log.open("rb") as file:
        longest = max(len(line) for line in file)
    assert longest <= MARK_EVERY_BYTES
    assert log.read_bytes()[16 * MIB :].startswith(MARK)


def test_a_log_that_its_job_has_made_a_tebibyte_long_takes_no_more_disk_than_another(
    logs: Path, bound: LogSizeLimiter, said: list[str]
) -> None:
    log = logs / "rank-0.log"
    fill(log, 4 * MIB)
    os.truncate(log, 2**40)
    bound.finish()
    marks = MARKED_BYTES // MARK_EVERY_BYTES
    assert disk_use(log) <= BOUND + marks * 8192
    assert said == []


def test_a_log_that_its_job_has_truncated_is_limited_again(logs: Path, bound: LogSizeLimiter) -> None:
    log = logs / "launcher.log"
    fill(log, 8 * MIB)
    bound.finish()
    os.truncate(log, 0)
    fill(log, 7 * MIB)
    bound.finish()
    assert disk_use(log) <= BOUND + 8192


def test_without_hole_punching_the_end_is_kept_and_an_error_logged_once(
    logs: Path, bound: LogSizeLimiter, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(descriptor: int, start: int, end: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(log_size_limit, "punch", cannot)
    for name in ("launcher.log", "rank-0.log"):
        log = logs / name
        with log.open("ab", buffering=0) as job:
            job.write(b"".join(b"%0255d\n" % place for place in range(0, 8 * MIB, 256)))
            bound.finish()
            job.write(b"still appended\n")
        assert log.stat().st_size == 8 * MIB + 15
        assert disk_use(log) <= BOUND
        assert kept(log) == 7 * MIB
        assert log.read_bytes()[7 * MIB : 7 * MIB + 256] == b"%0255d\n" % (7 * MIB)
        assert log.read_bytes().endswith(b"still appended\n")
    assert len(said) == 1
    assert "cannot punch holes (Operation not supported)" in said[0]


def test_files_that_are_not_the_jobs_own_logs_are_left_alone(logs: Path, tmp_path: Path, said: list[str]) -> None:
    elsewhere = tmp_path / "precious"
    lines = fill(elsewhere, 8 * MIB)
    (logs / "rank-0.log").symlink_to(elsewhere)
    fill(logs / "data.bin", 8 * MIB)
    os.mkfifo(logs / "rank-1.log")
    (logs / "rank-2.log").mkdir()
    LogSizeLimiter(logs, BOUND, os.getuid(), said.append).finish()
    assert elsewhere.read_bytes() == lines
    assert kept(logs / "data.bin") == 0

    fill(logs / "rank-4.log", 8 * MIB)
    LogSizeLimiter(logs, BOUND, os.getuid() + 1, said.append).finish()
    assert kept(logs / "rank-4.log") == 0, "another user's file was cut"

    (tmp_path / "link").symlink_to(logs)
    LogSizeLimiter(tmp_path / "link", BOUND, os.getuid(), said.append).finish()
    assert kept(logs / "rank-4.log") == 0, "a link was followed"


def test_a_missing_directory_is_no_error(tmp_path: Path, said: list[str]) -> None:
    LogSizeLimiter(tmp_path / "gone", BOUND, os.getuid(), said.append).finish()
    assert said == []


def test_checks_are_frequent_only_while_a_file_grows_fast(logs: Path, bound: LogSizeLimiter) -> None:
    pauses = []
    for _ in range(12):
        bound.next_at_s = 0.0
        bound.check()
        pauses.append(bound._pause_s)
    assert pauses[-1] == 1.0
    fill(logs / "launcher.log", MIB)
    bound.next_at_s = 0.0
    bound.check()
    assert bound._pause_s == 0.02


def test_a_check_opens_each_of_many_logs_once(
    logs: Path, bound: LogSizeLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may have thousands, and each is checked every second."""
    for rank in range(200):
        (logs / f"rank-{rank}.log").touch()
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or real(path, *rest, **more))
    bound.check()
    assert len(opened) <= 200 + 10


def test_on_a_disk_that_is_nearly_full_only_the_end_of_a_log_stays(
    logs: Path, bound: LogSizeLimiter, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [10 * MIB]
    monkeypatch.setattr(log_size_limit, "bytes_before_short", lambda _: room[0])
    lines = fill(logs / "launcher.log", 2 * MIB) + fill(logs / "launcher.log", 0)
    fill(logs / "rank-0.log", 2 * MIB)
    bound.check()
    assert disk_use(logs / "launcher.log") >= 2 * MIB, "within its limit"
    room[0] = 0
    bound.finish()
    for name in ("launcher.log", "rank-0.log"):
        assert disk_use(logs / name) <= MIB + 3 * 4096, name
        assert (logs / name).stat().st_size == 2 * MIB
    assert (logs / "launcher.log").read_bytes()[-MIB:] == lines[-MIB:]
    bound.finish()
    assert sum("nearly full" in line for line in said) == 1
    room[0] = 10 * MIB
    fill(logs / "launcher.log", MIB)
    bound.finish()
    assert disk_use(logs / "launcher.log") >= 2 * MIB, "there is space again"


def test_a_log_that_grows_is_looked_at_more_often_where_little_space_is_left(
    logs: Path, bound: LogSizeLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_size_limit, "bytes_before_short", lambda _: MIB)
    fill(logs / "launcher.log", MIB // 32)
    bound.finish()
    assert bound._pause_s > 0.02
    fill(logs / "launcher.log", MIB // 8)
    bound.finish()
    assert bound._pause_s == 0.02


def test_the_disk_is_nearly_full_at_5_percent_or_1_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk(blocks: int, free: int) -> int:
        answer = os.statvfs_result((4096, 4096, blocks, free, free, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: answer)
        return log_size_limit.bytes_before_short(tmp_path)

    gib = 2**30 // 4096
    assert disk(1000 * gib, 2 * gib) == 2**30
    assert disk(1000 * gib, gib // 2) < 0
    assert disk(1 * gib, gib // 10) > 0
    assert disk(1 * gib, gib // 100) < 0
