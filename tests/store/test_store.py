"""What is written is what is read back, all of it or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from gpulease.model import LeaseState, NodeMode
from gpulease_server.core.happenings import Key
from gpulease_server.core.ledger import ENDED_KEPT, Ledger
from gpulease_server.runtime import clock
from gpulease_server.runtime.writer import start_anew
from gpulease_server.store.database import DatabaseUnusable, connect, migration_config, upgrade
from gpulease_server.store.store import Store, StoreFailed, is_stored
from gpulease_server.store.tables import metadata
from tests.core.build import World


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def store(url: str):
    upgrade(url)
    store = Store(url)
    yield store
    store.close()


def save(store: Store, world: World) -> None:
    """Write what the world has decided since the last time."""
    store.write([change for change in world.changes if is_stored(change)], world.ledger)
    world.changes.clear()


def lasting(ledger: Ledger) -> dict[str, object]:
    """The parts of a ledger that outlive a restart."""
    names = ("leases", "jobs", "gpus", "nodes", "keys", "queue", "watched", "next_number", "next_token", "next_seq")
    return {name: getattr(ledger, name) for name in names}


def busy_world() -> World:
    """Leases in every state, a job, a draining GPU, a cordoned one, a drained node, a key."""
    world = World().node("a", gpus=4).node("b", gpus=2)
    world.lease(2, key=Key(key="k", fingerprint="f"))
    world.release(world.lease(1))
    world.submit(1, umask=0o027, limits={"nofile": (64, -1)}, retries=2)
    world.lease(4)
    world.lease(1, owner=7)
    world.lease(1, ttl_s=0.5, gpu_model="H100")
    world.pass_time(1, silent=("b",))
    world.cordon(1, "b")
    world.set_mode(NodeMode.DRAINING, "b")
    return world


def test_a_ledger_is_read_back_as_it_was(store: Store) -> None:
    world = busy_world()
    save(store, world)
    assert lasting(store.load()) == lasting(world.ledger)


def test_turn_after_turn_is_read_back(store: Store) -> None:
    world = World().node(gpus=2)
    for _ in range(5):
        lease = world.lease(2)
        save(store, world)
        world.release(lease)
        save(store, world)
        world.report()
        save(store, world)
    assert lasting(store.load()) == lasting(world.ledger)


def test_after_a_restart_every_holder_has_a_full_ttl_and_draining_goes_on(store: Store) -> None:
    world = busy_world()
    save(store, world)
    ledger, now = store.load(), clock.now()
    start_anew(ledger, now)
    live = [record.lease for record in ledger.leases.values() if record.lease.state is not LeaseState.ENDED]
    assert {lease.id: now.mono_s + lease.ttl_s for lease in live if lease.job_id is None} == ledger.deadlines
    assert set(ledger.draining_since) == {gpu.device.uuid for gpu in ledger.gpus.values() if gpu.draining}


def test_numbers_are_not_used_again_although_their_rows_are_gone(store: Store) -> None:
    world = busy_world()
    save(store, world)
    with store.engine.begin() as connection:
        for table in ("lease", "job", "event"):
            connection.execute(text(f"DELETE FROM {table}"))
    ledger = store.load()
    assert (ledger.next_number, ledger.next_token, ledger.next_seq) == (
        world.ledger.next_number,
        world.ledger.next_token,
        world.ledger.next_seq,
    )


def test_a_turn_that_cannot_be_committed_leaves_nothing(store: Store) -> None:
    world = busy_world()
    save(store, world)
    before = lasting(store.load())
    with store.engine.begin() as connection:
        connection.execute(text("CREATE TRIGGER refuse BEFORE INSERT ON event BEGIN SELECT RAISE(ABORT, 'full'); END"))
    world.release(next(record.lease for record in world.ledger.leases.values() if record.lease.state == "active"))
    with pytest.raises(StoreFailed, match="full"):
        save(store, world)
    assert lasting(store.load()) == before


def test_a_commit_is_on_the_disk(store: Store) -> None:
    with store.engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2, "not FULL: a power cut could undo it"


def test_pages_come_newest_first_and_end(store: Store) -> None:
    world = World().node(gpus=8)
    ids = [world.lease().id for _ in range(5)]
    save(store, world)
    first = store.leases([], None, 2)
    second = store.leases([], first[-1].number, 2)
    third = store.leases([], second[-1].number, 2)
    assert [record.lease.id for page in (first, second, third) for record in page] == ids[::-1]
    assert store.leases(["ended"], None, 10) == []
    assert [event.seq for event in store.events(1, 2)] == [2, 3]


def test_what_is_no_longer_in_memory_is_still_found(store: Store) -> None:
    world = World().node(gpus=1)
    first = world.lease()
    world.release(first)
    for _ in range(ENDED_KEPT + 1):
        world.report()
        world.release(world.lease())
    save(store, world)
    assert first.id not in world.ledger.leases
    found = store.lease(first.id)
    assert found is not None
    assert found.lease.token == first.token
    assert len(store.load().ended) == ENDED_KEPT


def test_no_drift_between_migrations_and_the_tables_that_the_code_uses(url: str) -> None:
    upgrade(url)
    with connect(url).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_migrations_go_down_and_up_again(url: str) -> None:
    upgrade(url)
    engine = connect(url)
    with engine.begin() as connection:
        config = migration_config(url)
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        tables = connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'")).scalars().all()
        assert tables == ["alembic_version"]
    engine.dispose()
    upgrade(url)


def test_a_ledger_of_the_version_before_is_in_use_after_the_upgrade(url: str) -> None:
    engine = connect(url)
    with engine.begin() as connection:
        config = migration_config(url)
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.execute(text("INSERT INTO node (name, host, simulated) VALUES ('a', 'a', 0)"))
        device = '{"uuid": "GPU-1", "node": "a", "index": 0}'
        row = {"uuid": "GPU-1", "device": device, "draining": False, "token": 0}
        connection.execute(
            text("INSERT INTO gpu (uuid, device, draining, token) VALUES (:uuid, :device, :draining, :token)"), row
        )
    engine.dispose()
    upgrade(url)
    store = Store(url)
    ledger = store.load()
    store.close()
    assert ledger.nodes["a"].mode is NodeMode.ACTIVE
    assert ledger.gpus["GPU-1"].cordoned is False


def test_a_database_of_a_newer_version_is_refused(url: str) -> None:
    upgrade(url)
    engine = connect(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(DatabaseUnusable, match="9999"):
        upgrade(url)


def test_a_database_that_is_not_sqlite_is_refused_with_what_to_use() -> None:
    with pytest.raises(DatabaseUnusable, match="sqlite"):
        connect("mysql://localhost/x")
