"""Log lines: their two formats, redaction, and that writing them never blocks."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.host.logging import (
    MAX_WAITING,
    HumanLine,
    JournalLine,
    JsonLine,
    fields,
    goes_to_the_journal,
)

SECRETS = [
    "postgresql://me:hunter2@host/name failed",
    "https://me:hunter2@host:1/x, and unix:///s",
    "postgresql://host/name?sslpassword=hunter2&password=hunter2",
    "{'Authorization': 'Bearer hunter2'}",
    "authorization: bearer hunter2",
]


def record(message: str, level: int = logging.INFO, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("gpulease.test", level, __file__, 1, message, (), None)
    made.__dict__ |= more
    return made


def failing(text: str) -> Any:
    try:
        raise ValueError(text)
    except ValueError:
        return sys.exc_info()


def test_a_json_line_has_the_fields() -> None:
    line = JsonLine("serve").format(record("lease.granted", **fields(lease_id="lease-1", gpus=("a", "b"), reason=None)))
    found = json.loads(line)
    assert found.pop("at").endswith("Z")
    assert found == {
        "level": "info",
        "program": "serve",
        "logger": "gpulease.test",
        "message": "lease.granted",
        "lease_id": "lease-1",
        "gpus": ["a", "b"],
    }


def test_a_field_does_not_overwrite_another() -> None:
    assert json.loads(JsonLine("serve").format(record("x", **fields(level="none", message="y"))))["level"] == "info"


def test_a_line_for_people() -> None:
    line = HumanLine().format(
        record("lease.granted", **fields(event="lease.granted", gpus=("a", "b"), reason="it is so"))
    )
    date, clock, *rest = line.split(" ", 2)
    assert (len(date), len(clock)) == (10, 12)
    assert rest == ['INFO    lease.granted gpus=a,b reason="it is so"']


def test_the_id_of_the_cause_is_at_the_end_of_a_line_for_people() -> None:
    line = HumanLine().format(record("lease.granted", **fields(cause="request-97ce79bd2ce6dee7", node="a", user="ada")))
    assert line.endswith(" lease.granted node=a user=ada cause=request-97ce79bd2ce6dee7")


def test_each_line_for_the_journal_begins_with_its_level_and_has_no_time() -> None:
    said = JournalLine().format(record("it broke", logging.ERROR, exc_info=failing("why"), **fields(node="a")))
    first, *trace = said.split("\n")
    assert first == "<3>it broke node=a"
    assert trace[-1] == "<3>ValueError: why"
    assert {line[:3] for line in trace} == {"<3>"}
    levels = {logging.WARNING: "<4>", logging.INFO: "<6>", logging.DEBUG: "<7>"}
    assert {level: JournalLine().format(record("x", level)) for level in levels} == {
        level: f"{word}x" for level, word in levels.items()
    }


@pytest.mark.parametrize("text", ["two\nlines", "\x1b[2J", "a\r\nERROR forged", "\udcff", "\u2028"], ids=ascii)
@pytest.mark.parametrize("form", [JsonLine("serve"), HumanLine(), JournalLine()], ids=["json", "human", "journal"])
def test_user_text_cannot_break_a_log_line(form: logging.Formatter, text: str) -> None:
    line = form.format(record(text, **fields(label=text))).encode(errors="backslashreplace").decode()
    assert "\n" not in line
    assert "\r" not in line
    assert "\x1b" not in line


@pytest.mark.parametrize("text", SECRETS)
@pytest.mark.parametrize("form", [JsonLine("serve"), HumanLine(), JournalLine()], ids=["json", "human", "journal"])
def test_passwords_and_tokens_are_redacted(form: logging.Formatter, text: str) -> None:
    line = form.format(record(text, exc_info=failing(text), **fields(reason=text, several=[text])))
    assert "hunter2" not in line
    assert "ValueError" in line


def test_the_length_of_a_line_is_bounded() -> None:
    assert len(JsonLine("serve").format(record("x" * 10**6, exc_info=failing("y" * 10**6)))) < 10**5


PROGRAM = """
import logging, os, sys
from gpulease_protocol.host.logging import LogFormat, LogLevel, logging_to_stderr
log = logging.getLogger("test")
with logging_to_stderr("test", LogFormat(sys.argv[1]), LogLevel("info")):
    for number in range(int(sys.argv[2])):
        log.info("line %d %s", number, "x" * 100)
    log.debug("not to be seen")
    os.write(1, b"done")
    sys.stdin.read()
"""


@pytest.fixture
def program() -> Iterator[Any]:
    started: list[subprocess.Popen[bytes]] = []

    def start(form: str, lines: int, **where: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, form, str(lines)],
            **{"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL} | where,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_log_records_are_written_before_exit(program: Any) -> None:
    process = program("auto", 500, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=60)
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["message"].split()[1] for line in lines] == [str(number) for number in range(500)]
    assert process.returncode == 0


def test_on_a_terminal_lines_are_for_people(program: Any) -> None:
    ours, theirs = pty.openpty()
    try:
        process = program("auto", 1, stderr=theirs)
        process.wait(60)
        line = os.read(ours, 1000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "INFO    line 0 xxx" in line
    assert "{" not in line


def test_in_the_journal_lines_are_for_people_and_not_in_a_file_of_what_it_started(program: Any, tmp_path: Path) -> None:
    def lines_in(file: Path, stream: str) -> list[str]:
        with file.open("wb") as output:
            environment = os.environ | {"JOURNAL_STREAM": stream}
            assert program("auto", 1, stderr=output, env=environment).wait(60) == 0
        return file.read_text().splitlines()

    journal, other = tmp_path / "journal", tmp_path / "other"
    journal.touch()
    stream = f"{journal.stat().st_dev}:{journal.stat().st_ino}"
    assert lines_in(journal, stream) == [f"<6>line 0 {'x' * 100}"]
    assert json.loads(lines_in(other, stream)[0])["level"] == "info"
    assert not goes_to_the_journal({})


def test_a_stuck_reader_blocks_no_one(program: Any) -> None:
    process = program("json", 3 * MAX_WAITING, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(4) == b"done"  # no line has been read so far, and the pipe is full
    process.wait(60)
    assert process.returncode == 0


def test_dropped_lines_are_counted(program: Any) -> None:
    process = program("json", 3 * MAX_WAITING, stderr=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(4) == b"done"
    assert process.stderr is not None
    written = 0
    while "were dropped" not in (message := json.loads(process.stderr.readline())["message"]):
        written += 1
    assert written + int(message.split()[0]) == 3 * MAX_WAITING
    assert written > MAX_WAITING
