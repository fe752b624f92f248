"""Waits for the driver's Xid errors in a thread of the probe, so that the next reading knows of each."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from gpulease_worker.probe.nvml_binding import LibraryFailed, Nvml

WAIT_S = 0.25
"""How long one wait lasts: closing a watch takes no longer."""
MAX_UNREAD = 1000
"""How many Xids may wait to be read. Beyond that new ones are dropped: the oldest say enough."""


class XidWatch:
    """Watches GPUs for Xid errors until `close`. Without driver support for events it reports none."""

    def __init__(self, nvml: Nvml, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._unread: queue.Queue[tuple[str, int, float]] = queue.Queue(MAX_UNREAD)
        self._closing = threading.Event()
        self.failing = False
        """True while waiting fails, as it does for the whole event set when one of its GPUs is lost."""
        self._events = nvml.register_xids(handles)
        self._thread = threading.Thread(target=self._run, daemon=True)
        if self._events is not None:
            self._thread.start()

    def new_xids(self) -> Iterator[tuple[str, int, float]]:
        """UUID, Xid and monotonic time of each error since the last call."""
        while not self._unread.empty():
            yield self._unread.get_nowait()

    def close(self) -> None:
        """End the watch and free its event set. Raises LibraryFailed if the library is gone.

        A set that a hung driver still waits on is not freed: it would be used after free.
        """
        self._closing.set()
        if self._events is not None:
            self._thread.join(2 * WAIT_S)
            if not self._thread.is_alive():
                self._nvml.free_xid_events(self._events)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                event = self._nvml.wait_for_xid(self._events, WAIT_S)
            except LibraryFailed:
                # The readings will say what is wrong; then the watch is recreated without the lost GPU.
                self.failing = True
                self._closing.wait(WAIT_S)
                continue
            self.failing = False
            if event is not None and not self._unread.full():
                self._unread.put_nowait((*event, time.monotonic()))
