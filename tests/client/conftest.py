from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from gpulease import Client
from gpulease.sansio.release_retries import DEBTS
from tests.client.fake_daemon import FakeDaemon


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    stand_in = FakeDaemon()
    yield stand_in
    stand_in.stop()


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(daemon.url) as connected:
        yield connected


@pytest.fixture
def until() -> Callable[..., None]:
    """Waits for a condition, with a deadline."""

    def wait(condition: Callable[[], bool], within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.005)

    return wait


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server here may have no time for a TLS handshake within a second. Tests that measure time have the usual."""
    if request.node.get_closest_marker("alone") is None:
        monkeypatch.setattr("gpulease.sansio.failover.CONNECT_TIMEOUT_S", 20.0)
        monkeypatch.setattr("gpulease.sansio.failover.CONNECT_ALL_TIMEOUT_S", 30.0)


@pytest.fixture(autouse=True)
def _debts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test leaves owed is not told to the daemon of another test, which may have the same port."""
    monkeypatch.setattr("gpulease.sansio.release_retries.MAX_PAUSE_S", 0.2)
    yield
    DEBTS.forget_all()
