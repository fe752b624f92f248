"""Serves the tasks of a `GPUExecutor`: for each a lease, a process under it, and the outcome into its future.

One thread with an event loop, however many tasks. A task stands in the daemon's queue only when it has one of the
`slots`; the others wait here, in order.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gpulease.async_client import AsyncClient
from gpulease.async_lease import AsyncLease
from gpulease.async_transport import until_done
from gpulease.errors import LeaseLost
from gpulease.route import Destination
from gpulease.task_process import TaskProcess


@dataclass(slots=True, eq=False)
class Task:
    """One call that is to be made in a process of its own."""

    order: bytes
    """What the process receives."""
    name: str
    """What people know it by."""
    future: Future[Any] = field(default_factory=Future)
    """Where its outcome goes."""


class TaskLoop:
    """The thread of one executor."""

    def __init__(
        self, destination: Destination, slots: int, wishes: Mapping[str, Any], progress: Callable[[int, int], None]
    ) -> None:
        """`slots`: tasks that ask or run at a time. `wishes`: arguments of `AsyncClient.lease` for each of them.
        `progress` is told how many tasks there are and how many of them are done."""
        self._destination = destination
        self._slots = slots
        self._wishes = wishes
        self._progress = progress
        self._lock = threading.RLock()  # a finalizer may call `close` anywhere
        self._waiting: deque[Task] = deque()
        self._serving: set[asyncio.Task[None]] = set()
        self._closed = self._ending = False
        self._total = self._done = 0
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None

    def put(self, task: Task) -> None:
        """Take a task on. Raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting.append(task)
            self._total += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._body, name="gpulease-tasks", daemon=True)
                self._thread.start()
        self._wake()

    def close(self, cancel: bool = False) -> None:
        """Take on no more; with `cancel`, also forget those that do not run yet."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting) if cancel else []
            for task in waiting:
                self._waiting.remove(task)
        for task in waiting:
            task.future.cancel()
            task.future.set_running_or_notify_cancel()
        self._wake(self._cancel_asking if cancel else None)

    def end(self) -> None:
        """Take on no more, take back what was asked for, end what runs."""
        self._ending = True
        self.close(cancel=True)

    def join(self, within_s: float | None = None) -> None:
        """Wait until every task has its outcome and its GPUs are given back."""
        if self._thread is not None:
            # Not by Thread.join: one that Ctrl-C interrupts takes the thread for stopped (Python 3.11).
            self._over.wait(within_s)

    def _wake(self, also: Callable[[], None] | None = None) -> None:
        with self._lock:
            if self._loop is None or self._changed is None:  # not begun, or over
                return
            if also is not None:
                self._loop.call_soon_threadsafe(also)
            self._loop.call_soon_threadsafe(self._changed.set)

    def _cancel_asking(self) -> None:
        for serving in self._serving:
            if self._ending or serving.get_name() == "asking":
                serving.cancel()

    def _body(self) -> None:
        try:
            asyncio.run(self._main())
        finally:
            with self._lock:
                self._loop, left, self._closed = None, list(self._waiting), True
            for task in left:  # only after a defect
                if task.future.set_running_or_notify_cancel():
                    task.future.set_exception(RuntimeError("The thread of the GPUExecutor has ended."))
            self._over.set()

    async def _main(self) -> None:
        self._changed = asyncio.Event()
        with self._lock:
            self._loop = asyncio.get_running_loop()
        async with AsyncClient.to(self._destination) as client:
            while True:
                self._begin(client)
                with self._lock:
                    if self._closed and not self._waiting and not self._serving:
                        self._loop = None
                        return
                if self._ending:
                    self._cancel_asking()
                await self._changed.wait()
                self._changed.clear()

    def _begin(self, client: AsyncClient) -> None:
        while self._waiting and len(self._serving) < self._slots:
            with self._lock:
                task = self._waiting.popleft() if self._waiting else None
            if task is not None:
                serving = asyncio.create_task(self._serve(client, task), name="asking")
                self._serving.add(serving)
                serving.add_done_callback(self._served)
        self._progress(self._total, self._done)

    def _served(self, serving: asyncio.Task[None]) -> None:
        self._serving.discard(serving)
        self._done += 1
        self._wake()

    async def _serve(self, client: AsyncClient, task: Task) -> None:
        """Give the task its outcome, whatever happens."""
        future, result, failure = task.future, None, None
        try:
            lease = await self._granted(client, future)
            async with lease:
                if not future.set_running_or_notify_cancel():
                    return
                current = asyncio.current_task()
                assert current is not None
                current.set_name("running")
                result, failure = await _run(task, lease)
        except asyncio.CancelledError:
            if not future.running():
                future.cancel()
                future.set_running_or_notify_cancel()
                return
            future.set_exception(RuntimeError(f"The GPUExecutor was ended while {task.name} ran."))
        except BaseException as error:
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

    async def _granted(self, client: AsyncClient, future: Future[Any]) -> AsyncLease:
        """A lease. Raises CancelledError, with the request taken back, when the future is cancelled."""

        async def ask() -> AsyncLease:
            return await client.lease(**self._wishes)

        loop, asking = asyncio.get_running_loop(), asyncio.create_task(ask())

        def forget(_: Future[Any]) -> None:
            if not asking.done():
                loop.call_soon_threadsafe(asking.cancel)

        future.add_done_callback(forget)
        try:
            return await asking
        except asyncio.CancelledError:
            # It may have been granted in the very round of the loop in which this task was cancelled.
            asking.cancel()
            with suppress(asyncio.CancelledError):  # which is raised in any case
                await until_done(asking)
            if not asking.cancelled() and asking.exception() is None:
                await asking.result().release()
            raise


async def _run(task: Task, lease: AsyncLease) -> tuple[Any, BaseException | None]:
    """The task's result, or its error. Raises LeaseLost, with the process ended, when the GPUs may be another's."""
    process = TaskProcess(task.order, lease.environ(), task.name)
    working, losing = asyncio.create_task(process.outcome()), asyncio.create_task(lease.lost.wait())
    try:
        await asyncio.wait({working, losing}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise LeaseLost(f"Lease {lease.id} was lost while {task.name} ran, and its process was ended.")
        return working.result()
    finally:
        losing.cancel()
        working.cancel()
        await until_done(working)
