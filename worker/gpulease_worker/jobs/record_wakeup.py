"""Tells the worker at once that a job's supervisor has written a record, so that it need not look again and again.

A datagram with the job's name goes to a socket in the worker's data directory, which only the worker's user may write
to. It says no more than where to look: what counts is the record. It may be lost, because no worker runs or the socket
cannot be made; the worker then sees the record when it looks again by itself. The end of a supervisor needs no news,
because the worker has a pidfd of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SOCKET = "record-news.socket"
"""Name of the socket, in the worker's data directory."""
NAME_BYTES = 512
"""Longer than the name of any job's directory."""
AT_ONCE = 64
"""How many messages are taken before the event loop goes on with something else."""
TELL_S = 0.2
"""How long to wait where more messages are under way than the kernel keeps (`net.unix.max_dgram_qlen`)."""


class NewsListener:
    """Receives the names of jobs with a new record, in the event loop.

    Args:
        data_dir: The worker's data directory.
        told: Called with each name, which may be any text.

    Raises OSError where the socket cannot be made.
    """

    def __init__(self, data_dir: Path, told: Callable[[str], None]) -> None:
        self._told = told
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            made = data_dir / f".{SOCKET}.{os.getpid()}"
            made.unlink(missing_ok=True)
            with _address(made) as address:
                self._socket.bind(address)
            made.chmod(0o600)
            made.rename(data_dir / SOCKET)  # in place of a former worker's
            asyncio.get_running_loop().add_reader(self._socket, self._receive)
        except OSError:
            self._socket.close()
            raise

    def close(self) -> None:
        """Listen no more. The file stays: it may be the next worker's by now."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                self._told(os.fsdecode(self._socket.recv(NAME_BYTES)))


def tell(directory: Path) -> None:
    """Tell the worker, if one listens, that there is a new record in a job's directory. Waits a moment where many tell
    at once; what is lost is found by polling."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(TELL_S)
        with _address(directory.parents[1] / SOCKET) as address:
            sender.sendto(os.fsencode(directory.name), address)


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """The address of a socket's file, whose path may be longer than the 107 bytes of an address."""
    parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{parent}/{path.name}"
    finally:
        os.close(parent)
