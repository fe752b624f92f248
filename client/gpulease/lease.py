"""The holder's side of a lease: it renews in the background, notices when the lease is lost, and gives it back.

What the holder may rely on, and what each failure does:

- The daemon is authoritative. It keeps a lease for at least `ttl_s` from the last renewal that it has answered.
- The holder trusts its lease until `ttl_s` after it *sent* the last renewal that succeeded, by its own monotonic clock.
  The daemon counts from a later moment, so the holder always stops trusting first.
- The daemon cannot be reached, or renewing fails in any other way: the renewals go on, more often, until the trust
  window has passed. Then the lease counts as lost, although the daemon may still have it: someone else may hold the
  GPUs. A thread of its own watches the window, because a renewal can hang longer than that, in name resolution.
- The holder was stopped (SIGSTOP, a debugger, a call that keeps the GIL) for longer than that. With liveness `process`
  the daemon has kept the lease all the while, for as long as a worker saw the owner live. So once the threads here run
  again they ask first: the lease is lost when the daemon says so, or does not answer for `ASK_S`. With liveness
  `heartbeat` it is lost at once.
- The daemon answers that the lease is over: it is lost at once.
- The process forks: the child is not the holder. It neither renews nor releases.
- The process ends in an orderly way without leaving the block: what is still held is released at exit. When it is
  killed, the daemon takes the GPUs back by itself.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from gpulease import calls, masks
from gpulease.errors import GpuleaseError, LeaseLost, NotFound, StaleToken
from gpulease.launchers import scrubbed
from gpulease.model import Device, Lease, Liveness, Mask

if TYPE_CHECKING:
    from gpulease.client import Client

LOG = logging.getLogger("gpulease")

RELEASE_S = 10.0
"""How long a release may hold up the end of a block or of the process: long enough for a daemon to be restarted."""

ASK_S = 10.0
"""How long a holder that was stopped tries to learn whether its lease is still there: a daemon may be restarting."""
STOPPED_S = 0.5
"""A thread that wakes later than this did not run for a while; neither did the other, then."""

_held: set[HeldLease] = set()


class HeldLease:
    """An active lease that this process holds; `Client.lease` makes it, and it is a context manager.

    ``lost`` is set when the GPUs may no longer be used; leaving the block releases them.
    """

    def __init__(
        self,
        client: Client,
        lease: Lease,
        *,
        trusted_from: float,
        on_lost: Callable[[HeldLease], None] | None = None,
        shared: bool = False,
    ) -> None:
        """Begin to renew `lease`. `trusted_from`: a monotonic time before its grant, at best shortly before.

        `on_lost` is called once, in whichever thread finds out, with the signal mask of the thread that calls here.
        `shared`: other processes hold it too, so the end of this one does not release it.
        """
        self._client = client
        self._lease = lease
        self._on_lost = on_lost
        self._sent_at = trusted_from
        self._resumed_at = float("-inf")
        """When a thread of this lease last noticed that it had not run for a while."""
        self._pid = os.getpid()
        self._over = threading.Event()
        # Reentrant, because a signal handler may call release() within release().
        self._releasing = threading.RLock()
        self._losing = threading.RLock()
        self._released = False
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.lost = threading.Event()
        """Set when the lease is lost, and never cleared: stop using the GPUs."""
        self.problems = lease.problems
        """What was wrong with the GPUs at the last renewal, such as someone else's process on one."""
        self._threads = tuple(
            threading.Thread(target=body, name=f"gpulease-{name}-{lease.id}", daemon=True)
            for name, body in (("renew", self._keep), ("watch", self._watch))
        )
        if not shared:
            _held.add(self)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            # Nobody gets this object, so nobody but us can give the GPUs back.
            self.leave()
            if not shared:
                self._release_quietly()
            raise

    def __repr__(self) -> str:
        state = "lost" if self.lost.is_set() else "released" if self._released else "active"
        return f"<HeldLease {self.id} {state}: {', '.join(f'{gpu.node}:{gpu.index}' for gpu in self.gpus)}>"

    @property
    def mine(self) -> bool:
        """True in the process that took the lease, false in its forked children."""
        return self._pid == os.getpid()

    @property
    def active(self) -> bool:
        """True until the lease is lost, or somebody has begun to release it: from then on nothing renews it."""
        return not self._over.is_set()

    @property
    def id(self) -> str:
        """Id of the lease."""
        return self._lease.id

    @property
    def token(self) -> int | None:
        """Fencing token: higher than that of every earlier grant."""
        return self._lease.token

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs, in PCI order."""
        return self._lease.gpus

    @property
    def env(self) -> dict[str, str]:
        """Variables that bind a process to the GPUs."""
        return dict(self._lease.env)

    def environ(self, mask: Mask | Literal["uuids", "indices"] = Mask.UUIDS) -> dict[str, str]:
        """A whole environment for a child: this process's own, without traces of other launchers, and `env` over it.

        `indices` is for programs that read only numbers in CUDA_VISIBLE_DEVICES, such as vLLM. Those of CUDA are not
        known beforehand: it is asked, in processes of its own that take a second or two, and up to two minutes on a
        driver that hangs. Raises UnknownOrdinals where it cannot be asked or does not show the GPUs.
        """
        bound = scrubbed(os.environ) | self._lease.env
        if Mask(mask) is Mask.UUIDS:
            return bound
        nodes = {gpu.node for gpu in self.gpus}
        simulated = any(node.simulated for node in self._client.nodes() if node.name in nodes)
        return masks.by_index(bound, self.gpus, simulated=simulated)

    def release(self) -> None:
        """Give the GPUs back, once; further calls, and calls in a forked child, do nothing.

        Raises DaemonUnavailable if no daemon answers: the lease then ends by itself within `ttl_s`, and a further call
        tries again.
        """
        if not self.mine:
            return
        given_up = self._over.is_set()
        self._over.set()
        self._join()
        with self._releasing:
            if self._released:
                return
            try:
                self._client.send(calls.release(self.id, self.token), patience_s=RELEASE_S, timeout_s=RELEASE_S)
            except (LeaseLost, StaleToken, NotFound) as error:
                if not given_up:
                    self._lose(str(error))
            except GpuleaseError:
                _held.discard(self)  # the end of the process need not wait for that daemon once more
                raise
            self._released = True
        _held.discard(self)

    def leave(self) -> None:
        """Renew no more, and give nothing back: what other processes hold too is theirs."""
        self._over.set()
        _held.discard(self)

    def _join(self) -> None:
        """Wait until nothing is renewed any more, for at most `RELEASE_S`."""
        end = time.monotonic() + RELEASE_S
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> HeldLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release_quietly()

    def _release_quietly(self) -> bool:
        """False if nobody has answered."""
        # The work in the block is done, or has an exception of its own: neither should be hidden by this.
        try:
            self.release()
        except GpuleaseError as error:
            LOG.warning(
                "Lease %s was not released and ends by itself in at most %g s: %s", self.id, self._lease.ttl_s, error
            )
            return False
        return True

    def _keep(self) -> None:
        """Body of the renewing thread: ends when the lease is released or lost."""
        _leave_signals_to_others()
        ttl_s = self._lease.ttl_s
        pause_s = self._sent_at + ttl_s / 3 - time.monotonic()
        while self._pause(pause_s) is not None:
            sent_at = time.monotonic()
            try:
                # A renewal that is sent too late to count might still revive a lease that its holder has given up.
                if (left_s := self._trusted_until - sent_at) > 0:
                    renewed = self._client.send(calls.renew(self.id, self.token), patience_s=0, timeout_s=left_s)
                    self._sent_at, self._lease = sent_at, renewed
                    self._heed(renewed.problems)
            except (LeaseLost, StaleToken, NotFound) as error:
                if not self._over.is_set():
                    self._lose(str(error))
                return
            except GpuleaseError as error:
                LOG.debug("Lease %s could not be renewed: %s", self.id, error)
            except Exception:
                LOG.exception("Lease %s could not be renewed; it is tried again until the lease is lost", self.id)
            jitter = random.uniform(0.8, 1.0)  # noqa: S311
            answered = self._sent_at == sent_at
            # From its sending, because this process may have been stopped before the answer was read.
            pause_s = sent_at + ttl_s / 3 * jitter - time.monotonic() if answered else min(1.0, ttl_s / 20) * jitter

    def _heed(self, problems: tuple[str, ...]) -> None:
        """Warn of each problem of the GPUs once, for as long as it lasts."""
        for problem in problems:
            if problem not in self.problems:
                LOG.warning("Lease %s: %s", self.id, problem)
        self.problems = problems

    def _watch(self) -> None:
        """Body of the watching thread: does nothing that can block but wait for the end of the trust window."""
        _leave_signals_to_others()
        while (woke_at := self._pause(self._trusted_until - time.monotonic())) is not None:
            if woke_at >= self._trusted_until:
                self._lose(f"No renewal of lease {self.id} succeeded for its ttl of {self._lease.ttl_s:g} s.")

    def _pause(self, seconds: float) -> float | None:
        """Wait; the moment of waking, or None when the lease is over. Notices that this thread was kept from waking."""
        due_at = time.monotonic() + max(0.0, seconds)
        if self._over.wait(max(0.0, seconds)):
            return None
        woke_at = time.monotonic()
        if woke_at > due_at + STOPPED_S:
            self._resumed_at = woke_at
        return woke_at

    @property
    def _trusted_until(self) -> float:
        until = self._sent_at + self._lease.ttl_s
        if self._lease.liveness is Liveness.PROCESS and self._resumed_at > self._sent_at:
            return max(until, self._resumed_at + ASK_S)
        return until

    def _lose(self, why: str) -> None:
        with self._losing:
            self._over.set()
            if self.lost.is_set():
                return
            self.lost.set()
        LOG.warning("Lease %s is lost; its GPUs may be someone else's now, stop using them. %s", self.id, why)
        if self._on_lost is None:
            return
        own = threading.current_thread() in self._threads
        if own:
            # What the callback starts inherits the mask, and a child that blocks SIGTERM is hard to be rid of.
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        try:
            self._on_lost(self)
        except Exception:
            LOG.exception("on_lost of lease %s failed", self.id)
        finally:
            if own:
                _leave_signals_to_others()


def _leave_signals_to_others() -> None:
    """Block every signal in this thread: it must not take them from a caller that waits for them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@atexit.register
def _release_all() -> None:
    """Give back what is still held when the process ends."""
    silent = set()
    for lease in list(_held):
        daemon = lease._client.destination
        if daemon in silent:  # the program has waited for it once
            LOG.warning("Lease %s was not released either and ends by itself.", lease.id)
        elif not lease._release_quietly():
            silent.add(daemon)
