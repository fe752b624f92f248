"""Connections: what each database must be told, and bringing its schema up to date."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from gpulease.errors import GpuleaseError

EXAMPLE = "Use sqlite:////absolute/path/gpulease.db"


class DatabaseUnusable(GpuleaseError):
    """The database cannot be opened, or is of a newer version of gpulease."""

    code, title = "database_unusable", "Database unusable"


def database_file(url: str) -> Path:
    """The file of an SQLite database. Raises `DatabaseUnusable` for any other database, and for one without a file."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise DatabaseUnusable(f"{url!r} is not the URL of a database.", remedy=EXAMPLE) from error
    if parsed.get_backend_name() != "sqlite":
        raise DatabaseUnusable(f"{parsed.get_backend_name()} is not supported yet.", remedy=EXAMPLE)
    if not parsed.database or parsed.database == ":memory:":
        raise DatabaseUnusable(f"{url!r} names no file, so nothing would be kept.", remedy=EXAMPLE)
    return Path(parsed.database).absolute()


def connect(url: str) -> Engine:
    """An engine for SQLite. Raises `DatabaseUnusable` as `database_file` does."""
    database_file(url)
    engine = create_engine(url, connect_args={"timeout": 10})
    event.listen(engine, "connect", _prepare_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    """WAL lets readers read while the writer commits; FULL makes a commit mean that it is on the disk."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


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
    """Bring the schema up to date. Raises `DatabaseUnusable` when it is newer than this program knows."""
    engine = connect(url)
    config = migration_config(url)
    try:
        with engine.begin() as connection:
            current = MigrationContext.configure(connection).get_current_revision()
            _refuse_newer(ScriptDirectory.from_config(config), current)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except (OSError, SQLAlchemyError) as error:
        reason = getattr(error, "orig", None) or error
        raise DatabaseUnusable(
            f"{url} cannot be used: {reason}.", remedy="Check the path and its permissions."
        ) from error
    finally:
        engine.dispose()


def _refuse_newer(script: ScriptDirectory, current: str | None) -> None:
    if current is None:
        return
    try:
        script.get_revision(current)
    except CommandError as error:
        raise DatabaseUnusable(
            f"The database has schema {current}, which this version of gpulease does not know.",
            remedy="Start the newer version that wrote it, or restore a backup.",
        ) from error
