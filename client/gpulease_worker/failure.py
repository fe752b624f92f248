"""How a launcher failed: the exit code of the rank that failed first, a sentence, and that rank's traceback.

torchrun's own exit code is 1 whatever has happened; the truth is in its summary, in the error file that `@record`
writes (TORCHELASTIC_ERROR_FILE), and in what the rank has printed. All of it lies where the job's user can write, so
it is read beneath the log directory alone, without following links, and believed only as far as a sentence goes.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from gpulease.log_files import tail

TAIL_BYTES = 64 * 1024
"""How much of the end of a log is read: torchrun's summary is its last part."""
ERROR_FILE_BYTES = 256 * 1024
"""How much of an error file is read; a longer one is not JSON then, and passed over."""
SUMMARY_LINES = 40
"""How much of torchrun's summary is looked at, from its beginning."""
TRACEBACK_CHARACTERS = 4096
"""How much of a traceback is kept, its end."""
REASON_CHARACTERS = 1200
"""How much of a reason is reported: what the job's user has printed may be in it."""
LINE_CHARACTERS = 300
"""How much of a traceback's last line goes into the sentence."""
ROOT_CAUSE = "Root Cause (first observed failure):"
"""torchrun's summary begins so."""
ENTRY = re.compile(r"[ \t]{0,20}(rank|exitcode|error_file)[ \t]{0,20}:[ \t]{0,20}(.{0,4096})")
"""A line of it. Anybody may print such lines, so every step that looks for them is bounded."""
NUMBER = re.compile(r"-?\d{1,5}")
"""A rank or an exit code, at the beginning of an entry."""
TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n|\n)*[^\s][^\n]*")
"""A traceback as Python prints it, down to the line that names the exception."""

NOT_READY = re.compile(r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY|cudaErrorSystemNotReady")
"""How CUDA's error 802 is told."""
FABRIC = " CUDA did not start (error 802): the node's fabric manager is not running, or was not done."
"""What that means, after what has happened."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How it failed."""

    code: int
    """Exit code of the rank that failed first, else of the launcher; 128 + N when signal N ended it."""
    sentence: str
    """Why, for people."""
    traceback: str | None = None
    """The rank's traceback; None where it left none."""


def first_failure(logs: Path, code: int) -> Failure:
    """The rank that failed first where torchrun says which, else the launcher's exit code or signal."""
    printed = tail(logs, "launcher.log", size_bytes=TAIL_BYTES)
    found = _root_cause(printed)
    if found is None:
        traceback = _last_traceback(printed)
        return Failure(code, f"The command {_ended(code)}{_line(traceback)}.{_cuda(printed)}", traceback)
    rank, rank_code, error_file = found
    own = tail(logs, f"rank-{rank}.log", size_bytes=TAIL_BYTES)
    traceback = _recorded(logs, error_file) or _last_traceback(own)
    sentence = f"Rank {rank} failed first: it {_ended(rank_code)}{_line(traceback)}.{_cuda(own + printed)}"
    return Failure(rank_code, sentence, traceback)


def _root_cause(printed: str) -> tuple[int, int, str] | None:
    """Rank, exit code and error file from torchrun's last summary, since it may have restarted its ranks; None where
    there is none, or none that a launcher would print."""
    _, found, summary = printed.rpartition(ROOT_CAUSE)
    entries: dict[str, str] = {}
    for line in summary.splitlines()[:SUMMARY_LINES] if found else ():
        if entry := ENTRY.match(line):
            entries.setdefault(entry[1], entry[2].strip())
    rank, code = (NUMBER.match(entries.get(name, "")) for name in ("rank", "exitcode"))
    if rank is None or code is None or int(rank[0]) < 0 or not -64 <= int(code[0]) <= 255:
        return None
    number = int(code[0])
    return int(rank[0]), number if number >= 0 else 128 - number, entries.get("error_file", "")


def _recorded(logs: Path, path: str) -> str | None:
    """The traceback in an error file, if it lies beneath the log directory."""
    try:
        parts = Path(path).relative_to(logs).parts
        message = json.loads(tail(logs, *parts, size_bytes=ERROR_FILE_BYTES))["message"]
        traceback = message["extraInfo"]["py_callstack"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return _clipped(traceback) if isinstance(traceback, str) and traceback.strip() else None


def _last_traceback(printed: str) -> str | None:
    found = TRACEBACK.findall(printed)
    return _clipped(found[-1]) if found else None


def _clipped(traceback: str) -> str:
    """Its end."""
    return _storable(traceback.strip()[-TRACEBACK_CHARACTERS:])


def reportable(reason: str | None) -> str | None:
    """A reason that the daemon takes, whatever is quoted in it: one that it refused would keep the node silent."""
    return None if reason is None else _storable(reason[:REASON_CHARACTERS])


def _storable(text: str) -> str:
    """The text as JSON and every database take it: half a surrogate pair is not, nor is NUL."""
    return text.encode(errors="replace").decode().replace("\0", "?")


def _line(traceback: str | None) -> str:
    """The line that names the exception, in brackets."""
    if traceback is None:
        return ""
    return f" ({traceback.splitlines()[-1].strip()[:LINE_CHARACTERS].rstrip('.')})"


def _cuda(printed: str) -> str:
    """What is to be known where CUDA did not start; a driver may not tell that before (A100)."""
    return FABRIC if NOT_READY.search(printed) else ""


def _ended(code: int) -> str:
    if code > 128:
        try:
            return f"was ended by {signal.Signals(code - 128).name}"
        except ValueError:
            pass  # 128 and more without such a signal is an exit code of the program's own
    return f"exited with code {code}"
