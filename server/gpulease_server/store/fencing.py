"""Fencing: only the newest writer of a database may commit.

A lock alone cannot ensure that: a daemon that was stopped for a minute and continued has lost its lock without knowing
it, and its next commit would succeed. So the one row of `writer` has a number, the term (a fencing epoch). A takeover
raises it; every writing transaction first updates that row where the term is its own, which locks the row. Either it
finds its term, and a successor waits until it has ended; or it finds another one, and ends without writing.

Two writers can have the same term: after a failover to a replica that lacks the first one's takeover, the second one
counts from where that one did. So the time of the takeover, as the server tells it, is compared as well.

The term also resolves in-doubt commits, those without an answer. The server may still be busy with one, or not have
begun: what is read at that moment may change later. So a writer in doubt raises its own term before it reads again:
that waits for a transaction under way, and fences off one that is still to come.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Connection, Engine, Row, bindparam, event, func, select, text, update
from sqlalchemy.exc import DataError, SQLAlchemyError

from gpulease_protocol.errors import Unavailable
from gpulease_server.store import tables
from gpulease_server.store.dialects import POSTGRESQL, execute, failure, pipeline, transaction_time
from gpulease_server.store.statements import driver_value, statement_text

log = logging.getLogger("gpulease.store")

_ROW = tables.writer.c.id == 1
_PROVED = bindparam("proved", type_=BigInteger())
_SINCE = bindparam("taken_over_at", type_=tables.UtcDateTime())
_PROOF = (
    update(tables.writer)
    .where(tables.writer.c.id == bindparam("id"), tables.writer.c.term == _PROVED, tables.writer.c.since == _SINCE)
    .values({"term": _PROVED})
)
"""Locks the row of the writer, if it has this term, of this takeover."""
_TERMINATE_ROW_HOLDER = (  # xmax is the transaction that has the row locked
    "SELECT pg_terminate_backend(a.pid) FROM writer w JOIN pg_stat_activity a ON a.backend_xid = w.xmax"
    " WHERE w.id = 1 AND a.datname = current_database()"
)
_TERMINATE = text(_TERMINATE_ROW_HOLDER)
_TERMINATE_OWN = text(f"{_TERMINATE_ROW_HOLDER} AND a.pid = ANY(CAST(:own AS integer[]))")
OLDER = "put the newer one back, or go on with the old one as after a restore (docs/databases.md)"
"""What to do about a database that is older than what was answered."""
_SESSIONS = 64
"""Sessions that a writer remembers; more than it has at a time."""


def new_database_id() -> str:
    """64 random bits, which no other database has."""
    return secrets.token_hex(8)


class StoreFailed(Unavailable):
    """A turn could not be committed. Nothing of it was written, unless only the answer to the commit was lost."""


class Superseded(StoreFailed):
    """Another daemon writes to this database now. This one must end."""

    title = "Superseded"


class WriterFence:
    """The fencing term of one writer.

    Args:
        engine: The database.
        on_superseded: Called, from any thread and perhaps more than once, when another writer has taken over.
    """

    def __init__(self, engine: Engine, on_superseded: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self.on_superseded = on_superseded
        self.term: int | None = None
        """The term that the row must have; None before `take_over`."""
        self.database_id: str | None = None
        """Tells the database from all others, see `tables.writer`; None before `take_over`."""
        self._first_term: int | None = None
        self._since: datetime | None = None
        """The time of the takeover: tells it from another one of the same term."""
        self._proof_since: Any = None
        """The same, as the driver takes it."""
        self._in_doubt = False
        self._proof = statement_text(engine, _PROOF)
        self._sessions: deque[int] = deque(maxlen=_SESSIONS)
        """Process ids of its sessions at the server, newest last."""
        if engine.dialect.name == POSTGRESQL:
            event.listen(engine, "connect", self._remember_session)

    def _remember_session(self, connection: Any, _record: Any) -> None:
        self._sessions.append(connection.info.backend_pid)

    def take_over(self, name: str) -> int:
        """Become the writer; returns the new term. `name` is for messages. Waits for a transaction of the former
        writer.

        Raises SQLAlchemyError. The caller must hold the lock: the former writer, if it still runs, ends.
        """
        table = tables.writer
        values = {
            "term": table.c.term + 1,
            "first_term": table.c.term + 1,
            "name": name[:255],
            "since": transaction_time(self._engine),
            "database_id": func.coalesce(table.c.database_id, new_database_id()),
        }
        raised = update(table).where(_ROW).values(values).returning(table.c.term, table.c.database_id, table.c.since)
        term: int
        with self._engine.begin() as connection:
            term, self.database_id, self._since = connection.execute(raised).one()
        self._proof_since = driver_value(self._engine, table.c.since, self._since)
        self.term = self._first_term = term
        self._in_doubt = False
        return term

    def end_open_transaction(self) -> None:
        """End the session in which a former writer has a transaction open, so that `take_over` does not wait for it.

        The caller must hold the lock. A writer that was stopped while it sent a statement keeps its row locks for as
        long as it is stopped: no time-out of the server applies while it waits for the rest of a message. Raises
        SQLAlchemyError.
        """
        if self._engine.dialect.name != POSTGRESQL:
            return
        with self._engine.begin() as connection:
            ended = connection.execute(_TERMINATE).all()
        if ended:
            log.warning("ended %d sessions of the former writer that had a transaction open", len(ended))

    def _end_own_transaction(self) -> None:
        """End a session of this writer that was cut off with a transaction open; never one of a successor."""
        if not self._sessions:
            return
        with suppress(SQLAlchemyError), self._engine.begin() as connection:
            if connection.execute(_TERMINATE_OWN, {"own": list(self._sessions)}).all():
                log.warning("ended a session of this daemon that was cut off with a transaction open")

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that commits only in this term. Raises `Superseded`, `StoreFailed`, or SQLAlchemy's DataError
        for a value that the database cannot store, which is an error of one row and not of the database."""
        try:
            if self.term is None:
                self.take_over("a program other than the daemon")
            with self._engine.begin() as connection:
                self._require_term(connection)
                yield connection
        except DataError:
            raise  # refused by the server, so nothing is in doubt
        except SQLAlchemyError as error:
            self._in_doubt = True
            detail = f"The ledger could not be written: {failure(error).rstrip('.')}."
            raise StoreFailed(detail, remedy="Ask again.") from error

    def _require_term(self, connection: Connection) -> None:
        proof = {"id": 1, "proved": self.term, "taken_over_at": self._proof_since}
        with pipeline(connection):
            proved = execute(connection, self._proof, [proof])
        if proved.rowcount != 1:
            self._refuse(connection)

    def resolve_in_doubt(self) -> None:
        """Before loading: make sure that no transaction of this writer with an unknown outcome can still commit.

        Waits for one that is under way, as long as the server allows. One that was cut off in the middle of a message
        would never end, so its session is ended when the wait fails, and the next call succeeds. Raises `Superseded` or
        SQLAlchemyError.
        """
        if not self._in_doubt or self.term is None:
            return
        table = tables.writer
        own = (table.c.first_term == self._first_term, table.c.since == self._since)
        mine = update(table).where(_ROW, *own).values(term=table.c.term + 1)
        try:
            with self._engine.begin() as connection:
                term: int | None = connection.execute(mine.returning(table.c.term)).scalar_one_or_none()
                if term is None:
                    self._refuse(connection)
        except SQLAlchemyError:
            self._end_own_transaction()
            raise
        self.term, self._in_doubt = term, False

    def check(self) -> None:
        """Raise `Superseded` if another writer has taken over. An older copy is no such thing: writes find it."""
        if self._first_term is None:
            return
        with self._engine.connect() as connection:
            row = connection.execute(select(tables.writer).where(_ROW)).one_or_none()
            if row is None or not (self._is_own(row) or self._is_before(row)):
                self._refuse(connection)

    def _is_own(self, row: Row[Any]) -> bool:
        """True if the row is that of this writer's takeover."""
        return (row.first_term, row.since) == (self._first_term, self._since)

    def _is_before(self, row: Row[Any]) -> bool:
        """True for the term of a former writer: terms only rise, so an older copy has taken the place of the database,
        as after a failover of PostgreSQL to a replica that lagged behind."""
        return self._first_term is not None and row.first_term < self._first_term

    def _refuse(self, connection: Connection) -> None:
        row = connection.execute(select(tables.writer).where(_ROW)).one_or_none()
        if row is not None and self._is_own(row):
            # `resolve_in_doubt` raised the term of this same writer while this transaction was under way.
            raise StoreFailed("The ledger is being read again.", remedy="Ask again.")
        if row is not None and self._is_before(row):
            raise StoreFailed(
                f"The database is older than this daemon: {row.name} wrote to it last, in term {row.term} of"
                f" {self.term}; {OLDER}.",
                remedy="Ask again.",
            )
        self.on_superseded()
        successor = "unknown" if row is None else row.name
        raise Superseded(
            f"Another daemon has taken over this database: {successor}. Nothing was written.",
            remedy="Use that one. This one ends; start it again when the other one has ended.",
        )
