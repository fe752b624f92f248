"""Functions that the tests of `GPUExecutor` run as tasks."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

AT_IMPORT = os.environ.get("CUDA_VISIBLE_DEVICES")
"""The mask when this module was imported; a library would have bound itself to it."""


def hold(directory: str, name: str, seconds: float = 0.15) -> tuple[list[str], float, float]:
    """The GPUs it was bound to, and the monotonic times of its start and end."""
    begun = time.monotonic()
    Path(directory, name).touch()
    time.sleep(seconds)
    return os.environ["CUDA_VISIBLE_DEVICES"].split(","), begun, time.monotonic()


def begin_and_wait_for(begun: str, continues: str) -> str:
    """Make the first file, and return once the second is there."""
    Path(begun).touch()
    while not Path(continues).exists():
        time.sleep(0.01)
    return "done"


def environment() -> tuple[str | None, dict[str, str], int]:
    return AT_IMPORT, dict(os.environ), os.getpid()


def fail(words: str) -> None:
    raise KeyError(words)


class Stubborn(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


def fail_stubbornly() -> None:
    raise Stubborn(1, 2)


def die(how: str) -> None:
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit(4)
    os.kill(os.getpid(), signal.SIGRTMIN + 1 if how == "real-time" else signal.SIGKILL)


def return_what_cannot_be_sent() -> object:
    return lambda: 1


def wait_until_ended(directory: str, name: str) -> None:
    """Ignores SIGTERM, and has a child that would outlive it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        time.sleep(300)
    written = Path(directory, f"{name}.new")
    written.write_text(f"{os.getpid()} {child}")
    written.replace(Path(directory, name))  # who sees the file reads all of it
    time.sleep(300)


def add(one: int, two: int) -> int:
    return one + two
