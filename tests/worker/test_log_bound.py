"""The bound of log files: what stays, what a reader finds in place of the rest, and what is left alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpulease.log_files import MARK, kept_from
from gpulease_worker import log_bound
from gpulease_worker.log_bound import MARK_EVERY_BYTES, LogBound

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
def bound(logs: Path, said: list[str]) -> LogBound:
    return LogBound(logs, BOUND, os.getuid(), said.append)


def fill(path: Path, size_bytes: int) -> bytes:
    """Append lines that say where they are. Returns all of the file as it should be."""
    before = path.stat().st_size if path.exists() else 0
    lines = b"".join(b"%015d\n" % place for place in range(before, before + size_bytes, 16))
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


def test_the_oldest_part_goes_and_every_byte_stays_where_it_was(logs: Path, bound: LogBound, said: list[str]) -> None:
    log = logs / "launcher.log"
    lines = fill(log, 8 * MIB)
    bound.finish()
    assert log.stat().st_size == len(lines)
    assert disk_use(log) <= BOUND + 8192
    assert kept(log) == 6 * MIB
    assert log.read_bytes()[6 * MIB :] == lines[6 * MIB :]
    assert said == []


def test_a_file_within_its_bound_is_whole(logs: Path, bound: LogBound) -> None:
    log = logs / "rank-3.log"
    lines = fill(log, BOUND)
    bound.finish()
    assert log.read_bytes() == lines
    assert kept(log) == 0


def test_who_reads_a_ranks_file_by_lines_finds_one_every_16_mib(logs: Path, bound: LogBound) -> None:
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


def test_a_log_that_its_job_has_cut_is_bounded_anew(logs: Path, bound: LogBound) -> None:
    log = logs / "launcher.log"
    fill(log, 8 * MIB)
    bound.finish()
    os.truncate(log, 0)
    fill(log, 7 * MIB)
    bound.finish()
    assert disk_use(log) <= BOUND + 8192


def test_where_holes_cannot_be_punched_the_end_stays_and_somebody_is_told_once(
    logs: Path, bound: LogBound, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(descriptor: int, start: int, end: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(log_bound, "punch", cannot)
    for name in ("launcher.log", "rank-0.log"):
        log = logs / name
        with log.open("ab", buffering=0) as job:
            job.write(b"".join(b"%015d\n" % place for place in range(0, 8 * MIB, 16)))
            bound.finish()
            job.write(b"still appended\n")
        assert log.stat().st_size == 8 * MIB + 15
        assert disk_use(log) <= BOUND
        assert kept(log) == 7 * MIB
        assert log.read_bytes()[7 * MIB : 7 * MIB + 16] == b"%015d\n" % (7 * MIB)
        assert log.read_bytes().endswith(b"still appended\n")
    assert len(said) == 1
    assert "cannot punch holes (Operation not supported)" in said[0]


def test_what_is_not_the_jobs_own_log_is_left_alone(logs: Path, tmp_path: Path, said: list[str]) -> None:
    elsewhere = tmp_path / "precious"
    lines = fill(elsewhere, 8 * MIB)
    (logs / "rank-0.log").symlink_to(elsewhere)
    fill(logs / "data.bin", 8 * MIB)
    os.mkfifo(logs / "rank-1.log")
    (logs / "rank-2.log").mkdir()
    LogBound(logs, BOUND, os.getuid(), said.append).finish()
    assert elsewhere.read_bytes() == lines
    assert kept(logs / "data.bin") == 0

    fill(logs / "rank-4.log", 8 * MIB)
    LogBound(logs, BOUND, os.getuid() + 1, said.append).finish()
    assert kept(logs / "rank-4.log") == 0, "another user's file was cut"

    (tmp_path / "link").symlink_to(logs)
    LogBound(tmp_path / "link", BOUND, os.getuid(), said.append).finish()
    assert kept(logs / "rank-4.log") == 0, "a link was followed"


def test_a_directory_that_is_gone_is_no_trouble(tmp_path: Path, said: list[str]) -> None:
    LogBound(tmp_path / "gone", BOUND, os.getuid(), said.append).finish()
    assert said == []


def test_it_looks_often_while_a_file_grows_fast_and_seldom_when_it_does_not(logs: Path, bound: LogBound) -> None:
    pauses = []
    for _ in range(12):
        bound.next_at_s = 0.0
        bound.look()
        pauses.append(bound._pause_s)
    assert pauses[-1] == 1.0
    fill(logs / "launcher.log", MIB)
    bound.next_at_s = 0.0
    bound.look()
    assert bound._pause_s == 0.02
