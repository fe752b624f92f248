"""Retries respect `Retry-After`, and after an unknown outcome only repeatable calls are sent again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpulease import AsyncClient, Client
from gpulease_protocol import endpoints
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import Unavailable
from gpulease_protocol.requests import LeaseRequest
from tests.client.fake_daemon import FakeDaemon

Send = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def send(request: pytest.FixtureRequest, daemon: FakeDaemon) -> Send:
    """`Client.send`, in a thread and in an event loop, of a client that has reached the daemon before."""

    def in_thread(call: ApiCall[Any], retry_s: float) -> Any:
        with Client(daemon.url) as client:
            client.alive()
            return client.send(call, retry_s=retry_s)

    async def in_loop(call: ApiCall[Any], retry_s: float) -> Any:
        async with AsyncClient(daemon.url) as client:
            await client.alive()
            return await client.send(call, retry_s=retry_s)

    return in_thread if request.param == "sync" else lambda *args: asyncio.run(in_loop(*args))


def times(daemon: FakeDaemon, what: str) -> list[float]:
    return [at_s for line, at_s in zip(daemon.request_lines, daemon.request_times_s, strict=True) if what in line]


def faults(*kinds: str) -> Callable[[str], str | None]:
    """One fault for each request except health checks."""
    left = list(kinds)
    return lambda line: None if "healthz" in line or not left else left.pop(0)


def test_retries_wait_for_retry_after(daemon: FakeDaemon, send: Send) -> None:
    daemon.retry_after, daemon.fault = "1", faults("503", "503")
    send(endpoints.gpus(), 30.0)
    first, second, third = times(daemon, "/v1/gpus")
    assert second - first >= 1.0
    assert third - second >= 1.0


def test_without_retry_after_it_is_retried_soon(daemon: FakeDaemon, send: Send) -> None:
    daemon.fault = faults("503")
    send(endpoints.gpus(), 30.0)
    assert len(times(daemon, "/v1/gpus")) == 2


@pytest.mark.parametrize("said", ["3600", "Wed, 21 Oct 2015 07:28:00 GMT", "-1", "soon", "9" * 400])
def test_the_retry_budget_ends_with_a_last_attempt_whatever_retry_after_is(
    daemon: FakeDaemon, send: Send, said: str
) -> None:
    daemon.retry_after, daemon.fault = said, lambda line: None if "healthz" in line else "503"
    begun_s = time.monotonic()
    with pytest.raises(Unavailable):
        send(endpoints.gpus(), 0.5)
    assert time.monotonic() - begun_s < 20
    assert len(times(daemon, "/v1/gpus")) >= 2


def test_a_call_with_an_unknown_outcome_is_resent_only_with_a_key(daemon: FakeDaemon, send: Send) -> None:
    keyed = endpoints.request_lease(LeaseRequest(count=1), "k")
    daemon.fault = faults("unknown")
    assert send(keyed, 30.0).state == "active"
    assert len(times(daemon, "POST /v1/leases")) == 2

    daemon.fault = faults("unknown")
    with pytest.raises(Unavailable):
        send(replace(keyed, idempotency_key=None, idempotent=False), 30.0)
    assert len(times(daemon, "POST /v1/leases")) == 3
