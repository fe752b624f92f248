"""A daemon that says when to come again is left alone for so long, and one that does not know what it did is told again
only what does no harm twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpulease import AsyncClient, Client, calls
from gpulease.calls import Call
from gpulease.errors import Unavailable
from gpulease.wire import LeaseRequest

from .stand_in import StandIn

Send = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def send(request: pytest.FixtureRequest, daemon: StandIn) -> Send:
    """`Client.send`, in a thread and in an event loop; the daemon has been reached before."""

    def in_thread(call: Call[Any], patience_s: float) -> Any:
        with Client(daemon.url) as client:
            client.alive()
            return client.send(call, patience_s=patience_s)

    async def in_loop(call: Call[Any], patience_s: float) -> Any:
        async with AsyncClient(daemon.url) as client:
            await client.alive()
            return await client.send(call, patience_s=patience_s)

    return in_thread if request.param == "sync" else lambda *args: asyncio.run(in_loop(*args))


def times(daemon: StandIn, what: str) -> list[float]:
    return [at_s for line, at_s in zip(daemon.seen, daemon.seen_at_s, strict=True) if what in line]


def faults(*kinds: str) -> Callable[[str], str | None]:
    """One for each request but those that ask whether the daemon lives."""
    left = list(kinds)
    return lambda line: None if "healthz" in line or not left else left.pop(0)


def test_it_is_asked_again_when_it_said_and_not_before(daemon: StandIn, send: Send) -> None:
    daemon.retry_after, daemon.fault = "1", faults("503", "503")
    send(calls.gpus(), 30.0)
    first, second, third = times(daemon, "/v1/gpus")
    assert second - first >= 1.0
    assert third - second >= 1.0


def test_without_a_word_it_is_asked_again_soon(daemon: StandIn, send: Send) -> None:
    daemon.fault = faults("503")
    send(calls.gpus(), 30.0)
    assert len(times(daemon, "/v1/gpus")) == 2


@pytest.mark.parametrize("said", ["3600", "Wed, 21 Oct 2015 07:28:00 GMT", "-1", "soon", "9" * 400])
def test_whatever_it_says_patience_has_its_end_with_a_last_attempt(daemon: StandIn, send: Send, said: str) -> None:
    daemon.retry_after, daemon.fault = said, lambda line: None if "healthz" in line else "503"
    begun_s = time.monotonic()
    with pytest.raises(Unavailable):
        send(calls.gpus(), 0.5)
    assert time.monotonic() - begun_s < 20
    assert len(times(daemon, "/v1/gpus")) >= 2


def test_what_may_have_been_recorded_is_sent_again_under_its_key_only(daemon: StandIn, send: Send) -> None:
    keyed = calls.request_lease(LeaseRequest(count=1), "k")
    daemon.fault = faults("unknown")
    assert send(keyed, 30.0).state == "active"
    assert len(times(daemon, "POST /v1/leases")) == 2

    daemon.fault = faults("unknown")
    with pytest.raises(Unavailable):
        send(replace(keyed, idempotency_key=None, same_twice=False), 30.0)
    assert len(times(daemon, "POST /v1/leases")) == 3
