"""Runs the tasks of a `GPUExecutor`: acquires a lease for each, runs its process, and resolves its future.

One thread with an event loop serves all tasks. A task enters the daemon's queue only when it gets one of the `slots`;
the others wait here, in order.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import field
from typing import Any

from gpulease.async_client import AsyncClient
from gpulease.async_lease import AsyncLease
from gpulease.executor.task_process import TaskProcess
from gpulease.sansio.async_transport import wait_through_cancellation
from gpulease.sansio.failover import Destination
from gpulease_protocol.errors import LeaseLost
from gpulease_protocol.lazy_dataclass import dataclass


@dataclass(slots=True, eq=False)
class Task:
    """One call to run in a process of its own."""

    payload: bytes
    """The pickled call that the process receives."""
    name: str
    """Name of the function, for error messages."""
    future: Future[Any] = field(default_factory=Future)
    """Gets the outcome."""


class TaskLoop:
    """The thread of one executor."""

    def __init__(
        self,
        destination: Destination,
        slots: int,
        lease_arguments: Mapping[str, Any],
        progress: Callable[[int, int], None],
    ) -> None:
        """`slots`: tasks that wait for GPUs or run at a time. `lease_arguments`: those of `AsyncClient.lease`.
        `progress` is called with the number of tasks and the number of those that are done."""
        self._destination = destination
        self._slots = slots
        self._lease_arguments = lease_arguments
        self._progress = progress
        self._lock = threading.RLock()  # reentrant, because a finalizer may call `close` at any point
        self._waiting: deque[Task] = deque()
        self._serving: set[asyncio.Task[None]] = set()
        self._closed = self._aborting = self._forked = False
        self._total = self._done = 0
        self._thread: threading.Thread | None = None
        self._finished = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None

    def submit(self, task: Task) -> None:
        """Accept a task. Raises RuntimeError after `close`."""
        with self._lock:
            if self._forked:
                raise RuntimeError("This GPUExecutor works in the parent process; make another one after the fork.")
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting.append(task)
            self._total += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._body, name="gpulease-tasks", daemon=True)
                self._thread.start()
        self._wake()

    def close(self, cancel: bool = False) -> None:
        """Accept no more tasks; with `cancel`, cancel those that do not run yet."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting) if cancel else []
            for task in waiting:
                self._waiting.remove(task)
        for task in waiting:
            task.future.cancel()
            task.future.set_running_or_notify_cancel()
        self._wake(self._cancel_waiting if cancel else None)

    def forked(self) -> None:
        """In a forked child: the thread, and so every task, is the parent's alone, so nothing here waits for them."""
        self._lock = threading.RLock()  # a thread of the parent may have held it
        if self._thread is not None:
            self._forked = self._closed = True
            self._loop = self._thread = None
            self._waiting.clear()

    def abort(self) -> None:
        """Accept no more tasks, withdraw requests, end running tasks."""
        self._aborting = True
        self.close(cancel=True)

    def join(self, within_s: float | None = None) -> None:
        """Wait until every task has its outcome and its GPUs are released."""
        if self._thread is not None:
            # Not Thread.join: if Ctrl-C interrupts it, it takes the thread for stopped (Python 3.11).
            self._finished.wait(within_s)

    def _wake(self, also: Callable[[], None] | None = None) -> None:
        with self._lock:
            if self._loop is None or self._changed is None:  # not started, or ended
                return
            if also is not None:
                self._loop.call_soon_threadsafe(also)
            self._loop.call_soon_threadsafe(self._changed.set)

    def _cancel_waiting(self) -> None:
        for serving in self._serving:
            if self._aborting or serving.get_name() == "waiting":
                serving.cancel()

    def _body(self) -> None:
        try:
            asyncio.run(self._main())
        finally:
            with self._lock:
                self._loop, left, self._closed = None, list(self._waiting), True
            for task in left:  # only after a bug
                if task.future.set_running_or_notify_cancel():
                    task.future.set_exception(RuntimeError("The thread of the GPUExecutor has ended."))
            self._finished.set()

    async def _main(self) -> None:
        self._changed = asyncio.Event()
        with self._lock:
            self._loop = asyncio.get_running_loop()
        async with AsyncClient.for_destination(self._destination) as client:
            while True:
                self._start_waiting(client)
                with self._lock:
                    if self._closed and not self._waiting and not self._serving:
                        self._loop = None
                        return
                if self._aborting:
                    self._cancel_waiting()
                await self._changed.wait()
                self._changed.clear()

    def _start_waiting(self, client: AsyncClient) -> None:
        while self._waiting and len(self._serving) < self._slots:
            with self._lock:
                task = self._waiting.popleft() if self._waiting else None
            if task is not None:
                serving = asyncio.create_task(self._serve(client, task), name="waiting")
                self._serving.add(serving)
                serving.add_done_callback(self._on_served)
        self._progress(self._total, self._done)

    def _on_served(self, serving: asyncio.Task[None]) -> None:
        self._serving.discard(serving)
        self._done += 1
        self._wake()

    async def _serve(self, client: AsyncClient, task: Task) -> None:
        """Run the task and set its outcome, whatever happens."""
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
            future.set_exception(RuntimeError(f"The GPUExecutor was shut down while {task.name} was running."))
        except BaseException as error:
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

    async def _granted(self, client: AsyncClient, future: Future[Any]) -> AsyncLease:
        """A lease. Withdraws the request and raises CancelledError if the future is cancelled."""

        async def acquire() -> AsyncLease:
            return await client.lease(**self._lease_arguments)

        loop, acquiring = asyncio.get_running_loop(), asyncio.create_task(acquire())

        def cancel(_: Future[Any]) -> None:
            if not acquiring.done():
                loop.call_soon_threadsafe(acquiring.cancel)

        future.add_done_callback(cancel)
        try:
            return await acquiring
        except asyncio.CancelledError:
            # The lease may have been granted in the same iteration of the loop in which this task was cancelled.
            acquiring.cancel()
            with suppress(asyncio.CancelledError):  # raised below in any case
                await wait_through_cancellation(acquiring)
            if not acquiring.cancelled() and acquiring.exception() is None:
                await acquiring.result().release()
            raise


async def _run(task: Task, lease: AsyncLease) -> tuple[Any, BaseException | None]:
    """The task's result, or its error. If the lease is lost, ends the process and raises LeaseLost."""
    process = TaskProcess(task.payload, lease.environ(), task.name)
    outcome, loss = asyncio.create_task(process.outcome()), asyncio.create_task(lease.lost.wait())
    try:
        await asyncio.wait({outcome, loss}, return_when=asyncio.FIRST_COMPLETED)
        if not outcome.done():
            raise LeaseLost(f"Lease {lease.id} was lost while {task.name} was running, so its process was ended.")
        return outcome.result()
    finally:
        loss.cancel()
        outcome.cancel()
        await wait_through_cancellation(outcome)
