"""Another user's process at an address where a client looks for its daemon. It answers, and records what it is sent."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from tests.imported_program import CONTEXT

EVE = 54321
"""A user whom no database knows."""
ROOT = os.geteuid() == 0
WITHIN_S = 60.0
TOKEN = "token-0123456789abcdef-of-ada"
"""What must never reach eve."""
ANSWER = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
CONNECTED = b"[connected]"


class Squatter:
    """Eve's process, which listens at `address` from entry to exit. Needs root, to be another user."""

    def __init__(
        self, address: tuple[str, int] | Path, record: Path, *, accepts: bool = True, answers: bool = True
    ) -> None:
        self._record = record
        record.touch()
        if isinstance(address, Path):
            address.parent.chmod(0o777)
        self._control, self._child_end = CONTEXT.Pipe()
        place = str(address) if isinstance(address, Path) else address
        self._process = CONTEXT.Process(
            target=squat, args=(place, str(record), self._child_end, accepts, answers), daemon=True
        )

    def __enter__(self) -> Self:
        self._process.start()
        self._child_end.close()
        assert self._control.poll(WITHIN_S), "eve's process has not begun"
        self.port = self._control.recv()
        assert isinstance(self.port, int), self.port
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(WITHIN_S)

    @property
    def recorded(self) -> bytes:
        """Everything that was sent to eve, and a word for each connection."""
        return self._record.read_bytes()

    def has_got_nothing(self) -> bool:
        """True if clients have connected, and none has sent anything."""
        return set(self.recorded.split(CONNECTED)) == {b""} and CONNECTED in self.recorded


def squat(address: str | tuple[str, int], record: str, control: Connection, accepts: bool, answers: bool) -> None:
    """In eve's process: listen, and record."""
    written = os.open(record, os.O_WRONLY | os.O_APPEND)
    os.setgroups([])
    os.setresgid(EVE, EVE, EVE)
    os.setresuid(EVE, EVE, EVE)
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        control.send(str(error))
        return
    control.send(0 if isinstance(address, str) else listener.getsockname()[1])
    while True:
        if accepts:
            caller, _ = listener.accept()
            threading.Thread(target=answer, args=(caller, written, answers), daemon=True).start()
        else:
            threading.Event().wait()


def answer(caller: socket.socket, written: int, answers: bool) -> None:
    """Record what one caller sends, and refuse it, or hang up."""
    os.write(written, CONNECTED)
    with caller, suppress(OSError):
        while piece := caller.recv(65536):
            os.write(written, piece)
            if not answers:
                return
            caller.sendall(ANSWER)
