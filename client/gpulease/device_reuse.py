"""Reuse of devices within a process: the same call of `find_usable_cuda_devices` returns the same GPUs.

A lock serializes the calls that may reuse: if two threads call at once, the second one gets what the first one found. A
forked child inherits the registry, but holds none of the leases in it.

Within a block of `usable_cuda_devices` the same call returns GPUs of that block, and of no other: blocks are not in the
registry but in the context (`contextvars`) of the thread or task that entered them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import field

from gpulease.cuda.ordinals import (
    MASK,
    ORDER,
    MaskSettings,
    VisibleDevices,
    initialized_since,
    mask_settings,
    visible_gpus,
)
from gpulease.cuda.ranks import FINDER_VARIABLE
from gpulease.lease import HeldLease
from gpulease_protocol.errors import InUse, NotNow, UnknownOrdinals
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Device

LOG = logging.getLogger("gpulease")

LEASE_VARIABLE = "GPULEASE_LEASE_ID"
TOKEN_VARIABLE = "GPULEASE_LEASE_TOKEN"  # noqa: S105 - no secret
SET_VARIABLES = (LEASE_VARIABLE, TOKEN_VARIABLE, FINDER_VARIABLE, MASK, ORDER)
"""What finding devices may set in the environment of this process."""
LOCK_TIMEOUT_S = 30.0
"""How much longer than its own `wait_s` a call waits for another thread's that does not wait for GPUs: about as long
as such a call takes when the daemon hardly responds."""


@dataclass(frozen=True, slots=True)
class DeviceRequirements:
    """What a call requires apart from the number of GPUs."""

    min_free_memory_bytes: int | None = None
    gpu_model: str | None = None
    set_visible: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FoundDevices:
    """The devices that one call found, and their lease."""

    lease: HeldLease
    ordinals: tuple[int, ...]
    """CUDA ordinals when the lease was taken."""
    requirements: DeviceRequirements
    visible: VisibleDevices
    """What CUDA showed then, or would have shown."""
    mask_settings: MaskSettings
    """The variables that decide what CUDA shows, as the call left them."""
    thread: threading.Thread = field(default_factory=threading.current_thread)
    """The thread that called."""
    holding: Mapping[Device, HeldLease] = field(default_factory=dict)
    """The GPUs of a block, which may be in several leases, or in a part of one; empty for all GPUs of `lease`."""

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs that were found."""
        return tuple(self.holding) or self.lease.gpus

    @property
    def active(self) -> bool:
        """True while all leases are renewed."""
        return all(lease.active for lease in (self.lease, *self.holding.values()))

    def current_ordinals(self) -> tuple[int, ...]:
        """The ordinals now, even if CUDA has been initialized or the mask has changed since.

        Raises UnknownOrdinals if CUDA no longer shows the GPUs.
        """
        if self.mask_settings == mask_settings() and not initialized_since(self.visible):
            return self.ordinals
        visible = visible_gpus(self.visible.host, simulated=self.visible.simulated)
        return tuple(visible.ordinals(gpu.uuid for gpu in self.gpus))

    def uses_cuda(self) -> bool:
        """As `uses_cuda`."""
        return uses_cuda(self.visible)


def uses_cuda(visible: VisibleDevices) -> bool:
    """True if CUDA is initialized in this process, as far as that is known; `visible` was made earlier."""
    try:
        return visible.initialized or initialized_since(visible)
    except UnknownOrdinals:
        return True


class DeviceRegistry:
    """The devices that this process has found, oldest first."""

    def __init__(self) -> None:
        self.ever_used = False
        """True once this process, or one that it was forked from, has found any."""
        self._entries: list[FoundDevices] = []
        self._changed = threading.Condition()
        self._caller: int | None = None
        """Id of the thread that is looking for devices."""
        self._waits = False
        """True once that call waits in the daemon's queue, or for the daemon."""
        self._environment: dict[str, str | None] | None = None
        """The variables that the calls set, as they were before; None while nothing is found."""
        self._thread_warned = False
        self.restored_mask = False
        """True once a mask that a call had set was taken back."""
        self.gave_back_at_s = float("-inf")
        """When this process last gave devices back, monotonic."""
        os.register_at_fork(after_in_child=self._unlock)

    @contextmanager
    def exclusive(self, wait_s: float) -> Iterator[None]:
        """Let one call at a time look for devices to reuse, and take a lease if there are none.

        Raises NotNow if another thread's call takes longer: than `wait_s` if it waits for GPUs, else than `wait_s`
        and `LOCK_TIMEOUT_S`. Raises InUse in a signal handler that interrupted such a call, because that call
        cannot continue before the handler returns.
        """
        me, until_s = threading.get_ident(), time.monotonic() + wait_s
        if self._caller == me:
            raise InUse(
                "A signal handler called this while its thread was looking for GPUs.",
                remedy="Set a flag in the handler, and look for GPUs where the flag is read.",
            )
        try:
            with self._changed:
                self._await(lambda: self._caller is None or self._waits, wait_s + LOCK_TIMEOUT_S)
                self._await(lambda: self._caller is None, until_s - time.monotonic())
                if self._caller is not None:
                    raise NotNow(
                        "Another thread of this process is still waiting for GPUs.",
                        remedy="Wait for it, or wait longer.",
                    )
                self._caller = me
            yield
        finally:
            if self._caller == me:
                self._call_is(None, waits=False)

    def waits(self) -> None:
        """This thread begins to wait for GPUs or for the daemon; other calls see it if they wait for this one."""
        if self._caller == threading.get_ident():
            self._call_is(self._caller, waits=True)

    def _await(self, condition: Callable[[], bool], timeout_s: float) -> None:
        self._changed.wait_for(condition, min(max(0.0, timeout_s), threading.TIMEOUT_MAX))

    def _call_is(self, caller: int | None, *, waits: bool) -> None:
        with self._changed:
            self._caller, self._waits = caller, waits
            self._changed.notify_all()

    def add(self, devices: FoundDevices) -> None:
        """Add what a call has found."""
        self.ever_used = True
        self._entries.append(devices)

    def warn_second_thread(self, found: list[FoundDevices]) -> None:
        """Say once that a thread gets the GPUs of another one that has not ended, and what to write instead."""
        me = threading.current_thread()
        others = [one for one in found if one.lease.is_holder and one.thread is not me and one.thread.is_alive()]
        if len(others) < len(found) or self._thread_warned:
            return
        self._thread_warned = True
        LOG.warning(
            "find_usable_cuda_devices was called in thread %r and returns the devices that thread %r has found: both"
            " use the same GPUs. For GPUs of its own in each thread, write `with gpulease.usable_cuda_devices(%d) as"
            " devices:`.",
            me.name,
            others[0].thread.name,
            len(others[0].ordinals),
        )

    def keep_order(self) -> None:
        """Have `restore_environment` leave CUDA_DEVICE_ORDER alone from now on, because a block relies on it."""
        if self._environment is not None:
            self._environment.pop(ORDER, None)

    def remember_environment(self) -> None:
        """Keep what a call is about to change, unless an earlier one has changed it already."""
        if self._environment is None:
            self._environment = {name: os.environ.get(name) for name in SET_VARIABLES}

    def restore_environment(self) -> None:
        """Take back what the calls have set, for this process and for those that it starts."""
        before, self._environment = self._environment or {}, None
        self.restored_mask |= MASK in before and before[MASK] != os.environ.get(MASK)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def active(self) -> list[FoundDevices]:
        """Those with a lease that this process, or the one it was forked from, has neither released nor lost."""
        # Remove one by one, instead of replacing the list, because another thread may be adding to it.
        for devices in [devices for devices in self._entries if not devices.lease.active]:
            with suppress(ValueError):
                self._entries.remove(devices)
        return list(self._entries)

    def _unlock(self) -> None:
        # A thread of the parent that does not exist here may have held it.
        self._changed = threading.Condition()
        self._caller, self._waits = None, False


REGISTRY = DeviceRegistry()

_blocks: ContextVar[tuple[FoundDevices, ...]] = ContextVar("gpulease_blocks", default=())
"""The blocks around the running code, outermost first. Some may have ended, and some may be a parent process's."""
_open_blocks: set[FoundDevices] = set()
"""Those of all threads and tasks of this process, and of those that it was forked from."""


def enter_block(devices: FoundDevices) -> None:
    """Begin a block in the current context."""
    _open_blocks.add(devices)
    _blocks.set((*_blocks.get(), devices))


def leave_block(devices: FoundDevices) -> None:
    """End a block. Its context may be another than that of its beginning, as in fixtures that yield."""
    _open_blocks.discard(devices)
    _blocks.set(tuple(one for one in _blocks.get() if one is not devices))


def blocks_around() -> list[FoundDevices]:
    """The blocks around the running code that renew a lease, outermost first."""
    return [one for one in _blocks.get() if one.active]


def check_no_blocks() -> None:
    """Raise InUse if the numbers of open blocks would change with the mask."""
    if any(one.lease.active and one.lease.is_holder for one in list(_open_blocks)):
        raise InUse(
            f"Blocks of usable_cuda_devices are open in this process, and their numbers would change with {MASK}.",
            remedy="Leave out set_visible, or call it before the first block.",
        )


def reuse_devices(num_devices: int, requirements: DeviceRequirements, found: list[FoundDevices]) -> list[int]:
    """The ordinals that an earlier call like this one found.

    All of them for -1, else those of a call that found exactly `num_devices`, else a part of those of a larger one.
    Raises InUse if earlier calls found fewer, or with other requirements.
    """
    alike = [
        devices.current_ordinals() for devices in found if requirements in (DeviceRequirements(), devices.requirements)
    ]
    if alike and num_devices == -1:
        return sorted({ordinal for ordinals in alike for ordinal in ordinals})
    enough = [ordinals for ordinals in alike if len(ordinals) >= num_devices > 0]
    if not enough:
        before = ", ".join(str(list(devices.current_ordinals())) for devices in found)
        raise InUse(
            f"This process has reserved the devices {before} in an earlier call, and this call asks for others.",
            remedy="Ask once for all devices, or pass reuse=False to reserve more.",
        )
    exact = [ordinals for ordinals in enough if len(ordinals) == num_devices]
    return list((exact or enough)[0][:num_devices])
