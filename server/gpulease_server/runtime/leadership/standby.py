"""Standby: a daemon that serves a copy of the ledger to readers, and takes over when there is no writer.

    start --lock acquired--> takes over --> writer
      |                         ^
      +--lock is held--> standby: tries the lock every 0.2 s, loads the ledger every 0.5 s, or less often so that
                         loading takes at most a fifth of the time

Authority: the database. The copy is never newer, is served with its time, and nothing is decided on it; a takeover
discards it and loads the ledger as every start does. After that every holder and waiter has a full `ttl_s`, and nothing
is granted before each node has reported.

| what happens | what follows |
|---|---|
| the writer ends | the server ends its session, and the next try acquires the lock |
| the writer is stopped or cut off | the same after `lock.SESSION_TIMEOUT_S`; its open transaction is ended |
| it goes on while this one takes over | its transactions fail from `WriterFence.take_over` on |
| an older database takes its place | the copy stays, and this one does not take over that database |
| there are several standbys | one acquires the lock; the others learn its name at the next try |
| the database is down | tries and loads fail and are repeated; the copy stays, with its time |
| the database is down during a takeover | retried while the lock is confirmed, else once it is again |
| the database gets a newer schema | this daemon ends within a second: it could not take over |
| this one is stopped between lock and term | the writer of that time ends at its next write, needlessly |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from gpulease_protocol.errors import GpuleaseError
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import NodeObservation
from gpulease_server.runtime import clock
from gpulease_server.runtime.leadership.lock import WriterLock
from gpulease_server.runtime.leadership.status import POLL_S, LeadershipStatus, StandbyCopy
from gpulease_server.runtime.outage import refuse_older_copy
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.database import SchemaNewer, refuse_newer
from gpulease_server.store.dialects import error_message
from gpulease_server.store.ledger_store import Store, StoreFailed

log = logging.getLogger("gpulease.standby")

TRY_S = 0.2
"""Time between two tries to acquire the lock; part of the delay that clients notice."""
READ_S = 0.5
"""Minimum time between two loads of the ledger."""
READINGS_ARE_THE_WRITERS = "this daemon is a standby; only the writer has readings of the GPUs"


class Standby:
    """Serves a copy until this daemon is the writer.

    Args:
        writer: Serves the copy meanwhile. Not running yet.
        leadership: Gets the copy.
        take_over: Makes this daemon the writer once it has the lock. Blocks. Raises GpuleaseError when it cannot.
    """

    def __init__(
        self,
        lock: WriterLock,
        store: Store,
        writer: Writer,
        leadership: LeadershipStatus,
        take_over: Callable[[], None],
    ) -> None:
        self._lock = lock
        self._store = store
        self._writer = writer
        self._leadership = leadership
        self._take_over = take_over
        self._logged_problem = ""
        self._logged_older = False
        self._newer: SchemaNewer | None = None

    def begin(self, holder: str) -> None:
        """Become a standby of `holder`."""
        self._leadership.standby_copy = StandbyCopy(holder)
        self._set_writer(holder)

    async def run(self) -> None:
        """Return when this daemon is the writer. Raises `SchemaNewer`."""
        reading = asyncio.create_task(self._refresh_copy())
        try:
            while not await self._try_lock():
                await asyncio.sleep(TRY_S)
                if self._newer is not None:
                    raise self._newer
            self._lock.keep_alive(self._store.fence.check)
            await self._become_writer()
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    async def leave(self) -> None:
        """Stop serving the copy once the writer has loaded its ledger."""
        while self._writer.problem is not None:  # noqa: ASYNC110 - for some milliseconds
            await asyncio.sleep(POLL_S)
        self._leadership.standby_copy = None

    async def _try_lock(self) -> bool:
        try:
            holder = await asyncio.to_thread(self._lock.try_acquire)
        except GpuleaseError as error:
            self._log_problem(error.detail)
            return False
        if holder is not None:
            self._log_problem("")
            self._set_writer(holder)
        return holder is None

    async def _become_writer(self) -> None:
        log.warning("the former writer is gone; taking over")
        while True:
            taking = asyncio.create_task(asyncio.to_thread(self._take_over))
            try:
                await asyncio.shield(taking)
                return
            except asyncio.CancelledError:
                await asyncio.wait({taking})
                raise
            except SchemaNewer:
                raise
            except (GpuleaseError, SQLAlchemyError) as error:
                self._log_problem(error.detail if isinstance(error, GpuleaseError) else error_message(error))
            await asyncio.sleep(TRY_S)
            while not self._lock.is_confirmed():  # noqa: ASYNC110 - a thread keeps it
                await asyncio.sleep(TRY_S)

    async def _refresh_copy(self) -> None:
        while True:
            now = clock.now()
            try:
                await asyncio.to_thread(refuse_newer, self._store.engine)
                ledger = await asyncio.to_thread(self._store.load)
                if self._leadership.standby_copy is not None:
                    refuse_older_copy(ledger, self._writer.committed)
                    self._publish(ledger)
                    self._leadership.standby_copy.as_of = now.at
                    self._logged_older = False
            except StoreFailed as error:
                if not self._logged_older:
                    log.error("the copy of the ledger stays as it is: %s", error.detail)
                self._logged_older = True
            except SchemaNewer as error:
                self._newer = error
                return
            except (GpuleaseError, SQLAlchemyError) as error:
                log.debug("the ledger cannot be read: %s", error)  # trying the lock logs it
            except Exception:
                log.exception("the ledger cannot be read; trying again")
            await asyncio.sleep(max(READ_S, 4 * (clock.now().mono_s - now.mono_s)))

    def _publish(self, ledger: Ledger) -> None:
        """Serve the ledger to readers, with every node unknown."""
        for name in ledger.nodes:
            unread = NodeObservation(
                node=name,
                worker_id="",
                reported_at_s=float("inf"),
                observed_at_s=None,
                problem=READINGS_ARE_THE_WRITERS,
            )
            ledger.apply(unread)
        self._writer.committed, self._writer.has_loaded = ledger, True
        self._writer.published += 1

    def _set_writer(self, holder: str) -> None:
        copy = self._leadership.standby_copy
        if copy is None:
            return
        if copy.writer != holder or self._writer.problem is None or not self._writer.problem.startswith("stands by"):
            log.info("stands by; the writer is %s", holder)
        copy.writer = holder
        self._writer.problem = f"stands by; the writer is {holder}"

    def _log_problem(self, problem: str) -> None:
        """Log a problem once, and its end once."""
        if problem and problem != self._logged_problem:
            log.error("cannot take over: %s Trying again.", problem)
            self._writer.problem = f"stands by, and cannot take over: {problem.rstrip('.')}"
        elif self._logged_problem and not problem:
            log.info("the database answers again")
        self._logged_problem = problem
