"""Releases and withdrawals that no daemon has answered yet: this process repeats them until one does.

A daemon may be away when a block ends, a task is cancelled or the user presses Ctrl-C. It keeps a lease for as long as
it sees its owner alive, and the owner is this process, which goes on. So what could not be said is said later:

    asked --no answer--> owed --any answer--> settled
                          |
                          +--the process ends--> the daemon sees its owner die, or the ttl passes

- One thread per process repeats everything that is owed, until it is settled. It starts with the first debt, and ends
  when nothing is owed.
- A client settles what it owes before it asks for GPUs again, so that no process waits behind its own former request.
- A forked child owes nothing: it is not the holder.

| what happens | what follows |
|---|---|
| the daemon is away, hangs, or cannot record (503) | repeated for as long as it takes, every `MAX_PAUSE_S` in the end |
| a release had been carried out, only its answer was lost | the daemon answers it the same way again |
| no one knows whether a request arrived | it is sent again under its key, which tells its id; then it is withdrawn |
| the request had arrived, and was granted meanwhile | the grant is released |
| the lease has ended, is unknown, or its holder may no longer ask | an answer (410, 412, 404, 401): settled |
| a signal arrives while this is said, also a second Ctrl-C | it is owed from before the first attempt |
| the daemon has no answer for one of them (500, or one that cannot be read) | the others are settled |
| the daemon of one of several clients hangs | the others' debts wait for at most its time limit |
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import replace
from typing import Any

from gpulease.sansio.effects import Flow
from gpulease.sansio.failover import Destination, Failover
from gpulease.sansio.sync_transport import Transport
from gpulease_protocol import endpoints
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import DaemonUnavailable, GpuleaseError, OverQuota, StaleToken, TooSlow, Unavailable
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Lease

LOG = logging.getLogger("gpulease")

SETTLE_TIMEOUT_S = 3.0
"""Time limit for each call: a user who has pressed Ctrl-C may be waiting."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
"""Time between two attempts to settle; it doubles from the first to the second."""


@dataclass(frozen=True, slots=True, eq=False)
class Debt:
    """A lease to release, or a request to withdraw. `settle` may run any number of times, also twice at once."""

    failover: Failover
    """Leads to the daemon that it is owed to."""
    lease_id: str | None = None
    """The lease; None if the response to its request was lost."""
    request: ApiCall[Lease] | None = None
    """That request; sent again it tells the id of the lease."""
    fencing_token: int | None = None
    """Fencing token of the lease; None while it is queued."""
    granted_too: bool = True
    """Release the lease also if it was granted meanwhile."""

    def settle(self) -> Flow[None]:
        """Say it once. Raises what the daemon refuses, or DaemonUnavailable or Unavailable."""
        lease_id = self.lease_id
        if lease_id is None:
            assert self.request is not None
            lease_id = (yield from self._send(self.request)).id
        try:
            yield from self._send(_release(lease_id, self.fencing_token))
        except StaleToken:
            if not self.granted_too:
                raise
            lease = yield from self._send(endpoints.lease(lease_id))
            yield from self._send(_release(lease_id, lease.fencing_token))

    def _send(self, call: ApiCall[Any]) -> Flow[Any]:
        return self.failover.send(call, SETTLE_TIMEOUT_S)


def _release(lease_id: str, fencing_token: int | None) -> ApiCall[Any]:
    # Any 2xx settles, even one that only a newer client can decode.
    return replace(endpoints.release(lease_id, fencing_token), read=lambda document: document)


def is_answer(error: BaseException) -> bool:
    """True if a daemon has answered, and would answer the same again."""
    if isinstance(error, OverQuota):
        return error.retry_after_s is None
    later = isinstance(error, DaemonUnavailable | Unavailable | TooSlow) or type(error) is GpuleaseError
    return isinstance(error, GpuleaseError) and not later


def is_about_its_debt(error: GpuleaseError) -> bool:
    """True if others that are owed to the same daemon may be settled all the same."""
    return type(error) is GpuleaseError or "by_proxy" in error.extra


class Debts:
    """All debts of this process, and the thread that settles them."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._debts: list[Debt] = []
        # Reentrant, because a signal handler may release a lease.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None

    def add(self, debt: Debt) -> None:
        """Owe this. The thread leaves it alone until `settle_in_background`."""
        with self._changed:
            self._debts.append(debt)

    def owe(self, debt: Debt) -> None:
        """Owe this, and have the thread settle it."""
        self.add(debt)
        self.settle_in_background()

    def owed_to(self, destination: Destination) -> list[Debt]:
        """Releases and withdrawals that are owed to a daemon of this destination, oldest first."""
        with self._changed:
            return [debt for debt in self._debts if debt.failover.destination.overlaps(destination)]

    def settled(self, debt: Debt) -> Flow[GpuleaseError | None]:
        """Settle a debt and forget it; or what kept a daemon from answering."""
        try:
            yield from debt.settle()
        except GpuleaseError as error:
            if not is_answer(error):
                return error
            LOG.debug("A repeated release or withdrawal was refused, so it is dropped: %s", error)
        with self._changed:
            if debt in self._debts:
                self._debts.remove(debt)
        return None

    def forget_all(self) -> None:
        """Owe nothing any more."""
        with self._changed:
            self._debts.clear()
            self._changed.notify_all()

    def settle_in_background(self) -> None:
        """Have the thread settle what is owed, if anything is."""
        with self._changed:
            self._changed.notify_all()
            if not self._debts or self._thread is not None:
                return
            self._thread = threading.Thread(target=self._body, name="gpulease-owed", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # at the end of the process, or no more threads are allowed
                self._thread = None
                LOG.debug("Releases and withdrawals are not repeated: %s", error)

    def _body(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pause_s = MIN_PAUSE_S
        while True:
            with self._changed:
                debts = list(self._debts)
                if not debts:
                    self._thread = None
                    return
            answered = False
            for failover in dict.fromkeys(debt.failover for debt in debts):
                answered |= self._settle_all([debt for debt in debts if debt.failover is failover])
            with self._changed:
                # A new debt ends the pause, because its daemon may be there.
                woken = not answered and self._changed.wait(pause_s)
            pause_s = MIN_PAUSE_S if answered or woken else min(pause_s * 2, MAX_PAUSE_S)

    def _settle_all(self, debts: list[Debt]) -> bool:
        """Settle debts to one daemon, as long as it answers. True if it answered at all."""
        transport, answered = Transport(debts[0].failover.destination), False
        try:
            for debt in debts:
                if (error := transport.run(self.settled(debt))) is not None:
                    LOG.debug("Owed still: %s", error)
                    if is_about_its_debt(error):
                        continue
                    break
                answered = True
        except Exception:
            LOG.exception("A release or withdrawal could not be repeated; it is tried again")
        finally:
            transport.close()
        return answered


DEBTS = Debts()
"""The debts of this process."""
