"""GPUs for as long as a block of code or a call: `usable_cuda_devices`, `on_gpus` and `free_cuda_devices`.

For pools, sweeps and event loops: their processes and threads outlive the work on a GPU. What must always hold:

- A block has a lease of its own. No two open blocks have a GPU in common, in whatever thread, task, process or program.
- The lease is given back when the block is left, however it is left. So it is when the process ends or is killed. Only
  in a process that has used CUDA it is kept for the next block, because the GPUs would drain until the process ends.
- The numbers mean the same GPUs until the block is left: the mask cannot be narrowed meanwhile (`check_no_blocks`), and
  the order in which CUDA numbers GPUs stays set.
- No block waits for GPUs that only its own end, or that of its process, could free.

| a block | is |
|---|---|
| made | an object: nothing is asked for |
| entered | waiting in the daemon's queue; Ctrl-C, or the end of the task, withdraws the request |
| open | leased: `find_usable_cuda_devices` called in it returns its GPUs |
| left | given back; the same object may be entered again |

| fault | what happens |
|---|---|
| an exception in the block | the GPUs are given back, and it goes on |
| the process is killed | a worker sees the owner end: the GPUs are free again |
| the daemon restarts, or is away for less than the lease's ttl | nothing: the lease is renewed when it is back |
| it is away when the block is left | the release is owed, and the block is left after at most 20 s |
| the lease is lost | the logger says so, and `lost` is true. The block is not interrupted |
| the process was started under a lease (a job, `gpulease run`) | InUse: it sees no GPUs but that lease's |
| the process forks in a block | the child leaves the block without effect, and opens blocks of its own |
| the parent of a pool ends | the block of its child is given back, see `gpulease.lease` |
| the process has used CUDA | CUDA keeps the GPUs until it ends, so its next blocks get them (`gpulease.kept_gpus`) |
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import operator
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from gpulease.brief_errors import brief_errors
from gpulease.client import Client
from gpulease.cuda import ranks
from gpulease.cuda.ordinals import VisibleDevices, mask_settings
from gpulease.device_request import (
    is_bound,
    lease_arguments,
    look,
    remaining_s,
    resolved_wait_s,
    surrounding_lease,
    too_few_usable,
    use_block,
    visible_devices,
)
from gpulease.device_reuse import (
    REGISTRY,
    DeviceRequirements,
    FoundDevices,
    blocks_around,
    enter_block,
    leave_block,
    uses_cuda,
)
from gpulease.kept_gpus import CalledBack, GpuKeeper, Holding, Waiter
from gpulease_protocol.errors import GpuleaseError, InUse, NotNow
from gpulease_protocol.model import Device, GpuState

LOG = logging.getLogger("gpulease")

Function = TypeVar("Function", bound=Callable[..., Any])


class DeviceBlock:
    """GPUs for a block of code, `with` or `async with`; `usable_cuda_devices` returns it. For one block at a time."""

    def __init__(
        self,
        num_devices: int,
        requirements: DeviceRequirements,
        wait_s: float | None,
        label: str,
        client: Client | None,
    ) -> None:
        self._num_devices = num_devices
        self._requirements = requirements
        self._wait_s = wait_s
        self._label = label
        self._client = client
        self._open: FoundDevices | None = None

    def __repr__(self) -> str:
        state = "not open" if self._open is None else f"open on {', '.join(f'{g.node}:{g.index}' for g in self.gpus)}"
        return f"<usable_cuda_devices({self._num_devices}) {state}>"

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs of the block while it is open."""
        return () if self._open is None else self._open.gpus

    @property
    def lost(self) -> bool:
        """True if a lease of the open block is lost: stop using the GPUs."""
        return self._open is not None and not self._open.active

    @brief_errors
    def __enter__(self) -> list[int]:
        if self._num_devices == 0:
            return []
        client = self._client or Client()
        until_s, visible = self._look(client)
        keeper, waiter = GpuKeeper.of(client.destination), self._waiter(visible)
        try:
            while keeper.take(waiter):
                try:
                    held = client.lease(**self._arguments(visible, waiter, until_s))
                except (CalledBack, GpuleaseError):
                    if not waiter.called_back:
                        raise
                else:
                    waiter.taken |= dict.fromkeys(held.gpus, held)
                    break
            keeper.done(waiter, client)
            return self._enter(client, waiter, visible)
        except BaseException as error:
            self._give_up(client, waiter, visible)
            return self._refused(visible, error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()()

    @brief_errors
    async def __aenter__(self) -> list[int]:
        if self._num_devices == 0:
            return []
        from gpulease.async_client import AsyncClient  # noqa: PLC0415 - loads httpx2, which only event loops need
        from gpulease.async_lease import run_in_thread  # noqa: PLC0415

        client = self._client or Client()
        looked: list[tuple[float, VisibleDevices]] = []
        around = blocks_around()
        await run_in_thread(lambda: looked.append(self._look(client, around, may_wait=False)))
        ((until_s, visible),) = looked
        keeper, waiter = GpuKeeper.of(client.destination), self._waiter(visible)
        try:
            async with AsyncClient.for_destination(client.destination) as connected:
                while keeper.take(waiter):
                    try:
                        lease = await connected.lease(**self._arguments(visible, waiter, until_s))
                    except (CalledBack, GpuleaseError):
                        if not waiter.called_back:
                            raise
                    else:
                        waiter.taken |= dict.fromkeys(lease.gpus, lease.held)
                        break
            await run_in_thread(lambda: keeper.done(waiter, client))
            return self._enter(client, waiter, visible)  # without an await after it, at which a task may be cancelled
        except BaseException as error:
            await run_in_thread(lambda: self._give_up(client, waiter, visible))
            return self._refused(visible, error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from gpulease.async_lease import run_in_thread  # noqa: PLC0415 - loads httpx2

        await run_in_thread(self._leave())

    @property
    def _resolved_wait_s(self) -> float:
        return resolved_wait_s(self._wait_s, math.inf)

    def _look(
        self, client: Client, around: list[FoundDevices] | None = None, *, may_wait: bool = True
    ) -> tuple[float, VisibleDevices]:
        """Until when to wait, and what CUDA shows this process. Raises InUse if the block would wait for itself."""
        if self._open is not None:
            raise RuntimeError("This block is open. Make one for each use: call usable_cuda_devices again.")
        until_s = time.monotonic() + self._resolved_wait_s
        visible = visible_devices(
            self._num_devices, self._requirements, client, until_s if may_wait else time.monotonic()
        )
        check_not_bound(client, visible)
        if self._num_devices != 1 and ranks.launcher_process() is not None:
            _warn_of_rank()
        kept = [one for one in (*(blocks_around() if around is None else around), *REGISTRY.active())]
        own = {gpu.uuid for one in kept if one.lease.is_holder for gpu in one.gpus}
        own &= {gpu.uuid for gpu in visible.gpus}
        if max(1, self._num_devices) > len(visible.gpus) - len(own):
            raise InUse(
                f"The devices {visible.ordinals(own)} are held until after this block, by a block around it or by"
                f" find_usable_cuda_devices, and this process sees {len(visible.gpus)}: it would wait for itself.",
                remedy="Ask for all devices in the outer block, or give them back first.",
            )
        return until_s, visible

    def _waiter(self, visible: VisibleDevices) -> Waiter:
        return Waiter(self._num_devices, frozenset(gpu.uuid for gpu in visible.gpus), self._requirements)

    def _arguments(self, visible: VisibleDevices, waiter: Waiter, until_s: float) -> dict[str, Any]:
        """The arguments of `Client.lease` for what a block still lacks."""
        count = -1 if self._num_devices == -1 else waiter.lacks
        arguments = lease_arguments(count, self._requirements, self._label, visible)
        taken = {gpu.uuid for gpu in waiter.taken}
        arguments["among"] = [uuid for uuid in arguments["among"] if uuid not in taken]
        return arguments | {"wait_s": remaining_s(self._resolved_wait_s, until_s), "on_queued": waiter}

    def _give_up(self, client: Client, waiter: Waiter, visible: VisibleDevices) -> None:
        GpuKeeper.of(client.destination).done(waiter, client)
        self._give_back(client, waiter.taken, visible)

    def _refused(self, visible: VisibleDevices, error: BaseException) -> list[int]:
        """What a call that got no GPUs returns. Raises the error unless there may be none."""
        if not isinstance(error, NotNow):
            raise error
        if self._num_devices == -1:
            return []
        raise too_few_usable(self._num_devices, visible, self._resolved_wait_s, error) from None

    def _enter(self, client: Client, waiter: Waiter, visible: VisibleDevices) -> list[int]:
        holding = dict(waiter.taken)
        ordinals = visible.fix_ordinals(gpu.uuid for gpu in holding)
        REGISTRY.keep_order()
        first = next(iter(holding.values()))
        self._open = FoundDevices(first, tuple(ordinals), self._requirements, visible, mask_settings(), holding=holding)
        self._used = client
        enter_block(self._open)
        return ordinals

    def _leave(self) -> Callable[[], None]:
        """End the block; what gives its GPUs back, which takes a while."""
        devices, self._open = self._open, None
        if devices is None:
            return lambda: None
        leave_block(devices)
        return functools.partial(self._give_back, self._used, devices.holding, devices.visible)

    @staticmethod
    def _give_back(client: Client, holding: Holding, visible: VisibleDevices) -> None:
        """Release the leases of these GPUs, but keep one if no one could get its GPUs, or others use some of them."""
        mine = {gpu: lease for gpu, lease in holding.items() if lease.is_holder}
        keeps = bool(mine) and uses_cuda(visible)
        whole = {lease for lease in mine.values() if not keeps and all(mine.get(gpu) is lease for gpu in lease.gpus)}
        for lease in whole:
            lease.__exit__(None, None, None)
        if rest := {gpu: lease for gpu, lease in mine.items() if lease not in whole}:
            GpuKeeper.of(client.destination).keep(rest, client)


def usable_cuda_devices(
    num_devices: int = 1,
    *,
    wait_s: float | None = None,
    min_free_memory_bytes: int | None = None,
    gpu_model: str | None = None,
    label: str = "",
    client: Client | None = None,
) -> DeviceBlock:
    """Reserve `num_devices` usable GPUs until the end of a block, which gets their CUDA ordinals.

        with gpulease.usable_cuda_devices(1) as devices:        # [2]; in an event loop: async with
            Trainer(accelerator="cuda", devices=devices).fit(model)

    Each block has a lease of its own, in every thread, task and process, and gives it back at its end. The ordinals are
    those of `find_usable_cuda_devices`, which within the block returns the same ones.

    `wait_s`: how long to wait in the queue (default: GPULEASE_WAIT_S, else without limit; 0 does not wait). -1 reserves
    every GPU that is usable, at least one; `[]` if there was none in time. The other arguments are those of
    `find_usable_cuda_devices`.

    Entering the block raises what that function raises, and InUse if the block would wait for GPUs that a block around
    it holds, or this process until its end.
    """
    try:
        count = operator.index(num_devices)
    except TypeError:
        raise TypeError(f"num_devices must be an integer, not {num_devices!r}") from None
    return DeviceBlock(count, DeviceRequirements(min_free_memory_bytes, gpu_model), wait_s, label, client)


def on_gpus(num_devices: int = 1, **options: Any) -> Callable[[Function], Function]:
    """A decorator: each call of the function runs in a block of `usable_cuda_devices`, with the same arguments.

        @gpulease.on_gpus(1)
        def train(learning_rate, devices):                      # train(0.1)
            ...

    The function gets the ordinals as the argument `devices`, if it has one. An `async def` is as good. TypeError for a
    generator function, which would hold its GPUs for as long as someone keeps the generator: write the block in it.
    """
    usable_cuda_devices(num_devices, **options)  # raises for arguments that are wrong

    def decorate(function: Function) -> Function:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator function, whose GPUs would stay reserved while nothing runs in"
                f" it. Write {use_block(num_devices)} in it."
            )
        signature = inspect.signature(function)
        takes_devices = "devices" in signature.parameters

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with usable_cuda_devices(num_devices, **options) as devices:
                return function(*args, **kwargs, **({"devices": devices} if takes_devices else {}))

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            async with usable_cuda_devices(num_devices, **options) as devices:
                return await function(*args, **kwargs, **({"devices": devices} if takes_devices else {}))

        decorated: Any = call_async if inspect.iscoroutinefunction(function) else call
        others = [one for name, one in signature.parameters.items() if name != "devices"]
        # What callers may pass: pytest, for one, looks for a fixture of each name.
        decorated.__signature__ = signature.replace(parameters=others)
        return cast("Function", decorated)

    return decorate


@brief_errors
def free_cuda_devices(*, client: Client | None = None) -> list[int]:
    """The CUDA ordinals of the GPUs that this process can see and that are free now. Reserves nothing.

        print(gpulease.free_cuda_devices())                     # [0, 3]; another program may have them already

    Raises DaemonUnavailable if no daemon answers, UnknownOrdinals as `find_usable_cuda_devices`.
    """
    client = client or Client()
    visible = look(client)
    kept = GpuKeeper.of(client.destination).kept()
    return visible.ordinals(gpu.uuid for gpu in visible.gpus if gpu.state == GpuState.FREE or gpu.uuid in kept)


@functools.cache
def _warn_of_rank() -> None:
    """Say once that the ranks of a training that open blocks do not share them."""
    LOG.warning(
        "This process is one of the ranks of a training, and each of them takes GPUs of its own in usable_cuda_devices:"
        " they may wait for each other. For GPUs that the ranks share, call gpulease.find_usable_cuda_devices."
    )


def check_not_bound(client: Client, visible: VisibleDevices) -> None:
    """Raise InUse in a process that sees only the GPUs of the lease that it was started under: none are left for it."""
    lease = surrounding_lease(client)
    if lease is not None and is_bound({one.uuid for one in lease.gpus} & {one.uuid for one in visible.gpus}, visible):
        raise InUse(
            f"This process was started under lease {lease.id}, and sees no GPUs but those of it.",
            remedy="Start it without that lease, or use find_usable_cuda_devices, which returns the lease's GPUs.",
        )
