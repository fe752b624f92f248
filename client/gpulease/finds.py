"""What this process has found so far, so that the same call gives the same GPUs.

One lock makes calls that may reuse follow each other: of two threads that call at once the second gets what the first
has found. A forked child inherits the list, but is not the holder of anything in it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from gpulease.errors import InUse, NotNow
from gpulease.lease import HeldLease
from gpulease.ordinals import Settings, Visible, settings, started_since, visible_gpus

TURN_S = 30.0
"""How much longer than its own wait a call waits for that of another thread: about as long as one takes that does not
wait in the queue, from a daemon that hardly answers."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a call asks for beside the number of GPUs."""

    min_free_memory_bytes: int | None = None
    gpu_model: str | None = None
    set_visible: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Find:
    """The outcome of one call that took a lease."""

    held: HeldLease
    ordinals: tuple[int, ...]
    """As they were when it was taken."""
    wishes: Wishes
    visible: Visible
    """What CUDA showed then, or would have shown."""
    settings: Settings
    """The variables by which it decides, as the call left them."""

    def ordinals_now(self) -> tuple[int, ...]:
        """CUDA's numbers for the GPUs, also if it was initialised since, or is yet to be under another mask.

        Raises UnknownOrdinals if it does not show them any more.
        """
        if self.settings == settings() and not started_since(self.visible):
            return self.ordinals
        visible = visible_gpus(self.visible.host, simulated=self.visible.simulated)
        return tuple(visible.ordinals(gpu.uuid for gpu in self.held.gpus))


class Finds:
    """The finds of this process, oldest first. Released at exit by their leases."""

    def __init__(self) -> None:
        self.any_yet = False
        """True once there was one in this process or in those that it was forked from."""
        self._finds: list[Find] = []
        self._lock = threading.Lock()
        self._caller: int | None = None
        """The thread that has the lock."""
        os.register_at_fork(after_in_child=self._unlock)

    @contextmanager
    def one_at_a_time(self, wait_s: float) -> Iterator[None]:
        """Let only one call at a time look for something to reuse and take a lease if there is nothing.

        Raises NotNow when another thread's call is not over after `wait_s` and `TURN_S`, InUse in a signal handler that
        has interrupted such a call, which cannot go on before the handler returns.
        """
        lock, me = self._lock, threading.get_ident()
        if self._caller == me:
            raise InUse(
                "This thread is in the middle of looking for GPUs, and this call came from a signal handler.",
                remedy="Let the handler only set a flag, and look for GPUs where it is read.",
            )
        if not lock.acquire(timeout=min(wait_s + TURN_S, threading.TIMEOUT_MAX)):
            raise NotNow("Another thread of this process still waits for GPUs.", remedy="Wait for it, or wait longer.")
        try:
            self._caller = me
            yield
        finally:
            self._caller = None
            lock.release()

    def add(self, find: Find) -> None:
        """Remember a find."""
        self.any_yet = True
        self._finds.append(find)

    def living(self) -> list[Find]:
        """The finds whose leases this process, or the one it was forked from, has neither released nor lost."""
        # One by one, and not by a new list: another thread may add to this one meanwhile.
        for find in [find for find in self._finds if not find.held.active]:
            with suppress(ValueError):
                self._finds.remove(find)
        return list(self._finds)

    def _unlock(self) -> None:
        # Another thread of the parent may have held it, and that thread does not exist here.
        self._lock = threading.Lock()
        self._caller = None


def again(num_devices: int, wishes: Wishes, finds: list[Find]) -> list[int]:
    """What the same call gave before: all for -1, exactly so many if there is such a find, else a part of a larger one.

    Raises InUse when earlier calls have found less, or something else.
    """
    alike = [find.ordinals_now() for find in finds if wishes in (Wishes(), find.wishes)]
    if alike and num_devices == -1:
        return sorted({ordinal for ordinals in alike for ordinal in ordinals})
    enough = [ordinals for ordinals in alike if len(ordinals) >= num_devices > 0]
    if not enough:
        before = ", ".join(str(list(find.ordinals_now())) for find in finds)
        raise InUse(
            f"This process already reserves the devices {before}, found by an earlier call, which are not what is asked"
            " for now.",
            remedy="Ask once for all that is needed, or pass reuse=False to reserve further devices.",
        )
    exact = [ordinals for ordinals in enough if len(ordinals) == num_devices]
    return list((exact or enough)[0][:num_devices])
