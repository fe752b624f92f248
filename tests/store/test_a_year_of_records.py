"""A year goes by, and the database is as great as after two months."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from gpulease_server.store.database import upgrade
from gpulease_server.store.integrity_check import check_database
from gpulease_server.store.ledger_store import Store
from gpulease_server.store.retention import ALWAYS_KEPT, RetentionLimits
from tests.store.old_records import NOW, count, ended_lease, event, job, metrics, prune, put
from tests.store.test_ledger_store import busy_world, lasting, save

pytestmark = [pytest.mark.slow, pytest.mark.busy("compute")]

WEEKS = 52
FULL = 12
"""Weeks after which nothing grows any more."""


@pytest.mark.parametrize(
    "each", [pytest.param(500, id="52000-leases"), pytest.param(4000, id="416000-leases", marks=pytest.mark.soak)]
)
def test_the_file_does_not_grow_over_a_year(tmp_path: Path, each: int) -> None:
    url = f"sqlite:///{tmp_path / 'year.db'}"
    upgrade(url)
    store = Store(url)
    world = busy_world()
    save(store, world)
    before = lasting(store.load())
    # By age two months of leases; by count three weeks of events.
    keep = RetentionLimits(age_s=timedelta(weeks=8).total_seconds(), ended=100 * each, events=12 * each)
    sizes, rows = [], []
    for week in range(WEEKS):
        a_week(store, week, each)
        prune(store, keep, NOW + timedelta(weeks=week + 1))
        sizes.append(size_of(tmp_path))
        rows.append(count(store))
    told = f"MiB after each week: {[round(size / 2**20, 1) for size in sizes]}; rows at the end: {rows[-1]}"
    print(told)
    assert max(sizes) <= 1.15 * max(sizes[:FULL]), told
    for week in range(FULL, WEEKS):
        assert rows[week]["lease"] <= 8 * 2 * each + ALWAYS_KEPT + len(world.ledger.leases), told
        assert rows[week]["event"] == max(12 * each, ALWAYS_KEPT)
    after = lasting(store.load())
    assert {name: after[name] for name in ("gpus", "nodes", "keys", "queue")} == {
        name: before[name] for name in ("gpus", "nodes", "keys", "queue")
    }
    page, _ = store.leases(["ended"], None, 100)
    assert [one.number for one in page] == sorted((one.number for one in page), reverse=True)
    assert page[0].lease.ended_at is not None
    assert page[0].lease.ended_at > NOW + timedelta(weeks=WEEKS - 1)
    store.close()
    assert check_database(url) == []


def a_week(store: Store, week: int, each: int) -> None:
    """As many leases without a job as with one, and four events for each."""
    first = 1_000_000 + 10 * each * week
    at = [NOW + timedelta(weeks=week) + timedelta(weeks=1) * (number / each) for number in range(each)]
    put(store, (ended_lease(first + 3 * number, one) for number, one in enumerate(at)))
    put(store, (job(first + 3 * number + 1, one) for number, one in enumerate(at)))
    of_jobs = [
        ended_lease(first + 3 * number + 2, one, f"job-{first + 3 * number + 1:016x}") for number, one in enumerate(at)
    ]
    put(store, of_jobs)
    metrics(store, (one.lease.id for one in of_jobs))
    put(store, (event(first + 4 * number + part, one) for number, one in enumerate(at) for part in range(4)))


def size_of(directory: Path) -> int:
    """The database with its log."""
    return sum(os.stat(file).st_size for file in directory.glob("year.db*"))
