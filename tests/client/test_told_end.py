"""A holder trusts its lease no longer than the daemon has said that it lasts, however long its `ttl_s` is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpulease import Client, Lease, Liveness
from gpulease.lease import HeldLease
from tests.client.fake_daemon import FakeDaemon

TTL_S = 300.0
SOON_S = 0.3
PREEMPTED = {"preempt_at": "2026-01-01T12:00:00Z", "ends_in_s": SOON_S}
"""As a daemon says it whose wall clock is far from this one's: only the seconds count."""


@contextmanager
def held(client: Client, lease: Lease, age_s: float = 0.0) -> Iterator[HeldLease]:
    """The lease, renewed for the last time so long ago."""
    with HeldLease(client, lease, trusted_from=time.monotonic() - age_s) as one:
        yield one


def granted(client: Client) -> Lease:
    """The lease as the daemon shows it now."""
    return client.lease_by_id("L-1")


@pytest.fixture(autouse=True)
def _granted(daemon: FakeDaemon) -> None:
    daemon.new_lease({"ttl_s": TTL_S})


def test_a_lease_is_lost_when_its_notice_is_over_although_no_renewal_fails_for_its_ttl(
    daemon: FakeDaemon, client: Client
) -> None:
    lease = granted(client)
    daemon.only_lease().update(PREEMPTED)
    with held(client, lease, TTL_S / 3) as one:
        assert one.preempting.wait(30)
        daemon.fault = lambda line: "503" if "renew" in line else None
        assert one.lost.wait(30)
        daemon.fault = lambda line: None
    assert one.loss_reason == "It was preempted, so that a request that waited can start."


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (PREEMPTED, "It was preempted"),
        ({"reclaim_at": "2026-01-01T12:00:00Z", "ends_in_s": SOON_S}, "Its GPUs were idle"),
        ({"ends_at": "2026-01-01T12:00:00Z", "ends_in_s": SOON_S}, "Its time has passed"),
    ],
)
@pytest.mark.parametrize("liveness", [Liveness.HEARTBEAT, Liveness.PROCESS])
def test_what_the_grant_says_holds_too_and_for_one_that_was_stopped(
    daemon: FakeDaemon, client: Client, monkeypatch, said: dict[str, object], reason: str, liveness: Liveness
) -> None:
    monkeypatch.setattr("gpulease.lease.CONFIRM_S", TTL_S)
    monkeypatch.setattr("gpulease.lease.LATE_WAKEUP_S", -1.0)  # as if it had been stopped each time
    daemon.only_lease().update(said, liveness=liveness)
    lease = granted(client)
    daemon.fault = lambda line: "503" if "renew" in line else None
    with held(client, lease) as one:
        assert one.lost.wait(30)
        daemon.fault = lambda line: None
    assert (one.loss_reason or "").startswith(reason)


def test_a_holder_asks_before_the_end_whether_it_was_put_off(daemon: FakeDaemon, client: Client, until) -> None:
    daemon.only_lease().update(PREEMPTED, ends_in_s=30.0)
    lease = granted(client)
    daemon.only_lease().update(preempt_at=None, ends_in_s=None)
    with held(client, lease, 15.0) as one:
        until(lambda: daemon.count("renew") and one.preempt_at is None)
        assert not one.lost.is_set()
        assert one._trusted_until > time.monotonic() + TTL_S / 2
