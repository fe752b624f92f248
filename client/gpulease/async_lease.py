"""A lease for programs that run in an event loop.

It is renewed by the threads of `gpulease.lease` and not by a task: while an event loop computes, loads a model or waits
in CUDA, its tasks do not run, and the lease would be lost in the middle of the work. So the rules of trust are those of
`HeldLease`. The loop learns of a loss (`lost`, `on_lost`) when it next runs; `is_lost` is true at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Generator
from datetime import datetime
from types import TracebackType
from typing import Any, Literal

from gpulease.brief_errors import brief_errors
from gpulease.lease import HeldLease, LeaseClient
from gpulease.sansio.async_transport import wait_through_cancellation
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import Device, Lease, LeaseMember, Mask

LOG = logging.getLogger("gpulease")

OnLost = Callable[["AsyncLease"], Any]


class AsyncLease:
    """An active lease that this process holds and renews; `AsyncClient.lease` returns it.

    async with client.lease(count=2, wait_s=600) as lease:      # released at the end of the block
        process = await asyncio.create_subprocess_exec(*command, env=lease.environ())
    """

    def __init__(
        self,
        client: LeaseClient,
        lease: Lease,
        *,
        trusted_from: float,
        on_lost: OnLost | None = None,
        shared: bool = False,
        owner: ProcessId | None = None,
    ) -> None:
        """Start to renew `lease` with `client`, as `HeldLease` does."""
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._callback_task: asyncio.Task[Any] | None = None
        self.lost = asyncio.Event()
        """Set when the lease is lost, and never cleared: stop using the GPUs."""
        self._held = HeldLease(
            client, lease, trusted_from=trusted_from, on_lost=self._on_held_lost, shared=shared, owner=owner
        )

    def __repr__(self) -> str:
        return repr(self._held).replace("HeldLease", "AsyncLease", 1)

    @property
    def held(self) -> HeldLease:
        """The same lease for threads."""
        return self._held

    @property
    def is_lost(self) -> bool:
        """True as soon as the lease is lost, even while the event loop is blocked."""
        return self._held.lost.is_set()

    @property
    def id(self) -> str:
        """Id of the lease."""
        return self._held.id

    @property
    def fencing_token(self) -> int | None:
        """Fencing token: greater than that of every earlier grant."""
        return self._held.fencing_token

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs, in the order of `devices` or else in PCI order, node by node."""
        return self._held.gpus

    @property
    def members(self) -> tuple[LeaseMember, ...]:
        """The nodes of a gang by rank, as `HeldLease.members`."""
        return self._held.members

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems of the GPUs at the last renewal, such as another user's process on one."""
        return self._held.problems

    @property
    def preempt_at(self) -> datetime | None:
        """When the lease ends for a request that waits, as of the last renewal; None unless it is preempted."""
        return self._held.preempt_at

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that bind a process to the GPUs."""
        return self._held.env

    def environ(self, mask: Mask | Literal["uuids", "indices"] = Mask.UUIDS) -> dict[str, str]:
        """The complete environment for a child process, as `HeldLease.environ`.

        `indices` blocks for seconds, so use `await asyncio.to_thread(lease.environ, "indices")`.
        """
        return self._held.environ(mask)

    async def release(self) -> None:
        """Give the GPUs back. Runs to its end even if the task is cancelled, for 20 s at most.

        Raises DaemonUnavailable if no daemon responds. This process then repeats it until one does, as `HeldLease`.
        """
        await run_in_thread(self._held.release)

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run_in_thread(lambda: self._held.__exit__(kind, error, trace))

    def _on_held_lost(self, _: HeldLease) -> None:
        """Runs in a thread of the lease."""
        try:
            self._loop.call_soon_threadsafe(self._notify)
        except RuntimeError:
            LOG.debug("Lease %s was lost after its event loop had ended", self.id)

    def _notify(self) -> None:
        self.lost.set()
        if self._on_lost is None:
            return
        try:
            result = self._on_lost(self)
        except Exception:
            LOG.exception("on_lost of lease %s failed", self.id)
            return
        if isinstance(result, Awaitable):
            self._callback_task = asyncio.ensure_future(result)
            self._callback_task.add_done_callback(self._log_callback_error)

    def _log_callback_error(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("on_lost of lease %s failed", self.id, exc_info=error)


class PendingLease:
    """A lease that is not granted yet: `await` it, or enter it with `async with`, once."""

    def __init__(self, grant: Callable[[], Awaitable[AsyncLease]]) -> None:
        self._grant = grant
        self._lease: AsyncLease | None = None

    def __await__(self) -> Generator[Any, None, AsyncLease]:
        return self._granted().__await__()

    @brief_errors
    async def _granted(self) -> AsyncLease:
        return await self._grant()

    @brief_errors
    async def __aenter__(self) -> AsyncLease:
        self._lease = await self._grant()
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lease is not None
        await self._lease.__aexit__(kind, error, trace)


async def run_in_thread(call: Callable[[], None]) -> None:
    """Run a blocking call to its end in a new thread, even if the waiting task is cancelled.

    Not in the loop's executor, which the work on the GPUs may fill.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def body() -> None:
        error: BaseException | None = None
        try:
            call()
        except BaseException as raised:
            error = raised
        loop.call_soon_threadsafe(finish, error)

    try:
        threading.Thread(target=body, name="gpulease-release").start()
    except RuntimeError:  # the interpreter is exiting and starts no more threads
        call()
        return
    try:
        await wait_through_cancellation(done)
    except asyncio.CancelledError:
        done.exception()  # mark it as retrieved
        raise
    done.result()
