"""GPU-hours held and used in a period, by user, label and node; on either database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from gpulease_protocol.model import Device, EndReason, Holder, LeaseMember, LeaseState
from gpulease_protocol.usage import Usage, UsageKey
from gpulease_server.core.records import LeaseRecord
from gpulease_server.runtime import usage
from gpulease_server.runtime.job_metrics.recorder import encode_series
from gpulease_server.runtime.job_metrics.time_series import TimeSeries
from gpulease_server.runtime.usage import gpu_usage
from gpulease_server.store import job_metrics_table
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
    job_metrics_table.save(store, "lease-0000000000000001", encode_series(series))

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
    job_metrics_table.save(store, gang.lease.id, encode_series(series))

    by_node = gpu_usage(store, NOW - HOUR, NOW, UsageKey.NODE)
    assert hours(by_node) == {"n1": 2.0, "n2": 2.0}
    assert {share.key: share.gpu_hours_used for share in by_node.shares} == pytest.approx({"n1": 1.0, "n2": 2.0})
    by_user = gpu_usage(store, NOW - HOUR, NOW, UsageKey.USER)
    assert hours(by_user) == {"ada": 4.0}
    for found in (by_node, by_user):
        assert (found.leases, found.gpu_hours_held, found.gpu_hours_used) == pytest.approx((1, 4, 3))


def test_an_answer_has_a_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_SHARES", 2)
    put(store, [held(number, NOW - number * HOUR, NOW, user=f"user-{number}") for number in range(1, 5)])

    assert hours(gpu_usage(store, NOW - 9 * HOUR, NOW, UsageKey.USER)) == {"user-4": 4.0, None: 6.0}
