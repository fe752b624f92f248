"""What is said of a database's URL, and how long anyone waits for a database."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psycopg
import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DatabaseError, DataError, DBAPIError, IntegrityError, OperationalError

from gpulease_protocol.model import Event
from gpulease_server.api.problems import expected_error
from gpulease_server.core.ledger import Ledger
from gpulease_server.serving import Serving
from gpulease_server.store import dialects, gpu_metrics_table, migrations, tables
from gpulease_server.store.database import (
    DatabaseUnusable,
    connect,
    database_file,
    migrate,
    parse_url,
    redacted,
    unusable_error,
    upgrade,
)
from gpulease_server.store.dialects import failure
from gpulease_server.store.gpu_metrics_table import BlockRow
from gpulease_server.store.ledger_store import Store, StoreFailed, is_stored
from gpulease_server.store.psycopg_timeout import TimeoutConnection
from tests.core.build import World
from tests.databases import PASSWORD, PostgresServer
from tests.ports import free_port

SHARED_MEMORY_FULL = 'could not resize shared memory segment "/PostgreSQL.7" to 8388608 bytes: No space left on device'


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_way_to_write_postgresql_is_psycopg(scheme: str) -> None:
    assert parse_url(f"{scheme}://u@h/d").drivername == "postgresql+psycopg"
    assert database_file(f"{scheme}://u@h/d") is None


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:s3cret@h/d",
        "postgresql://u@h/d?password=s3cret&sslmode=require",
        "postgresql://u@h/d?sslmode=require&password=s3cret",
        "postgresql://u:p%40s3cret@h:5432/d",
    ],
)
def test_a_password_is_not_shown(url: str) -> None:
    assert "s3cret" not in redacted(url)
    assert "@h" in redacted(url)


@pytest.mark.parametrize(
    "url",
    ["mysql://u:s3cret@localhost/x", "postgresql://u:s3cret@h:port/d", "nonsense s3cret", "postgresql+asyncpg://u@h/d"],
)
def test_what_cannot_be_used_is_refused_with_what_to_use(url: str) -> None:
    with pytest.raises(DatabaseUnusable) as refused:
        connect(url)
    assert "sqlite:///" in str(refused.value.remedy)
    assert "postgresql://" in str(refused.value.remedy)
    assert "s3cret" not in str(refused.value)


def test_a_database_that_another_process_is_making_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two daemons that start at once on a new file: SQLite refuses the second at once, whatever its timeout."""
    file = tmp_path / "ledger.db"
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waited = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _seconds: other.rollback())
    monkeypatch.setattr(dialects, "time", waited)
    upgrade(f"sqlite:///{file}")
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


def test_a_server_that_is_not_there_is_said_without_the_password() -> None:
    with pytest.raises(DatabaseUnusable) as refused:
        upgrade(f"postgresql://postgres:{PASSWORD}@127.0.0.1:{free_port()}/x")
    assert PASSWORD not in f"{refused.value} {refused.value.remedy}"
    assert "--database-url" in str(refused.value.remedy)


def test_a_password_with_special_characters_is_to_be_encoded() -> None:
    with pytest.raises(DatabaseUnusable) as refused:
        upgrade(f"postgresql://gl:{PASSWORD}@:/x@h/d")
    assert PASSWORD not in f"{refused.value} {refused.value.remedy}"
    assert "%40 for @" in str(refused.value.remedy)


def test_several_servers_are_named_as_the_error_says(postgres_url: str) -> None:
    server, _, database = postgres_url.rpartition("/")
    user, _, here = server.rpartition("@")
    with pytest.raises(DatabaseUnusable) as refused:
        upgrade(f"{user}@127.0.0.1:{free_port()},{here}/{database}")
    shown = str(refused.value.remedy)
    assert "?host=a:5432&host=b:5432&target_session_attrs=read-write." in shown
    upgrade(f"{user}@/{database}?host=127.0.0.1:{free_port()}&host={here}&target_session_attrs=read-write")


@pytest.mark.parametrize(
    ("url", "message", "remedy"),
    [
        ("sqlite:////tmp/x.db", "database or disk is full", "free some space"),
        ("sqlite:////tmp/x.db", "database is locked", "Another program has locked it"),
        ("sqlite:////tmp/x.db", "unable to open database file", "Check the path"),
        ("sqlite:////tmp/x.db", "disk I/O error", "a quota or `ulimit -f` is reached"),
        ("postgresql://h/d", 'password authentication failed for user "u"', "Check the user and the password"),
        ("postgresql://h/d", "fe_sendauth: no password supplied", "/etc/gpulease/environment"),
        ("postgresql://h/d", "permission denied for schema public", "OWNER TO"),
        ("postgresql://h/d", "permission denied for table writer", "Another user owns the tables"),
        ("postgresql://h/d", "must be owner of table lease", "Another user owns the tables"),
        ("postgresql://h/d", "no schema has been selected to create in", "RESET search_path"),
        ("postgresql://h/d", "transaction blocks not allowed in statement pooling mode", "pool_mode = session"),
        ("postgresql://h/d", "canceling statement due to statement timeout", "RESET statement_timeout"),
        ("postgresql://h/d", "canceling statement due to lock timeout", "such as pg_dump"),
        ("postgresql://h/d", 'could not extend file "base/5/1": No space left on device', "disk of the server is full"),
        ("postgresql://h/d", SHARED_MEMORY_FULL, "docker run --shm-size"),
        ("postgresql://h/d", 'FATAL:  database "gpulease" does not exist', "createdb"),
        ("postgresql://h/d", 'root certificate file "/root/.postgresql/root.crt" does not exist', "sslrootcert="),
        ("postgresql://h/d", 'server certificate for "db1" does not match host name "h"', "sslmode=verify-ca"),
        ("postgresql://h/d", 'FATAL:  role "gpulease" does not exist', "createuser"),
        ("postgresql://h/d", 'too many connections for role "gpulease"', "CONNECTION LIMIT"),
        ("postgresql://h/d", "sorry, too many clients already", "max_connections"),
        ("postgresql://h/d", "remaining connection slots are reserved", "max_connections"),
        ("postgresql://h/d", "cannot execute UPDATE in a read-only transaction", "primary server"),
        ("postgresql://h/d", "Connection refused", "Check that the server runs"),
    ],
)
def test_what_cannot_be_used_comes_with_what_to_do_about_it(url: str, message: str, remedy: str) -> None:
    assert remedy in unusable_error(url, OSError(message)).remedy


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ('could not extend file "base/5/1": No space left on device', "disk of the database server is full"),
        (SHARED_MEMORY_FULL, "docker run --shm-size"),
        ("canceling statement due to lock timeout", "Another program uses the tables"),
    ],
)
def test_a_failed_commit_is_logged_with_what_to_do_about_it(message: str, remedy: str) -> None:
    assert remedy in failure(OSError(message))


def test_a_file_on_a_full_disk_is_said_to_be_that_whatever_sqlite_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert "free some space" in unusable_error(f"sqlite:///{tmp_path}/x.db", OSError("disk I/O error")).remedy


def test_what_needs_a_damaged_file_is_no_bug_and_says_what_to_do(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    (tmp_path / "x.db").write_bytes(b"damaged" * 1000)

    def read() -> None:
        with connect(url).connect():
            pass

    with pytest.raises(DatabaseError) as failed:
        read()
    answer = expected_error(failed.value)
    assert answer is not None
    assert (answer.status, "restore a backup" in answer.remedy) == (503, True)
    assert "restore a backup" in failure(failed.value)
    unread = SimpleNamespace(url=url, recorder=SimpleNamespace(restore=read))
    with pytest.raises(DatabaseUnusable, match="not a database") as refused:
        Serving._restore(cast("Serving", unread))
    assert "Restore a backup" in refused.value.remedy
    assert expected_error(IntegrityError("", {}, ValueError("a bug"))) is None


def test_what_a_database_refuses_is_said_without_the_values(database_url: str) -> None:
    engine = connect(database_url)
    try:
        with engine.connect() as connection, pytest.raises(DBAPIError) as refused:
            connection.execute(text("INSERT INTO nowhere VALUES (:environment)"), {"environment": "s3cret"})
    finally:
        engine.dispose()
    assert "nowhere" in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_every_connection_has_its_bounds(postgres_url: str) -> None:
    engine = connect(postgres_url)
    names = (
        "lock_timeout",
        "statement_timeout",
        "idle_in_transaction_session_timeout",
        "synchronous_commit",
        "timezone",
    )
    with engine.connect() as connection:
        found = [connection.execute(text(f"SHOW {name}")).scalar() for name in names]
    engine.dispose()
    assert found == ["5s", "10s", "5s", "on", "UTC"]


@pytest.mark.parametrize(
    "default",
    ["datestyle = 'German'", "default_transaction_isolation = 'serializable'", "client_encoding = 'LATIN1'"],
)
def test_what_an_administrator_has_set_for_other_programs_does_no_harm(postgres: PostgresServer, default: str) -> None:
    url = postgres.database()
    postgres.execute(f"ALTER DATABASE {url.rsplit('/', 1)[1]} SET {default}")
    with closing(Store(url)) as one, closing(Store(url)) as other:
        one.write([Event(seq=1, at=datetime.now(UTC), kind="x", cause="x", reason="nähe 日")], Ledger(next_seq=2))
        with one.engine.begin() as first, other.engine.connect() as second:
            second.execute(text("SELECT * FROM writer"))
            first.execute(text("UPDATE writer SET name = 'a'"))
            first.commit()
            second.execute(text("UPDATE writer SET name = 'b'"))
        assert other.load().next_seq == 2
        (event,), _ = other.history(0, 10)
        assert event.reason == "nähe 日"
    postgres.drop(url)


def test_a_time_limit_of_transactions_ends_no_migration(postgres: PostgresServer) -> None:
    url = postgres.database()
    if int(postgres.execute("SHOW server_version_num")[0][0]) >= 170000:
        postgres.execute(f"ALTER DATABASE {url.rsplit('/', 1)[1]} SET transaction_timeout = '1s'")
    engine = connect(url)
    with dialects.schema_change(engine, 1, 60) as connection:
        assert connection.execute(text("SELECT 1 FROM pg_sleep(1.5)")).scalar() == 1
    engine.dispose()
    postgres.drop(url)


def test_a_migration_that_loses_its_connection_says_why(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(connection: Connection, *_: object) -> None:
        connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    monkeypatch.setattr(migrations, "run_migrations", lose)
    with pytest.raises(DatabaseUnusable, match="terminating connection due to administrator command"):
        migrate(postgres_url, "0033")


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_an_encoding_that_cannot_store_every_name_is_refused_with_what_to_do(
    postgres: PostgresServer, encoding: str
) -> None:
    postgres.execute(f"CREATE DATABASE narrow TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
    try:
        with pytest.raises(DatabaseUnusable, match=f"has the encoding {encoding}") as refused:
            upgrade(postgres.url("narrow"))
        assert "--encoding=UTF8" in str(refused.value.remedy)
    finally:
        postgres.drop(postgres.url("narrow"))


def test_a_commit_that_the_server_would_not_sync_is_synced_all_the_same(postgres: PostgresServer) -> None:
    url = postgres.database()
    name = url.rsplit("/", 1)[1]
    for setting, used in (("off", "on"), ("remote_apply", "remote_apply")):
        postgres.execute(f"ALTER DATABASE {name} SET synchronous_commit = {setting}")
        engine = connect(url)
        with engine.connect() as connection:
            assert connection.execute(text("SHOW synchronous_commit")).scalar() == used
        engine.dispose()
    postgres.drop(url)


def test_a_row_is_not_quoted_in_an_error(postgres_url: str) -> None:
    engine = connect(postgres_url)
    with pytest.raises(DBAPIError) as failed, engine.begin() as connection:
        connection.execute(text("INSERT INTO node (name, host) VALUES ('s3cret', 's3cret')"))
    assert "s3cret" not in dialects.error_message(failed.value)
    assert "not-null" in dialects.error_message(failed.value)
    engine.dispose()


def test_statements_of_a_pipeline_count_their_rows_and_fail_as_one(database_url: str) -> None:
    """Also where the server says only at the end that the first of them was refused."""
    engine = connect(database_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE pair (id INTEGER PRIMARY KEY, number INTEGER NOT NULL)")
    mark = ("(%(id)s, %(number)s)", "number = %(number)s WHERE id = %(id)s")
    if engine.dialect.name == dialects.SQLITE:
        mark = ("(:id, :number)", "number = :number WHERE id = :id")
    insert, update = f"INSERT INTO pair VALUES {mark[0]}", f"UPDATE pair SET {mark[1]}"
    with engine.begin() as connection, dialects.pipeline(connection):
        added = dialects.execute(connection, insert, [{"id": 1, "number": 1}, {"id": 2, "number": 2}])
        changed = dialects.execute(connection, update, [{"id": one, "number": 7} for one in (1, 2, 3)])
    assert (added.rowcount, changed.rowcount) == (2, 2)

    def add_twice() -> None:
        with engine.begin() as connection, dialects.pipeline(connection):
            dialects.execute(connection, insert, [{"id": 1, "number": 5}])
            dialects.execute(connection, insert, [{"id": 4, "number": 5}])

    with pytest.raises(IntegrityError) as refused:
        add_twice()
    assert "pair" in dialects.error_message(refused.value)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT id, number FROM pair ORDER BY id")).all() == [(1, 7), (2, 7)]
    engine.dispose()


def test_a_table_that_cannot_be_written_fails_the_write_beside_a_turn_as_in_one(database_url: str) -> None:
    store = Store(database_url)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE gpu_metrics RENAME TO away")
    for save in (
        lambda: gpu_metrics_table.save(store, {"lease": b"content"}),
        lambda: gpu_metrics_table.save_blocks(store, [BlockRow("GPU-1", 60, 0, b"content")]),
    ):
        with pytest.raises(StoreFailed, match="gpu_metrics"):
            save()
    store.close()


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("SELECT 1 / %(zero)s", "division by zero"),
        (
            "SELECT pg_terminate_backend(pg_backend_pid(), %(zero)s)",
            "terminating|closed the connection|is lost",
        ),
    ],
)
def test_a_turn_that_fails_in_the_middle_says_why_and_the_next_one_works(
    postgres_url: str, statement: str, why: str
) -> None:
    store = Store(postgres_url)
    world = World().node(gpus=2)
    store.write([change for change in world.changes if is_stored(change)], world.ledger)

    def fail() -> None:
        with store.writing() as connection, dialects.pipeline(connection):
            store.statements.delete(connection, tables.gpu, world.ledger.gpus)
            dialects.execute(connection, statement, [{"zero": 0}])
            store.statements.delete(connection, tables.node, world.ledger.nodes)

    for _ in range(2):
        with pytest.raises((StoreFailed, DataError), match=why):
            fail()
        found = store.load()
        assert (len(found.gpus), len(found.nodes)) == (2, 1)
        store.write([], found)
    store.close()


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        yield server.start()
    finally:
        server.close()


def test_a_server_that_stops_answering_is_given_up(own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = connect(own_server.database())
    with engine.connect() as connection:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        monkeypatch.setattr(TimeoutConnection, "wait_timeout_s", 1.0)
        own_server.signal(pid, signal.SIGSTOP)
        with pytest.raises(OperationalError, match="has not answered for 1 s"):
            connection.execute(text("SELECT 1"))
        own_server.signal(pid, signal.SIGCONT)
    engine.dispose()


def test_a_server_that_is_stopped_and_continued_is_used_again(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialects, "CONNECT_S", 5)
    store = Store(own_server.database())
    store.fence.take_over("only")
    ledger = store.load()
    with own_server.stopped():
        monkeypatch.setattr(TimeoutConnection, "wait_timeout_s", 1.0)
        with pytest.raises(StoreFailed, match=r"timeout|not answered"):
            store.write([], ledger)
    monkeypatch.setattr(TimeoutConnection, "wait_timeout_s", 20.0)
    monkeypatch.setattr(dialects, "CONNECT_S", 20)
    store.write([], store.load())
    store.close()


def test_a_server_that_was_restarted_is_used_again(own_server: PostgresServer) -> None:
    store = Store(own_server.database())
    store.fence.take_over("only")
    ledger = store.load()
    own_server.stop()
    with pytest.raises(StoreFailed):
        store.write([], ledger)
    own_server.start()
    store.write([], store.load())
    store.close()


def test_a_file_that_could_not_be_written_for_a_while_is_written_again(sqlite_url: str) -> None:
    file, store = database_file(sqlite_url), Store(sqlite_url)
    assert file is not None
    store.fence.take_over("only")
    ledger, is_read_only = store.load(), True

    def open_for_reading(*_: object) -> sqlite3.Connection | None:
        """As SQLite does where the file cannot be opened for writing."""
        return sqlite3.connect(f"file:{file}?mode=ro", uri=True) if is_read_only else None

    with closing(sqlite3.connect(file)) as other:
        other.execute("PRAGMA user_version").fetchall()  # the log and its index are there
        store.engine.dispose()
        event.listen(store.engine, "do_connect", open_for_reading)
        with pytest.raises(StoreFailed, match="readonly"):
            store.write([], ledger)
        is_read_only = False
        store.write([], store.load())
    store.close()


def test_psycopg_is_a_connection_of_ours(postgres_url: str) -> None:
    engine = connect(postgres_url)
    with engine.connect() as connection:
        assert isinstance(connection.connection.driver_connection, psycopg.Connection)
        assert isinstance(connection.connection.driver_connection, TimeoutConnection)
    engine.dispose()
