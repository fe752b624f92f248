"""Reading log files while they are written: merged lines, files that appear, are cut or are replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.host import log_reader
from gpulease_protocol.host.log_reader import LINE_BYTES, MAX_RANKS, LogReader, OpenFiles


@pytest.fixture
def merged(tmp_path: Path) -> Iterator[LogReader]:
    reader = LogReader(tmp_path, None, {})
    yield reader
    reader.close()


def write(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def taken(reader: LogReader, last: bool = False) -> bytes:
    found = b""
    while piece := reader.take(last):
        found += piece
    return found


def single(logs: Path, name: str = "launcher.log", offset: int = 0, tail: int | None = None) -> bytes:
    reader = LogReader(logs, name, {"launcher": offset}, tail)
    try:
        return taken(reader, last=True)
    finally:
        reader.close()


def test_a_line_is_returned_when_it_is_complete(tmp_path: Path, merged: LogReader) -> None:
    zero, one = tmp_path / "rank-0.log", tmp_path / "rank-1.log"
    write(zero, b"half a ")
    assert taken(merged) == b""
    write(one, b"other\n")
    assert taken(merged) == b"[rank 1] other\n"
    write(zero, b"line\nand")
    assert taken(merged) == b"[rank 0] half a line\n"
    assert merged.offset == "0:12,launcher:0,1:6"
    assert taken(merged, last=True) == b"[rank 0] and\n"
    assert merged.offset == "0:15,launcher:0,1:6"


def test_a_carriage_return_or_crlf_ends_a_line(tmp_path: Path, merged: LogReader) -> None:
    log = tmp_path / "rank-0.log"
    write(log, b"\r 10%\r 20%")
    assert taken(merged) == b"[rank 0] \r[rank 0]  10%\r"
    write(log, b"\r")
    assert taken(merged) == b""
    write(log, b"\nx")
    assert taken(merged) == b"[rank 0]  20%\r\n"


def test_an_endless_line_is_split(tmp_path: Path, merged: LogReader) -> None:
    write(tmp_path / "rank-0.log", b"x" * (3 * LINE_BYTES))
    lines = taken(merged, last=True).splitlines()
    assert all(line.startswith(b"[rank 0] x") for line in lines)
    assert sum(len(line) - len(b"[rank 0] ") for line in lines) == 3 * LINE_BYTES


def test_lines_that_the_launcher_only_copies_are_left_out(tmp_path: Path, merged: LogReader) -> None:
    write(tmp_path / "rank-0.log", b"hello\n")
    write(tmp_path / "launcher.log", b"W0101 of torchrun\n[default0]:hello\n[default 0] not a copy\n")
    assert sorted(taken(merged).splitlines()) == [
        b"[launcher] W0101 of torchrun",
        b"[launcher] [default 0] not a copy",
        b"[rank 0] hello",
    ]


def test_a_launcher_that_is_rank_0_is_shown_once(tmp_path: Path, merged: LogReader) -> None:
    write(tmp_path / "launcher.log", b"hello\n")
    os.link(tmp_path / "launcher.log", tmp_path / "rank-0.log")
    assert taken(merged) == b"[rank 0] hello\n"


def test_a_job_that_makes_thousands_of_logs_costs_its_reader_a_bounded_number_of_descriptors(
    tmp_path: Path, merged: LogReader
) -> None:
    for rank in range(2000):
        write(tmp_path / f"rank-{rank}.log", b"line\n")
    assert len(taken(merged).splitlines()) == MAX_RANKS
    assert len(merged.descriptors) <= MAX_RANKS + 2


def test_the_files_of_one_user_are_open_in_a_bounded_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all who read them: the daemon needs its descriptors for everyone."""
    monkeypatch.setattr(log_reader, "OPEN_FILES", OpenFiles(3))
    write(tmp_path / "rank-0.log", b"line\n")
    readers = [LogReader(tmp_path, "rank-0.log", {}) for _ in range(4)]
    try:
        for reader in readers[:3]:
            reader.open()
        with pytest.raises(Unavailable, match="3 log files of one user are being read"):
            readers[3].open()
        readers[0].close()
        readers[3].open()
        assert taken(readers[3]) == b"line\n"
    finally:
        for reader in readers:
            reader.close()


def test_restarted_ranks_begin_a_new_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    write(log, b"first start\nhalf")
    reader = LogReader(tmp_path, "rank-0.log", {})
    try:
        assert taken(reader) == b"first start\nhalf"
        log.unlink()
        write(log, b"second\n")
        assert taken(reader) == b"\n[... it was started again; its new log begins]\nsecond\n"
    finally:
        reader.close()


def test_a_log_that_the_job_has_truncated_begins_again(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    write(log, b"a long line\n")
    reader = LogReader(tmp_path, "launcher.log", {})
    try:
        assert taken(reader) == b"a long line\n"
        os.truncate(log, 0)
        write(log, b"new\n")
        assert taken(reader) == b"[... the log was truncated and begins again]\nnew\n"
    finally:
        reader.close()


def test_an_offset_into_dropped_output_begins_with_what_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    with log.open("wb") as file:
        file.seek(2**20)
        file.write(b"\nend\n")
    assert single(tmp_path) == b"[... 1.0 MiB of older output was dropped]\n\nend\n"
    assert single(tmp_path, offset=2**20 - 100) == b"[... 100 bytes of older output was dropped]\n\nend\n"
    assert single(tmp_path, offset=2**20 + 1) == b"end\n"
    assert single(tmp_path, offset=2**30) == b""
    assert single(tmp_path, tail=1) == b"end\n"


def test_zeros_that_a_job_has_written_are_not_a_hole(tmp_path: Path) -> None:
    content = b"\0" * 300_000 + b"x"
    write(tmp_path / "launcher.log", content)
    assert single(tmp_path) == content


@pytest.mark.parametrize(("lines", "shown"), [(0, b""), (1, b"c"), (2, b"b\nc"), (3, b"a\nb\nc"), (9, b"a\nb\nc")])
def test_the_last_lines(tmp_path: Path, lines: int, shown: bytes) -> None:
    write(tmp_path / "launcher.log", b"a\nb\nc")
    assert single(tmp_path, tail=lines) == shown
    write(tmp_path / "launcher.log", b"\n")
    assert single(tmp_path, tail=lines) == shown + (b"\n" if lines else b"")


def test_the_last_lines_of_a_file_of_many_chunks(tmp_path: Path) -> None:
    lines = [b"%06d" % number + b"x" * (number % 200) + b"\n" for number in range(20_000)]
    write(tmp_path / "launcher.log", b"".join(lines))
    assert single(tmp_path, tail=5_000) == b"".join(lines[-5_000:])


def test_a_link_or_a_fifo_in_place_of_a_log_is_not_read(tmp_path: Path, merged: LogReader) -> None:
    (tmp_path / "rank-0.log").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "rank-1.log")
    assert taken(merged, last=True) == b""
