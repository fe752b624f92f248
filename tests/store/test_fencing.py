"""One writer: a superseded writer cannot commit one more row, whatever it still believes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, StaticPool, create_engine, event, text
from sqlalchemy.exc import InternalError, OperationalError

from gpulease_server.runtime.leadership.lock import (
    AdvisoryLock,
    AlreadyRunning,
    CannotLock,
    acquire_or_raise,
    writer_lock,
)
from gpulease_server.store import gpu_metrics_table
from gpulease_server.store.database import connect, parse_url
from gpulease_server.store.ledger_store import Store, StoreFailed, Superseded, is_stored
from tests.core.build import World
from tests.daemon import eventually
from tests.databases import PostgresServer

WITHIN_S = 30


def leases(url: str) -> int:
    engine = connect(url)
    with engine.connect() as connection:
        count = connection.execute(text("SELECT count(*) FROM lease")).scalar_one()
    engine.dispose()
    return int(count)


def write_lease(store: Store, world: World) -> None:
    world.lease()
    store.write([change for change in world.changes if is_stored(change)], world.ledger)
    world.changes.clear()


def test_a_writer_that_was_superseded_commits_nothing_more(database_url: str) -> None:
    told = threading.Event()
    first, second = Store(database_url, told.set), Store(database_url)
    world = World().node(gpus=8)
    first.fence.take_over("pid 1 on a")
    write_lease(first, world)
    assert second.fence.take_over("pid 2 on b") == 2
    before = second.load()
    with pytest.raises(Superseded, match="pid 2 on b"):
        write_lease(first, world)
    with pytest.raises(Superseded):
        gpu_metrics_table.save(first, {"lease": b"content"})
    with pytest.raises(Superseded):
        first.fence.check()
    assert told.is_set()
    assert second.load().leases == before.leases
    assert gpu_metrics_table.load(second.engine, ["lease"]) == {}
    second.write([], before)
    first.close()
    second.close()


def test_an_older_copy_of_the_database_is_no_successor(database_url: str) -> None:
    told = threading.Event()
    store, world = Store(database_url, told.set), World().node(gpus=8)
    store.fence.take_over("pid 1 on a")
    store.fence.take_over("pid 2 on b")
    write_lease(store, world)
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE writer SET term = 1, first_term = 1, name = 'pid 1 on a'"))
    with pytest.raises(StoreFailed, match="older than this daemon: pid 1 on a wrote to it last") as refused:
        write_lease(store, world)
    assert not isinstance(refused.value, Superseded)
    store.fence.check()
    assert not told.is_set(), "it ends, and its next start takes the older copy for the database"
    store.close()


def test_a_writer_of_the_same_term_in_an_older_copy_is_a_successor(database_url: str) -> None:
    """After a failover to a replica that lacks a takeover, the next writer gets the same number."""
    told = threading.Event()
    first, second = Store(database_url, told.set), Store(database_url)
    world = World().node(gpus=8)
    assert first.fence.take_over("pid 1 on gpulease-0") == 1
    write_lease(first, world)
    with second.engine.begin() as connection:
        connection.execute(text("UPDATE writer SET term = 0, first_term = 0, name = ''"))
        connection.execute(text("DELETE FROM lease"))
    assert second.fence.take_over("pid 1 on gpulease-0") == 1
    second.write([], second.load())
    with pytest.raises(Superseded):
        write_lease(first, world)
    with pytest.raises(Superseded):
        first.fence.check()
    first.fence._in_doubt = True
    with pytest.raises(Superseded):
        first.fence.resolve_in_doubt()
    assert told.is_set()
    assert leases(database_url) == 0
    second.write([], second.load())
    first.close()
    second.close()


def test_a_successor_waits_for_a_transaction_under_way_and_reads_what_it_wrote(postgres_url: str) -> None:
    first, second = Store(postgres_url), Store(postgres_url)
    world = World().node(gpus=8)
    first.fence.take_over("first")
    written, go_on, seen = threading.Event(), threading.Event(), []

    @event.listens_for(first.engine, "commit")
    def pause(_connection: object) -> None:
        written.set()
        assert go_on.wait(WITHIN_S)

    def take_over() -> None:
        second.fence.take_over("second")
        seen.append(len(second.load().leases))

    writing = threading.Thread(target=write_lease, args=(first, world))
    writing.start()
    assert written.wait(WITHIN_S)
    taking = threading.Thread(target=take_over)
    taking.start()
    eventually(lambda: waits_for_a_lock(second), WITHIN_S)
    assert seen == [], "the successor began although a transaction of the former writer was open"
    go_on.set()
    taking.join(WITHIN_S)
    writing.join(WITHIN_S)
    assert seen == [1]
    first.close()
    second.close()


def test_a_successor_is_not_kept_out_by_one_that_was_stopped_while_it_sent_a_statement(postgres_url: str) -> None:
    """The server waits for the rest of the message, and none of its time-outs counts meanwhile."""
    stopped = psycopg.connect(postgres_url, autocommit=True)
    successor = Store(postgres_url)
    try:
        wire = stopped.pgconn
        wire.enter_pipeline_mode()
        wire.send_query_params(b"BEGIN", None)
        wire.send_query_params(b"UPDATE writer SET term = term", None)
        wire.send_flush_request()
        wire.flush()
        eventually(lambda: has_changed_the_term(successor), WITHIN_S)
        with pytest.raises(OperationalError, match="lock timeout"):
            successor.fence.take_over("too polite")
        successor.fence.end_open_transaction()
        assert successor.fence.take_over("second") == 1
        successor.fence.end_open_transaction()  # there is no one
    finally:
        successor.close()
        stopped.close()


@pytest.mark.parametrize("own", [True, False], ids=["its own", "somebody else's"])
def test_only_a_session_of_its_own_that_was_cut_off_is_ended_by_who_reads_again(postgres_url: str, own: bool) -> None:
    """It waits for the rest of a message that never comes, when no time-out of the server counts."""
    store = Store(postgres_url)
    try:
        store.fence.take_over("only")
        connection: Any = store.engine.raw_connection() if own else psycopg.connect(postgres_url)
        cut_off = connection.cursor()
        cut_off.execute("SET idle_in_transaction_session_timeout = 0")
        cut_off.execute("UPDATE writer SET term = term")
        store.fence._in_doubt = True
        with pytest.raises(OperationalError, match="lock timeout"):
            store.fence.resolve_in_doubt()
        if own:
            store.fence.resolve_in_doubt()
            assert store.fence.term == 2
        else:
            with pytest.raises(OperationalError, match="lock timeout"):
                store.fence.resolve_in_doubt()
            cut_off.execute("SELECT 1")
        connection.close()
    finally:
        store.close()


def has_changed_the_term(store: Store) -> bool:
    """True if an open transaction has. Each look has a transaction of its own, because one shows what it saw first."""
    found = text("SELECT count(*) FROM writer w JOIN pg_stat_activity a ON a.backend_xid = w.xmax")
    with store.engine.connect() as connection:
        return connection.execute(found).scalar_one() == 1


def waits_for_a_lock(store: Store) -> bool:
    with store.engine.connect() as connection:
        return bool(connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar())


def test_a_transaction_in_doubt_is_over_before_the_ledger_is_read_again(postgres_url: str) -> None:
    """The client gave up on a statement that the server still works on: it must not take effect after the reading."""
    store = Store(postgres_url)
    store.fence.take_over("only")
    world = World().node(gpus=8)
    write_lease(store, world)
    late = psycopg.connect(postgres_url)  # the server's side of the transaction, that no one listens to any more
    proof = "UPDATE writer SET term = %s WHERE id = 1 AND term = %s"
    term = store.fence.term
    assert late.execute(proof, (term, term)).rowcount == 1
    late.execute("UPDATE lease SET ttl_s = 7777")
    store.fence._in_doubt = True
    found: list[float] = []
    reading = threading.Thread(
        target=lambda: found.extend(record.lease.ttl_s for record in store.load().leases.values())
    )
    reading.start()
    other = Store(postgres_url)
    eventually(lambda: waits_for_a_lock(other), WITHIN_S)
    assert found == []
    late.commit()
    reading.join(WITHIN_S)
    assert found == [7777]
    assert late.execute(proof, (term, term)).rowcount == 0, "a statement that comes later still is in term"
    late.close()
    write_lease(store, world)
    other.close()
    store.close()


def test_a_session_of_a_server_that_was_a_replica_is_left(postgres: PostgresServer, postgres_url: str) -> None:
    store = Store(postgres_url)
    store.fence.take_over("only")
    setting = f"ALTER DATABASE {postgres_url.rsplit('/', 1)[1]} SET default_transaction_read_only = "
    postgres.execute(f"{setting} on")
    store.engine.dispose()
    with pytest.raises(StoreFailed, match="read-only transaction"):
        store.write([], World().ledger)
    postgres.execute(f"{setting} off")
    with pytest.raises(InternalError, match="read-only transaction"):
        store.load()
    store.write([], store.load())
    store.close()


def test_a_failed_write_in_doubt_is_no_loss_of_the_database(database_url: str) -> None:
    store = Store(database_url)
    store.fence.take_over("only")
    world = World().node(gpus=8)
    write_lease(store, world)

    def fail(*_: object) -> None:
        event.remove(store.engine, "commit", fail)
        raise OperationalError("COMMIT", {}, Exception("cut off"))

    event.listen(store.engine, "commit", fail)
    with pytest.raises(StoreFailed, match=r"cut off\. Ask again"):
        write_lease(store, world)
    ledger = store.load()
    assert len(ledger.leases) == 1
    store.write([], ledger)
    store.close()


@pytest.mark.parametrize("url", ["sqlite", "postgresql"])
def test_a_second_lock_is_refused_and_says_who_has_it(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue("postgres_url") if url == "postgresql" else f"sqlite:///{tmp_path / 'x.db'}"
    first, second = writer_lock(place), writer_lock(place)
    acquire_or_raise(first)
    with pytest.raises(AlreadyRunning, match=r"pid [0-9]+") as refused:
        acquire_or_raise(second)
    assert "s3cret" not in str(refused.value)
    first.close()
    eventually(lambda: second.try_acquire() is None, WITHIN_S)
    second.close()


def test_a_lock_of_a_database_is_one_whatever_link_leads_to_it(tmp_path: Path) -> None:
    file, link = tmp_path / "gpulease.db", tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(file)
    first, second = writer_lock(f"sqlite:///{file}"), writer_lock(f"sqlite:///{link}")
    assert first.try_acquire() is None
    with pytest.raises(AlreadyRunning, match=r"gpulease\.db"):
        acquire_or_raise(second)
    first.close()


def test_locks_of_two_databases_of_one_server_do_not_meet(postgres: PostgresServer) -> None:
    urls = [postgres.database(empty=True) for _ in range(2)]
    locks = [writer_lock(url) for url in urls]
    for lock in locks:
        acquire_or_raise(lock)
    for lock, url in zip(locks, urls, strict=True):
        lock.close()
        postgres.drop(url)


def test_a_pooler_that_does_not_keep_sessions_is_refused(postgres: PostgresServer, postgres_url: str) -> None:
    """It gives two clients the same session, which gets its own lock as often as it asks."""
    lock = AdvisoryLock(postgres_url)
    lock._engine = create_engine(parse_url(postgres_url), poolclass=StaticPool)
    with pytest.raises(CannotLock, match="does not keep sessions"):
        lock.try_acquire()
    assert not lock.is_confirmed()
    eventually(lambda: not holders(postgres, postgres_url), WITHIN_S)
    lock.close()


def test_a_pooler_with_one_connection_is_told_to_have_more(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second client gets that connection when the server has ended the session with the lock."""
    lock = AdvisoryLock(postgres_url)
    at_once = lock._engine.connect

    def late() -> Connection:
        if holders(postgres, postgres_url):
            cut(postgres, postgres_url)
            eventually(lambda: not holders(postgres, postgres_url), WITHIN_S)
        return at_once()

    monkeypatch.setattr(lock._engine, "connect", late)
    with pytest.raises(CannotLock, match="took over 3 s") as refused:
        lock.try_acquire()
    assert "default_pool_size" in refused.value.remedy
    assert not lock.is_confirmed()
    eventually(lambda: not holders(postgres, postgres_url), WITHIN_S)
    lock.close()


def cut(postgres: PostgresServer, url: str) -> None:
    """End the session that has the lock, as a server does that restarts."""
    postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND database ="
        f" (SELECT oid FROM pg_database WHERE datname = '{url.rsplit('/', 1)[1]}')"
    )


def test_a_lock_that_was_cut_off_is_taken_again_by_its_holder(postgres: PostgresServer, postgres_url: str) -> None:
    store = Store(postgres_url)
    lock, other = AdvisoryLock(postgres_url), AdvisoryLock(postgres_url)
    acquire_or_raise(lock)
    store.fence.take_over("first")
    checks: list[None] = []

    def check() -> None:
        store.fence.check()
        checks.append(None)

    lock.keep_alive(check)
    for number in range(1, 4):
        before = holders(postgres, postgres_url)
        cut(postgres, postgres_url)
        # Of a new session: that which is cut off may have it for a moment longer.
        eventually(lambda: holders(postgres, postgres_url).isdisjoint(before), WITHIN_S)  # noqa: B023
        eventually(lambda: len(holders(postgres, postgres_url)) == 1, WITHIN_S)
        eventually(lambda: len(checks) >= 2 * number, WITHIN_S, lambda: "not checked before and after")  # noqa: B023
    assert other.try_acquire() is not None
    store.write([], store.load())
    lock.close()
    other.close()
    store.close()


def holders(postgres: PostgresServer, url: str) -> set[int]:
    """The sessions that have the lock of this database: one, or none."""
    name = url.rsplit("/", 1)[1]
    found = postgres.execute(
        "SELECT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
        f" WHERE locktype = 'advisory' AND granted AND datname = '{name}'"
    )
    return {int(row[0]) for row in found}


def test_a_writer_that_lost_the_lock_to_another_finds_out_without_writing(
    postgres: PostgresServer, postgres_url: str
) -> None:
    told = threading.Event()
    first, second = Store(postgres_url, told.set), Store(postgres_url)
    lock, other = AdvisoryLock(postgres_url), AdvisoryLock(postgres_url)
    acquire_or_raise(lock)
    first.fence.take_over("first")
    cut(postgres, postgres_url)
    eventually(lambda: other.try_acquire() is None, WITHIN_S)
    second.fence.take_over("second")
    lock.keep_alive(first.fence.check)
    assert told.wait(WITHIN_S)
    with pytest.raises(Superseded, match="second"):
        first.write([], first.load())
    lock.close()
    other.close()
    first.close()
    second.close()


def test_the_server_ends_the_session_of_a_holder_that_gives_no_sign_of_life(postgres_url: str) -> None:
    silent, other = AdvisoryLock(postgres_url), AdvisoryLock(postgres_url)
    acquire_or_raise(silent)  # and never kept
    eventually(lambda: other.try_acquire() is None, WITHIN_S)
    silent.close()
    other.close()
