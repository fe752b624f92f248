"""For how long the process of a test was kept from running, so that a bound in seconds is one of the client alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PAUSE_S = 0.01


@contextmanager
def stalls() -> Iterator[Callable[[], float]]:
    """A function that tells for how many seconds so far no thread of this process could run: what one overslept."""
    ended, lock = threading.Event(), threading.Lock()
    woke_s, overslept_s = time.monotonic(), 0.0

    def told() -> float:
        with lock:  # this thread may run before the other one has noticed
            return overslept_s + max(0.0, time.monotonic() - woke_s - PAUSE_S)

    def watch() -> None:
        nonlocal woke_s, overslept_s
        while not ended.wait(PAUSE_S):
            with lock:
                now_s = time.monotonic()
                woke_s, overslept_s = now_s, overslept_s + max(0.0, now_s - woke_s - PAUSE_S)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield told
    finally:
        ended.set()
        watching.join()
