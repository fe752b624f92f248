"""What SQLite and PostgreSQL must be told differently; all else is the same SQLAlchemy Core for both.

PostgreSQL: every connection has a bound on each wait. `connect_timeout` for the first answer; `lock_timeout` and
`statement_timeout` at the server; `idle_in_transaction_session_timeout`, so that a client that was stopped in the
middle of a transaction does not keep its row locks; `patience` at the client, for a server that says nothing at all.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event
from sqlalchemy.dialects import postgresql, sqlite

SQLITE, POSTGRESQL = "sqlite", "postgresql"
BUSY_S = 10
"""How long SQLite waits for another process's transaction."""
CONNECT_S = 5
"""How long PostgreSQL may take to answer a connection."""
LOCK_MS, STATEMENT_MS, IDLE_IN_TRANSACTION_MS = 5_000, 10_000, 5_000
"""How long PostgreSQL lets a statement wait for a lock and run, and a transaction wait for its next statement."""
POOL = {"pool_size": 10, "max_overflow": 10, "pool_timeout": 10, "pool_recycle": 1800, "pool_pre_ping": True}
"""Connections are tried before use: after a restart of the server nobody is handed one that is dead."""
KEEPALIVE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}
"""What libpq sets on TCP, so that a peer that is gone is noticed within about ten seconds."""

# Only `off` makes a commit less than durable here; what is stronger, such as remote_apply, is the administrator's.
_SESSION = f"""
SET lock_timeout = {LOCK_MS};
SET statement_timeout = {STATEMENT_MS};
SET idle_in_transaction_session_timeout = {IDLE_IN_TRANSACTION_MS};
SET timezone = 'UTC';
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';
"""


def engine(url: URL, **options: Any) -> Engine:
    """An engine for either database, whose connections are prepared. Connects to nothing yet.

    `options` go to `create_engine`. What it raises does not say with which values: the environments of jobs are among
    them.
    """
    options["hide_parameters"] = True
    if url.get_backend_name() == SQLITE:
        made = create_engine(url, connect_args={"timeout": BUSY_S}, **options)
        event.listen(made, "connect", _prepare_sqlite)
        return made
    usual = {"connect_timeout": CONNECT_S, "application_name": "gpulease", **KEEPALIVE}
    arguments = {name: value for name, value in usual.items() if name not in url.query}
    made = create_engine(url, connect_args=arguments, **{**POOL, **options})
    event.listen(made, "do_connect", _connect_postgresql)
    event.listen(made, "connect", _prepare_postgresql)
    return made


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    """WAL lets readers read while the writer commits; FULL makes a commit mean that it is on the disk."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _connect_postgresql(_dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
    from .patience import PatientConnection  # noqa: PLC0415 - needs psycopg, which SQLite does without

    return PatientConnection.connect(*arguments, **options)


def _prepare_postgresql(connection: Any, _record: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_SESSION)
    connection.commit()


@contextmanager
def snapshot(engine: Engine) -> Iterator[Connection]:
    """A connection all of whose reads show one moment, whatever is committed meanwhile."""
    with engine.connect() as connection:
        if engine.dialect.name == SQLITE:
            connection.exec_driver_sql("BEGIN")  # sqlite3 begins none for a SELECT
        else:
            connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        yield connection


@contextmanager
def schema_change(engine: Engine, lock: int, most_s: int) -> Iterator[Connection]:
    """A transaction that changes the schema, whole or not at all, and one at a time.

    It may take `most_s`, but waits no longer than others for a lock, so that it does not hold up readers for long.
    """
    with engine.begin() as connection:
        if engine.dialect.name == SQLITE:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # sqlite3 begins none for DDL
        else:
            connection.connection.driver_connection.patience_s = most_s + 10.0  # type: ignore[union-attr]
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = {most_s * 1000}")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({lock})")
        try:
            yield connection
        finally:
            if engine.dialect.name == POSTGRESQL:
                connection.detach()  # with its patience


def upsert(connection: Connection, table: Table, key: str) -> Any:
    """An insert that writes over the row with the same key."""
    insert = sqlite.insert if connection.dialect.name == SQLITE else postgresql.insert
    statement = insert(table)
    changed = {column.name: statement.excluded[column.name] for column in table.columns if not column.primary_key}
    return statement.on_conflict_do_update(index_elements=[key], set_=changed)


def why(error: BaseException) -> str:
    """What the database says in one line. Not PostgreSQL's DETAIL, which may quote a whole row."""
    cause = getattr(error, "orig", None) or error
    primary = getattr(getattr(cause, "diag", None), "message_primary", None)
    return str(primary or cause or type(cause).__name__).strip().splitlines()[0]


def file_of(connection: Connection) -> sqlite3.Connection:
    """The driver's own connection of an SQLite database."""
    own: sqlite3.Connection = connection.connection.driver_connection  # type: ignore[assignment]
    return own
