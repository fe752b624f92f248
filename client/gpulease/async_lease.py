"""A lease in a program that runs in an event loop.

A thread renews it, the very one of `gpulease.lease`, and not a task: an event loop that computes, loads a model or
waits in CUDA renews nothing, and the lease would be lost in the middle of the work that it is for. So the rules of
trust are those of `HeldLease`, word for word. What the loop hears of it, ``lost`` and `on_lost`, it hears when it next
runs; `is_lost` is true at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Literal

from gpulease.async_transport import until_done
from gpulease.client import Client
from gpulease.lease import HeldLease
from gpulease.model import Device, Lease, Mask

LOG = logging.getLogger("gpulease")

OnLost = Callable[["AsyncLease"], Any]


class AsyncLease:
    """An active lease that this process holds; `AsyncClient.lease` makes it. `async with` gives it back at the end."""

    def __init__(
        self, client: Client, lease: Lease, trusted_from: float, on_lost: OnLost | None, *, shared: bool = False
    ) -> None:
        """Begin to renew `lease` with `client`. `trusted_from`: a monotonic time before its grant.

        `shared`: other processes hold it too, so the end of this one does not release it.
        """
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._telling: asyncio.Task[Any] | None = None
        self.lost = asyncio.Event()
        """Set when the lease is lost, and never cleared: stop using the GPUs."""
        self._held = HeldLease(client, lease, trusted_from=trusted_from, on_lost=self._heard, shared=shared)

    def __repr__(self) -> str:
        return repr(self._held).replace("HeldLease", "AsyncLease", 1)

    @property
    def is_lost(self) -> bool:
        """True as soon as the lease is lost, also while the event loop is kept from running."""
        return self._held.lost.is_set()

    @property
    def id(self) -> str:
        """Id of the lease."""
        return self._held.id

    @property
    def token(self) -> int | None:
        """Fencing token: higher than that of every earlier grant."""
        return self._held.token

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs, in PCI order."""
        return self._held.gpus

    @property
    def problems(self) -> tuple[str, ...]:
        """What was wrong with the GPUs at the last renewal, such as someone else's process on one."""
        return self._held.problems

    @property
    def env(self) -> dict[str, str]:
        """Variables that bind a process to the GPUs."""
        return self._held.env

    def environ(self, mask: Mask | Literal["uuids", "indices"] = Mask.UUIDS) -> dict[str, str]:
        """A whole environment for a child, as `HeldLease.environ`.

        With `indices` it waits for CUDA, for seconds: `await asyncio.to_thread(lease.environ, "indices")`.
        """
        return self._held.environ(mask)

    async def release(self) -> None:
        """Give the GPUs back, once. Goes on to its end although the task is cancelled, for 20 s at most.

        Raises DaemonUnavailable if no daemon answers: the lease then ends by itself within `ttl_s`, and a further call
        tries again.
        """
        await in_a_thread(self._held.release)

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await in_a_thread(lambda: self._held.__exit__(kind, error, trace))

    def _heard(self, _: HeldLease) -> None:
        """In a thread of the lease."""
        try:
            self._loop.call_soon_threadsafe(self._tell)
        except RuntimeError:
            LOG.debug("Lease %s was lost after its event loop had ended", self.id)

    def _tell(self) -> None:
        self.lost.set()
        if self._on_lost is None:
            return
        try:
            told = self._on_lost(self)
        except Exception:
            LOG.exception("on_lost of lease %s failed", self.id)
            return
        if isinstance(told, Awaitable):
            self._telling = asyncio.ensure_future(told)
            self._telling.add_done_callback(self._told)

    def _told(self, telling: asyncio.Task[Any]) -> None:
        if not telling.cancelled() and (error := telling.exception()) is not None:
            LOG.error("on_lost of lease %s failed", self.id, exc_info=error)


class AskedLease:
    """A lease that is yet to be granted: `await` it, or enter it with `async with`, once."""

    def __init__(self, grant: Callable[[], Awaitable[AsyncLease]]) -> None:
        self._grant = grant
        self._lease: AsyncLease | None = None

    def __await__(self) -> Generator[Any, None, AsyncLease]:
        return self._grant().__await__()

    async def __aenter__(self) -> AsyncLease:
        self._lease = await self._grant()
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lease is not None
        await self._lease.__aexit__(kind, error, trace)


async def in_a_thread(call: Callable[[], None]) -> None:
    """Run a blocking call to its end in a thread of its own, whoever cancels the task that waits for it.

    Not in the loop's executor: the work for which the GPUs were leased may fill that.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
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
        loop.call_soon_threadsafe(settle, error)

    try:
        threading.Thread(target=body, name="gpulease-release").start()
    except RuntimeError:  # the interpreter is about to end and starts no more threads
        call()
        return
    try:
        await until_done(done)
    except asyncio.CancelledError:
        done.exception()  # heard of, if not told
        raise
    done.result()
