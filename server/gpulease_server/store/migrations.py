"""Alembic: runs the migrations, and compares the schema with `tables`.

No other module imports it. A daemon with an empty database, or the newest schema, does without it: that saves 10 MiB.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from gpulease_server.store.tables import metadata


def run_migrations(connection: Connection, directory: Path, revision: str) -> None:
    """Migrate the schema to this revision, up or down; to `base` for none. The transaction is the caller's."""
    config = Config()
    config.set_main_option("script_location", str(directory).replace("%", "%%"))
    config.attributes["connection"] = connection
    current = MigrationContext.configure(connection).get_current_revision()
    script = ScriptDirectory.from_config(config)
    older = {item.revision for item in script.iterate_revisions(current, "base")} if current else set()
    move = command.downgrade if revision == "base" or revision in older else command.upgrade
    move(config, revision)


def differences(connection: Connection) -> list[str]:
    """The differences between the schema and the one that this program works with, one line each."""
    found = compare_metadata(MigrationContext.configure(connection), metadata)
    return [_describe(item) for item in found]


def _describe(difference: object) -> str:
    """One line for a difference of Alembic: a tuple that describes a change, or a list of those."""
    if isinstance(difference, (list, tuple)):
        return " ".join(_describe(part) for part in difference if part is not None and not isinstance(part, dict))
    return str(getattr(difference, "name", difference))
