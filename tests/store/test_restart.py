"""A restart with a great ledger is short, and what it reads is what there was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pprint import pformat

import pytest

from gpulease_protocol.model import Lease, LeaseState
from gpulease_server.core.lease_index import put_watch
from gpulease_server.core.ledger import MAX_ENDED_IN_MEMORY, Ledger
from gpulease_server.core.records import GpuRecord
from gpulease_server.runtime.outage import copy_ledger, reset_deadlines
from gpulease_server.store.database import upgrade
from gpulease_server.store.ledger_store import Store
from tests.core.build import World
from tests.store.large_ledger import ACTIVE, GPUS, large_ledger
from tests.store.test_ledger_store import busy_world, save

pytestmark = [pytest.mark.slow, pytest.mark.alone]

RATIO = 18.0
"""Of the plain SELECT of the same rows, at most; bench/README.md has what it is on a quiet machine, and the seconds."""
RESTART = """
import sys
from pathlib import Path
from pprint import pformat
from bench.restart import best, fetch, rebuild
from gpulease_server.store.ledger_store import Store
file = Path(sys.argv[1])
store = Store(f"sqlite:///{file}")
print(best(lambda: fetch(file), 3), best(lambda: rebuild(store), 3))
"""
"""In a process of its own, as a restart is: in one full of other tests the garbage collector takes most of the time."""


def test_ten_thousand_gpus_are_there_again_within_a_second(tmp_path: Path) -> None:
    file = tmp_path / "great.db"
    store = Store(large_ledger(file))
    try:
        ledger = store.load()
        assert len(ledger.gpus) == GPUS
        assert sum(record.lease.state == "active" for record in ledger.leases.values()) == ACTIVE
        assert len(ledger.ended_leases) == MAX_ENDED_IN_MEMORY
        ends = [ledger.leases[lease_id].lease.ended_at for lease_id in ledger.ended_leases]
        assert None not in ends
        assert ends == sorted(ends), "not the oldest first"
        with store.engine.connect() as connection:
            newest = connection.exec_driver_sql(
                f"SELECT id FROM lease WHERE state = 'ended' ORDER BY ended_at DESC, number DESC "
                f"LIMIT {MAX_ENDED_IN_MEMORY}"
            )
            assert set(ledger.ended_leases) == set(newest.scalars())
    finally:
        store.close()
    limit_s, took_s = map(float, subprocess.check_output([sys.executable, "-c", RESTART, file], text=True).split())
    assert took_s < RATIO * limit_s, f"{took_s:.2f} s, where the rows alone take {limit_s:.2f} s"


def test_a_copy_of_a_ledger_changes_alone() -> None:
    def parts(ledger: Ledger) -> dict[str, object]:
        # Not by `repr`: the copy of a set may have another order.
        return {name: pformat(value, sort_dicts=False) for name, value in vars(ledger).items()}

    world: World = busy_world()
    copy, before = copy_ledger(world.ledger), parts(world.ledger)
    assert parts(copy) == before
    assert {name: type(value) for name, value in vars(copy).items()} == {
        name: type(value) for name, value in vars(world.ledger).items()
    }
    for record in list(copy.leases.values()):
        put_watch(copy.watched_owners, record, withdrawn=True)
        if (record.arrival, record.lease.id) in copy.queue:
            copy.withdraw(record)
    for gpu in list(copy.gpus.values()):
        copy.apply(GpuRecord(device=gpu.device))
    copy.deadlines.clear()
    copy.keys.clear()
    assert parts(copy) != before
    assert parts(world.ledger) == before


def test_after_a_restart_nothing_is_granted_of_a_node_that_has_not_reported(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    upgrade(url)
    store = Store(url)
    before = World().node("a", gpus=2).node("b", gpus=2)
    save(store, before)
    world = World(ledger=store.load(), nodes=before.nodes, at_s=before.at_s)
    store.close()
    reset_deadlines(world.ledger, world.now)

    def node_of(call: str) -> str | None:
        lease = world.answers[call]
        assert isinstance(lease, Lease)
        current = world.ledger.leases[lease.id].lease
        return current.gpus[0].node if current.state is LeaseState.ACTIVE else None

    first = world.ask(1)
    assert node_of(first) is None, "no node has reported"
    world.report("b")
    second = world.ask(2)
    assert (node_of(first), node_of(second)) == ("b", None)
    world.report("a")
    assert (node_of(first), node_of(second)) == ("b", "a")
