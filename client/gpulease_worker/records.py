"""The files in a job's directory through which worker and supervisor tell each other what has happened.

```
JOB_DIR/            mode 0700: the environment in order.json may hold secrets; 0711 where the job is another user's
  order.json        what to run, as ordered and as planned     written by the worker, with the directory itself
  start.json        who supervises, who was launched           written by the supervisor, before and after it launches
  stop.json         an order to stop                           written by the worker, then SIGTERM to the supervisor
  stuck.json        what SIGKILL does not end                  written by whoever has the lock
  exit.json         how it ended                               written by whoever saw the end, once
  forgotten         the daemon no longer asks for this job     written by the worker
  lock              held by the supervisor while it lives, and by the worker while it records an end
  accelerate.json   what accelerate reads in place of the user's own configuration
  logs/             launcher.log, rank-0.log, rank-1.log, ...    the job's user's: read it without following links
  work/             where a job without a working directory runs    the job's user's
```

Each is written to another name, synced and renamed: it is there whole, or it is not there. The room for `exit.json` is
taken when the directory is made, because a job that fills the disk must still be able to say how it ended.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gpulease import wire
from gpulease.exchange import JobOrder
from gpulease.model import Noun
from gpulease.owner import boot_id
from gpulease_worker import processes
from gpulease_worker.launch import Plan

ORDER, START, STOP, STUCK, EXIT = "order.json", "start.json", "stop.json", "stuck.json", "exit.json"
FORGOTTEN, LOGS, WORK, LOCK = "forgotten", "logs", "work", "lock"
RESERVED_BYTES = 32768
"""Room for one record: a traceback of 4,096 characters and a reason of 1,200, each written as six, and the rest."""

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Noun):
    """What was ordered and how it is run: `order.json`."""

    order: JobOrder
    """As the daemon ordered it."""
    plan: Plan
    """As this node runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Noun):
    """Who runs a job: `start.json`. Its presence means that the job must never be launched again."""

    boot_id: str
    """The boot in which the start times count."""
    supervisor: processes.Identity
    """The job's supervisor."""
    launcher: processes.Identity | None = None
    """The launcher; null until it is up."""
    started_at: datetime | None = None
    """When the launcher was up."""
    rank_at: datetime | None = None
    """When the first rank was up."""
    cgroup: str | None = None
    """Directory of the job's cgroup; null where it has none."""

    def supervised(self) -> bool:
        """True while the supervisor lives."""
        return self.boot_id == boot_id() and self.supervisor.alive()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Noun):
    """An order to stop: `stop.json`."""

    grace_s: float
    """Seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck(Noun):
    """Processes of a job that would not die: `stuck.json`. What the job holds, it keeps until they have ended."""

    pids: tuple[int, ...]
    """The first of them."""
    reason: str
    """What keeps them, as the end of a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit(Noun):
    """How a job ended: `exit.json`."""

    exit_code: int | None
    """Exit code of the rank that failed first, else of the launcher, 128 + N when signal N ended it; null when nothing
    started or nobody saw the end."""
    reason: str | None = None
    """A sentence that says why it failed; null when it did not."""
    traceback: str | None = None
    """Traceback of the rank that failed first; null where it left none."""
    timed_out: bool = False
    """True when it was ended because of its `timeout_s`."""
    ended_at: datetime
    """When its last process had ended."""


def write(directory: Path, name: str, record: Any) -> None:
    """Put a record into a directory, whole and on disk, in the room reserved for it if there is any. Raises OSError."""
    content = json.dumps(wire.to_json(record)).encode()
    reserved = _reserved(directory, name)
    if reserved.exists():
        # Its blocks are used again, so that nothing has to be found for it on a full disk.
        with reserved.open("r+b") as file:
            _fill(file, content)
        reserved.rename(directory / name)
    else:
        temporary = directory / f".{name}.{os.getpid()}"
        try:
            with open(temporary, "wb", opener=_private) as file:
                _fill(file, content)
            temporary.rename(directory / name)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    sync(directory)


def reserve(directory: Path, name: str) -> None:
    """Take the room that a record will need, so that `write` has it however full the disk is. Raises OSError."""
    with open(_reserved(directory, name), "wb", opener=_private) as file:
        os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)


def lock(directory: Path) -> int | None:
    """The lock of a job's directory, held until the caller closes it; None while another has it. Raises OSError.

    Only who holds it may launch the job or record its end.
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def read(directory: Path, name: str, kind: type[Record]) -> Record | None:
    """A record of a directory; None if there is none. Raises ValueError that names a file that cannot be read."""
    path = directory / name
    try:
        return wire.from_json(kind, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def sync(directory: Path) -> None:
    """Have the names in a directory on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def now() -> datetime:
    """The wall clock, in UTC."""
    return datetime.now(UTC)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _reserved(directory: Path, name: str) -> Path:
    return directory / f".{name}.reserved"


def _fill(file: BinaryIO, content: bytes) -> None:
    file.write(content)
    file.truncate()
    file.flush()
    os.fsync(file.fileno())
