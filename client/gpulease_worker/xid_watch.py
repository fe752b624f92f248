"""Waits for the driver's Xid errors, in a thread of the probe, so that one is known at the next reading."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from gpulease_worker.nvml import LibraryFailed, Nvml

WAIT_S = 0.25
"""How long one wait lasts: a watch ends within that."""
MAX_KEPT = 1000
"""Xids that may wait to be read; beyond that the newest are dropped, because the eldest say enough."""


class XidWatch:
    """Watches these GPUs until `close`. Where the driver has no events it sees nothing."""

    def __init__(self, nvml: Nvml, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._seen: queue.Queue[tuple[str, int, float]] = queue.Queue(MAX_KEPT)
        self._closing = threading.Event()
        self.spoilt = False
        """Waiting fails, as it does for the whole set when one of its GPUs is lost."""
        self._events = nvml.register_xids(handles)
        self._thread = threading.Thread(target=self._run, daemon=True)
        if self._events is not None:
            self._thread.start()

    def seen(self) -> Iterator[tuple[str, int, float]]:
        """UUID, Xid and monotonic time of each error since the last call."""
        while not self._seen.empty():
            yield self._seen.get_nowait()

    def close(self) -> None:
        """End the watch and give its event set back. Raises LibraryFailed when there is no library any more.

        A set that a hung driver still waits on is not given back: it would be used after that.
        """
        self._closing.set()
        if self._events is not None:
            self._thread.join(2 * WAIT_S)
            if not self._thread.is_alive():
                self._nvml.forget_xids(self._events)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                found = self._nvml.wait_for_xid(self._events, WAIT_S)
            except LibraryFailed:
                # The readings will say what is wrong, and then the watch is made anew without the GPU that is lost.
                self.spoilt = True
                self._closing.wait(WAIT_S)
                continue
            self.spoilt = False
            if found is not None and not self._seen.full():
                self._seen.put_nowait((*found, time.monotonic()))
