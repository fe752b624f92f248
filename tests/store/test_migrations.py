"""The schema: every migration up and down, with rows in it, on either database; and the same however it was reached."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text

from gpulease_protocol.model import NodeMode
from gpulease_server.runtime.leadership import lock, takeover
from gpulease_server.runtime.leadership.lock import AlreadyRunning, writer_lock
from gpulease_server.runtime.leadership.takeover import upgrade_alone
from gpulease_server.store.database import (
    DatabaseUnusable,
    connect,
    known_revisions,
    migrate,
    migrations_directory,
    revision_of,
    upgrade,
)
from gpulease_server.store.integrity_check import revisions
from gpulease_server.store.ledger_store import Store
from gpulease_server.store.migrations import differences
from tests.databases import PostgresServer
from tests.imported_program import CONTEXT

REVISIONS = [script.revision for script in ScriptDirectory(migrations_directory()).walk_revisions("base", "heads")][
    ::-1
]
AT = "'2026-11-01 12:00:00'"
DEVICE = '{"uuid": "GPU-1", "node": "a", "index": 0}'
ROWS = (
    "INSERT INTO node (name, host, simulated) VALUES ('a', 'a', false)",
    f"INSERT INTO gpu (uuid, device, lease_id, draining, token) VALUES ('GPU-1', '{DEVICE}', 'lease-1', false, 7)",
    "INSERT INTO lease (id, number, state, holder, demand, gpus, env, token, ttl_s, liveness, job_id, cause,"
    f" created_at) VALUES ('lease-1', 1, 'active', '{{\"user\": \"ada\"}}', '{{\"count\": 1}}', '[{DEVICE}]', '{{}}',"
    f" 7, 60, 'job', 'job-1', 'r', {AT})",
    "INSERT INTO job (id, number, name, state, lease_id, spec, gpus, grace_s, attempts, created_at)"
    f" VALUES ('job-1', 2, '', 'running', 'lease-1', '{{\"command\": [\"t.py\"], \"gpus\": 1}}', '[]', 35, 1, {AT})",
    f"INSERT INTO event (seq, at, kind, cause, gpus) VALUES (3, {AT}, 'lease.granted', 'r', '[]')",
    f"INSERT INTO idempotency_key (key, fingerprint, made, at) VALUES ('0:k', 'f', 'lease-1', {AT})",
    "INSERT INTO counter (name, value) VALUES ('token', 8)",
)


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    made = connect(empty_url)
    yield made
    made.dispose()


def shape(engine: Engine) -> dict[str, Any]:
    """Everything about the tables but the order of their columns."""
    looked, found = inspect(engine), {}
    for table in looked.get_table_names():
        if table == "alembic_version":
            continue
        columns = {
            column["name"]: (str(column["type"]), column["nullable"], str(column["default"]).strip("'").split("'::")[0])
            for column in looked.get_columns(table)
        }
        unique = {(item["name"], tuple(item["column_names"])) for item in looked.get_unique_constraints(table)}
        indexes = {
            (item["name"], tuple(item["column_names"]), bool(item["unique"]))
            for item in looked.get_indexes(table)
            if "duplicates_constraint" not in item
        }
        found[table] = (columns, looked.get_pk_constraint(table), unique, indexes)
    return found


def count(engine: Engine) -> dict[str, int]:
    """Rows in each of the first tables."""
    with engine.connect() as connection:
        names = [statement.split()[2] for statement in ROWS]
        return {name: connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in names}


def fill(engine: Engine) -> None:
    with engine.begin() as connection:
        for row in ROWS:
            connection.exec_driver_sql(row)


def test_the_names_of_the_migrations_tell_their_revisions() -> None:
    assert known_revisions() == REVISIONS


def migrate_from_the_first(url: str) -> None:
    """All migrations, which an empty database does without."""
    migrate(url, REVISIONS[0])
    upgrade(url)


def test_no_drift_between_migrations_and_the_tables_that_the_code_uses(empty_url: str, engine: Engine) -> None:
    migrate_from_the_first(empty_url)
    with engine.connect() as connection:
        assert differences(connection) == []


def test_no_drift_between_a_migrated_schema_and_a_fresh_one(empty_url: str, engine: Engine) -> None:
    upgrade(empty_url)
    fresh, first_rows = shape(engine), contents(engine)
    migrate(empty_url, "base")
    assert shape(engine) == {}
    migrate_from_the_first(empty_url)
    assert shape(engine) == fresh
    assert contents(engine) == first_rows
    assert first_rows["alembic_version"] == [{"version_num": REVISIONS[-1]}]
    assert len(first_rows["writer"]) == len(first_rows["pruned"]) == 1


def contents(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, but for when it was made."""
    with engine.connect() as connection:
        tables = inspect(connection).get_table_names()
        found = {name: connection.execute(text(f"SELECT * FROM {name}")).mappings().all() for name in tables}
    return {
        table: [{**row} | ({"since": None} if "since" in row else {}) for row in rows] for table, rows in found.items()
    }


def test_an_empty_schema_is_filled_again(empty_url: str, engine: Engine) -> None:
    upgrade(empty_url)
    migrate(empty_url, "base")
    upgrade(empty_url)
    store = Store(empty_url)
    store.write([], store.load())
    store.close()


def test_a_database_with_tables_of_something_else_is_left_alone(empty_url: str, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE job (id integer)"))
    with pytest.raises(DatabaseUnusable, match="already exists"):
        upgrade(empty_url)
    assert list(shape(engine)) == ["job"]


@pytest.mark.slow
def test_every_migration_goes_up_and_down_with_rows(empty_url: str, engine: Engine) -> None:
    migrate(empty_url, REVISIONS[0])
    fill(engine)
    rows, shapes = count(engine), {}
    for revision in REVISIONS[1:]:
        migrate(empty_url, revision)
        shapes[revision] = shape(engine)
        assert count(engine) == rows, revision
    for revision in REVISIONS[-2:0:-1]:
        migrate(empty_url, revision)
        assert shape(engine) == shapes[revision], revision
        assert count(engine) == rows, revision
    migrate(empty_url, "base")
    assert shape(engine) == {}
    upgrade(empty_url)


@pytest.mark.parametrize(
    ("reason", "before"), [("reclaimed_idle", "0031"), ("time_over", "0028"), ("budget_spent", "0017")]
)
def test_a_version_back_knows_every_reason_of_an_end(empty_url: str, engine: Engine, reason: str, before: str) -> None:
    migrate(empty_url, REVISIONS[0])
    fill(engine)
    upgrade(empty_url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE lease SET state = 'ended', end_reason = '{reason}', ended_at = {AT}"))
    migrate(empty_url, before)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT end_reason FROM lease")).scalar_one() == "expired"


def test_a_ledger_of_the_first_version_is_in_use_after_the_upgrade(empty_url: str, engine: Engine) -> None:
    migrate(empty_url, REVISIONS[0])
    fill(engine)
    upgrade(empty_url)
    store = Store(empty_url)
    ledger = store.load()
    store.write([], ledger)
    store.close()
    assert ledger.nodes["a"].mode is NodeMode.ACTIVE
    assert ledger.gpus["GPU-1"].cordoned is False
    assert ledger.leases["lease-1"].lease.fencing_token == 7
    assert ledger.live_jobs["job-1"].uid is None
    assert ledger.live_jobs["job-1"].job.user == "ada"
    assert ledger.next_token == 8


def test_a_migration_that_fails_leaves_the_schema_as_it_was(empty_url: str, engine: Engine) -> None:
    migrate(empty_url, "0001")
    before = shape(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE writer (id integer)"))  # in the way of the last migration
    with pytest.raises(DatabaseUnusable, match="writer"):
        upgrade(empty_url)
    with engine.begin() as connection:
        assert revision_of(connection) == "0001"
        connection.execute(text("DROP TABLE writer"))
    assert shape(engine) == before
    upgrade(empty_url)


def test_two_upgrades_at_once_both_succeed(empty_url: str, engine: Engine) -> None:
    both = [CONTEXT.Process(target=upgrade, args=(empty_url,)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
    assert [one.exitcode for one in both] == [0, 0]
    with engine.connect() as connection:
        assert revision_of(connection) == REVISIONS[-1]


def test_the_schema_is_not_upgraded_under_a_daemon_that_runs(database_url: str) -> None:
    with closing(writer_lock(database_url)) as daemon:
        assert daemon.try_acquire() is None
        upgrade_alone(database_url)  # nothing to do
        migrate(database_url, "0033")
        with pytest.raises(AlreadyRunning):
            upgrade_alone(database_url)
        assert revisions(database_url)[0] == "0033"
    upgrade_alone(database_url)
    assert revisions(database_url)[0] == known_revisions()[-1]


def test_no_daemon_takes_over_while_an_upgrade_takes_long(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older daemon would work with the schema that is being changed. The server ends an idle session with a lock."""
    monkeypatch.setattr(lock, "SESSION_TIMEOUT_S", 3.0)
    monkeypatch.setattr(lock, "PING_S", 0.1)
    begun, ending = threading.Event(), threading.Event()

    def migrating(_: str) -> None:
        begun.set()
        ending.wait(30)

    monkeypatch.setattr(takeover, "upgrade", migrating)
    migrate(postgres_url, "0033")
    upgrading = threading.Thread(target=upgrade_alone, args=(postgres_url,))
    upgrading.start()
    try:
        assert begun.wait(30)
        until_s = time.monotonic() + lock.SESSION_TIMEOUT_S + 2.0
        while time.monotonic() < until_s:
            with closing(writer_lock(postgres_url)) as daemon:
                assert daemon.try_acquire() is not None
    finally:
        ending.set()
        upgrading.join()


def test_a_database_of_a_newer_version_is_refused(database_url: str) -> None:
    engine = connect(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(DatabaseUnusable, match="9999"):
        upgrade(database_url)


def test_an_upgrade_does_not_wait_forever_for_a_table_in_use(postgres: PostgresServer) -> None:
    url = postgres.database(empty=True)
    migrate(url, "0006")
    with psycopg.connect(url) as reader:
        reader.execute("LOCK TABLE job IN ACCESS SHARE MODE")
        with pytest.raises(DatabaseUnusable, match="lock timeout"):
            migrate(url, "base")
    upgrade(url)
    postgres.drop(url)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"not a database, but long enough to have a header" * 100)
    with pytest.raises(DatabaseUnusable, match=r"not a database\. Restore a backup"):
        upgrade(f"sqlite:///{tmp_path / 'ledger.db'}")


@pytest.mark.parametrize("empty", [True, False])
def test_a_start_on_an_empty_database_and_on_the_newest_schema_imports_neither_alembic_nor_another_dialect(
    empty: bool, sqlite_url: str, tmp_path: Path
) -> None:
    """They would stay in the daemon's memory, 10 MiB and 3 MiB of it."""
    url = f"sqlite:///{tmp_path / 'empty.db'}" if empty else sqlite_url
    program = (
        "import sys, gpulease_server.main; from gpulease_server.store.database import upgrade; upgrade(sys.argv[1]);"
        " sys.exit(bool({'alembic', 'sqlalchemy.dialects.postgresql'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program, url], check=False).returncode == 0
