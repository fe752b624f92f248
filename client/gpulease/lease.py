"""The holder's side of a lease: renews it in the background, detects its loss, and releases it.

What the holder may rely on, and what each failure does:

- The daemon is authoritative. It keeps a lease for at least `ttl_s` from the last renewal that it answered.
- The holder trusts its lease until `ttl_s` after it *sent* the last successful renewal, by its own monotonic clock. The
  daemon counts from a later moment, so the holder always stops trusting first.
- The daemon cannot be reached, or renewing fails in another way: the holder goes on renewing, more often, until the
  trust window ends. No renewal waits for its answer through the whole window, because a connection can go silent for
  good while a new one works. Then the lease counts as lost, because another user may hold the GPUs, even if the daemon
  still has the lease. A second thread watches the window, because a renewal can hang in name resolution.
- The holder was stopped (SIGSTOP, a debugger, a call that keeps the GIL) for longer than that. With liveness `process`
  the daemon kept the lease as long as a worker saw the owner alive. So the threads ask first once they run again: the
  lease is lost if the daemon says so or does not respond for `CONFIRM_S`. With liveness `heartbeat` it is lost at once.
- The daemon says when the lease ends however often it is renewed (`Lease.ends_in_s`): it is preempted, its idle GPUs
  are taken back, or its time or its token's budget ends. The holder trusts it until then at most, counted as above, so
  that it stops in time also if it cannot reach the daemon. It renews more often before, because the end may be put off.
- The daemon says that the lease has ended: it is lost at once.
- The process that this one works for ends: the launcher of a rank, the parent of a child of multiprocessing or joblib.
  What an orphan does is useless, and it may wait for work forever. So the lease is given back, and counts as lost.
- The process forks: the child is not the holder. It neither renews nor releases.
- The process exits without leaving the block: its leases are released at exit. If it is killed, the daemon takes the
  GPUs back by itself.
- No daemon answers the release: it is repeated for as long as the process lives (`gpulease.sansio.release_retries`).
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
from datetime import datetime
from types import TracebackType
from typing import Literal, NoReturn, Protocol, TypeVar

from gpulease.cuda import index_mask, ranks
from gpulease.sansio.failover import Destination, Failover
from gpulease.sansio.release_retries import DEBTS, Debt, is_answer
from gpulease_protocol import endpoints
from gpulease_protocol.errors import GpuleaseError, LeaseLost, NotFound, StaleToken
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.launchers import lease_variables, strip_launcher_variables
from gpulease_protocol.model import Device, Lease, LeaseMember, Liveness, Mask, Node

Answer = TypeVar("Answer")

LOG = logging.getLogger("gpulease")

RELEASE_TIMEOUT_S = 10.0
"""How long a release may delay the end of a block or of the process: long enough for a restart of the daemon."""
RENEW_TIMEOUT_S, MIN_RENEW_TIMEOUT_S = 10.0, 1.0
"""Time limit for the response to a renewal: half of what is left of the trust window, and within these bounds."""
CONFIRM_S = 10.0
"""How long a holder that was stopped tries to confirm its lease: the daemon may be restarting."""
ORPHAN_CHECK_S = 1.0
"""How often a process that works for another checks that this one lives."""
LATE_WAKEUP_S = 0.5
"""A thread that wakes later than this was stopped, and so was the other one."""
MAX_RENEWAL_PAUSE_S = 60.0  # a holder hears of an end or a preemption as soon, however long its ttl
NOT_RENEWED = "No renewal of lease"
"""How `HeldLease.loss_reason` begins where the daemon may still have the lease."""
KEEPS_TRYING = "this process keeps trying until a daemon answers"

_held_leases: set[HeldLease] = set()


class LeaseClient(Protocol):
    """The part of `Client` that a lease needs: it renews, releases, and asks whether a node is simulated."""

    destination: Destination

    def send(
        self, call: endpoints.ApiCall[Answer], *, retry_s: float | None = None, timeout_s: float | None = None
    ) -> Answer:
        """As `Client.send`."""

    def release(
        self, lease_id: str, fencing_token: int | None, *, retry_s: float | None = None, timeout_s: float | None = None
    ) -> Lease:
        """As `Client.release`."""

    def nodes(self) -> tuple[Node, ...]:
        """As `Client.nodes`."""


class HeldLease:
    """An active lease that this process holds and renews; `Client.lease` returns it.

        with client.lease(count=2, wait_s=600) as lease:        # released at the end of the block
            process = subprocess.Popen(command, env=lease.environ())
            while process.poll() is None and not lease.lost.wait(1):
                pass

    `lost` is set when the GPUs may no longer be used.
    """

    def __init__(
        self,
        client: LeaseClient,
        lease: Lease,
        *,
        trusted_from: float,
        on_lost: Callable[[HeldLease], None] | None = None,
        shared: bool = False,
        owner: ProcessId | None = None,
    ) -> None:
        """Start to renew `lease`. `trusted_from`: a monotonic time before its grant, at best just before.

        `on_lost` is called once, in the thread that detects the loss, with the signal mask of the constructing thread.
        `shared`: see the attribute.
        `owner`: the process that owns the lease, if it is another; the lease is given back when that ends.
        """
        self._client = client
        self._works_for = ranks.pool_parent() if owner in (None, ProcessId.this_process()) else owner
        self._lease = lease
        self._on_lost = on_lost
        self.shared = shared
        """True if other processes hold the lease too, so that the exit of this one does not release it."""
        self._sent_at = trusted_from
        # Unlike `ttl_s` it counts from the answer, before which a long poll may have been held. The first renewal knows
        # it better.
        self._ends_at_s = float("inf") if lease.ends_in_s is None else time.monotonic() + lease.ends_in_s
        self._resumed_at = float("-inf")
        """When a thread of this lease last noticed that it had been stopped."""
        self._failure = ""
        """Why the last renewal failed; empty if it did not."""
        self._pid = os.getpid()
        self._stopped = threading.Event()
        # Reentrant, because a signal handler may call release() during release().
        self._releasing = threading.RLock()
        self._losing = threading.RLock()
        self._released = False
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.lost = threading.Event()
        """Set when the lease is lost, and never cleared: stop using the GPUs."""
        self.problems = lease.problems
        """Problems of the GPUs at the last renewal, such as another user's process on one."""
        self.preempt_at = lease.preempt_at
        """When the lease ends for a request that waits, as of the last renewal; None unless it is preempted."""
        self.preempting = threading.Event()
        """Set while the lease is to be preempted: save your work, and give it back before `preempt_at`."""
        self.on_preempting: Callable[[HeldLease], None] | None = None
        """Called when `preempting` is set, in the thread that renews."""
        self.loss_reason: str | None = None
        """Why the lease is lost, in a sentence; None before."""
        self._threads = tuple(
            threading.Thread(target=body, name=f"gpulease-{name}-{lease.id}", daemon=True)
            for name, body in (("renew", self._renew_loop), ("watch", self._watch_loop))
        )
        try:
            if not shared:
                _held_leases.add(self)
            for thread in self._threads:
                thread.start()
        except BaseException:
            # The caller never gets this object and could not release the GPUs.
            self.detach()
            if not shared:
                self._release_quietly()
            raise

    def __repr__(self) -> str:
        state = "lost" if self.lost.is_set() else "released" if self._released else "active"
        return f"<HeldLease {self.id} {state}: {', '.join(f'{gpu.node}:{gpu.index}' for gpu in self.gpus)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to this process, so it cannot be pickled: pass on its environ(), or its id.")

    @property
    def is_holder(self) -> bool:
        """True in the process that took the lease, false in its forked children."""
        return self._pid == os.getpid()

    @property
    def active(self) -> bool:
        """True while the lease is renewed: until it is lost, or its release has begun."""
        return not self._stopped.is_set()

    @property
    def id(self) -> str:
        """Id of the lease."""
        return self._lease.id

    @property
    def fencing_token(self) -> int | None:
        """Fencing token: greater than that of every earlier grant."""
        return self._lease.fencing_token

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs, in the order of `devices` or else in PCI order, node by node."""
        return self._lease.gpus

    @property
    def members(self) -> tuple[LeaseMember, ...]:
        """The nodes of a gang by rank, each with its address, GPUs and environment; empty for a lease on one node."""
        return self._lease.members

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that bind a process to the GPUs, of a gang to those of rank 0; only those in
        `LEASE_VARIABLES`."""
        return lease_variables(self._lease.env)

    def environ(self, mask: Mask | Literal["uuids", "indices"] = Mask.UUIDS) -> dict[str, str]:
        """The complete environment for a child process: this process's, without variables of launchers, and `env`.

        `mask="indices"` is for programs that read only numbers in CUDA_VISIBLE_DEVICES, such as vLLM. CUDA's numbers
        are not known in advance, so CUDA is queried in two short processes: a second or two, up to two minutes if the
        driver hangs. Raises UnknownOrdinals if it cannot be queried or does not show the GPUs.
        """
        bound = strip_launcher_variables(os.environ) | lease_variables(self._lease.env, os.environ)
        if Mask(mask) is Mask.UUIDS:
            return bound
        gpus = self.members[0].gpus if self.members else self.gpus
        nodes = {gpu.node for gpu in gpus}
        simulated = any(node.simulated for node in self._client.nodes() if node.name in nodes)
        return index_mask.with_index_mask(bound, gpus, simulated=simulated)

    def release(self) -> None:
        """Give the GPUs back. Further calls, and calls in a forked child, do nothing.

        Raises DaemonUnavailable if no daemon responds. This process then repeats the release in the background until a
        daemon answers, so that the GPUs are free again as soon as it is back; another call tries again too.
        """
        if not self.is_holder:
            return
        was_stopped = self._stopped.is_set()
        try:
            self._stopped.set()
            try:
                self._join()
            finally:  # Ctrl-C meanwhile
                with self._releasing:
                    if not self._released:
                        self._release(was_stopped)
        except BaseException as error:
            if not (self._released or isinstance(error, GpuleaseError)):  # Ctrl-C before the client could say or owe it
                DEBTS.owe(
                    Debt(Failover(self._client.destination), self.id, None, self.fencing_token, granted_too=False)
                )
            raise

    def _release(self, was_stopped: bool) -> None:
        try:
            self._client.release(self.id, self.fencing_token, retry_s=RELEASE_TIMEOUT_S, timeout_s=RELEASE_TIMEOUT_S)
        except (LeaseLost, StaleToken, NotFound) as error:
            if not was_stopped:
                self._mark_lost(str(error))
        except GpuleaseError:
            _held_leases.discard(self)  # the exit of the process need not wait for that daemon again
            raise
        self._released = True
        _held_leases.discard(self)

    def detach(self) -> None:
        """Stop renewing without releasing: other processes hold the lease too."""
        self._stopped.set()
        _held_leases.discard(self)

    def _join(self) -> None:
        """Wait for the threads to end, for at most `RELEASE_TIMEOUT_S`."""
        end = time.monotonic() + RELEASE_TIMEOUT_S
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
        """Release without raising. False if no daemon responded."""
        # The work in the block is done or has raised its own exception; a failed release must hide neither.
        try:
            self.release()
        except GpuleaseError as error:
            then = "it lasts until its ttl or this process ends" if is_answer(error) else KEEPS_TRYING
            LOG.warning("Lease %s was not released; %s: %s", self.id, then, error)
            return False
        return True

    def _renew_loop(self) -> None:
        """Body of the renewing thread; returns when the lease is released or lost."""
        _block_signals()
        pause_s = self._sent_at + self._renewal_pause_s - time.monotonic()
        while self._wait(pause_s) is not None:
            sent_at = time.monotonic()
            try:
                # A renewal sent after the trust window could revive a lease that its holder has given up.
                if (left_s := self._trusted_until - sent_at) <= 0:
                    self._mark_lost(self._why_over(sent_at))  # the other thread may wait for an end that was later
                else:
                    renewed = self._client.send(
                        endpoints.keep(self._lease), retry_s=0, timeout_s=renew_timeout_s(left_s)
                    )
                    ends_at_s = float("inf") if renewed.ends_in_s is None else sent_at + renewed.ends_in_s
                    answered_at = time.monotonic()
                    if answered_at > sent_at + renewed.ttl_s:  # it had arrived before, so this thread could not run
                        self._resumed_at = answered_at
                    self._sent_at, self._lease, self._ends_at_s, self._failure = sent_at, renewed, ends_at_s, ""
                    self._report_problems(renewed.problems)
                    self._report_preemption(renewed.preempt_at)
            except (LeaseLost, StaleToken, NotFound) as error:
                if not self._stopped.is_set():
                    self._mark_lost(str(error))
                return
            except GpuleaseError as error:
                LOG.debug("Lease %s could not be renewed: %s", self.id, error)
                self._failure = f" {error}"
            except Exception:
                LOG.exception("Lease %s could not be renewed; retrying until it is lost", self.id)
            jitter = random.uniform(0.8, 1.0)  # noqa: S311
            pause_s = retry_s = min(1.0, self._lease.ttl_s / 20) * jitter
            if self._sent_at == sent_at:  # answered
                # Counted from when it was sent, because this process may have been stopped before it read the response.
                pause_s = sent_at + max(self._renewal_pause_s * jitter, retry_s) - time.monotonic()

    def _report_preemption(self, preempt_at: datetime | None) -> None:
        """Warn once that the lease is to end for a request that waits, and once that it is not."""
        if preempt_at == self.preempt_at:
            return
        self.preempt_at = preempt_at
        if preempt_at is None:
            self.preempting.clear()
            LOG.warning("Lease %s is not preempted after all.", self.id)
            return
        self.preempting.set()
        when = f"{preempt_at:%Y-%m-%d %H:%M:%S} UTC"
        LOG.warning("Lease %s ends at %s for a request that waits: save your work until then.", self.id, when)
        if self.on_preempting is not None:
            try:
                self.on_preempting(self)
            except Exception:
                LOG.exception("on_preempting of lease %s failed", self.id)

    def _report_problems(self, problems: tuple[str, ...]) -> None:
        """Warn once of each problem of the GPUs, for as long as it lasts."""
        for problem in problems:
            if problem not in self.problems:
                LOG.warning("Lease %s: %s", self.id, problem)
        self.problems = problems

    def _watch_loop(self) -> None:
        """Body of the watching thread, which only waits for the end of the trust window: nothing else may block it."""
        _block_signals()
        # Now and then also without need: a thread that wakes late shows that the process hardly runs.
        longest_s = CONFIRM_S / 3 if self._works_for is None else ORPHAN_CHECK_S
        while (woke_at := self._wait(min(longest_s, self._trusted_until - time.monotonic()))) is not None:
            if self._works_for is not None and not self._works_for.alive():
                self._give_back(self._works_for)
            elif woke_at >= self._trusted_until:
                self._mark_lost(self._why_over(woke_at))

    def _why_over(self, woke_at: float) -> str:
        """Why it is trusted no more."""
        if woke_at < self._ends_at_s:
            return f"{NOT_RENEWED} {self.id} succeeded for its ttl of {self._lease.ttl_s:g} s.{self._failure}"
        if self._lease.preempt_at is not None:
            return "It was preempted, so that a request that waited can start."
        if self._lease.reclaim_at is not None:
            return "Its GPUs were idle, and are taken back for a request that waited."
        return "Its time has passed, or the budget of its token is spent."

    def _give_back(self, ended: ProcessId) -> None:
        """Release the lease of an orphan. Its GPUs drain for as long as it uses them."""
        self._stopped.set()
        self._release_quietly()  # first, because `on_lost` may take long
        self._mark_lost(f"Process {ended.pid}, for which this one works, has ended, so it was given back.")

    def _wait(self, seconds: float) -> float | None:
        """Wait; the time of waking, or None if the lease has ended. Notices if this thread was stopped meanwhile."""
        pause_s = min(max(0.0, seconds), threading.TIMEOUT_MAX)
        due_at = time.monotonic() + pause_s
        if self._stopped.wait(pause_s):
            return None
        woke_at = time.monotonic()
        if woke_at > due_at + LATE_WAKEUP_S:
            self._resumed_at = woke_at
        return woke_at

    @property
    def _renewal_pause_s(self) -> float:
        """How long after the last renewal was sent the next one is."""
        return min(self._lease.ttl_s / 3, (self._ends_at_s - self._sent_at) / 3, MAX_RENEWAL_PAUSE_S)

    @property
    def _trusted_until(self) -> float:
        until = self._sent_at + self._lease.ttl_s
        if self._lease.liveness is Liveness.PROCESS and self._resumed_at > self._sent_at:
            until = max(until, self._resumed_at + CONFIRM_S)
        return min(until, self._ends_at_s)

    def _mark_lost(self, reason: str) -> None:
        with self._losing:
            self._stopped.set()
            if self.lost.is_set():
                return
            self.loss_reason = reason
            self.lost.set()
        LOG.warning("Lease %s is lost. Another user may hold its GPUs now, so stop using them. %s", self.id, reason)
        if self._on_lost is None:
            return
        in_own_thread = threading.current_thread() in self._threads
        if in_own_thread:
            # Programs that the callback starts inherit the mask, and one that blocks SIGTERM is hard to stop.
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        try:
            self._on_lost(self)
        except Exception:
            LOG.exception("on_lost of lease %s failed", self.id)
        finally:
            if in_own_thread:
                _block_signals()


def own_lease_ids() -> set[str]:
    """The leases that this process holds alone."""
    return {lease.id for lease in list(_held_leases) if lease.is_holder}


def renew_timeout_s(left_s: float) -> float:
    """How long to wait for the response to a renewal when the trust window ends in `left_s`."""
    return min(left_s, max(MIN_RENEW_TIMEOUT_S, min(RENEW_TIMEOUT_S, left_s / 2)))


def _block_signals() -> None:
    """Block every signal in this thread, so that it takes none from a caller that waits for them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@atexit.register
def _release_all() -> None:
    """Release what is still held when the process exits."""
    unresponsive = set()
    for lease in list(_held_leases):
        daemon = lease._client.destination
        if daemon in unresponsive:  # the exit has waited for it once
            LOG.warning("Lease %s was not released either; it ends after the process that owns it.", lease.id)
        elif not lease._release_quietly():
            unresponsive.add(daemon)
