"""A holder stops trusting its lease before the daemon can grant the GPUs to another user."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gpulease import Client, LeaseLost
from gpulease.lease import HeldLease
from tests.client.fake_daemon import FakeDaemon
from tests.client.stalls import stalls

pytestmark = pytest.mark.alone

TTL_S = 5.0
DELAY_S = 2.0
LATE_S = 1.5
"""What a loaded machine may add before a thread runs, beyond what the whole process is kept from running."""


class Grant:
    """Remembers when the daemon granted: its ttl counts from then, and no renewal reaches it."""

    def __init__(self, daemon: FakeDaemon, stalled_s: Callable[[], float]) -> None:
        self._daemon = daemon
        self._stalled_s = stalled_s
        self.at = float("inf")

    def now(self) -> None:
        self.at = time.monotonic()
        self._daemon.grant("L-1")

    def is_over(self, lease: HeldLease) -> None:
        """Fail unless the lease is lost by the time at which the daemon may let it expire."""
        assert lease.lost.wait(20)
        late_s = self.age_s - TTL_S - self._stalled_s()
        self._daemon.fault = lambda line: None
        lease.release()
        assert late_s < LATE_S

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.at


@pytest.fixture
def grant(daemon: FakeDaemon) -> Iterator[Grant]:
    """A grant that is still to come."""
    with stalls() as stalled_s:
        yield Grant(daemon, stalled_s)


def test_trust_does_not_start_at_the_response_after_a_lost_one(
    daemon: FakeDaemon, client: Client, grant: Grant
) -> None:
    daemon.free = False

    def fault(line: str) -> str | None:
        if "renew" in line:
            return "503"
        if "wait_while=queued" in line and grant.age_s < 0:
            grant.now()
            return "break"
        return "503" if 0 <= grant.age_s < DELAY_S else None

    daemon.fault = fault
    grant.is_over(client.lease(1, wait_s=20, ttl_s=TTL_S))


def test_trust_does_not_start_at_the_withdrawal(daemon: FakeDaemon, client: Client, grant: Grant) -> None:
    daemon.free = False
    slow = threading.Event()

    def fault(line: str) -> str | None:
        if "explain" in line:
            grant.now()
            slow.wait(DELAY_S)
        return "503" if "renew" in line else None

    daemon.fault = fault
    grant.is_over(client.lease(1, wait_s=0.1, ttl_s=TTL_S))


@pytest.mark.parametrize("wait_s", [0, 20])
def test_trust_starts_when_the_request_was_first_sent(
    daemon: FakeDaemon, grant: Grant, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    monkeypatch.setattr("gpulease.sansio.flows.RETRY_S", 10 * DELAY_S)
    client = Client(daemon.url)
    client.gpus()

    def fault(line: str) -> str | None:
        if line.startswith("POST /v1/leases?") and grant.age_s < 0:
            grant.at = time.monotonic()
            return "break"
        return "503" if "renew" in line or 0 <= grant.age_s < DELAY_S else None

    daemon.fault = fault
    with client:
        grant.is_over(client.lease(1, wait_s=wait_s, ttl_s=TTL_S))


@pytest.mark.parametrize("expired", [False, True])
def test_a_grant_that_arrives_after_its_ttl_is_renewed_first(daemon, client, grant: Grant, expired: bool) -> None:
    client.gpus()

    def fault(line: str) -> str | None:
        if line.startswith("POST /v1/leases?") and grant.age_s < 0:
            grant.at = time.monotonic()
            return "break"
        if "renew" in line and expired:
            daemon.end("L-1")
        return "503" if 0 <= grant.age_s < TTL_S else None

    daemon.fault = fault
    if expired:
        with pytest.raises(LeaseLost):
            client.lease(1, wait_s=20, ttl_s=TTL_S)
    else:
        with client.lease(1, wait_s=20, ttl_s=TTL_S) as lease:
            assert daemon.count("renew") >= 1
            assert not lease.lost.wait(TTL_S / 2)
