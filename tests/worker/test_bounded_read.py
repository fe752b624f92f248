"""Reads of processes whose memory is locked in the kernel, so that every reader hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gpulease_worker.processes import bounded_read
from tests.client.stalls import stalls


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Looks at what hangs return when it is set."""
    event = threading.Event()
    yield event
    event.set()


def hanging_at(stuck: threading.Event, *pids: int, hung: list[int] | None = None) -> Callable[[int], int]:
    """A look at a process that hangs at these, and notes the threads that do so."""

    def look(pid: int) -> int:
        if pid in pids:
            if hung is not None:
                hung.append(threading.get_native_id())
            stuck.wait(60)
        return -pid

    return look


@pytest.mark.alone
def test_a_hung_process_is_skipped_and_the_others_are_read(
    stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep: list[int] = []
    monkeypatch.setattr(bounded_read, "_sleeps_uninterruptibly", lambda thread: thread.native_id in asleep)
    pids = range(10**9, 10**9 + 400)
    hung = [pids[0], *pids[100:108], pids[-1]]
    with stalls() as stalled_s:
        begun = time.monotonic()
        seen = bounded_read.read_each(hanging_at(stuck, *hung, hung=asleep), pids)
        assert time.monotonic() - begun < 3 + stalled_s()
    assert seen == {pid: -pid for pid in pids if pid not in hung}
    assert bounded_read.abandoned_recently()
    again: list[int] = []
    assert bounded_read.read_one(hanging_at(stuck, *hung, hung=again), pids[0], 7) == 7
    assert again == [], "it was tried again"
    begun = time.monotonic()
    stuck.set()
    while any(map(bounded_read.is_hung, hung)):
        assert time.monotonic() - begun < 30
        time.sleep(0.01)
    assert bounded_read.read_one(hanging_at(stuck, *hung), pids[0], 7) == -pids[0]
    assert not bounded_read.abandoned_recently()


def test_a_slow_read_is_awaited(stuck: threading.Event) -> None:
    timer = threading.Timer(4 * bounded_read.STALL_S, stuck.set)
    timer.start()
    assert bounded_read.read_one(hanging_at(stuck, 10**9), 10**9, 7) == -(10**9)
    timer.join()


def test_an_exception_of_a_read_is_raised_to_the_caller() -> None:
    def look(pid: int) -> int:
        raise OSError(24, "Too many open files")

    with pytest.raises(OSError, match="Too many"):
        bounded_read.read_each(look, (os.getpid(),))
