"""Finds the daemons, workers and jobs of one installation that run, whether or not a daemon answers.

It reads command lines in /proc: a job is known by its supervisor, which lives until the last process of the job has
ended. Anyone can give their process such a command line. So this is for what is shown to root before something is
removed, and for nothing that is decided without them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from gpulease_protocol.host.process_id import stat
from gpulease_protocol.host.server_owner import user_name
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.node_protocol import parse_attempt_name

PROC = Path("/proc")
SUPERVISOR = "gpulease_worker.jobs.supervisor"
"""The module in a supervisor's command line; the job's directory follows."""
PROGRAM = ("gpulease", "gpulease_cli")
"""The program in a command line: its file, or its module."""
DAEMON, WORKER, JOB = "daemon", "worker", "job"
COMMANDS = {"serve": DAEMON, "worker": WORKER}
WITH_PARENT = "--with-parent"
"""Option of a worker that its daemon has started, and that ends with it."""
COMMAND_BYTES = 65536
"""As much of a command line is read."""


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A process of this installation."""

    kind: str
    """`daemon`, `worker`, or `job` for the supervisor of one."""
    pid: int
    user: str
    name: str = ""
    """The id of a job."""
    service: str = ""
    """The service that systemd has started it as; empty for none."""
    started_at_s: float = 0.0
    """Seconds since 1970."""

    def __str__(self) -> str:
        return f"{self.name or f'a {self.kind}'} (pid {self.pid} of {self.user})"


def of_installation(
    prefix: Path, data: Path, services: Sequence[str] = (), proc: Path = PROC
) -> tuple[RunningProgram, ...]:
    """What runs from `prefix`, a virtual environment, or keeps its records in `data`; by pid.

    Not what runs in a container: its /opt and its /var are others.
    """
    found = []
    for pid in sorted(int(entry) for entry in os.listdir(proc) if entry.isdecimal()):
        words = _command_line(proc / str(pid))
        kind, name = _kind(words)
        if kind and (_is_of(prefix, words[:1], proc / str(pid)) or _is_of(data, words[1:], proc / str(pid))):
            program = _program(proc, pid, kind, name, services)
            found += [] if program is None else [program]
    return tuple(found)


def _command_line(process: Path) -> list[str]:
    try:
        with (process / "cmdline").open("rb") as file:
            return [os.fsdecode(word) for word in file.read(COMMAND_BYTES).rstrip(b"\0").split(b"\0")]
    except OSError:
        return []


def _kind(words: Sequence[str]) -> tuple[str, str]:
    """What a command line starts, and the id of a job; nothing for what is not of gpulease."""
    if SUPERVISOR in words[1:-1]:
        return JOB, parse_attempt_name(os.path.basename(words[-1]))[0]
    place = next((place for place in (1, 2, 3) if os.path.basename("".join(words[place : place + 1])) in PROGRAM), None)
    rest = list(words[place + 1 :]) if place else []
    while rest and rest[0].startswith("-"):  # an option of the program, with its value
        del rest[: 1 if "=" in rest[0] else 2]
    return COMMANDS.get(rest[0], "") if rest and WITH_PARENT not in rest else "", ""


def _is_of(directory: Path, words: Sequence[str], process: Path) -> bool:
    """True if one of the words is a path in the directory, and the process sees the same directory there."""
    if not any(Path(word).is_relative_to(directory) for word in words):
        return False
    try:
        return os.path.samefile(process / "root" / directory.relative_to("/"), directory)
    except OSError:
        return False


def _program(proc: Path, pid: int, kind: str, name: str, services: Sequence[str]) -> RunningProgram | None:
    """None where it has ended meanwhile."""
    try:
        uid, cgroup = (proc / str(pid)).stat().st_uid, (proc / str(pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return None
    status = stat(pid, proc)
    if status is None or status.dead:
        return None
    booted_at_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return RunningProgram(
        kind,
        pid,
        user_name(uid),
        name,
        next((service for service in services if f"/{service}" in cgroup), ""),
        booted_at_s + status.start_ticks / os.sysconf("SC_CLK_TCK"),
    )


def installed_at_s() -> float:
    """When this version was installed, seconds since 1970; 0 where that is not recorded."""
    record = next((file for file in metadata.files("gpulease") or () if file.name == "RECORD"), None)
    return 0.0 if record is None else Path(str(record.locate())).stat().st_mtime
