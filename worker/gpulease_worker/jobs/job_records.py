"""The files in a job's directory through which worker and supervisor exchange what has happened.

```
JOB_DIR/            mode 0700, as the environment in order.json may hold secrets; 0711 where the job is another user's
  order.json        what to run (`LaunchPlan`)             written by the worker, with the directory itself
  start.json        the supervisor and the launcher        written by the supervisor, before and after it launches
  go                all nodes of the job are prepared      written by the worker, then SIGUSR1 to the supervisor
  stop.json         an order to stop                       written by the worker, then SIGTERM to the supervisor
  database.json     the daemon's database has changed      written by the worker
  stuck.json        processes that survive SIGKILL         written by the holder of the lock
  exit.json         how it ended                           written by the holder of the lock, once
  forgotten         the daemon no longer orders this job   written by the worker
  lock              held by the supervisor while it runs, and by the worker while it records an end
  accelerate.json   configuration for accelerate, in place of the user's own
  logs/             launcher.log, rank-0.log, rank-1.log, ...    owned by the job's user: read without following links
  work/             the working directory of a job that names none    owned by the job's user
```

Each file is written under another name, synced and renamed: it is complete, or it does not exist. The space for
`exit.json` is reserved with the directory, because a job that fills the disk must still be able to record its end.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gpulease_protocol import codec
from gpulease_protocol.host.process_id import ProcessId, boot_id
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun

ORDER, START, STOP, UNKILLABLE, EXIT = "order.json", "start.json", "stop.json", "stuck.json", "exit.json"
FORGOTTEN, LOGS, WORK, LOCK, GO = "forgotten", "logs", "work", "lock", "go"
DATABASE = "database.json"
NOTIFY_LOG = "notify.log"
"""Beside the job's logs: what its `notify` command printed, or why a URL was not told."""
RESERVED_BYTES = 32768
"""Space for one record: a traceback of 4,096 characters and a reason of 1,200, six bytes each, and the rest."""
RETRY_S = 0.5
"""Pause before another attempt to read or write a record where its file system does not answer, or is full."""
DEADLINE_S = 60.0
"""How long a supervisor tries that; after that the worker, which sees it end, records the end of the job."""

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseRecord(Noun):
    """From where a job was last ordered, where that is not as in its `order.json`: `database.json`."""

    database_id: str
    """As in `DesiredState`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord(Noun):
    """The processes that run a job: `start.json`. Once it exists, the job must never be launched again."""

    boot_id: str
    """The boot in which the start times are valid."""
    supervisor: ProcessId
    """The job's supervisor."""
    launcher: ProcessId | None = None
    """The launcher; null until it has started."""
    started_at: datetime | None = None
    """When the launcher had started."""
    rank_at: datetime | None = None
    """When the first rank had started."""
    cgroup: str | None = None
    """Directory of the job's cgroup; null where it has none."""
    fence_s: float | None = None
    """The fence that the supervisor keeps; null where the job has none."""
    prepared_at: datetime | None = None
    """When its node was prepared, for a job on several nodes; null until then."""
    waits_for: str | None = None
    """What its node still waits for, as a sentence; null where that is nothing of another node's."""

    def supervised(self) -> bool:
        """True while the supervisor is alive."""
        return self.boot_id == boot_id() and self.supervisor.alive()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRecord(Noun):
    """An order to stop: `stop.json`."""

    grace_s: float
    """Seconds between SIGTERM and SIGKILL."""
    node_left: bool = False
    """True when no one wanted it to end, but its node leaves."""
    again: bool = False
    """As `JobOrder.again`."""
    failure: str | None = None
    """As `JobOrder.failure`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnkillableRecord(Noun):
    """Processes of a job that survive SIGKILL: `stuck.json`. The job keeps what it holds until they have ended."""

    pids: tuple[int, ...]
    """Some of them, by pid in ascending order."""
    reason: str
    """A sentence that names them and where they hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord(Noun):
    """How a job ended: `exit.json`."""

    exit_code: int | None
    """Exit code of the rank that failed first, else of the launcher, 128 + N when signal N ended it; null when nothing
    started or the end was not observed."""
    reason: str | None = None
    """A sentence that says why it failed; null when it did not."""
    traceback: str | None = None
    """Traceback of the rank that failed first; null where it left none."""
    timed_out: bool = False
    """True when it was ended because of its `timeout_s`."""
    stopped: bool = False
    """True when it was told to stop, by its worker or by a SIGTERM of another."""
    follows: bool = False
    """As `JobReport.follows`."""
    fence_reached: bool = False
    """As `JobReport.fence_reached`."""
    ended_at: datetime
    """When its last process ended."""


def never_launched(reason: str, *, stopped: bool) -> ExitRecord:
    """The record of a job that ends now and was never launched."""
    return ExitRecord(exit_code=None, reason=reason, stopped=stopped, ended_at=now())


def write(directory: Path, name: str, record: Any, *, replaces: bool = False) -> None:
    """Write a record into a directory, atomically and synced, in the space reserved for it if any. Raises OSError.

    The content is synced before it gets its name, so that no record is there in part. The directory is synced because a
    record that was read must not be gone after a crash; but not where it `replaces` one that was: either is complete.
    """
    content = json.dumps(codec.to_json(record)).encode()
    reserved = _reserved(directory, name)
    if reserved.exists():
        # The reserved blocks are reused, so that no new ones are needed on a full disk.
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
    if not replaces:
        sync(directory)


def reserve(directory: Path, name: str) -> None:
    """Reserve the space for a record, so that `write` succeeds on a full disk too. Raises OSError."""
    with open(_reserved(directory, name), "wb", opener=_private) as file:
        os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)


def lock(directory: Path) -> int | None:
    """Take the lock of a job's directory, held until the caller closes it; None while it is taken. Raises OSError.

    Only the holder may launch the job or record its end.
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


def take_order(directory: Path, kind: type[Record]) -> Record | None:
    """Take the lock of a job's directory and read its order, to launch the job; None where a supervisor has the lock,
    or had it and has launched.

    Raises OSError or ValueError where there is no order, and where the file system has not answered for DEADLINE_S or
    until SIGTERM, which the caller blocks.
    """
    give_up_s, locked = time.monotonic() + DEADLINE_S, False
    while True:
        try:
            locked = locked or lock(directory) is not None
            if not locked or (directory / START).exists() or (directory / EXIT).exists():
                return None
            if (order := read(directory, ORDER, kind)) is not None:
                return order
            raise ValueError(f"{directory} has no {ORDER}")
        except (OSError, ValueError) as error:
            away = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
            stopped = signal.SIGTERM in signal.sigpending()
            if not away or stopped or is_removed(directory) or time.monotonic() > give_up_s:
                raise
            time.sleep(RETRY_S)


def read(directory: Path, name: str, kind: type[Record]) -> Record | None:
    """Read a record of a directory; None if there is none. Raises ValueError that names an unreadable file."""
    path = directory / name
    try:
        return codec.from_json(kind, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def sync(directory: Path) -> None:
    """Sync a directory, so that the names in it are on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_removed(directory: Path) -> bool:
    """True where someone has removed a job's directory, rather than that its file system is away."""
    try:
        return directory.parent.is_dir() and not directory.exists()
    except OSError:  # an I/O error, a stale file handle: it may come back
        return False


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
