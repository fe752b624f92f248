"""Processes at which everybody hangs who reads their memory, because its lock is held in the kernel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gpulease_worker import patience


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Looks at what hangs return when it is set."""
    event = threading.Event()
    yield event
    event.set()


def hanging_at(stuck: threading.Event, *pids: int) -> Callable[[int], int]:
    def look(pid: int) -> int:
        if pid in pids:
            stuck.wait(60)
        return -pid

    return look


def test_what_hangs_is_left_out_and_the_rest_is_seen(stuck: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_sleeps_in_kernel", lambda thread: True)
    pids = range(10**9, 10**9 + 400)
    hung = [pids[0], *pids[100:108], pids[-1]]
    begun = time.monotonic()
    seen = patience.each(hanging_at(stuck, *hung), pids)
    took_s = time.monotonic() - begun
    assert seen == {pid: -pid for pid in pids if pid not in hung}
    assert took_s < 3
    assert patience.doubtful()
    begun = time.monotonic()
    assert patience.one(hanging_at(stuck, *hung), pids[0], 7) == 7
    assert time.monotonic() - begun < patience.PATIENCE_S, "it was tried again"
    stuck.set()
    while any(map(patience.hangs, hung)):
        assert time.monotonic() - begun < 30
        time.sleep(0.01)
    assert patience.one(hanging_at(stuck, *hung), pids[0], 7) == -pids[0]
    assert not patience.doubtful()


def test_what_is_only_slow_is_waited_for(stuck: threading.Event) -> None:
    timer = threading.Timer(4 * patience.PATIENCE_S, stuck.set)
    timer.start()
    assert patience.one(hanging_at(stuck, 10**9), 10**9, 7) == -(10**9)
    timer.join()


def test_what_a_look_raises_reaches_who_asked() -> None:
    def look(pid: int) -> int:
        raise OSError(24, "Too many open files")

    with pytest.raises(OSError, match="Too many"):
        patience.each(look, (os.getpid(),))
