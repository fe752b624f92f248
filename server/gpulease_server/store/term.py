"""Which of all who ever wrote to this database may write now.

A lock alone cannot say so: a daemon that was stopped for a minute and continued has lost its lock and does not know it,
and its next commit would be believed. So the one row of `writer` has a number, the term. Whoever takes over raises it;
every transaction that writes first updates the row where the term is its own, which takes the row's lock. Either it
finds its term, and a successor waits until it has ended; or it finds another one, and ends without having written.

The term also settles what became of a commit whose answer was lost. The server may still be busy with it, or not have
begun: what is read at that moment may be undone, or done, later. So whoever does not know raises his own term before he
reads again: that waits for a transaction under way, and leaves one that is still to come without its term.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Engine, event, func, select, text, update
from sqlalchemy.exc import DataError, SQLAlchemyError

from gpulease.errors import Unavailable

from . import tables
from .dialects import POSTGRESQL, why

log = logging.getLogger("gpulease.store")

_ROW = tables.writer.c.id == 1
_WITH_THE_ROW = (  # xmax is the transaction that has the row locked
    "SELECT pg_terminate_backend(a.pid) FROM writer w JOIN pg_stat_activity a ON a.backend_xid = w.xmax"
    " WHERE w.id = 1 AND a.datname = current_database()"
)
_EVICT = text(_WITH_THE_ROW)
_EVICT_OWN = text(f"{_WITH_THE_ROW} AND a.pid = ANY(CAST(:own AS integer[]))")
_SESSIONS = 64
"""How many of its own sessions a writer remembers: more than it has at a time."""


class StoreFailed(Unavailable):
    """A turn could not be committed. Nothing of it was written, unless only the answer to the commit is missing."""


class Superseded(StoreFailed):
    """Another daemon writes to this database now. This one has to end."""

    title = "Superseded"


class Term:
    """The right of one writer to write, as far as it goes.

    Args:
        engine: The database.
        on_superseded: Called, from any thread and perhaps more than once, when another writer has taken over.
    """

    def __init__(self, engine: Engine, on_superseded: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self.on_superseded = on_superseded
        self.number: int | None = None
        """What the row must say; None before the first."""
        self._first: int | None = None
        self._doubtful = False
        self._sessions: deque[int] = deque(maxlen=_SESSIONS)
        """Process ids of its sessions at the server, the last at the end."""
        if engine.dialect.name == POSTGRESQL:
            event.listen(engine, "connect", self._begin_session)

    def _begin_session(self, connection: Any, _record: Any) -> None:
        self._sessions.append(connection.info.backend_pid)

    def take_over(self, name: str) -> int:
        """Become the writer, under a name for people; returns the term. Waits for a transaction of the former one.

        Raises SQLAlchemyError. Whoever calls this must know that the former writer is gone, or accept that it ends.
        """
        table = tables.writer
        raised = (
            update(table)
            .where(_ROW)
            .values(term=table.c.term + 1, first_term=table.c.term + 1, name=name[:255], since=func.now())
        )
        with self._engine.begin() as connection:
            term: int = connection.execute(raised.returning(table.c.term)).scalar_one()
        self.number = self._first = term
        self._doubtful = False
        return term

    def evict(self) -> None:
        """End the session in which a former writer has a transaction open, so that `take_over` does not wait for it.

        For whoever has the lock. A writer that was stopped in the middle of sending a statement keeps its row locks for
        as long as it is stopped: none of the server's time-outs counts while it waits for the rest of a message.
        Raises SQLAlchemyError.
        """
        if self._engine.dialect.name != POSTGRESQL:
            return
        with self._engine.begin() as connection:
            ended = connection.execute(_EVICT).all()
        if ended:
            log.warning("ended %d sessions of the former writer, with a transaction open", len(ended))

    def _evict_own(self) -> None:
        """The same for a session of this writer's own that was cut off, and for no successor's."""
        if not self._sessions:
            return
        with suppress(SQLAlchemyError), self._engine.begin() as connection:
            if connection.execute(_EVICT_OWN, {"own": list(self._sessions)}).all():
                log.warning("ended a session of this daemon's that was cut off, with a transaction open")

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that commits only in this term. Raises `Superseded`, `StoreFailed`, or, for a value that the
        database cannot keep, SQLAlchemy's DataError: that is the fault of one row and not of the database."""
        try:
            if self.number is None:
                self.take_over("a program that is no daemon")
            with self._engine.begin() as connection:
                self._prove(connection)
                yield connection
        except DataError:
            raise  # the server has refused it, so nothing is in doubt
        except SQLAlchemyError as error:
            self._doubtful = True
            detail = f"The ledger could not be written: {why(error)}"
            raise StoreFailed(detail, remedy="Ask again.") from error

    def _prove(self, connection: Connection) -> None:
        term = tables.writer.c.term
        proved = connection.execute(update(tables.writer).where(_ROW, term == self.number).values(term=self.number))
        if proved.rowcount != 1:
            self._refuse(connection)

    def settle(self) -> None:
        """Before reading again: have an end put to every transaction of this writer whose outcome is not known.

        Waits for one that is under way, as long as the server lets it. One that was cut off in the middle of a message
        is under way for ever, so it is ended then, and whoever asks again finds the way free. Raises `Superseded`, or
        SQLAlchemyError.
        """
        if not self._doubtful or self.number is None:
            return
        table = tables.writer
        mine = update(table).where(_ROW, table.c.first_term == self._first).values(term=table.c.term + 1)
        try:
            with self._engine.begin() as connection:
                term: int | None = connection.execute(mine.returning(table.c.term)).scalar_one_or_none()
                if term is None:
                    self._refuse(connection)
        except SQLAlchemyError:
            self._evict_own()
            raise
        self.number, self._doubtful = term, False

    def check(self) -> None:
        """Raise `Superseded` if another writer has taken over."""
        if self._first is None:
            return
        with self._engine.connect() as connection:
            found = connection.execute(select(tables.writer.c.first_term).where(_ROW)).scalar_one_or_none()
            if found != self._first:
                self._refuse(connection)

    def _refuse(self, connection: Connection) -> None:
        row = connection.execute(select(tables.writer).where(_ROW)).one_or_none()
        if row is not None and row.first_term == self._first:
            # Only `settle` raises a term without a new writer: it has, while this transaction was on its way.
            raise StoreFailed("The ledger is being read again.", remedy="Ask again.")
        self.on_superseded()
        who = "nobody any more" if row is None else row.name
        raise Superseded(
            f"Another daemon has taken over this database: {who}. Nothing was written.",
            remedy="Ask that one. This one ends; start it again when the other one is gone.",
        )


def writer_name(engine: Engine) -> str:
    """Who writes to this database, or did last; empty if nobody ever has. Raises SQLAlchemyError."""
    with engine.connect() as connection:
        return str(connection.execute(select(tables.writer.c.name).where(_ROW)).scalar_one_or_none() or "")
