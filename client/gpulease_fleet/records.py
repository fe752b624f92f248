"""The records of pools: what was asked for, and each pilot that was ever submitted. A file of SQLite for each pool.

Each write is on disk, with fsync, before the call returns: a row must be there before its pilot is submitted.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from gpulease_protocol.lazy_dataclass import dataclass

SCHEMA = """
CREATE TABLE IF NOT EXISTS carried (
    pool TEXT NOT NULL, ordinal INTEGER NOT NULL, generation INTEGER NOT NULL, handle TEXT NOT NULL,
    state TEXT NOT NULL, ends_at TEXT, last_seen REAL NOT NULL, node TEXT NOT NULL, since REAL NOT NULL,
    was_ready INTEGER NOT NULL, stops_since REAL, why TEXT NOT NULL, PRIMARY KEY (pool, ordinal));
CREATE TABLE IF NOT EXISTS pool (name TEXT PRIMARY KEY, record TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotRow:
    """The last pilot of an ordinal."""

    pool: str
    ordinal: int
    generation: int
    handle: str = ""
    """The engine's id; empty while it is not known whether the engine has taken it."""
    state: str
    """See `gpulease_fleet.pool.LIVE`."""
    ends_at: str | None = None
    """When its allocation ends, ISO 8601; None where that is not known."""
    last_seen: float
    """When the engine last listed it; of one that has ended, when its token was revoked. Seconds since the epoch."""
    node: str = ""
    """Its node, as the daemon names it; empty before it has one."""
    since: float
    """When it was submitted. Seconds since the epoch."""
    was_ready: bool = False
    """True once its worker has reported."""
    stops_since: float | None = None
    """Since when it has been asked to end. Seconds since the epoch."""
    why: str = ""
    """Why it ended, or what the engine says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecord:
    """What was asked for, and how it goes."""

    name: str
    least: int = 0
    most: int = 0
    idle_s: float = 600.0
    """How long a node must be idle before its pilot is ended, where there are more than `least`."""
    down: bool = False
    """True once the pool was taken down."""
    problem: str = ""
    """Why nothing was decided in the last round; empty where something was."""
    failed_submissions: int = 0
    """How many in a row."""
    failed_starts: int = 0
    """How many pilots in a row ended before their worker reported."""
    paused: str = ""
    """Why nothing is submitted any more; empty while it is."""
    idle_since: dict[str, float] = field(default_factory=dict)
    """By node: since when all of it has been idle while no one waited. Seconds since the epoch."""
    options: dict[str, Any]
    """Those of the engine."""


class Records:
    """The records of one pool. Raises OSError or sqlite3.Error when the file cannot be used.

    Args:
        directory: Where the file is; made if need be, for this user alone.
        pool: Name of the pool.
    """

    SYNCHRONOUS: ClassVar[str] = "FULL"
    COLUMNS: ClassVar[tuple[str, ...]] = tuple(column.name for column in fields(PilotRow))

    def __init__(self, directory: Path, pool: str) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory, self.pool = directory, pool
        self._lock: int | None = None
        path = directory / f"{pool}.db"
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        self._database = sqlite3.connect(path, isolation_level=None, timeout=10.0)
        self._database.execute(f"PRAGMA synchronous={self.SYNCHRONOUS}")
        self._database.executescript(SCHEMA)

    def close(self) -> None:
        """Release the file and its lock."""
        self._database.close()
        if self._lock is not None:
            os.close(self._lock)

    def lock(self) -> bool:
        """Take the pool, so that no other process keeps it; False while one does."""
        descriptor = os.open(self.directory / f"{self.pool}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._lock = descriptor
        return True

    def read_pool(self) -> PoolRecord | None:
        """The pool; None before it was ever brought up."""
        found = self._database.execute("SELECT record FROM pool WHERE name = ?", (self.pool,)).fetchone()
        if found is None:
            return None
        known = {one.name for one in fields(PoolRecord)}  # a newer release may have written more
        return PoolRecord(**{name: value for name, value in json.loads(found[0]).items() if name in known})

    def put_pool(self, record: PoolRecord) -> None:
        """Record the pool."""
        content = json.dumps(asdict(record))
        self._database.execute("INSERT OR REPLACE INTO pool VALUES (?, ?)", (record.name, content))

    def change_pool(self, **changes: Any) -> PoolRecord:
        """Change fields of the pool, which another process may change too."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            before = self.read_pool()
            assert before is not None
            changed = replace(before, **changes)
            self.put_pool(changed)
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")
        return changed

    def pilots(self) -> list[PilotRow]:
        """All ordinals, in order."""
        order = ", ".join(self.COLUMNS)
        query = f"SELECT {order} FROM carried WHERE pool = ? ORDER BY ordinal"  # noqa: S608 - names of this module
        rows = (dict(zip(self.COLUMNS, row, strict=True)) for row in self._database.execute(query, (self.pool,)))
        return [PilotRow(**row | {"was_ready": bool(row["was_ready"])}) for row in rows]

    def put(self, row: PilotRow) -> None:
        """Record a pilot in place of the last one of its ordinal."""
        values = asdict(row)
        names, places = ", ".join(values), ", ".join("?" for _ in values)
        self._database.execute(
            f"INSERT OR REPLACE INTO carried ({names}) VALUES ({places})",  # noqa: S608 - names of this module
            tuple(values.values()),
        )
