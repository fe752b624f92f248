"""What a replay reads of an installation's database; on either database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.limits import LimitKind, Limits
from gpulease_protocol.model import (
    Demand,
    Device,
    EndReason,
    Holder,
    JobDependency,
    LeaseState,
    Priority,
    TopologyMode,
)
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import LimitRecord
from gpulease_server.core.records import Change, GpuRecord, LeaseRecord, NodeRecord
from gpulease_server.replay import database_recording
from gpulease_server.replay.database_recording import read_database
from gpulease_server.replay.recorded_requests import RecordedRequest
from gpulease_server.store import tables
from gpulease_server.store.database import DatabaseUnusable
from gpulease_server.store.ledger_store import Store
from tests.store.old_records import MODEL, NOW, job

MINUTE = timedelta(minutes=1)
SINCE = NOW - 60 * MINUTE


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    yield store
    store.close()


def lease(
    number: int, asked: float, granted: float | None, ended: float | None, *, job_id: str | None = None, **demand: Any
) -> LeaseRecord:
    """A lease, by minutes before now."""

    def at(minutes: float | None) -> datetime | None:
        return None if minutes is None else NOW - minutes * MINUTE

    state = LeaseState.QUEUED if granted is None and ended is None else LeaseState.ACTIVE
    noun = replace(
        MODEL.lease,
        id=f"lease-{number}",
        state=state if ended is None else LeaseState.ENDED,
        end_reason=None if ended is None else EndReason.RELEASED,
        holder=Holder(user="ada"),
        demand=Demand(**demand),
        gpus=(),
        fencing_token=None if granted is None else number,
        job_id=job_id,
        created_at=NOW - asked * MINUTE,
        granted_at=at(granted),
        ended_at=at(ended),
    )
    return replace(MODEL, lease=noun, number=number)


def kept(store: Store, *changes: Change) -> None:
    store.write(list(changes), Ledger(next_number=10**6, next_token=10**6))


def requests(url: str) -> dict[str, RecordedRequest]:
    return {one.id: one for one in read_database(url, SINCE, NOW).requests}


def test_times_are_those_of_the_leases(store: Store, database_url: str) -> None:
    kept(
        store,
        lease(1, 59, 58, 30, count=2, gpu_model="H100"),
        lease(2, 50, 20, None),
        lease(3, 90, 80, 70),  # over before the period
    )

    found = requests(database_url)

    assert list(found) == ["lease-1", "lease-2"]
    first, second = found.values()
    assert (first.asked_at_s, first.waited_s, first.duration_s) == (60, 60, 28 * 60)
    assert (first.user, first.demand) == ("ada", Demand(count=2, gpu_model="H100"))
    assert (second.waited_s, second.duration_s) == (30 * 60, 20 * 60)  # so far


def test_what_held_gpus_at_the_beginning_is_played_and_not_counted(store: Store, database_url: str) -> None:
    kept(store, lease(1, 90, 80, 30), lease(2, 50, 20, 10))

    recording = read_database(database_url, SINCE, NOW)

    assert recording.begin_at == NOW - 90 * MINUTE
    assert [(one.asked_at_s, one.counted) for one in recording.requests] == [(0, False), (40 * 60, True)]


def test_what_was_never_granted_is_left_out_and_counted(store: Store, database_url: str) -> None:
    kept(store, lease(1, 50, None, 40), lease(2, 30, None, None), lease(3, 20, 10, None), lease(4, 100, None, 55))

    recording = read_database(database_url, SINCE, NOW)

    assert [one.id for one in recording.requests] == ["lease-3"]
    assert recording.left_out == 2


def test_the_next_attempt_of_a_job_follows_the_one_before(store: Store, database_url: str) -> None:
    kept(store, lease(1, 50, 40, 30, job_id="job-1"), lease(2, 30, 29, 10, job_id="job-1"))

    first, second = requests(database_url).values()

    assert (first.part_of, first.after) == (("job-1",), ())
    assert (second.part_of, second.after, second.asked_at_s) == (("job-1",), ("lease-1",), 0.0)


def test_a_job_that_waited_for_others_waits_for_these(store: Store, database_url: str) -> None:
    last = job(5, None)
    last = replace(
        last, job=replace(last.job, id="job-2", lease_id="lease-2", after=(JobDependency(job="job-1", when="ended"),))
    )
    kept(store, lease(1, 50, 40, 30, job_id="job-1"), last, lease(2, 45, 25, 10, job_id="job-2"))

    waiting = requests(database_url)["lease-2"]

    assert waiting.after == ("job-1",)
    assert waiting.waited_s == 5 * 60  # from the end of the other one


def test_an_array_with_a_bound_keeps_it(store: Store, database_url: str) -> None:
    one = job(7, None, array_id="array-1")
    one = replace(one, job=replace(one.job, id="job-1", lease_id="lease-1", array_at_most=4))
    kept(store, one, lease(1, 50, 40, 30, job_id="job-1"))

    found = requests(database_url)["lease-1"]

    assert (found.part_of, found.array_id, found.array_at_most) == (("job-1", "array-1"), "array-1", 4)
    assert found.waited_s is None


def test_a_declared_time_is_as_long_as_a_lease_lasts(store: Store, database_url: str) -> None:
    kept(
        store,
        lease(1, 50, 40, 30, time_s=3600.0),
        lease(2, 50, 40, 30, time_s=590.0),  # a job's time counts from its start, ten seconds after the grant: not lost
        lease(3, 50, 40, 30, time_s=4 * 3600.0, priority=Priority.INTERACTIVE),
    )

    found = requests(database_url).values()
    assert [(one.demand.time_s, one.duration_s) for one in found] == [(3600.0, 600.0), (590.0, 590.0), (None, 600.0)]


def test_limits_are_those_that_are_set_and_tokens_those_of_the_leases(store: Store, database_url: str) -> None:
    group = LimitRecord(
        kind=LimitKind.GROUP,
        name="vision",
        limits=Limits(max_gpus=2, gpu_hours=5.5, window_s=7200.0),
        members=("ada", "bob"),
        set_at=NOW,
        set_by="root",
    )
    by_token = lease(2, 50, 40, 30)
    by_token = replace(by_token, lease=replace(by_token.lease, holder=Holder(user="ada", token_id="token-1")))
    kept(store, group, lease(1, 50, 40, 30), by_token)

    recording = read_database(database_url, SINCE, NOW)

    assert recording.limits == (group,)
    assert [one.token_id for one in recording.requests] == [None, "token-1"]


def test_the_longest_time_that_a_limit_gave_is_none_of_the_request(store: Store, database_url: str) -> None:
    kept(
        store,
        LimitRecord(kind=LimitKind.USER, name="ada", limits=Limits(max_lease_s=600.0), set_at=NOW),
        lease(1, 50, 40, 29.9, time_s=600.0),
        lease(2, 50, 40, 35, time_s=300.0),
    )

    found = requests(database_url)

    assert [one.demand.time_s for one in found.values()] == [None, 300.0]
    assert found["lease-1"].duration_s == 600.0  # the end of a lease takes a moment, which would count as more


def test_nodes_are_those_of_now_and_connections_are_not_required(store: Store, database_url: str) -> None:
    gpus = [Device(uuid=f"GPU-{index}", node="b", index=index, name="NVIDIA H100") for index in (1, 0)]
    kept(
        store,
        NodeRecord(name="b", host="host-b"),
        *(GpuRecord(device=one) for one in gpus),
        lease(1, 50, 40, 30, topology=TopologyMode.REQUIRED),
    )

    recording = read_database(database_url, SINCE, NOW)

    (node,) = recording.nodes
    assert (node.name, node.host, [one.index for one in node.gpus]) == ("b", "host-b", [0, 1])
    assert recording.requests[0].demand.topology is TopologyMode.PREFERRED


def test_an_empty_period_a_bound_and_another_schema_are_refused(
    store: Store, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="No request was made and granted since"):
        read_database(database_url, SINCE, NOW)
    kept(store, lease(1, 50, 40, 30), lease(2, 50, 40, 30))
    monkeypatch.setattr(database_recording, "MAX_REQUESTS", 1)
    with pytest.raises(InvalidRequest, match="More than 1 requests"):
        read_database(database_url, SINCE, NOW)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    with pytest.raises(DatabaseUnusable, match="has schema 0001"):
        read_database(database_url, SINCE, NOW)


def test_reading_writes_nothing(store: Store, database_url: str) -> None:
    kept(store, lease(1, 50, 40, 30))

    def rows() -> list[int]:
        with store.engine.connect() as connection:
            return [
                connection.execute(select(func.count()).select_from(one)).scalar_one()
                for one in tables.metadata.sorted_tables
            ]

    before = rows()
    read_database(database_url, SINCE, NOW)

    assert rows() == before
