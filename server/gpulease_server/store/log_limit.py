"""Keeps the write-ahead log of an SQLite database short.

SQLite begins its log again from the beginning at a moment at which no one reads from it. Readers that overlap, such as
a few clients that list old leases in a loop, leave no such moment, and the log grows until the disk is full. So a log
over `LIMIT_BYTES` is copied to the database and cut off while no one writes; a reader that begins meanwhile reads the
database alone. That takes until those who read before have ended. Each time that the log has grown by `LIMIT_BYTES`,
turns wait for them, longer from one time to the next, at most `MAX_WAIT_S`; at other times nothing waits.

A program that reads for longer, such as a backup or `sqlite3` in a transaction, keeps the log until it ends.
"""

from __future__ import annotations

import logging
from pathlib import Path

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from gpulease_server.store.dialects import BUSY_S

log = logging.getLogger("gpulease.store")

LIMIT_BYTES = 64 * 2**20
"""SQLite begins the log again after some 4 MiB where it can."""
MAX_WAIT_S = 5.0
"""How long turns wait, at most; under `BUSY_S`, which other writers of this daemon wait."""


class LogLimit:
    """The limit of one log. Used from the thread that commits, between two turns.

    Args:
        engine: The database.
        file: Its write-ahead log.
    """

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine = engine
        self.file = file
        self._wait_from_bytes = LIMIT_BYTES
        """From this size on, the next attempt waits for readers."""

    def keep(self) -> None:
        """Cut a log off that is too long. Blocks. Raises nothing."""
        try:
            size_bytes = self.file.stat().st_size
            if size_bytes < LIMIT_BYTES:
                self._wait_from_bytes = LIMIT_BYTES
                return
            wait_s = min(size_bytes // LIMIT_BYTES, MAX_WAIT_S) if size_bytes >= self._wait_from_bytes else 0.0
            with self._engine.connect() as connection:
                is_cut = _cut_off(connection, wait_s)
        except (OSError, SQLAlchemyError):
            return  # there is no log, or the next commit says what is wrong
        if wait_s and not is_cut:
            self._wait_from_bytes = size_bytes + LIMIT_BYTES
            log.warning(
                "%s has %d MiB, and grows while another program reads the database, such as a backup or sqlite3",
                self.file,
                size_bytes // 2**20,
            )


def _cut_off(connection: Connection, wait_s: float) -> bool:
    """True if the log is empty now."""
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(wait_s * 1000)}")
    try:
        blocked, *_ = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {BUSY_S * 1000}")
    return not blocked
