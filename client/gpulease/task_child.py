"""What runs in the process of one task of a `GPUExecutor`. It is started with the variables of its lease in its
environment, so that whatever the caller's modules import finds its GPUs and no others."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from multiprocessing import process, spawn
from typing import Any

LENGTH = struct.Struct("!Q")
"""Before each message: its size in bytes."""
PR_SET_PDEATHSIG = 1


def main(line_fd: int, parent_pid: int) -> None:
    """Receive a task, run it, send back what came of it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it has died before it could be tied to us
        os._exit(1)
    with socket.socket(fileno=line_fd) as line:
        outcome = _outcome(*pickle.loads(_received(line)))  # noqa: S301 - from the parent, over a socket pair
        line.sendall(LENGTH.pack(len(outcome)) + outcome)


def _outcome(preparation: dict[str, Any], task: bytes) -> bytes:
    """The pickled result as `(True, pickle)`, else the error as `(False, pickle or None, text)`."""
    try:
        # As multiprocessing does it: a main module that starts tasks when it is imported is refused, not run for ever.
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        spawn.prepare(preparation)
        del process.current_process()._inheriting  # type: ignore[attr-defined]
        function, positional, named = pickle.loads(task)  # noqa: S301
        result = function(*positional, **named)
    except BaseException as error:
        return pickle.dumps((False, _portable(error), "".join(traceback.format_exception(error))))
    try:
        return pickle.dumps((True, pickle.dumps(result)))
    except Exception as error:
        unsendable = TypeError(f"The result of the task, a {type(result).__name__}, cannot be pickled: {error}")
        return pickle.dumps((False, pickle.dumps(unsendable), "".join(traceback.format_exception(error))))


def _portable(error: BaseException) -> bytes | None:
    """The error as bytes from which it can be made again; None for one that forbids it."""
    try:
        content = pickle.dumps(error)
        pickle.loads(content)  # noqa: S301
    except Exception:
        return None
    return content


def _received(line: socket.socket) -> bytes:
    (size,) = LENGTH.unpack(_exactly(line, LENGTH.size))
    return _exactly(line, size)


def _exactly(line: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        piece = line.recv(min(size - len(content), 2**20))
        if not piece:
            sys.exit("the parent has gone")
        content += piece
    return bytes(content)
