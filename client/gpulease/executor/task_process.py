"""The parent's side of the process that runs one task: starts it, awaits its outcome, ends it.

The process has a session of its own, so that Ctrl-C in a terminal reaches only the parent, and so that everything it
has started can be ended with it. The kernel kills it when the parent dies.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from gpulease.executor.task_child import MESSAGE_LENGTH
from gpulease.sansio.async_transport import wait_through_cancellation

EXIT_TIMEOUT_S = 10.0
"""How long a process may take to exit after it has sent its outcome."""
GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL."""
CHILD_PROGRAM = (
    "import sys; sys.path.append({place!r}); from gpulease.executor.task_child import main; main({fd}, {parent})"
)


class ProcessDied(BrokenProcessPool):
    """The process of a task ended before the task returned. Only the future of that task raises it."""


class TaskTraceback(Exception):
    """The cause of an error that a task raised: its traceback in the task process, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class TaskProcess:
    """A process that runs one task under the environment of its lease."""

    def __init__(self, payload: bytes, environ: Mapping[str, str], name: str) -> None:
        """Start it. `payload` is what `task_child` receives; `name` names the task in errors."""
        self._payload = payload
        self._name = name
        self._socket, child_socket = socket.socketpair()
        self._socket.setblocking(False)
        with child_socket:
            program = CHILD_PROGRAM.format(
                place=str(Path(__file__).parents[1]), fd=child_socket.fileno(), parent=os.getpid()
            )
            self._process = subprocess.Popen(
                [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", program],  # type: ignore[attr-defined]
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                pass_fds=(child_socket.fileno(),),
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended.set)

    async def outcome(self) -> tuple[Any, BaseException | None]:
        """What the task returned, or the error that it raised, or ProcessDied, once the process has ended.

        The error is returned, not raised: an event loop would take a task's SystemExit for its own.
        """
        exchange = asyncio.create_task(self._exchange())
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({exchange, ended}, return_when=asyncio.FIRST_COMPLETED)
            # Read what it sent before it ended; a child process of its own may keep the socket open.
            await asyncio.wait({exchange}, timeout=1.0)
            response = exchange.result() if exchange.done() and exchange.exception() is None else None
            await asyncio.wait({ended}, timeout=EXIT_TIMEOUT_S)
        finally:
            exchange.cancel()
            ended.cancel()
            await self.end()
        if response is None:
            return None, ProcessDied(
                f"The process {self._process.pid} of {self._name} {_describe_exit(self._process.returncode)} before it"
                " returned. Its output may say why. A SIGKILL that no one sent is often the kernel's, which ran out of"
                " memory (see dmesg)."
            )
        return await asyncio.to_thread(_unpickle_outcome, response)

    async def end(self) -> None:
        """End the process, and what it has started if it did not exit with 0. Further calls do nothing."""
        if self._process.returncode is not None:
            return
        ending = asyncio.create_task(self._end())
        await wait_through_cancellation(ending)
        ending.result()

    async def _end(self) -> None:
        if not self._ended.is_set():
            self._signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._ended.wait(), GRACE_S)
            except TimeoutError:
                self._signal(signal.SIGKILL)
                await self._ended.wait()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._reap()

    def _reap(self) -> None:
        os.close(self._pidfd)
        self._socket.close()
        # Until it is reaped, neither its pid nor its process group id can be reused.
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if status is None or status.si_code != os.CLD_EXITED or status.si_status != 0:
            self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    async def _exchange(self) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, MESSAGE_LENGTH.pack(len(self._payload)) + self._payload)
        (size,) = MESSAGE_LENGTH.unpack(await self._exactly(MESSAGE_LENGTH.size))
        return await self._exactly(size)

    async def _exactly(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            chunk = await asyncio.get_running_loop().sock_recv(self._socket, min(size - len(content), 2**20))
            if not chunk:
                raise EOFError
            content += chunk
        return bytes(content)


def _unpickle_outcome(response: bytes) -> tuple[Any, BaseException | None]:
    """The result or the error that a process has sent; the error if the result cannot be unpickled."""
    succeeded, content, *traceback = pickle.loads(response)  # noqa: S301 - from our own child
    if succeeded:
        try:
            return pickle.loads(content), None  # noqa: S301
        except BaseException as failure:  # a SystemExit would end the event loop
            return None, failure
    error: BaseException = RuntimeError("The task failed with an error that cannot be pickled; see its cause.")
    if content is not None:
        error = pickle.loads(content)  # noqa: S301
    error.__cause__ = TaskTraceback(traceback[0])
    return None, error


def _describe_exit(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:  # most real-time signals have no name
        return f"was ended by signal {-returncode}"
