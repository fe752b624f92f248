"""GPU-hours held and used in a period, by user, label and node; on either database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from gpulease_protocol.model import Demand, Device, EndReason, Event, Holder, LeaseMember, LeaseState
from gpulease_protocol.usage import Usage, UsageKey
from gpulease_server.api.routes.job_metrics import job_metrics, lease_metrics
from gpulease_server.core.records import LeaseRecord
from gpulease_server.runtime import usage
from gpulease_server.runtime.gpu_metrics.recorder import encode_series
from gpulease_server.runtime.gpu_metrics.time_series import TimeSeries
from gpulease_server.runtime.usage import gpu_usage
from gpulease_server.store import gpu_metrics_table
from gpulease_server.store.held_gpus import changes_of
from gpulease_server.store.ledger_store import Store
from tests.store.old_records import MODEL, NOW, put

HOUR = timedelta(hours=1)


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    yield store
    store.close()


def held(
    number: int,
    granted_at: datetime,
    ended_at: datetime | None,
    *,
    gpus: int = 1,
    user: str | None = "ada",
    label: str = "",
    node: str = "n1",
    job_id: str | None = None,
) -> LeaseRecord:
    devices = tuple(Device(uuid=f"GPU-{node}-{index}", node=node, index=index) for index in range(gpus))
    noun = replace(
        MODEL.lease,
        id=f"lease-{number:016x}",
        state=LeaseState.ENDED if ended_at else LeaseState.ACTIVE,
        end_reason=EndReason.RELEASED if ended_at else None,
        holder=Holder(user=user, label=label),
        gpus=devices,
        fencing_token=number,
        job_id=job_id,
        granted_at=granted_at,
        ended_at=ended_at,
    )
    return replace(MODEL, lease=noun, number=number)


def hours(found: Usage) -> dict[str | None, float]:
    return {share.key: share.gpu_hours_held for share in found.shares}


def busy(seconds: int, ratio: float) -> TimeSeries:
    """Readings of a GPU that is used to this extent from its grant on."""
    series = TimeSeries.empty()
    for second in range(1, seconds + 1):
        series.add(second, 1, (ratio, None, None, None))
    return series


def test_held_hours_are_those_within_the_period(store: Store) -> None:
    put(
        store,
        [
            held(1, NOW - 5 * HOUR, NOW - 4 * HOUR),  # before
            held(2, NOW - 3 * HOUR, NOW - HOUR, gpus=2, label="sweep"),  # one hour of it in the period
            held(3, NOW - HOUR, None, user="bob", node="n2"),  # still held
            held(4, NOW - HOUR, NOW - HOUR / 2, user=None, label="sweep"),
            held(5, NOW + HOUR, None, user="bob"),  # after
        ],
    )
    period = (NOW - 2 * HOUR, NOW)

    assert hours(gpu_usage(store, *period, UsageKey.USER)) == {"ada": 2.0, "bob": 1.0, None: 0.5}
    assert hours(gpu_usage(store, *period, UsageKey.LABEL)) == {"sweep": 2.5, None: 1.0}
    assert hours(gpu_usage(store, *period, UsageKey.NODE)) == {"n1": 2.5, "n2": 1.0}
    assert hours(gpu_usage(store, *period, UsageKey.NODE, "bob")) == {"n2": 1.0}
    whole = gpu_usage(store, *period, UsageKey.USER)
    assert (whole.leases, whole.gpu_hours_held, whole.gpu_hours_used) == (3, 3.5, None)
    assert whole.gpu_hours_unknown == 3.5


def test_used_hours_are_known_for_jobs_and_clipped_to_the_period(store: Store) -> None:
    put(
        store,
        [
            held(1, NOW - 2 * HOUR, NOW, gpus=2, job_id="job-1"),
            held(2, NOW - HOUR, NOW, user="bob", job_id="job-2"),  # nothing was recorded
        ],
    )
    series = {f"GPU-n1-{index}": busy(7200, ratio) for index, ratio in enumerate((0.5, 1.0))}
    gpu_metrics_table.save(store, {"lease-0000000000000001": encode_series(series)})

    ada, bob = gpu_usage(store, NOW - 2 * HOUR, NOW, UsageKey.USER).shares
    assert (ada.gpu_hours_held, ada.gpu_hours_used) == pytest.approx((4, 3))
    assert ada.gpu_hours_unknown == pytest.approx(0, abs=1e-6)
    assert (bob.gpu_hours_used, bob.gpu_hours_unknown) == (None, 1)
    half = gpu_usage(store, NOW - HOUR / 2, NOW, UsageKey.USER).shares[0]
    assert (half.gpu_hours_held, half.gpu_hours_used) == pytest.approx((1, 0.75))


def test_a_gang_counts_on_each_of_its_nodes(store: Store) -> None:
    one, two = (held(0, NOW, None, gpus=2, node=node).lease.gpus for node in ("n1", "n2"))
    gang = held(1, NOW - HOUR, NOW, job_id="job-1")
    members = tuple(
        LeaseMember(rank=rank, node=f"n{rank + 1}", address="10.0.0.1", gpus=gpus)
        for rank, gpus in enumerate((one, two))
    )
    put(store, [replace(gang, lease=replace(gang.lease, gpus=one + two, members=members))])
    series = {device.uuid: busy(3600, 0.5 if device.node == "n1" else 1.0) for device in one + two}
    gpu_metrics_table.save(store, {gang.lease.id: encode_series(series)})

    by_node = gpu_usage(store, NOW - HOUR, NOW, UsageKey.NODE)
    assert hours(by_node) == {"n1": 2.0, "n2": 2.0}
    assert {share.key: share.gpu_hours_used for share in by_node.shares} == pytest.approx({"n1": 1.0, "n2": 2.0})
    by_user = gpu_usage(store, NOW - HOUR, NOW, UsageKey.USER)
    assert hours(by_user) == {"ada": 4.0}
    for found in (by_node, by_user):
        assert (found.leases, found.gpu_hours_held, found.gpu_hours_used) == pytest.approx((1, 4, 3))


def elastic(number: int, granted_at: datetime, ended_at: datetime | None, *nodes: str) -> LeaseRecord:
    """An elastic lease of two GPUs on each of these nodes, which it had last."""
    one = held(number, granted_at, ended_at, job_id=f"job-{number}")
    of = {node: held(0, NOW, None, gpus=2, node=node).lease.gpus for node in nodes}
    members = tuple(
        LeaseMember(rank=rank, node=node, address="10.0.0.1", gpus=gpus) for rank, (node, gpus) in enumerate(of.items())
    )
    demand = Demand(count=2, nodes=2, max_nodes=3)
    return replace(one, lease=replace(one.lease, gpus=sum(of.values(), start=()), members=members, demand=demand))


def changed(seq: int, at: datetime, kind: str, number: int, node: str) -> Event:
    uuids = tuple(f"GPU-{node}-{index}" for index in range(2))
    return Event(seq=seq, at=at, kind=kind, cause="tick", lease_id=f"lease-{number:016x}", node=node, gpus=uuids)


def test_an_elastic_lease_counts_each_node_for_the_time_that_it_had_it(store: Store) -> None:
    put(
        store,
        [
            elastic(1, NOW - 10 * HOUR, NOW, "n1", "n2"),
            changed(1, NOW - 8 * HOUR, "lease.grown", 1, "n3"),
            changed(2, NOW - 5 * HOUR, "lease.shrunk", 1, "n3"),
            changed(3, NOW - 4 * HOUR, "lease.shrunk", 1, "n4"),  # it had that from the beginning
            changed(4, NOW - 2 * HOUR, "lease.grown", 1, "n2"),
        ],
    )
    by_node = {"n1": 20.0, "n2": 4.0, "n3": 6.0, "n4": 12.0}
    assert hours(gpu_usage(store, NOW - 10 * HOUR, NOW, UsageKey.NODE)) == by_node
    by_user = gpu_usage(store, NOW - 10 * HOUR, NOW, UsageKey.USER)
    assert hours(by_user) == {"ada": sum(by_node.values())}
    assert by_user.leases == 1

    assert hours(gpu_usage(store, NOW - 3 * HOUR, NOW - HOUR, UsageKey.NODE)) == {"n1": 4.0, "n2": 2.0}
    assert hours(gpu_usage(store, NOW - 3 * HOUR, NOW - HOUR, UsageKey.USER)) == {"ada": 6.0}


def test_a_node_of_an_elastic_lease_that_came_back_counts_twice(store: Store) -> None:
    put(
        store,
        [
            elastic(1, NOW - 6 * HOUR, None, "n1", "n2", "n3"),
            changed(1, NOW - 5 * HOUR, "lease.grown", 1, "n3"),
            changed(2, NOW - 4 * HOUR, "lease.shrunk", 1, "n3"),
            changed(3, NOW - 1 * HOUR, "lease.grown", 1, "n3"),
        ],
    )
    found = gpu_usage(store, NOW - 6 * HOUR, NOW, UsageKey.NODE)
    assert hours(found) == {"n1": 12.0, "n2": 12.0, "n3": 4.0}
    assert {share.key: share.leases for share in found.shares} == {"n1": 1, "n2": 1, "n3": 1}


def test_the_metrics_of_an_elastic_lease_count_what_usage_counts(store: Store) -> None:
    record = elastic(1, NOW - 10 * HOUR, None, "n1", "n2")
    lease_id = record.lease.id
    put(
        store,
        [
            record,
            changed(1, NOW - 4 * HOUR, "lease.shrunk", 1, "n4"),  # it had that from the beginning
            changed(2, NOW - 2 * HOUR, "lease.grown", 1, "n2"),
        ],
    )
    content = encode_series({"GPU-n1-0": busy(3600, 0.5), "GPU-n4-1": busy(3600, 1.0)})
    gpu_metrics_table.save(store, {lease_id: content})
    changes = changes_of(store.engine, [lease_id, "lease-of-no-one"])
    of_lease = lease_metrics(record, content, NOW, 600, changes[lease_id])
    assert [(one.uuid, one.gpu_hours_held) for one in of_lease.gpus] == [
        ("GPU-n1-0", 10.0),
        ("GPU-n1-1", 10.0),
        ("GPU-n2-0", 2.0),
        ("GPU-n2-1", 2.0),
    ]
    by_user = gpu_usage(store, NOW - 10 * HOUR, NOW, UsageKey.USER)
    of_job = job_metrics("job-1", [record], {lease_id: content}, NOW, 600, changes)
    for found in (by_user, of_lease, of_job, of_job.attempts[0]):
        given_back = 2 * 6.0
        assert found.gpu_hours_held == 10.0 + 10.0 + 2.0 + 2.0 + given_back
        assert (found.gpu_hours_used, found.gpu_hours_unknown) == pytest.approx((0.5 + 1.0, 36.0 - 2.0))


def test_a_lease_counts_on_each_of_its_days_and_all_of_it_in_the_sum(store: Store) -> None:
    put(
        store,
        [
            held(1, NOW - 30 * HOUR, NOW + 2 * HOUR, gpus=2, job_id="job-1"),  # NOW is midnight
            held(2, NOW + HOUR, NOW + 3 * HOUR, user="bob"),
        ],
    )
    gpu_metrics_table.save(store, {"lease-0000000000000001": encode_series({"GPU-n1-0": busy(7200, 0.5)})})
    found = gpu_usage(store, NOW - 30 * HOUR, NOW + 4 * HOUR, UsageKey.DAY)
    days = ["2026-12-30", "2026-12-31", "2027-01-01"]
    assert [(share.key, share.gpu_hours_held, share.leases) for share in found.shares] == list(
        zip(days, (12.0, 48.0, 6.0), (1, 1, 2), strict=True)
    )
    assert [share.gpu_hours_used for share in found.shares] == [pytest.approx(1.0), None, None]
    assert (found.leases, found.gpu_hours_held) == (2, 66.0)


def test_the_time_without_work_is_idle(store: Store) -> None:
    put(store, [held(1, NOW - HOUR, NOW, job_id="job-1")])
    series = TimeSeries.empty()
    for second in range(1, 3001):
        series.add(second, 1, (0.0 if second <= 1200 else 0.5, None, None, None))
    gpu_metrics_table.save(store, {"lease-0000000000000001": encode_series({"GPU-n1-0": series})})

    (share,) = gpu_usage(store, NOW - HOUR, NOW, UsageKey.USER).shares
    assert share.gpu_hours_idle == pytest.approx(1200 / 3600, rel=0.01)
    assert share.gpu_hours_unknown == pytest.approx(600 / 3600, rel=0.01)
    (part,) = gpu_usage(store, NOW - HOUR, NOW - HOUR + timedelta(seconds=600), UsageKey.USER).shares
    assert (part.gpu_hours_idle, part.gpu_hours_used) == pytest.approx((600 / 3600, 0), rel=0.01)


def test_a_clock_that_was_set_back_makes_no_time_negative(store: Store) -> None:
    put(store, [held(1, NOW, NOW - HOUR), held(2, NOW - HOUR, NOW, user="bob")])
    assert hours(gpu_usage(store, NOW - 2 * HOUR, NOW + HOUR, UsageKey.USER)) == {"bob": 1.0, "ada": 0.0}


def test_an_answer_has_a_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_SHARES", 2)
    put(store, [held(number, NOW - number * HOUR, NOW, user=f"user-{number}") for number in range(1, 5)])

    assert hours(gpu_usage(store, NOW - 9 * HOUR, NOW, UsageKey.USER)) == {"user-4": 4.0, None: 6.0}
