"""Finds why a launcher failed: exit code, reason and traceback of the rank that failed first.

torchrun's own exit code is 1 in any case; the cause is in its summary, in the error file that `@record` writes
(TORCHELASTIC_ERROR_FILE), and in the rank's output. The job's user can write all of these, so they are read beneath
the log directory only, without following links, and trusted for no more than a sentence.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from gpulease_protocol.host.log_files import tail
from gpulease_protocol.lazy_dataclass import dataclass

TAIL_BYTES = 64 * 1024
"""How much of the end of a log is read: torchrun's summary is its last part."""
ERROR_FILE_BYTES = 256 * 1024
"""How much of an error file is read; a longer one is then not JSON, and is ignored."""
SUMMARY_LINES = 40
"""How many lines of torchrun's summary are read, from its beginning."""
TRACEBACK_CHARACTERS = 4096
"""How much of a traceback is kept, its end."""
REASON_CHARACTERS = 1200
"""How much of a reason is reported: it may quote the job's output."""
LINE_CHARACTERS = 300
"""How much of a traceback's last line goes into the sentence."""
ROOT_CAUSE = "Root Cause (first observed failure):"
"""The beginning of torchrun's summary."""
ENTRY = re.compile(r"[ \t]{0,20}(rank|exitcode|error_file)[ \t]{0,20}:[ \t]{0,20}(.{0,4096})")
"""A line of the summary. Any program may print such lines, so every search for them is bounded."""
NUMBER = re.compile(r"-?\d{1,5}")
"""A rank or an exit code, at the beginning of an entry."""
TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n|\n)*[^\s][^\n]*")
"""A traceback as Python prints it, down to the line that names the exception."""

NOT_READY = re.compile(r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY|cudaErrorSystemNotReady")
"""The wordings of CUDA's error 802."""
LOST_PEER = re.compile(
    r"Connection (?:closed|reset|refused|aborted)|Broken pipe|DistNetworkError|remote process exited|NCCL communicator"
    r"|(?:Timed out|timed out|timeout) waiting|recvValue failed|Socket Timeout",
    re.IGNORECASE,
)
"""The wordings of gloo, NCCL and torch where a rank has lost another one. They say that the cause is elsewhere."""
LIMITS = {
    signal.SIGXFSZ: " (a file that it wrote, or its log, reached `ulimit -f`)",
    signal.SIGXCPU: " (it reached `ulimit -t`)",
    signal.SIGKILL: " (by the kernel if memory was short: see dmesg)",
}
"""Limits that end a program, by signal. A job has the resource limits of the shell that submitted it."""
FABRIC = " CUDA did not start (error 802): the node's fabric manager is not running, or has not finished starting."
"""What that means; appended to the reason."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed."""

    code: int
    """Exit code of the rank that failed first, else of the launcher; 128 + N when signal N ended it."""
    reason: str
    """Why, as a sentence."""
    traceback: str | None = None
    """The rank's traceback; None where it left none."""
    lost_peer: bool = False
    """True where it says that it lost its connection to another rank."""


def first_failure(logs: Path, code: int) -> Failure:
    """The failure of the rank that torchrun names as the first, else the launcher's exit code or signal."""
    output = tail(logs, "launcher.log", size_bytes=TAIL_BYTES)
    root_cause = _root_cause(output)
    if root_cause is None:
        traceback = _last_traceback(output)
        reason = f"The command {_ended(code)}{_line(traceback)}.{_cuda(output)}"
        return Failure(code, reason, traceback, _lost_peer(traceback))
    rank, rank_code, error_file = root_cause
    own = tail(logs, f"rank-{rank}.log", size_bytes=TAIL_BYTES)
    traceback = _recorded(logs, error_file) or _last_traceback(own)
    reason = f"Rank {rank} failed first: it {_ended(rank_code)}{_line(traceback)}.{_cuda(own + output)}"
    return Failure(rank_code, reason, traceback, _lost_peer(traceback))


def _root_cause(output: str) -> tuple[int, int, str] | None:
    """Rank, exit code and error file from torchrun's last summary, since it may have restarted its ranks; None if there
    is no summary, or none that a launcher would print."""
    _, found, summary = output.rpartition(ROOT_CAUSE)
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
    """The traceback in an error file, if the file is beneath the log directory."""
    try:
        parts = Path(path).relative_to(logs).parts
        message = json.loads(tail(logs, *parts, size_bytes=ERROR_FILE_BYTES))["message"]
        traceback = message["extraInfo"]["py_callstack"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return _clipped(traceback) if isinstance(traceback, str) and traceback.strip() else None


def _last_traceback(output: str) -> str | None:
    found = TRACEBACK.findall(output)
    return _clipped(found[-1]) if found else None


def _clipped(traceback: str) -> str:
    """The end of a traceback."""
    return _storable(traceback.strip()[-TRACEBACK_CHARACTERS:])


def reportable(reason: str | None) -> str | None:
    """A reason that the daemon accepts, whatever it quotes: a refused one would block all reports of the node."""
    return None if reason is None else _storable(reason[:REASON_CHARACTERS])


def _storable(text: str) -> str:
    """The text without what JSON or a database refuses: unpaired surrogates and NUL."""
    return text.encode(errors="replace").decode().replace("\0", "?")


def _line(traceback: str | None) -> str:
    """The line that names the exception, in brackets."""
    if traceback is None:
        return ""
    return f" ({traceback.splitlines()[-1].strip()[:LINE_CHARACTERS].rstrip('.')})"


def _lost_peer(traceback: str | None) -> bool:
    """True where the exception is about the connection to another rank."""
    return traceback is not None and LOST_PEER.search(traceback.splitlines()[-1][: LINE_CHARACTERS * 4]) is not None


def _cuda(output: str) -> str:
    """An explanation where CUDA did not start; some drivers do not report this beforehand (A100)."""
    return FABRIC if NOT_READY.search(output) else ""


def _ended(code: int) -> str:
    if code > 128:
        try:
            found = signal.Signals(code - 128)
            return f"was ended by {found.name}{LIMITS.get(found, '')}"
        except ValueError:
            pass  # no such signal: it is the program's own exit code
    return f"exited with code {code}"
