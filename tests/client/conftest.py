from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from gpulease import Client

from .stand_in import StandIn


@pytest.fixture
def daemon() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.stop()


@pytest.fixture
def client(daemon: StandIn) -> Iterator[Client]:
    with Client(daemon.url) as connected:
        yield connected


@pytest.fixture
def until() -> Callable[..., None]:
    """Waits for a condition, with a deadline."""

    def wait(condition: Callable[[], bool], within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.005)

    return wait
