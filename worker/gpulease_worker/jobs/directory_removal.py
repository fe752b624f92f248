"""Removes directories in the background, one after another, also where their user would rather keep them.

If the removal of a directory hangs or fails, the log names it, once, and it is left to the next worker; the others are
removed all the same.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import threading
import time
from pathlib import Path

from gpulease_worker.jobs.user_mounts import detach_beneath

CHECK_S = 1.0
"""How often to look, while a directory is removed, whether its user has mounted something in it again."""
MAX_TRIES = 3
"""How often to begin with a directory in which its user mounts again and again."""
TURN_S = 600.0
"""How long one directory may take before the others get their turn."""
END_S = 1.0
"""How long to wait for the end of a killed rm."""
MAX_HUNG = 8
"""How many rm that SIGKILL does not end there may be; while there are as many, nothing is removed."""

log = logging.getLogger(__name__)


class DirectoryRemover:
    """Removes each directory some time later; one that is left when this process ends is removed by the next worker.

    It uses rm(1), because `rmtree` recurses, and the user of a job may have made directories of any depth, with a
    million files in them.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hung: list[subprocess.Popen[bytes]] = []

    def put(self, directory: Path) -> None:
        """Queue a directory for removal."""
        self._queue.put(directory)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="removal", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            directory = self._queue.get()
            self._wait_for_hung()
            try:
                problem = self._remove(directory)
            except OSError as error:
                problem = str(error)
            if problem is not None:
                log.warning("%s is not removed, and stays until a worker starts again: %s", directory, problem)

    def _remove(self, directory: Path) -> str | None:
        """Remove a directory, or put it last if that takes long. Returns why it stays, if it does."""
        until_s = time.monotonic() + TURN_S
        for _ in range(MAX_TRIES):
            mounted = detach_beneath(directory) > 0
            process = _start_removal(directory)
            while not (ended := _has_ended(process, CHECK_S)) and time.monotonic() < until_s:
                if detach_beneath(directory) > 0:
                    mounted = True
                    break
            if not self._end(process):
                return "rm hangs in the kernel, and SIGKILL does not end it"
            if process.returncode == 0:
                return None
            if not mounted and detach_beneath(directory) == 0:
                if ended:
                    return f"rm ended with {process.returncode}; try `rm -rf --one-file-system` by hand"
                self._queue.put(directory)
                return None
        return "its user mounts file systems in it, again and again"

    def _end(self, process: subprocess.Popen[bytes]) -> bool:
        """End an rm. False if it does not end."""
        if process.poll() is None:
            process.kill()
        if _has_ended(process, END_S):
            return True
        self._hung.append(process)
        return False

    def _wait_for_hung(self) -> None:
        """Wait while too many rm hang."""
        self._hung = [process for process in self._hung if process.poll() is None]
        if len(self._hung) >= MAX_HUNG:
            log.error("no directory is removed while %d rm hang in the kernel", len(self._hung))
            while all(process.poll() is None for process in self._hung):
                time.sleep(CHECK_S)


def _start_removal(directory: Path) -> subprocess.Popen[bytes]:
    silent = subprocess.DEVNULL
    command = ["rm", "-rf", "--one-file-system", "--", str(directory)]
    return subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent)


def _has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True
