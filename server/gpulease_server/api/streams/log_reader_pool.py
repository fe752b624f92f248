"""The threads that read logs, shared by all requests, and the bound on how many of them one user's files may hold.

A log lies where its job's user owns the directory, and they may see to it that a read of it never ends: with a write to
the same file that hangs in a file system of their own, for instance. No thread can be taken back from such a read. So
the files of one user hold at most `THREADS_PER_USER` of the `THREADS`, and requests for them get 503 instead. The
threads are daemon threads, and not those of an executor, which the interpreter would wait for at its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import ClassVar, TypeVar

from fastapi import Request

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.host.daemon_thread import call_in_thread
from gpulease_protocol.host.file_poller import FilePoller, Signatures
from gpulease_server.api import fair_share

THREADS = 32
THREADS_PER_USER = 2
"""Threads for the files of one user, of all their readers together."""

Result = TypeVar("Result")


class LogsHang(Unavailable):
    """The log files of a user do not answer."""


class LogReaderPool:
    """The threads and the poller that all log requests share. For one event loop."""

    patience_s: ClassVar[float] = 20.0
    """How long to wait for a read, and for those of the same user before it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.follower_count = 0
        self.followers_by_user = Counter[str | None]()
        self._free_threads = asyncio.Semaphore(THREADS)
        self._free_threads_by_user = defaultdict[str | None, asyncio.Semaphore](
            lambda: asyncio.Semaphore(THREADS_PER_USER)
        )
        """By the user of the files."""
        # A poll that hangs hangs for all: followers then notice a change only when they look for themselves.
        self.poller = FilePoller(self._poll)

    @classmethod
    def of(cls, request: Request) -> LogReaderPool:
        """The pool of the application that a request belongs to."""
        state = request.app.state
        pool: LogReaderPool | None = getattr(state, "log_reader_pool", None)
        if pool is None or pool.loop is not asyncio.get_running_loop():
            pool = state.log_reader_pool = cls()
        return pool

    async def run(self, owner: str | None, function: Callable[..., Result], *arguments: object) -> Result:
        """The result of a blocking function that reads files of a user; the caller's other requests go on meanwhile.

        Raises `LogsHang`.
        """
        async with fair_share.waiting():
            return await self._run(owner, function, *arguments)

    async def _run(self, owner: str | None, function: Callable[..., Result], *arguments: object) -> Result:
        of_user = self._free_threads_by_user[owner]
        try:
            async with asyncio.timeout(self.patience_s):
                await of_user.acquire()
                try:
                    await self._free_threads.acquire()
                except asyncio.CancelledError:
                    of_user.release()
                    raise
                work = call_in_thread(function, *arguments)
                work.add_done_callback(lambda _: self._release(of_user))
                return await asyncio.wrap_future(work)
        except TimeoutError as error:
            detail = f"The log files of {owner or 'an unknown user'} do not answer."
            raise LogsHang(detail, remedy="Read another job's, or ask again later.") from error

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function that does not hang, without waiting for it."""
        call_in_thread(function)

    async def _poll(self, poll: Callable[[Collection[int]], Signatures], descriptors: Collection[int]) -> Signatures:
        return await asyncio.wrap_future(call_in_thread(poll, descriptors))

    def _release(self, of_user: asyncio.Semaphore) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._free_threads.release)
            self.loop.call_soon_threadsafe(of_user.release)
