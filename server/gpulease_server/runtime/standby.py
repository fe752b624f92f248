"""A daemon that stands by: it keeps a copy of the ledger for readers, and becomes the writer when there is none.

    start --lock taken--> takes over --> writer
      |                      ^
      +--lock is held--> stands by: tries the lock every 0.2 s, reads the ledger every 0.5 s or as often as that
                         takes no more than a fifth of the time

Authority: the database. The copy is never newer than it, is shown with its time, and decides nothing; the takeover
throws it away and reads the ledger as every start does. So a standby can know nothing wrongly: every holder and waiter
has a full `ttl_s` from then on, and nothing is granted before each node has reported.

| what happens | what follows |
|---|---|
| the writer ends | the server ends its session, and the next try takes the lock |
| the writer is stopped or cut off | the same after `lock.SESSION_S`; a transaction that it has open is ended |
| it goes on while this one takes over | its transactions lack the term from `Term.take_over` on |
| several stand by | one has the lock; the others hear its name at the next try |
| the database is away | tries and readings fail, and go on; the copy stays, with its time |
| the database is away in the takeover | tried again while the lock is confirmed, else when it is again |
| the database has a newer schema | this daemon ends: it cannot be the writer |
| this one is stopped between lock and term | who is the writer by then ends at its next write, for nothing |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from gpulease.errors import GpuleaseError

from ..core.ledger import Ledger, Sighting
from ..store.database import SchemaNewer
from ..store.dialects import why
from ..store.store import Store
from . import clock
from .lock import WriterLock
from .standing import LOOK_S, Copy, Standing
from .writer import Writer

log = logging.getLogger("gpulease.standby")

TRY_S = 0.2
"""Time between two tries to take the lock: part of the delay that clients notice."""
READ_S = 0.5
"""Least time between two readings of the ledger."""
READINGS_ARE_THE_WRITERS = "this daemon stands by; the writer has the readings of the GPUs"


class Standby:
    """Stands by until it is the writer.

    Args:
        writer: Shows the copy meanwhile. Not running yet.
        standing: Says that this daemon stands by.
        take_over: Makes it the writer, with the lock in hand. Blocks. Raises GpuleaseError when it cannot.
    """

    def __init__(
        self, lock: WriterLock, store: Store, writer: Writer, standing: Standing, take_over: Callable[[], None]
    ) -> None:
        self._lock = lock
        self._store = store
        self._writer = writer
        self._standing = standing
        self._take_over = take_over
        self._said = ""

    def begin(self, holder: str) -> None:
        """Say that `holder` is the writer, and that this daemon stands by."""
        self._standing.copy = Copy(holder)
        self._name(holder)

    async def run(self) -> None:
        """Return when this daemon is the writer. Raises `SchemaNewer`."""
        reading = asyncio.create_task(self._keep_reading())
        try:
            while not await self._has_lock():  # noqa: ASYNC110 - it asks the database
                await asyncio.sleep(TRY_S)
            self._lock.keep(self._store.term.check)
            await self._become_writer()
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    async def leave(self) -> None:
        """Stop to show the copy, once the writer shows its ledger."""
        while self._writer.problem is not None:  # noqa: ASYNC110 - for some milliseconds
            await asyncio.sleep(LOOK_S)
        self._standing.copy = None

    async def _has_lock(self) -> bool:
        try:
            holder = await asyncio.to_thread(self._lock.try_take)
        except GpuleaseError as error:
            self._say(error.detail)
            return False
        if holder is not None:
            self._say("")
            self._name(holder)
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
                self._say(error.detail if isinstance(error, GpuleaseError) else why(error))
            await asyncio.sleep(TRY_S)
            while not self._lock.confirmed():  # noqa: ASYNC110 - a thread keeps it
                await asyncio.sleep(TRY_S)

    async def _keep_reading(self) -> None:
        while True:
            now = clock.now()
            try:
                ledger = await asyncio.to_thread(self._store.load)
                if self._standing.copy is not None:
                    self._show(ledger)
                    self._standing.copy.as_of = now.at
            except (GpuleaseError, SQLAlchemyError) as error:
                log.debug("the ledger cannot be read: %s", error)  # the try for the lock says it
            except Exception:
                log.exception("the ledger cannot be read; trying again")
            await asyncio.sleep(max(READ_S, 4 * (clock.now().mono_s - now.mono_s)))

    def _show(self, ledger: Ledger) -> None:
        """To readers: the ledger, and that of no node anything is known here."""
        for name in ledger.nodes:
            ledger.sightings[name] = Sighting(
                node=name,
                worker_id="",
                reported_at_s=float("inf"),
                observed_at_s=None,
                problem=READINGS_ARE_THE_WRITERS,
            )
        self._writer.committed, self._writer.has_read = ledger, True

    def _name(self, holder: str) -> None:
        copy = self._standing.copy
        if copy is None:
            return
        if copy.writer != holder or self._writer.problem is None or not self._writer.problem.startswith("stands by"):
            log.info("stands by; the writer is %s", holder)
        copy.writer = holder
        self._writer.problem = f"stands by; the writer is {holder}"

    def _say(self, problem: str) -> None:
        """Log what is wrong once, and once that it is over."""
        if problem and problem != self._said:
            log.error("cannot take over: %s Trying again.", problem)
            self._writer.problem = f"stands by, and cannot take over: {problem}"
        elif self._said and not problem:
            log.info("the database answers again")
        self._said = problem
