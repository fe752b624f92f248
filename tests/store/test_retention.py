"""What is old or too much goes, whole; what is live or needed stays; and who reads events hears of the gap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update
from sqlalchemy.event import listen

from gpulease_protocol.model import JobState
from gpulease_server.core.records import GpuRecord
from gpulease_server.store import retention, tables
from gpulease_server.store.integrity_check import check_database
from gpulease_server.store.ledger_store import Store, Superseded
from gpulease_server.store.retention import (
    ALWAYS_KEPT,
    PruneBatch,
    PruneScan,
    RetentionLimits,
    delete_batch,
    prune_bounds,
)
from gpulease_server.store.rows import to_row
from tests.store.old_records import FIRST, MODEL, NOW, count, ended_lease, event, ids, job, metrics, prune, put
from tests.store.test_ledger_store import busy_world, lasting, save

DAY = timedelta(days=1)
MONTH = RetentionLimits(age_s=30 * DAY.total_seconds())
KEPT = 20
"""Stands for `ALWAYS_KEPT` in all tests but one."""
YOUNG = KEPT + 10
"""More than stay in any case."""


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand rows of each kind show no more, and take most of the time."""
    monkeypatch.setattr(retention, "ALWAYS_KEPT", KEPT)


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    made = Store(database_url)
    yield made
    made.close()
    assert [found for found in check_database(database_url) if "fsync" not in found] == []


def young(store: Store, rows: int = YOUNG) -> None:
    """So much that is recent that nothing stays only for want of other things."""
    at = [NOW - DAY + timedelta(seconds=number) for number in range(rows)]
    put(store, (ended_lease(FIRST + 10 * number, one) for number, one in enumerate(at)))
    put(store, (job(FIRST + 10 * number + 4, one) for number, one in enumerate(at)))
    put(store, (ended_lease(FIRST + 10 * number + 5, one, f"job-{FIRST + 10 * number + 4:016x}")
                for number, one in enumerate(at)))  # fmt: skip
    put(store, (event(FIRST + number, one) for number, one in enumerate(at)))


def test_what_is_older_than_it_is_kept_goes_and_nothing_else(store: Store) -> None:
    young(store)
    before = count(store)
    old, just_kept = NOW - 31 * DAY, NOW - 30 * DAY
    put(store, [ended_lease(1, old), ended_lease(2, just_kept), ended_lease(3, NOW - 400 * DAY)])
    put(store, [event(1, old), event(2, just_kept)])
    assert prune(store, MONTH) == {"lease": 2, "event": 1}
    assert {table: rows - before[table] for table, rows in count(store).items()} == {
        "lease": 1,
        "job": 0,
        "gpu_metrics": 0,
        "event": 1,
    }
    assert store.lease(ended_lease(2, NOW).lease.id) is not None
    assert store.lease(ended_lease(1, NOW).lease.id) is None
    assert prune(store, MONTH) == {}


def test_of_each_no_more_than_so_many_are_kept_and_those_are_the_newest(store: Store) -> None:
    young(store)
    most = RetentionLimits(ended=KEPT + 2, events=KEPT + 3)
    removed = prune(store, most, now=None)
    assert count(store)["job"] <= KEPT + 2
    assert count(store)["event"] == KEPT + 3
    assert removed["event"] == YOUNG - KEPT - 3
    with store.engine.connect() as connection:
        kept = list(connection.scalars(select(tables.event.c.seq).order_by(tables.event.c.seq)))
        alone = list(connection.scalars(select(tables.lease.c.number).where(tables.lease.c.job_id.is_(None))))
    assert kept == list(range(FIRST + YOUNG - KEPT - 3, FIRST + YOUNG))
    assert min(alone) > FIRST, "not the oldest went"
    assert count(store)["lease"] <= KEPT + 2 + KEPT, "more than those and what the newest jobs have"


def test_jobs_go_when_their_leases_are_too_many(store: Store) -> None:
    at = [NOW - DAY + timedelta(seconds=number) for number in range(KEPT + 2)]
    put(store, (job(10 * number, one) for number, one in enumerate(at)))
    for attempt in (1, 2):
        leases = (ended_lease(10 * number + attempt, one, f"job-{10 * number:016x}") for number, one in enumerate(at))
        put(store, leases)
    prune(store, RetentionLimits(ended=KEPT + 10), now=None)
    assert count(store)["job"] == KEPT
    assert count(store)["lease"] == 2 * KEPT


def test_many_that_ended_in_one_moment_are_bounded_too(store: Store) -> None:
    put(store, (ended_lease(FIRST + number, NOW) for number in range(2 * KEPT)))
    prune(store, RetentionLimits(ended=KEPT + 5), now=None)
    assert ids(store, tables.lease) == {
        ended_lease(FIRST + number, NOW).lease.id for number in range(KEPT - 5, 2 * KEPT)
    }


def test_the_newest_stay_however_old_they_are(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ALWAYS_KEPT", ALWAYS_KEPT)  # what is kept in memory is of that number
    young(store, ALWAYS_KEPT + 10)
    prune(store, MONTH, NOW + 5000 * DAY)
    left = count(store)
    assert left["event"] == left["job"] == ALWAYS_KEPT
    assert len(store.load().ended_leases) == ALWAYS_KEPT
    assert left["lease"] >= ALWAYS_KEPT + ALWAYS_KEPT // 2, "those of the newest jobs, and the newest of no job"


def test_a_job_goes_with_the_leases_of_its_attempts_and_their_metrics(store: Store) -> None:
    young(store)
    old = NOW - 99 * DAY
    record = job(10, old)
    attempts = [ended_lease(11 + number, old, record.job.id) for number in range(3)]
    put(store, [record, *attempts])
    metrics(store, (one.lease.id for one in attempts))
    assert prune(store, MONTH) == {"job": 1}
    assert count(store)["gpu_metrics"] == 0
    assert store.job(record.job.id) is None
    assert [store.lease(one.lease.id) for one in attempts] == [None, None, None]


def test_the_lease_of_a_job_that_is_kept_is_kept(store: Store) -> None:
    young(store)
    record = job(10, NOW - DAY)
    first = ended_lease(12, NOW - 99 * DAY, record.job.id)
    put(store, [record, ended_lease(11, NOW - DAY, record.job.id), first])
    assert prune(store, MONTH) == {}
    assert store.lease(first.lease.id) == first


def test_jobs_of_an_array_stay_until_all_of_it_is_over(store: Store) -> None:
    young(store)
    old = NOW - 99 * DAY
    first, last = job(10, old, "array-1"), job(20, None, "array-1", JobState.QUEUED)
    alone = job(30, old, "array-2")
    put(store, [first, last, alone])
    put(store, [ended_lease(11, old, first.job.id), ended_lease(31, old, alone.job.id)])
    queued = ended_lease(21, old, last.job.id)
    with store.writing() as connection:
        connection.execute(
            insert(tables.lease).values(
                **to_row(queued)[1] | {"state": "queued", "ended_at": None, "end_reason": None, "token": None}
            )
        )
    assert prune(store, MONTH) == {"job": 1}
    assert {first.job.id, last.job.id} <= ids(store, tables.job)
    assert alone.job.id not in ids(store, tables.job)
    with store.writing() as connection:
        over = {"state": "cancelled", "ended_at": old}
        connection.execute(update(tables.job).where(tables.job.c.id == last.job.id).values(**over))
        connection.execute(update(tables.lease).where(tables.lease.c.number == 21).values(state="ended", ended_at=old))
    assert prune(store, MONTH) == {"job": 2}


def test_a_lease_that_drains_or_might_revive_stays(store: Store) -> None:
    young(store)
    old = NOW - 99 * DAY
    drains, last, gone = ended_lease(1, old), ended_lease(2, old), ended_lease(3, old)
    drains_of_job, record = ended_lease(5, old, job(4, old).job.id), job(4, old)
    put(store, [drains, last, gone, drains_of_job, record])
    (device,) = MODEL.lease.gpus
    gpus = [
        GpuRecord(device=device, lease_id=drains.lease.id, draining=True),
        GpuRecord(device=replace(device, uuid="GPU-1"), fencing_token=2),
        GpuRecord(
            device=replace(device, uuid="GPU-2"), lease_id=drains_of_job.lease.id, draining=True, fencing_token=5
        ),
    ]
    store.write(gpus, store.load())
    assert prune(store, MONTH) == {"lease": 1}
    for kept in (drains, last, drains_of_job):
        assert store.lease(kept.lease.id) is not None, kept.lease.id
    assert store.job(record.job.id) is not None
    store.write(
        [GpuRecord(device=gpu.device, fencing_token=77) for gpu in gpus], store.load()
    )  # clean, and granted to others
    assert prune(store, MONTH) == {"job": 1, "lease": 2}


def test_a_request_that_was_never_granted_goes_like_any_other(store: Store) -> None:
    young(store)
    put(store, [ended_lease(1, NOW - 99 * DAY)])
    with store.writing() as connection:
        connection.execute(update(tables.lease).where(tables.lease.c.number == 1).values(token=None))
    store.write([GpuRecord(device=MODEL.lease.gpus[0])], store.load())
    assert prune(store, MONTH) == {"lease": 1}


def test_live_things_are_what_they_were_and_a_restart_reads_them(store: Store) -> None:
    world = busy_world()
    world.release(next(one.lease for one in world.ledger.leases.values() if one.lease.state == "active"))
    save(store, world)
    before = lasting(store.load())
    young(store)
    put(store, (ended_lease(number, NOW - 99 * DAY) for number in range(1000, 1000 + 3 * KEPT)))
    prune(store, RetentionLimits(age_s=1, ended=KEPT, events=KEPT), NOW + 999 * DAY)
    after = store.load()
    for part in ("gpus", "nodes", "keys", "queue", "watched_owners"):
        assert getattr(after, part) == before[part], part
    leases, jobs = before["leases"], before["jobs"]
    assert isinstance(leases, dict)
    assert isinstance(jobs, dict)
    live = {key: one for key, one in leases.items() if one.lease.state != "ended"}
    assert live
    assert {key: after.leases.get(key) for key in live} == live
    assert {key: after.jobs.get(key) for key in jobs} == jobs
    draining = {gpu.lease_id for gpu in after.gpus.values() if gpu.draining}
    assert draining
    assert draining <= set(after.leases)


def test_events_stay_a_suffix_though_the_wall_clock_went_back(store: Store) -> None:
    old, later = NOW - 99 * DAY, NOW - DAY
    at = [old, later, old, *[later] * YOUNG]
    put(store, (event(FIRST + number, one) for number, one in enumerate(at)))
    assert prune(store, MONTH) == {"event": 1}
    found, pruned_seq = store.history(0, 2)
    assert ([one.seq for one in found], pruned_seq) == ([FIRST + 1, FIRST + 2], FIRST)


def test_a_page_and_up_to_where_events_are_gone_are_of_one_moment(store: Store) -> None:
    put(store, (event(FIRST + number, NOW) for number in range(2 * KEPT)))
    other = Store(store.engine.url.render_as_string(hide_password=False))

    def prune_meanwhile(_connection: Any, _cursor: Any, statement: str, *_: object) -> None:
        if "FROM event" in statement:
            prune(other, RetentionLimits(events=KEPT), now=None)

    listen(store.engine, "after_cursor_execute", prune_meanwhile)
    found, pruned_seq = store.history(FIRST, 2)
    assert ([one.seq for one in found], pruned_seq) == ([FIRST + 1, FIRST + 2], 0)
    found, pruned_seq = store.history(FIRST, 2)
    assert ([one.seq for one in found], pruned_seq) == (
        [FIRST + KEPT, FIRST + KEPT + 1],
        FIRST + KEPT - 1,
    )
    other.close()


def test_a_seq_is_not_used_again_though_every_event_is_gone(store: Store) -> None:
    put(store, (event(FIRST + number, NOW) for number in range(10)))
    delete_batch(store, PruneBatch(kind="event", seq=FIRST + 9, rows=10))
    with store.writing() as connection:
        connection.execute(delete(tables.event))
    assert store.load().next_seq == FIRST + 10
    assert store.history(FIRST + 4, 10) == ([], FIRST + 9)


def test_metrics_whose_lease_is_gone_go_too(store: Store) -> None:
    young(store)
    metrics(store, ["lease-that-was", ended_lease(FIRST + 5, NOW).lease.id])
    assert prune(store, MONTH) == {}
    assert prune(store, MONTH, orphans=True) == {"metrics": 1}
    assert count(store)["gpu_metrics"] == 1


def test_who_is_not_the_writer_any_more_prunes_nothing(store: Store) -> None:
    young(store)
    put(store, [ended_lease(1, NOW - 99 * DAY)])
    other = Store(str(store.engine.url.render_as_string(hide_password=False)))
    other.fence.take_over("another daemon")
    other.close()
    before = count(store)
    batch = PruneScan(store.engine, prune_bounds(store.engine, MONTH, NOW - 30 * DAY)).next()
    assert batch is not None
    with pytest.raises(Superseded):
        delete_batch(store, batch)
    assert count(store) == before


def test_a_batch_is_small(store: Store) -> None:
    put(store, (event(FIRST + number, NOW) for number in range(KEPT + 1300)))
    walk, sizes = PruneScan(store.engine, prune_bounds(store.engine, RetentionLimits(events=KEPT), None)), []
    while batch := walk.next():
        delete_batch(store, batch)
        sizes.append(batch.rows)
    assert sizes == [500, 500, 300]


def test_what_is_to_go_is_found_without_sorting_all_there_is(sqlite_url: str) -> None:
    store = Store(sqlite_url)
    put(store, (ended_lease(number, NOW) for number in range(2 * KEPT)))
    put(store, (job(FIRST + number, NOW) for number in range(2 * KEPT)))
    plans: dict[str, list[str]] = {}

    def explain(connection: Any, _cursor: Any, statement: str, values: Any, *_: object) -> None:
        if statement.startswith(("SELECT", "DELETE")):
            steps = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
            plans[statement] = [step[-1] for step in steps if "SUBQUERY" not in step[-1]]

    listen(store.engine, "before_cursor_execute", explain)
    prune(store, RetentionLimits(ended=KEPT), NOW)
    store.close()
    assert len(plans) > 10
    for statement, steps in plans.items():
        told = f"{statement}: {steps}"
        assert not any("TEMP B-TREE" in step for step in steps), told
        walks = [step for step in steps if step.startswith("SCAN") and "COVERING" not in step and "gpu" not in step]
        assert walks == [] or "ORDER BY event.seq" in statement, told
        assert not any("ix_lease_state" in step for step in steps), told
