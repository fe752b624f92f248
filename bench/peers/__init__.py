"""What gpulease is compared with. A peer runs in a directory and on ports of its own, as a child of the measurement.

A peer that is not installed says so by `NotInstalled`, and its rows say what to install.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_S = 60.0
ROOT = Path(__file__).parents[2]


class NotInstalled(Exception):
    """The peer is missing, or cannot run here; the text says why."""


def program(name: str, package: str) -> str:
    """Path of a program. Raises NotInstalled, which names Debian's package."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise NotInstalled(f"not installed: apt-get install {package}")
    return path


@contextmanager
def running(
    command: Sequence[str],
    log: Path,
    ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    user: str | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that is `ready`; ended at the close. `user` runs it. Raises NotInstalled if it does not start."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, user=user, cwd=ROOT)
    try:
        until_s = time.monotonic() + START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > until_s:
                raise NotInstalled(f"{command[0]} does not start here: {log.read_text(errors='replace')[-600:]}")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def listens(port: int) -> bool:
    """True when something accepts connections on a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
