"""The differences between SQLite and PostgreSQL; everything else is the same SQLAlchemy Core for both.

PostgreSQL: every wait of a connection is bounded. `connect_timeout` for the first answer; `lock_timeout` and
`statement_timeout` at the server; `idle_in_transaction_session_timeout`, so that a client that was stopped in the
middle of a transaction does not keep its row locks; `psycopg_timeout` at the client, for a silent server.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
from sqlalchemy import URL, ColumnElement, Connection, Engine, ExceptionContext, create_engine, event, func
from sqlalchemy.exc import DBAPIError

from gpulease_protocol.codec import to_json

SQLITE, POSTGRESQL = "sqlite", "postgresql"
BUSY_S = 10
"""How long SQLite waits for another process's transaction."""
IO_ERROR = "disk I/O error"
"""SQLite's message for whatever the system refuses, but for a full disk."""
IO_REMEDY = "See whether a quota or `ulimit -f` is reached, and dmesg for errors of the disk."
SHARED_MEMORY = "shared memory segment"
"""PostgreSQL's message for a full /dev/shm also ends in "No space left on device"."""
SHARED_MEMORY_REMEDY = "The server has too little shared memory: give its container more (docker run --shm-size 1g)."
_REMEDIES = {
    IO_ERROR: IO_REMEDY,
    SHARED_MEMORY: SHARED_MEMORY_REMEDY,
    ": No space left on device": "The disk of the database server is full: free some space there.",
    "lock timeout": "Another program uses the tables, such as pg_restore: see pg_stat_activity on the server.",
}
"""What to do about a failed commit, by what the database says; on a full disk, SQLite says it in other words."""
DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
READ_ONLY = "25006"
"""PostgreSQL's code for a write in a session that only reads."""
PAUSE_S = 0.01
"""Between two attempts at what SQLite does not wait for."""
CONNECT_S = 5
"""How long PostgreSQL may take to answer a connection."""
LOCK_MS, STATEMENT_MS, IDLE_IN_TRANSACTION_MS = 5_000, 10_000, 5_000
"""How long PostgreSQL lets a statement wait for a lock and run, and a transaction wait for its next statement."""
POOL = {"pool_size": 10, "max_overflow": 10, "pool_timeout": 10, "pool_recycle": 1800, "pool_pre_ping": True}
"""Connections are tested before use, so that a restart of the server leaves no dead ones in the pool."""
READ_THREADS = 10
"""How many threads may read at a time: fewer than either pool has connections, so that the writer always finds one."""
KEEPALIVE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}
"""TCP options of libpq: a dead peer is noticed within about ten seconds."""

# `off` is not durable, so it becomes `on`; stronger settings of the administrator, such as remote_apply, stay.
# `transaction_timeout`, from version 17 on, would end a migration, or the reading of a large ledger, again and again.
_SESSION = f"""
SET lock_timeout = {LOCK_MS};
SET statement_timeout = {STATEMENT_MS};
SET idle_in_transaction_session_timeout = {IDLE_IN_TRANSACTION_MS};
SET timezone = 'UTC';
SET datestyle = 'ISO';
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';
SELECT set_config('transaction_timeout', '0', false) WHERE current_setting('transaction_timeout', true) <> '0';
"""


class Counted(Protocol):
    """What tells how many rows a statement has changed."""

    @property
    def rowcount(self) -> int: ...


def engine(url: URL, **options: Any) -> Engine:
    """An engine for either database, with connections set up as below. Connects to nothing yet.

    `options` go to `create_engine`. Its errors hide the values of statements, which include the environments of jobs.
    """
    options |= {"hide_parameters": True, "json_serializer": json_text}
    if url.get_backend_name() == SQLITE:
        made = create_engine(url, connect_args={"timeout": BUSY_S}, **options)
        event.listen(made, "connect", _prepare_sqlite)
        event.listen(made, "handle_error", _give_up_read_only)
        return made
    usual = {"connect_timeout": CONNECT_S, "application_name": "gpulease", "client_encoding": "utf8", **KEEPALIVE}
    arguments = {name: value for name, value in usual.items() if name not in url.query}
    made = create_engine(url, connect_args=arguments, isolation_level="READ COMMITTED", **{**POOL, **options})
    event.listen(made, "do_connect", _connect_postgresql)
    event.listen(made, "connect", _prepare_postgresql)
    event.listen(made, "handle_error", _leave_replica)
    return made


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    """WAL: readers do not wait for the writer. FULL: a commit is on the disk when it returns."""
    cursor = connection.cursor()
    _use_wal(cursor)
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _give_up_read_only(context: ExceptionContext) -> None:
    """SQLite opens a file that cannot be written for reading only, and the connection stays so when it can be written
    again: then the next one is new. Not before: each keeps a descriptor for as long as others are open."""
    is_read_only = getattr(context.original_exception, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY
    if is_read_only and context.engine is not None and os.access(str(context.engine.url.database), os.W_OK):
        context.is_disconnect = True


def _leave_replica(context: ExceptionContext) -> None:
    """A session that is read-only stays so, also after a failover: the next one may be at the new primary server."""
    if getattr(context.original_exception, "sqlstate", None) == READ_ONLY:
        context.is_disconnect = True


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """SQLite does not wait where another process is just making the same new database use WAL, so try again."""
    give_up_s = time.monotonic() + BUSY_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_s:
                raise
            time.sleep(PAUSE_S)
        else:
            return


def _connect_postgresql(_dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
    from gpulease_server.store.psycopg_timeout import TimeoutConnection  # noqa: PLC0415 - needs psycopg, which SQLite does without

    return TimeoutConnection.connect(*arguments, **options)


def _prepare_postgresql(connection: Any, _record: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_SESSION)
    connection.commit()


@contextmanager
def snapshot(engine: Engine) -> Iterator[Connection]:
    """A connection with snapshot isolation: all its reads show the same moment."""
    with engine.connect() as connection:
        if engine.dialect.name == SQLITE:
            connection.exec_driver_sql("BEGIN")  # sqlite3 begins no transaction for a SELECT
        else:
            connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        yield connection


@contextmanager
def schema_change(engine: Engine, lock: int, most_s: int) -> Iterator[Connection]:
    """A transaction that changes the schema, all or nothing, one at a time.

    It may take `most_s`, but waits for locks no longer than others, so that it does not block readers for long.
    """
    with engine.begin() as connection:
        if engine.dialect.name == SQLITE:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # sqlite3 begins no transaction for DDL
        else:
            connection.connection.driver_connection.wait_timeout_s = most_s + 10.0  # type: ignore[union-attr]
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = {most_s * 1000}")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({lock})")
        try:
            yield connection
        finally:
            if engine.dialect.name == POSTGRESQL and not connection.invalidated:
                connection.detach()  # its longer time-out must not return to the pool


@contextmanager
def pipeline(connection: Connection) -> Iterator[None]:
    """The statements that `execute` runs in the block are sent to PostgreSQL one behind the other, and their answers
    read at its end: a way there and back for all of them, not for each. SQLite has no way to go."""
    if connection.dialect.name == SQLITE:
        yield
        return
    driver: Any = connection.connection.driver_connection
    with _errors_of_driver(connection), driver.pipeline():
        yield


def execute(connection: Connection, text: str, rows: Sequence[Mapping[str, Any]]) -> Counted:
    """Run a statement of the driver for each of these parameters. How many rows it changed is known at the end of the
    `pipeline`, if it is in one."""
    if connection.dialect.name == SQLITE:
        return connection.exec_driver_sql(text, rows)
    with _errors_of_driver(connection):
        cursor = connection.connection.cursor()
        cursor.executemany(text, rows)
    return cursor


@contextmanager
def _errors_of_driver(connection: Connection) -> Iterator[None]:
    """Errors of psycopg become SQLAlchemy's, as in statements that SQLAlchemy runs.

    A connection that is lost is given up at once: to roll it back would fail as well, and say less.
    """
    driver = connection.connection.driver_connection
    database_errors = connection.dialect.loaded_dbapi.Error
    try:
        yield
    except database_errors as error:
        if connection.dialect.is_disconnect(error, driver, None):
            connection.invalidate(error)
        raise DBAPIError.instance(
            None, None, error, database_errors, hide_parameters=True, dialect=connection.dialect
        ) from error


def is_later_by(
    connection: Connection, moment: ColumnElement[Any], before: ColumnElement[Any], seconds: float
) -> ColumnElement[bool]:
    """That a time is at least so much later than another one; to the millisecond."""
    if connection.dialect.name == SQLITE:
        return (func.julianday(moment) - func.julianday(before)) * 86400.0 >= seconds - 0.0005
    return func.extract("epoch", moment - before) >= seconds


def transaction_time(engine: Engine) -> ColumnElement[Any]:
    """The present time, for a column of times; to the microsecond, of SQLite to the millisecond."""
    return func.strftime("%Y-%m-%d %H:%M:%f000", "now") if engine.dialect.name == SQLITE else func.now()


def json_text(value: Any) -> str:
    """The JSON text of a column: of a noun, several of them, or a dict.

    It is ASCII, which a PostgreSQL database of any encoding can store. Where msgspec does not make ASCII of it, `json`
    does, which is slower: it escapes every other character, and halves of surrogate pairs.
    """
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        encoded = b"\xff"
    return encoded.decode("ascii") if encoded.isascii() else json.dumps(value, default=to_json)


def error_message(error: BaseException) -> str:
    """The error of the database in one line. Without PostgreSQL's DETAIL, which may quote a whole row."""
    cause = getattr(error, "orig", None) or error
    primary = getattr(getattr(cause, "diag", None), "message_primary", None)
    return str(primary or cause or type(cause).__name__).strip().splitlines()[0]


def is_damaged(error: BaseException) -> bool:
    """True if an SQLite file cannot be read any more."""
    return getattr(getattr(error, "orig", None), "sqlite_errorcode", 0) & 0xFF in DAMAGED


def failure(error: BaseException) -> str:
    """As `error_message`; where the message does not say it, also what to do."""
    message = error_message(error)
    if is_damaged(error):  # no other attempt will succeed
        return f"{message}; restore a backup, see docs/databases.md"
    remedy = next((f". {one}" for words, one in _REMEDIES.items() if words in message), "")
    return message + remedy
