"""The statements of turns, compiled once for a database.

`tables` declares the tables, and SQLAlchemy makes of them the texts of these statements and what converts the values of
each column. Left to itself it does so at each execution, or finds the text by a key that it makes of the whole
statement. That took more time than all that the database does for a small turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import JSON, ClauseElement, Column, Connection, Engine, Table, bindparam, delete, insert, update
from sqlalchemy.dialects import sqlite

from gpulease_server.store import tables
from gpulease_server.store.dialects import SQLITE, Counted, execute, json_text

Row = dict[str, Any]
"""The values of a row by column, as records have them: nouns in JSON columns, aware times."""
Converter = Callable[[Any], Any]


class _TableStatements(NamedTuple):
    insert: str
    upsert: str
    delete: str
    converters: tuple[tuple[str, Converter], ...]
    """By column: what makes of a value, unless it is None, the one that the driver takes."""


def statement_text(engine: Engine, statement: ClauseElement) -> str:
    """What `Connection.exec_driver_sql` takes with a dict of parameters by their names in the statement."""
    named = sqlite.dialect(paramstyle="named") if engine.dialect.name == SQLITE else engine.dialect
    return str(statement.compile(dialect=named))


def driver_value(engine: Engine, column: Column[Any], value: Any) -> Any:
    """A value of a column as `Connection.exec_driver_sql` takes it."""
    processor = column.type.dialect_impl(engine.dialect).bind_processor(engine.dialect)
    return value if processor is None else processor(value)


class Statements:
    """The statements for one database. Each table has one column as its primary key."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._of_table: dict[Table, _TableStatements] = {}
        self._of_columns: dict[tuple[Column[Any], ...], tuple[str, tuple[tuple[str, Converter | None], ...]]] = {}

    def insert(self, connection: Connection, table: Table, rows: Iterable[Row]) -> None:
        """Add new rows."""
        statements = self._statements(table)
        _execute_if_any(connection, statements.insert, [_converted(row, statements.converters) for row in rows])

    def upsert(self, connection: Connection, table: Table, rows: Iterable[Row]) -> None:
        """Write rows, over those with the same keys."""
        statements = self._statements(table)
        _execute_if_any(connection, statements.upsert, [_converted(row, statements.converters) for row in rows])

    def update(
        self, connection: Connection, columns: tuple[Column[Any], ...], values: Mapping[str, Sequence[Any]]
    ) -> Counted | None:
        """Change some columns of rows, by their keys. Returns what tells how many there are; None without any."""
        if columns not in self._of_columns:
            (key,) = columns[0].table.primary_key
            changed = update(columns[0].table).where(key == bindparam("key"))
            changed = changed.values({one: bindparam(f"new_{one.name}", type_=one.type) for one in columns})
            made = tuple((f"new_{one.name}", self._converter(one)) for one in columns)
            self._of_columns[columns] = statement_text(self._engine, changed), made
        text, converters = self._of_columns[columns]
        rows = []
        for key_value, new in values.items():
            row = {"key": key_value}
            for (name, converter), value in zip(converters, new, strict=True):
                row[name] = converter(value) if converter is not None and value is not None else value
            rows.append(row)
        return _execute_if_any(connection, text, rows)

    def delete(self, connection: Connection, table: Table, keys: Iterable[str]) -> None:
        """Delete the rows with these keys."""
        _execute_if_any(connection, self._statements(table).delete, [{"key": key} for key in keys])

    def _statements(self, table: Table) -> _TableStatements:
        if table not in self._of_table:
            (key,) = table.primary_key
            self._of_table[table] = _TableStatements(
                insert=statement_text(self._engine, insert(table)),
                upsert=statement_text(self._engine, self._upsert(table, key)),
                delete=statement_text(self._engine, delete(table).where(key == bindparam("key"))),
                converters=tuple(self._converters(table)),
            )
        return self._of_table[table]

    def _upsert(self, table: Table, key: Column[Any]) -> Any:
        if self._engine.dialect.name == SQLITE:
            added: Any = sqlite.insert(table)
        else:
            from sqlalchemy.dialects import postgresql  # noqa: PLC0415 - large, and SQLite does without

            added = postgresql.insert(table)
        changed = {column.name: added.excluded[column.name] for column in table.columns if column is not key}
        return added.on_conflict_do_update(index_elements=[key], set_=changed)

    def _converters(self, table: Table) -> Iterable[tuple[str, Converter]]:
        for column in table.columns:
            converter = self._converter(column)
            if converter is not None:
                yield column.name, converter

    def _converter(self, column: Column[Any]) -> Converter | None:
        if isinstance(column.type, JSON):
            return json_text
        if isinstance(column.type, tables.UtcDateTime) and self._engine.dialect.name == SQLITE:
            return _sqlite_time
        return column.type.dialect_impl(self._engine.dialect).bind_processor(self._engine.dialect)


def _sqlite_time(at: datetime) -> str:
    """As SQLAlchemy writes it, in a third of the time."""
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")


def _converted(row: Row, converters: tuple[tuple[str, Converter], ...]) -> Row:
    for name, converter in converters:
        value = row[name]
        if value is not None:
            row[name] = converter(value)
    return row


def _execute_if_any(connection: Connection, text: str, rows: list[Row]) -> Counted | None:
    return execute(connection, text, rows) if rows else None
