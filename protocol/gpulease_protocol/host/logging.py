"""The lines of a log on stderr: for people on a terminal and in the journal, else a JSON object on each. For daemon and
worker.

```
2026-11-22 01:44:00.123 INFO    lease.granted lease_id=lease-9f86d081884c7d65 gpus=GPU-da36...,GPU-491c... cause=call-1c
{"at": "2026-11-22T01:44:00.123Z", "level": "info", "program": "serve", "logger": "gpulease.decisions",
 "message": "lease.granted", "event": "lease.granted", "lease_id": "lease-9f86d081884c7d65", ...}
```

What must hold:

- Who logs is never held up. A thread writes; when the reader of stderr is stuck, lines wait in a bounded queue, and
  what does not fit is counted and the count logged. Lines that a killed process had not written are lost; decisions are
  in the database.
- The journal notes the time, and reads the level from the line (sd-daemon(3)): neither is there twice.
- One line is one line, whatever a user has put into a label or a command.
- No password and no bearer token is in any line, nor in the traceback of one.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

MAX_WAITING = 10_000
"""Lines that may wait to be written, at most."""
MAX_AT_ONCE = 100
"""Lines that are written at once, at most."""
GATHER_S = 0.02
"""How long lines wait for others: to wake the thread for each line takes longer than to make it."""
FLUSH_S = 2.0
"""How long the end of a program waits for its last lines to be written."""
MAX_TEXT = 4000
"""Characters of one text in a line, at most; a traceback may have ten times as many."""
STDERR = 2
QUIET = {
    "alembic": logging.WARNING,
    "httpx2": logging.WARNING,
    "httpcore2": logging.WARNING,
    "asyncio": logging.WARNING,
}
"""Loggers of libraries that write an uninformative line for every request or migration."""


JOURNAL_LEVELS = ((logging.ERROR, "<3>"), (logging.WARNING, "<4>"), (logging.INFO, "<6>"), (0, "<7>"))
"""Prefixes of the journal's priorities (sd-daemon(3)), by lowest level."""


class LogFormat(StrEnum):
    """The form of a log."""

    AUTO = "auto"
    HUMAN = "human"
    JSON = "json"


class LogLevel(StrEnum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def fields(**what: Any) -> dict[str, Any]:
    """For `extra=` of a call that logs: fields of the line beside its message. None is left out."""
    return {"fields": {name: value for name, value in what.items() if value is not None and value != ()}}


@contextmanager
def logging_to_stderr(program: str, form: LogFormat, level: LogLevel) -> Iterator[None]:
    """While the block runs, what is logged anywhere in this process goes to stderr; at its end the rest is written."""
    lines = Lines(_formatter(program, form))
    root = logging.getLogger()
    before = root.level
    root.setLevel(level.upper())
    root.addHandler(lines)
    for name, least in QUIET.items():
        logging.getLogger(name).setLevel(max(least, root.level))
    try:
        yield
    finally:
        root.removeHandler(lines)
        root.setLevel(before)
        lines.close()


def _formatter(program: str, form: LogFormat) -> logging.Formatter:
    if form is not LogFormat.JSON and goes_to_the_journal():
        return JournalLine()
    people = form is LogFormat.HUMAN or (form is LogFormat.AUTO and sys.stderr.isatty())
    return HumanLine() if people else JsonLine(program)


def goes_to_the_journal(environ: Mapping[str, str] = os.environ) -> bool:
    """True if stderr is the stream that systemd has connected to its journal (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        stream = os.fstat(STDERR)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


class Lines(logging.Handler):
    """Writes records to stderr from a thread of its own."""

    def __init__(self, form: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(form)
        self._waiting: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._left_out = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Leave a record to the thread; never blocks."""
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(record)
        else:
            self._left_out += 1

    def close(self) -> None:
        """Write what waits, for at most FLUSH_S."""
        until_s = time.monotonic() + FLUSH_S
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(max(0.0, until_s - time.monotonic()))
        super().close()

    def _write_all(self) -> None:
        ended = False
        while not ended:
            records = [self._waiting.get()]
            if self._waiting.qsize() < MAX_AT_ONCE:
                self._closing.wait(GATHER_S)
            while len(records) < MAX_AT_ONCE and not self._waiting.empty():
                records.append(self._waiting.get())
            ended = None in records
            if self._left_out and (ended or self._waiting.empty()):
                text, self._left_out = f"{self._left_out} lines were dropped: stderr was not read", 0
                records.append(logging.LogRecord("gpulease.log", logging.WARNING, __file__, 0, text, (), None))
            self._write(b"".join(self._line(record) for record in records if record is not None))

    def _line(self, record: logging.LogRecord) -> bytes:
        try:
            line = self.format(record)
        except Exception as error:  # a line that cannot be made is a fault; it must not end all others
            line = f"a line of the log at {record.pathname}:{record.lineno} cannot be made: {error!r}"
        return line.encode(errors="backslashreplace") + b"\n"

    def _write(self, left: bytes) -> None:
        # Not through sys.stderr: a thread that is stuck in there makes Python abort at its end.
        with suppress(OSError):  # it is not read any more
            while left:
                left = left[os.write(STDERR, left) :]


class JsonLine(logging.Formatter):
    """A record as one JSON object on a line."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "at": _at(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": logging.getLevelName(record.levelno).lower(),
            "program": self._program,
            "logger": record.name,
            "message": _clean(record.getMessage()),
        }
        for name, value in getattr(record, "fields", {}).items():
            line.setdefault(name, _cleaned(value))
        if record.exc_info:
            line["exception"] = _clean(self.formatException(record.exc_info), 10 * MAX_TEXT)
        return _json_text(line)


class HumanLine(logging.Formatter):
    """A record as one line for people, below it the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        at = _at(record).astimezone()
        begin = f"{at:%Y-%m-%d %H:%M:%S}.{int(record.msecs):03} {logging.getLevelName(record.levelno):<7} "
        return "\n    ".join((begin + self.words(record), *self.trace(record)))

    def words(self, record: logging.LogRecord) -> str:
        """Message and fields. The cause comes last: its long id matters only in a search."""
        more = {name: value for name, value in getattr(record, "fields", {}).items() if name not in ("event", "cause")}
        more |= {name: value for name, value in getattr(record, "fields", {}).items() if name == "cause"}
        message = _printable(_clean(record.getMessage()))
        return message + "".join(f" {name}={_word(value)}" for name, value in more.items())

    def trace(self, record: logging.LogRecord) -> list[str]:
        """The lines of the traceback, if there is one."""
        if not record.exc_info:
            return []
        return [_printable(part) for part in _clean(self.formatException(record.exc_info), 10 * MAX_TEXT).splitlines()]


class JournalLine(HumanLine):
    """The same for the journal, which has the time, and takes each line for an entry with a level of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        level = next(word for least, word in JOURNAL_LEVELS if record.levelno >= least)
        return "\n".join(level + line for line in (self.words(record), *self.trace(record)))


_json_text = json.JSONEncoder(ensure_ascii=False, default=str).encode
"""As `json.dumps`, which makes an encoder for each text; that takes as long as the text."""


def _at(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _clean(text: str, limit: int = MAX_TEXT) -> str:
    """The text without passwords of URLs and bearer tokens, cut to a bounded length."""
    if "://" in text:
        text = re.sub(r"(://[^\s/@:]*:)[^\s/@]*@", r"\1...@", text)
    folded = text.casefold()  # as the regular expression ignores case
    if "bearer" in folded or "password=" in folded:
        text = re.sub(r"(?i)\b(bearer\s+|(?:ssl)?password=)[^\s&'\"]+", r"\1...", text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return _clean(value)
    return [_cleaned(item) for item in value] if isinstance(value, (list, tuple)) else value


def _word(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    text = _printable(_clean(text))
    return json.dumps(text, ensure_ascii=False) if not text or re.search(r"[\s\"=]", text) else text


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
