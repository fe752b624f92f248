"""A restart with a great ledger is short, and what it reads is what there was."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.restart import best, fetch, rebuild
from gpulease_server.core.ledger import ENDED_KEPT, GpuRecord, Ledger
from gpulease_server.runtime.outage import twin
from gpulease_server.store.store import Store
from tests.core.build import World
from tests.store.great import ACTIVE, GPUS, great_ledger
from tests.store.test_store import busy_world

pytestmark = pytest.mark.xdist_group("machine")

RATIO = 12.0
"""Of the plain SELECT of the same rows, at most; bench/README.md has what it is on a quiet machine, and the seconds."""


def test_ten_thousand_gpus_are_there_again_within_a_second(tmp_path: Path) -> None:
    file = tmp_path / "great.db"
    store = Store(great_ledger(file))
    try:
        ledger = store.load()
        assert len(ledger.gpus) == GPUS
        assert sum(record.lease.state == "active" for record in ledger.leases.values()) == ACTIVE
        assert len(ledger.ended) == ENDED_KEPT
        ends = [ledger.leases[lease_id].lease.ended_at for lease_id in ledger.ended]
        assert None not in ends
        assert ends == sorted(ends), "not the oldest first"
        with store.engine.connect() as connection:
            newest = connection.exec_driver_sql(
                f"SELECT id FROM lease WHERE state = 'ended' ORDER BY ended_at DESC, number DESC LIMIT {ENDED_KEPT}"
            )
            assert set(ledger.ended) == set(newest.scalars())
        limit_s, took_s = best(lambda: fetch(file), 3), best(lambda: rebuild(store), 3)
        assert took_s < RATIO * limit_s, f"{took_s:.2f} s, where the rows alone take {limit_s:.2f} s"
    finally:
        store.close()


def test_a_copy_of_a_ledger_changes_alone() -> None:
    def parts(ledger: Ledger) -> dict[str, object]:
        return {name: repr(value) for name, value in vars(ledger).items()}

    world: World = busy_world()
    copy, before = twin(world.ledger), parts(world.ledger)
    assert parts(copy) == before
    for record in list(copy.leases.values()):
        copy._put_watch(record, over=True)
        if (record.number, record.lease.id) in copy.queue:
            copy.withdraw(record)
    for gpu in list(copy.gpus.values()):
        copy.apply(GpuRecord(device=gpu.device))
    copy.deadlines.clear()
    copy.keys.clear()
    assert parts(copy) != before
    assert parts(world.ledger) == before
