"""What a process that the worker starts inherits from it and is made of, to be compared with what it was before.

A fork server passes on what it had when it was started itself. So it is replaced once this has changed: after an
upgrade of the package under a running worker, or a `prlimit`, `renice` or `taskset` of the worker.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import gpulease
import gpulease_protocol
import gpulease_worker
from gpulease_worker.jobs import resource_limits

PACKAGES = tuple(path for package in (gpulease_worker, gpulease_protocol, gpulease) for path in package.__path__)
"""The directories of the packages that a supervisor imports."""
STATUS = ("Umask", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "SigIgn", "Cpus_allowed:", "Mems_allowed:")
"""The lines of /proc/self/status that a child inherits."""
File = tuple[str, int, int, int]


def current(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Everything that counts, now, for a process with this environment. Takes half a millisecond."""
    return (dict(environment), tuple(_files()), _inherited())


def _files() -> Iterator[File]:
    """The files of the packages, the interpreter, and the directories in which packages are installed."""
    installed = (
        sys.path if sys.flags.safe_path else sys.path[1:]
    )  # supervisors import nothing from a script's directory
    for place in (sys.executable, *installed):
        with suppress(OSError):
            yield _file(place, os.stat(place))
    waiting = list(PACKAGES)
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    yield _file(entry.path, entry.stat())
                elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                    waiting.append(entry.path)


def _file(path: str, status: os.stat_result) -> File:
    return path, status.st_ino, status.st_size, status.st_mtime_ns


def _inherited() -> tuple[object, ...]:
    own = tuple(resource.getrlimit(number) for number in range(resource_limits.COUNT))
    priority = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
    status = [line for line in _read("status").splitlines() if line.startswith(STATUS)]
    return own, priority, tuple(status), _read("oom_score_adj"), _read("cgroup")


def _read(name: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/self/{name}").read_text(errors="replace")
    return ""
