"""The parent's side of the process that runs one task: starts it, awaits its outcome, ends it.

It is a process of its own session, so that Ctrl-C in a terminal reaches the parent alone, and so that everything it has
started can be ended with it. The kernel kills it when the parent dies.
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
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

from gpulease.async_transport import until_done
from gpulease.task_child import LENGTH

EXIT_S = 10.0
"""How long a process may take to end after it has sent its outcome."""
GRACE_S = 5.0
"""How long between SIGTERM and SIGKILL."""
PROGRAM = "import sys; sys.path.append({place!r}); from gpulease.task_child import main; main({fd}, {parent})"


class ProcessDied(BrokenExecutor):
    """The process of a task ended before the task returned; only the future of that task has this error."""


class TaskTraceback(Exception):
    """The cause of an error that a task raised: its traceback there, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class TaskProcess:
    """A process that runs one task under the environment of its lease."""

    def __init__(self, order: bytes, environ: Mapping[str, str], what: str) -> None:
        """Start it. `order` is what `task_child` receives; `what` names the task in errors."""
        self._order = order
        self._what = what
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        with theirs:
            program = PROGRAM.format(place=str(Path(__file__).parents[1]), fd=theirs.fileno(), parent=os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", program],  # type: ignore[attr-defined]
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended.set)

    async def outcome(self) -> tuple[Any, BaseException | None]:
        """What the task returned, or else the error that it raised, once the process has ended; or ProcessDied.

        The error is not raised here: an event loop would take a task's SystemExit for its own.
        """
        talking = asyncio.create_task(self._talk())
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({talking, ended}, return_when=asyncio.FIRST_COMPLETED)
            # What it has sent before it ended is there to be read; a child of its own may keep the line open.
            await asyncio.wait({talking}, timeout=1.0)
            answer = talking.result() if talking.done() and talking.exception() is None else None
            await asyncio.wait({ended}, timeout=EXIT_S)
        finally:
            talking.cancel()
            ended.cancel()
            await self.end()
        if answer is None:
            return None, ProcessDied(
                f"The process {self._process.pid} of {self._what} {_how(self._process.returncode)} before it returned."
                f" Its output may say why; SIGKILL that nobody sent is often the kernel, out of memory (see dmesg)."
            )
        return await asyncio.to_thread(_opened, answer)

    async def end(self) -> None:
        """End the process, and what it has started if it did not end well. Further calls do nothing."""
        if self._process.returncode is not None:
            return
        ending = asyncio.create_task(self._end())
        await until_done(ending)
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
        self._line.close()
        # Until it is waited for its id is nobody else's, and that of its group neither.
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if status is None or status.si_code != os.CLD_EXITED or status.si_status != 0:
            self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    async def _talk(self) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._line, LENGTH.pack(len(self._order)) + self._order)
        (size,) = LENGTH.unpack(await self._exactly(LENGTH.size))
        return await self._exactly(size)

    async def _exactly(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            piece = await asyncio.get_running_loop().sock_recv(self._line, min(size - len(content), 2**20))
            if not piece:
                raise EOFError
            content += piece
        return bytes(content)


def _opened(answer: bytes) -> tuple[Any, BaseException | None]:
    """The result that a process sent, or the error."""
    good, content, *text = pickle.loads(answer)  # noqa: S301 - from our own child
    if good:
        return pickle.loads(content), None  # noqa: S301
    error: BaseException = RuntimeError("The task failed with an error that cannot be pickled; see its cause.")
    if content is not None:
        error = pickle.loads(content)  # noqa: S301
    error.__cause__ = TaskTraceback(text[0])
    return None, error


def _how(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return f"exited with code {returncode}"
    return f"was ended by {signal.Signals(-returncode).name}"
