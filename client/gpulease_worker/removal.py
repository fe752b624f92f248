"""Removes directories in the background, one after the other."""

from __future__ import annotations

import queue
import subprocess
import threading
from pathlib import Path


class Removal:
    """What is given to it is gone some time later, unless this process ends before; it then goes on the next time.

    By rm(1), because `rmtree` goes down by recursion, and the user of a job may have made his directory as deep as he
    likes, and put a million files into it.
    """

    def __init__(self) -> None:
        self._doomed: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, directory: Path) -> None:
        """Have a directory removed."""
        self._doomed.put(directory)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="removal", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            command = ["rm", "-rf", "--", str(self._doomed.get())]
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
