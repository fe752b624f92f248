"""A backup is complete or absent, and what is wrong with a database is found."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import text

from gpulease_server.commands import database as commands
from gpulease_server.database_settings import default_database_url, sqlite_url
from gpulease_server.runtime.leadership.takeover import take_over, upgrade_alone
from gpulease_server.store import backup as backup_module
from gpulease_server.store import database, integrity_check
from gpulease_server.store.backup import COUNTER_SKIP, BackupFailed, backup
from gpulease_server.store.database import DatabaseUnusable, connect, migrate, upgrade
from gpulease_server.store.integrity_check import check_database, revisions
from gpulease_server.store.ledger_store import Store
from tests.core.build import World
from tests.databases import PASSWORD, PostgresServer
from tests.small_disk import mounted
from tests.store.test_ledger_store import busy_world, lasting, save

NEXT = ("next_number", "next_token", "next_seq")


def fill(url: str) -> World:
    store, world = Store(url), busy_world()
    save(store, world)
    store.close()
    return world


def run(url: str, *statements: str) -> None:
    engine = connect(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


@pytest.mark.parametrize(("uid", "remedy"), [(1000, "This is for its administrator"), (0, "Give the --database-url")])
def test_a_user_of_the_system_s_daemon_is_sent_to_its_administrator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, remedy: str
) -> None:
    monkeypatch.setattr(integrity_check, "has_system_socket", lambda: True)
    monkeypatch.setattr(integrity_check.os, "geteuid", lambda: uid)
    with pytest.raises(DatabaseUnusable) as refused:
        backup(f"sqlite:///{tmp_path / 'absent.db'}", tmp_path / "copy.db")
    assert refused.value.remedy.startswith(remedy)


def test_a_backup_has_everything_and_counts_on_from_further_up(sqlite_url: str, tmp_path: Path) -> None:
    world, file = fill(sqlite_url), tmp_path / "copy.db"
    backup(sqlite_url, file)
    assert file.stat().st_mode & 0o777 == 0o600
    copy = Store(f"sqlite:///{file}")
    found, kept = lasting(copy.load()), lasting(world.ledger)
    copy.close()
    assert [found.pop(name) for name in NEXT] == [kept.pop(name) + COUNTER_SKIP for name in NEXT]
    assert found == kept
    assert check_database(f"sqlite:///{file}") == []
    assert sorted(path.name for path in tmp_path.iterdir() if "copy" in path.name) == ["copy.db"]


def test_a_database_on_a_read_only_file_system_says_so_and_a_copy_of_its_files_works(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 2**24) as disk:
        url = sqlite_url(disk / "gpulease.db")
        upgrade(url)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        attempts = [lambda: revisions(url), lambda: check_database(url), lambda: backup(url, tmp_path / "copy.db")]
        for attempt in attempts:
            with pytest.raises(DatabaseUnusable, match=r"disk/gpulease\.db cannot be used") as refused:
                attempt()
            assert "Its file system is read-only" in refused.value.remedy
        copy = shutil.copy(disk / "gpulease.db", tmp_path / "copied.db")
    assert check_database(sqlite_url(copy)) == []


def test_a_database_of_another_user_says_who_can_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, error = tmp_path / "gpulease.db", sqlite3.OperationalError("unable to open database file")
    file.touch()
    monkeypatch.setattr(database.os, "access", lambda place, _mode: place != file)
    assert database.unusable_error(sqlite_url(file), error).remedy == "Check the path and its permissions."
    monkeypatch.setattr(database.os, "geteuid", lambda: file.stat().st_uid + 1)
    remedy = database.unusable_error(sqlite_url(file), error).remedy
    assert remedy == f"Run this as {file.owner()}, the owner of {file}."


@contextmanager
def busy_writer(url: str) -> Iterator[None]:
    """Leases come and go, each in transactions of its own."""
    store, world, done = Store(url), World().node(gpus=4), threading.Event()
    save(store, world)

    def write() -> None:
        while not done.is_set():
            world.release(world.lease(2))
            world.report()
            save(store, world)

    writing = threading.Thread(target=write)
    writing.start()
    try:
        yield
    finally:
        done.set()
        writing.join(60)
        store.close()


def test_a_check_while_a_writer_writes_is_of_one_moment(database_url: str) -> None:
    with busy_writer(database_url):
        for _ in range(8):
            assert [finding for finding in check_database(database_url) if "fsync" not in finding] == []


def test_a_backup_while_a_writer_writes_is_of_one_moment(sqlite_url: str, tmp_path: Path) -> None:
    with busy_writer(sqlite_url):
        for number in range(5):
            backup(sqlite_url, tmp_path / f"{number}.db")  # which looks through what it made
    seqs = []
    for number in range(5):
        with sqlite3.connect(tmp_path / f"{number}.db") as copy:
            count, last = copy.execute("SELECT count(*), max(seq) FROM event").fetchone()
        copy.close()
        assert count == last, "an event is missing"
        seqs.append(last)
    assert seqs == sorted(seqs)


def test_a_backup_can_be_made_before_an_upgrade(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url)
    migrate(sqlite_url, "0033")
    file = tmp_path / "copy.db"
    backup(sqlite_url, file)
    assert revisions(f"sqlite:///{file}")[0] == "0033"
    upgrade(f"sqlite:///{file}")
    assert check_database(f"sqlite:///{file}") == []


def test_an_upgraded_backup_has_a_log_of_its_own(sqlite_url: str, tmp_path: Path) -> None:
    """Otherwise the next start takes that log, after a crash, for one of another database."""
    fill(sqlite_url)
    migrate(sqlite_url, "0033")
    file = tmp_path / "copy.db"
    backup(sqlite_url, file)
    upgrade_alone(f"sqlite:///{file}")
    with closing(sqlite3.connect(file)) as other:
        other.execute("PRAGMA journal_mode = wal")
        other.execute("UPDATE counter SET value = value + 1")
        other.commit()
        assert file.with_name("copy.db-wal").stat().st_size > 0
        assert check_database(f"sqlite:///{file}") == []


def test_a_backup_beside_the_log_of_a_database_that_crashed_is_not_destroyed(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url)
    copy = tmp_path / "copy.db"
    backup(sqlite_url, copy)
    for name in ("db", "db-wal"):
        shutil.copyfile(copy, tmp_path / f"restored.{name}")  # what the log has in it is not looked at
    restored = f"sqlite:///{tmp_path / 'restored.db'}"
    store = Store(restored)
    for use in (check_database, revisions, upgrade_alone, lambda url: take_over(store, url)):
        with pytest.raises(DatabaseUnusable, match="the log beside it") as refused:
            use(restored)
        assert "Move restored.db-wal and restored.db-shm away" in refused.value.remedy
    assert (tmp_path / "restored.db").read_bytes() == copy.read_bytes()
    (tmp_path / "restored.db-wal").unlink()
    take_over(store, restored)
    store.write([], store.load())
    assert (tmp_path / "restored.db-wal").stat().st_size > 0, "it is not closed, as after a crash"
    take_over(store, restored)
    store.close()


@pytest.mark.parametrize("is_there", [True, False])
def test_the_log_of_a_lost_database_is_not_deleted(tmp_path: Path, is_there: bool) -> None:
    lost, its_log = tmp_path / "lost.db", tmp_path / "lost.db-wal"
    if is_there:
        lost.touch()
    its_log.write_bytes(b"the last leases")
    url = f"sqlite:///{lost}"
    with closing(Store(url)) as store:
        for use in (upgrade_alone, lambda url: take_over(store, url)):
            with pytest.raises(DatabaseUnusable, match="missing or empty") as refused:
                use(url)
            assert "move lost.db-wal and lost.db-shm away" in refused.value.remedy
    assert its_log.read_bytes() == b"the last leases"
    assert lost.exists() == is_there


def test_what_a_newer_version_wrote_is_left_to_it(sqlite_url: str) -> None:
    fill(sqlite_url)
    run(sqlite_url, "UPDATE alembic_version SET version_num = '9999'")
    [finding] = check_database(sqlite_url)
    assert "run the newer gpulease" in finding
    ran = subprocess.run(
        [sys.executable, "-m", "gpulease_cli", "db", "current", "--database-url", sqlite_url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "db upgrade" not in ran.stdout
    assert "use the gpulease that wrote it" in ran.stdout


def test_a_backup_never_writes_over_a_file(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url)
    (tmp_path / "copy.db").write_text("precious")
    with pytest.raises(BackupFailed, match="already"):
        backup(sqlite_url, tmp_path / "copy.db")
    assert (tmp_path / "copy.db").read_text() == "precious"


@pytest.mark.parametrize("step", ["_copy", "_sync"])
def test_a_backup_that_fails_leaves_nothing(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    fill(sqlite_url)
    (tmp_path / "backups").mkdir()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backup_module, step, fail)
    with pytest.raises(BackupFailed, match="No space"):
        backup(sqlite_url, tmp_path / "backups" / "copy.db")
    assert list((tmp_path / "backups").iterdir()) == []


def test_a_backup_on_a_full_disk_says_so_and_leaves_nothing(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url)
    with mounted(tmp_path / "disk", 2**16) as disk:
        with pytest.raises(BackupFailed, match="disk is full") as refused:
            backup(sqlite_url, disk / "copy.db")
        assert str(refused.value.remedy).endswith("its free space.")
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize("name", ["a?b", "a%20b", "a b", "ä#@:b", "a&b=c"])
def test_a_directory_may_have_any_name(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    place.mkdir()
    url = default_database_url(place)
    upgrade(url)
    fill(url)
    backup(url, place / f"{name}.db")
    assert {file.name for file in place.iterdir()} == {"gpulease.db", f"{name}.db"}
    assert list(tmp_path.iterdir()) == [place]
    assert check_database(sqlite_url(place / f"{name}.db")) == []


def test_a_backup_of_a_wrong_ledger_is_refused(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url)
    run(sqlite_url, "UPDATE counter SET value = 1")
    with pytest.raises(BackupFailed, match="db check"):
        backup(sqlite_url, tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()


def test_what_is_not_there_is_not_made(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'none.db'}"
    for call in (lambda: backup(url, tmp_path / "copy.db"), lambda: check_database(url), lambda: revisions(url)):
        with pytest.raises(DatabaseUnusable, match="does not exist"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_postgresql_is_backed_up_as_the_refusal_says(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    world = fill(postgres_url)
    with pytest.raises(BackupFailed) as refused:
        backup(postgres_url, tmp_path / "copy.dump")
    assert PASSWORD not in str(refused.value.remedy)
    words = str(refused.value.remedy).split(", and ")[0].replace("'", "").split()
    copy = postgres.database(empty=True)
    for command in (words, ["pg_restore", f"--dbname={copy}", str(tmp_path / "copy.dump")]):
        subprocess.run([str(postgres.binaries / command[0]), *command[1:]], check=True, capture_output=True, timeout=60)
    store = Store(copy)
    assert lasting(store.load()) == lasting(world.ledger)
    store.close()
    postgres.drop(copy)


def test_nothing_is_wrong_with_what_a_writer_has_written(database_url: str) -> None:
    fill(database_url)
    assert [finding for finding in check_database(database_url) if "fsync" not in finding] == []


ACTIVE = "(SELECT max(id) FROM lease WHERE state = 'active')"
WRONG = {
    "a GPU is held by no one's lease": (f"UPDATE lease SET state = 'ended' WHERE id = {ACTIVE}", "is not active"),
    "an active lease has lost its GPU": (f"UPDATE gpu SET lease_id = NULL WHERE lease_id = {ACTIVE}", "holds no GPU"),
    "the token of a GPU is another": (f"UPDATE gpu SET token = 0 WHERE lease_id = {ACTIVE}", "has token 0"),
    "the next token is in use": ("UPDATE counter SET value = 1 WHERE name = 'token'", "next token would be 1"),
    "the next number is missing": ("DELETE FROM counter WHERE name = 'number'", "next number would be missing"),
    "the next seq is in use": ("UPDATE counter SET value = 2 WHERE name = 'seq'", "next seq would be 2"),
    "the row of the writer is gone": ("DELETE FROM writer", "0 rows"),
    "an index is gone": ("DROP INDEX ix_lease_state", "ix_lease_state"),
    "a column is gone": ("ALTER TABLE job DROP COLUMN uid", "uid"),
    "the schema is older": ("UPDATE alembic_version SET version_num = '0001'", "0001"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_found(database_url: str, case: str) -> None:
    statement, said = WRONG[case]
    fill(database_url)
    run(database_url, statement)
    assert [finding for finding in check_database(database_url) if said in finding], check_database(database_url)


def test_a_gpu_in_two_active_leases_is_found(database_url: str) -> None:
    world = fill(database_url)
    active = [one.lease for one in world.ledger.leases.values() if one.lease.state == "active"]
    assert len(active) > 1, "the world has too few leases for this test"
    gpus = json.dumps([{"uuid": active[0].gpus[0].uuid, "node": "a", "index": 0}])
    run(database_url, f"UPDATE lease SET gpus = '{gpus}' WHERE id = '{active[1].id}'".replace(":", "\\:"))
    assert [finding for finding in check_database(database_url) if "2 active leases" in finding]


def test_a_damaged_file_is_found(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url)
    file = tmp_path / "ledger.db"
    content = bytearray(file.read_bytes())
    content[4096 * 3 : 4096 * 6] = b"\xaa" * 4096 * 3
    file.write_bytes(content)
    assert check_database(sqlite_url)


def test_a_check_leaves_the_locks_of_its_own_process(tmp_path: Path) -> None:
    """Without them another program that closes the database removes the log that this one writes to."""
    url = f"sqlite:///{tmp_path / 'gpulease.db'}"
    upgrade(url)
    engine = connect(url)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA user_version = 7")
        assert check_database(url) == []
        closes = "import sqlite3, sys; a = sqlite3.connect(sys.argv[1]); print(*a.execute(sys.argv[2])); a.close()"
        command = [sys.executable, "-c", closes, tmp_path / "gpulease.db", "PRAGMA user_version"]
        subprocess.run(command, check=True, timeout=60)
        assert (tmp_path / "gpulease.db-wal").exists()
    engine.dispose()


@pytest.mark.parametrize(
    ("uid", "options", "looks_at"),
    [(0, [], 'database "ledger"'), (0, ["--data-dir", "."], "gpulease.db"), (1000, [], "gpulease.db")],
)
def test_root_looks_at_the_database_of_the_service(
    postgres: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    options: list[str],
    looks_at: str,
) -> None:
    """A ledger that has moved to PostgreSQL leaves an SQLite file behind, and a backup of that is useless."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "GPULEASE" not in name})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "environment").write_text(f'# of the unit\nGPULEASE_DATABASE_URL="{postgres.url("ledger")}"\nPGX=a=b\n')
    monkeypatch.setattr(commands, "SERVICE_ENVIRONMENT", tmp_path / "environment")
    monkeypatch.setattr(commands, "default_data_dir", lambda: tmp_path)
    monkeypatch.setattr(integrity_check, "has_system_socket", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    refused = CliRunner().invoke(commands.db, ["check", *options]).exception
    assert isinstance(refused, DatabaseUnusable)
    assert f"{looks_at}{chr(34) if looks_at == 'ledger' else ''} does not exist" in str(refused)
    assert os.environ.get("PGX") == ("a=b" if looks_at.startswith("database") else None)
