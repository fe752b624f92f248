"""A file system that takes a request and never answers it, so that a process hangs in the kernel.

`python -m tests.hanging_filesystem DIR UID` mounts it (FUSE, by hand: mount(2) and a few answers), in the name of a
user, and serves it until it is ended. A read of `DIR/hangs` is not answered, nor is anything about `DIR/nowhere`;
`DIR/written` can be read and mapped, and what is written back to it is not answered. With `mute` as a third argument
nothing at all is answered, not even what `DIR` is. A process that waits for such an answer takes no signal, SIGKILL
included, once the request was taken, until the connection ends: here, when this process ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from gpulease_protocol.host.process_tree import signal_on_parent_death
from tests.daemon import eventually

ROOT, HANGS, WRITTEN = 1, 2, 3
INIT = 26
NAMES = {b"hangs": HANGS, b"written": WRITTEN}
DIRECT_IO, KEEP_CACHE = 1, 2
MNT_DETACH = 2
Result = TypeVar("Result")
libc = ctypes.CDLL(None, use_errno=True)


class Hanging:
    """The file system, while it is mounted."""

    def __init__(self, place: Path, server: subprocess.Popen[bytes]) -> None:
        self.place = place
        self._server = server

    @property
    def file(self) -> Path:
        """A file of which a read is never answered."""
        return self.place / "hangs"

    @property
    def written(self) -> Path:
        """A file that can be mapped, and to which nothing is ever written."""
        return self.place / "written"

    @property
    def nowhere(self) -> Path:
        """A path of which no one is told whether it exists."""
        return self.place / "nowhere"

    def abort(self) -> None:
        """End the connection: what waits for an answer gets an error."""
        self._server.kill()
        self._server.wait()


@contextmanager
def hanging(place: Path, user: int = 0, mute: bool = False) -> Iterator[Hanging]:
    """The file system at a directory, as a user would mount it; aborted and unmounted at the end, whatever happens."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("only root can mount FUSE, and only where there is /dev/fuse")
    place.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.hanging_filesystem", str(place), str(user), *["mute"] * mute]
    with subprocess.Popen(command) as server:
        system = Hanging(place, server)
        try:
            eventually(lambda: is_mounted(place) or server.poll() is not None, 60)
            if server.poll() is not None:
                pytest.skip("FUSE cannot be mounted here")
            yield system
        finally:
            system.abort()
            libc.umount2(os.fsencode(place), MNT_DETACH)


def is_mounted(place: Path) -> bool:
    """True while something is mounted at a path. Does not ask what is mounted."""
    return f" {place} " in Path("/proc/self/mountinfo").read_text()


def in_time(call: Callable[[], Result], within_s: float = 30.0) -> Result:
    """The result of a call that must not hang."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(within_s)
    assert not thread.is_alive(), "it hangs"
    return results[0]


def serve(place: str, user: int, mute: bool) -> None:
    """Mount the file system at a directory, and answer what is to be answered."""
    connection = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={connection},rootmode=40000,user_id={user},group_id={user},allow_other".encode()
    if libc.mount(b"tests", os.fsencode(place), b"fuse", 6, options) != 0:
        sys.exit(f"not mounted: {os.strerror(ctypes.get_errno())}")
    while True:
        request = os.read(connection, 2**20)
        _, operation, number, node, *_ = struct.unpack_from("<IIQQIIII", request)
        answer = None if mute and operation != INIT else _answer(operation, node, request[40:])
        if answer is not None:
            error, content = answer
            os.write(connection, struct.pack("<IiQ", 16 + len(content), -error, number) + content)


def _answer(operation: int, node: int, rest: bytes) -> tuple[int, bytes] | None:
    """Error number and content; None for what gets no answer."""
    match operation:
        case 26:  # INIT, protocol 7.31, with the sizes that fuse(4) wants
            return 0, struct.pack("<IIIIHHIIHHI7I", 7, 31, 0, 0, 12, 9, 4096, 1, 0, 0, 0, *[0] * 7)
        case 1 if rest.rstrip(b"\0") == b"nowhere":  # LOOKUP
            return None
        case 1 if (name := rest.rstrip(b"\0")) in NAMES:
            return 0, struct.pack("<QQQQII", NAMES[name], 0, 0, 0, 0, 0) + _attributes(NAMES[name])
        case 1:
            return errno.ENOENT, b""
        case 3:  # GETATTR
            return 0, struct.pack("<QII", 0, 0, 0) + _attributes(node)
        case 14:  # OPEN: with FOPEN_DIRECT_IO each read is a request
            return 0, struct.pack("<QII", 1, DIRECT_IO if node == HANGS else KEEP_CACHE, 0)
        case 15 if node == WRITTEN:
            return 0, bytes(4096)
        case 15 | 16 | 2 | 36 | 42:  # READ, WRITE, which hang; INTERRUPT, not obeyed; FORGET, twice, which want none
            return None
        case _:
            return errno.ENOSYS, b""


def _attributes(node: int) -> bytes:
    mode, size = (0o40777, 0) if node == ROOT else (0o100666, 4096)
    return struct.pack("<QQQQQQIIIIIIIIII", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


if __name__ == "__main__":
    signal_on_parent_death(signal.SIGKILL)
    serve(sys.argv[1], int(sys.argv[2]), "mute" in sys.argv[3:])
