"""Removes directories in the background, one after another."""

from __future__ import annotations

import queue
import subprocess
import threading
from pathlib import Path


class DirectoryRemover:
    """Removes each directory some time later; one that is left when this process ends is removed by the next worker.

    It uses rm(1), because `rmtree` recurses, and the user of a job may have made directories of any depth, with a
    million files in them.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, directory: Path) -> None:
        """Queue a directory for removal."""
        self._queue.put(directory)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="removal", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            command = ["rm", "-rf", "--", str(self._queue.get())]
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
