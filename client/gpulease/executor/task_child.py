"""Runs in the process of one task of a `GPUExecutor`.

The process is started with the variables of its lease, so that the caller's modules see only its GPUs when imported.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from multiprocessing import process, spawn
from typing import Any

MESSAGE_LENGTH = struct.Struct("!Q")
"""Sent before each message: its size in bytes."""
PR_SET_PDEATHSIG = 1


class NotPicklable(pickle.PicklingError, TypeError):
    """A task or its result cannot be sent to another process. The message says which part."""


def main(socket_fd: int, parent_pid: int) -> None:
    """Receive a task, run it, and send back its outcome."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before PR_SET_PDEATHSIG was set
        os._exit(1)
    with socket.socket(fileno=socket_fd) as connection:
        outcome = _run_task(*pickle.loads(_receive(connection)))  # noqa: S301 - from the parent, over a socket pair
        connection.sendall(MESSAGE_LENGTH.pack(len(outcome)) + outcome)


def _run_task(preparation: dict[str, Any], task: bytes, by_value: bool) -> bytes:
    """The pickled result as `(True, pickle)`, else the error as `(False, pickle or None, text)`.

    `by_value`: also what this process alone can import is sent, with cloudpickle.
    """
    dumps: Callable[[object], bytes] = pickle.dumps
    try:
        # As in multiprocessing: a main module that submits tasks on import gets an error instead of endless processes.
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        spawn.prepare(preparation)
        del process.current_process()._inheriting  # type: ignore[attr-defined]
        if by_value:
            import cloudpickle  # noqa: PLC0415 - only where it is asked for

            dumps = cloudpickle.dumps
        function, positional, named = pickle.loads(task)  # noqa: S301
        result = function(*positional, **named)
    except BaseException as error:
        return pickle.dumps((False, _pickle_error(error, dumps), "".join(traceback.format_exception(error))))
    try:
        return pickle.dumps((True, dumps(result)))
    except BaseException as error:
        unsendable = error
        if isinstance(error, Exception):
            unsendable = NotPicklable(f"The result of the task, a {type(result).__name__}, cannot be pickled: {error}")
        return pickle.dumps((False, pickle.dumps(unsendable), "".join(traceback.format_exception(error))))


def _pickle_error(error: BaseException, dumps: Callable[[object], bytes]) -> bytes | None:
    """The pickled error; None if it cannot be pickled and unpickled."""
    try:
        content = dumps(error)
        pickle.loads(content)  # noqa: S301
    except Exception:
        return None
    return content


def _receive(connection: socket.socket) -> bytes:
    (size,) = MESSAGE_LENGTH.unpack(_receive_exactly(connection, MESSAGE_LENGTH.size))
    return _receive_exactly(connection, size)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        chunk = connection.recv(min(size - len(content), 2**20))
        if not chunk:
            sys.exit("the parent is gone")
        content += chunk
    return bytes(content)
