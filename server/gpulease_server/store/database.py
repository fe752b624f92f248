"""Which database is meant, and its schema: what it is, and bringing it up to date.

A URL may carry a password, so it is only ever printed by `shown`.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from gpulease.errors import GpuleaseError

from . import dialects, tables

EXAMPLE = "Use sqlite:////absolute/path/gpulease.db or postgresql://user@host/database"
MIGRATION_LOCK = 0x67707565_61736501
"""Key of the advisory lock that a migration takes."""
MIGRATION_S = 600
"""How long a migration may take on PostgreSQL."""
_NAMES = {"postgres", "postgresql", "postgresql+psycopg"}


class DatabaseUnusable(GpuleaseError):
    """The database cannot be opened, or is of a newer version of gpulease."""

    code, title = "database_unusable", "Database unusable"


class SchemaNewer(DatabaseUnusable):
    """A newer version of gpulease wrote this database."""


def parsed(url: str) -> URL:
    """The URL of a database that can be used. Raises `DatabaseUnusable`, without telling a password."""
    try:
        made = make_url(url)
    except (ArgumentError, ValueError) as error:
        scheme, separator, _ = url.partition("://")
        shape = f"{scheme}://..." if separator else "it"
        raise DatabaseUnusable(f"{shape} is not the URL of a database.", remedy=EXAMPLE) from error
    if made.drivername in _NAMES:
        return made.set(drivername="postgresql+psycopg")
    if made.get_backend_name() != dialects.SQLITE:
        raise DatabaseUnusable(f"{made.drivername} is not supported.", remedy=EXAMPLE)
    if not made.database or made.database == ":memory:":
        raise DatabaseUnusable(f"{url!r} names no file, so nothing would be kept.", remedy=EXAMPLE)
    return made


def shown(url: str) -> str:
    """The URL as it may be printed: without a password."""
    text = parsed(url).render_as_string(hide_password=True).replace("postgresql+psycopg:", "postgresql:")
    return re.sub(r"([?&](?:ssl)?password=)[^&]*", r"\1***", text)


def database_file(url: str) -> Path | None:
    """The file of an SQLite database; None for PostgreSQL. Raises `DatabaseUnusable`."""
    made = parsed(url)
    return Path(made.database).absolute() if made.get_backend_name() == dialects.SQLITE and made.database else None


def connect(url: str) -> Engine:
    """An engine for this database; connects to nothing yet. Raises `DatabaseUnusable`."""
    try:
        return dialects.engine(parsed(url))
    except ModuleNotFoundError as error:
        raise DatabaseUnusable(
            f"PostgreSQL needs the package {error.name}.", remedy="pip install 'gpulease[server]'"
        ) from error


def unusable(url: str, error: BaseException) -> DatabaseUnusable:
    """The error for a database that does not answer as it should."""
    remedy = "Check the path and its permissions."
    if database_file(url) is None:
        remedy = "Check that the server runs, and the user, password and database of --database-url."
    return DatabaseUnusable(f"{shown(url)} cannot be used: {dialects.why(error)}.", remedy=remedy)


def migrations_directory() -> Path:
    """Where the migrations are: inside the installed package, or beside the server in a checkout."""
    installed = Path(str(resources.files("gpulease_server"))) / "migrations"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "migrations"


def migration_config(url: str) -> Config:
    """Alembic's configuration for this database."""
    config = Config()
    config.set_main_option("script_location", str(migrations_directory()))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def upgrade(url: str) -> None:
    """Bring the schema up to date, wholly or not at all; two at once take turns.

    Raises `DatabaseUnusable` when it is newer than this program knows.
    """
    migrate(url, "head")


def migrate(url: str, revision: str) -> None:
    """Bring the schema to a revision: `head`, or an older one, or `base` for none. Raises `DatabaseUnusable`."""
    config = migration_config(url)
    engine = connect(url)
    try:
        with dialects.schema_change(engine, MIGRATION_LOCK, MIGRATION_S) as connection:
            current = MigrationContext.configure(connection).get_current_revision()
            script = ScriptDirectory.from_config(config)
            _refuse_newer(script, current)
            config.attributes["connection"] = connection
            older = {item.revision for item in script.iterate_revisions(current, "base")} if current else set()
            move = command.downgrade if revision == "base" or revision in older else command.upgrade
            move(config, revision)
    except (OSError, SQLAlchemyError) as error:
        raise unusable(url, error) from error
    finally:
        engine.dispose()


def revision_of(connection: Connection) -> str | None:
    """The revision of the schema; None where there is none yet."""
    return MigrationContext.configure(connection).get_current_revision()


def newest_revision() -> str:
    """The revision that this program works with."""
    return ScriptDirectory.from_config(migration_config("")).get_current_head() or ""


def differences(connection: Connection) -> list[str]:
    """Where the schema is not the one that this program works with, each in a line."""
    found = compare_metadata(MigrationContext.configure(connection), tables.metadata)
    return [_told(item) for item in found]


def _told(difference: object) -> str:
    """A difference as Alembic has it: a tuple of what would have to be done, or a list of those."""
    if isinstance(difference, (list, tuple)):
        return " ".join(_told(part) for part in difference if part is not None and not isinstance(part, dict))
    return str(getattr(difference, "name", difference))


def _refuse_newer(script: ScriptDirectory, current: str | None) -> None:
    if current is None:
        return
    try:
        script.get_revision(current)
    except CommandError as error:
        raise SchemaNewer(
            f"The database has schema {current}, which this version of gpulease does not know.",
            remedy="Start the newer version that wrote it, or restore a backup.",
        ) from error
