"""The database of a URL, and its schema: revisions and migrations.

A URL may contain a password, so it is only printed by `redacted`.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib import resources
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, func, inspect, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from gpulease_protocol.errors import GpuleaseError
from gpulease_server.store import dialects, tables

EXAMPLE = "Use sqlite:////absolute/path/gpulease.db or postgresql://user@host/database"
_ENCODED = "In a user or password, write special characters with a percent sign, such as %40 for @; or set PGPASSWORD."
_SERVERS = "Name several servers as ?host=a:5432&host=b:5432&target_session_attrs=read-write."
MIGRATION_LOCK = 0x67707565_61736501
"""Key of the advisory lock of a migration."""
MIGRATION_S = 600
"""How long a migration may take on PostgreSQL."""
_NAMES = {"postgres", "postgresql", "postgresql+psycopg"}


class DatabaseUnusable(GpuleaseError):
    """The database cannot be opened, or was written by a newer version of gpulease."""

    code, title = "database_unusable", "Database unusable"


class SchemaNewer(DatabaseUnusable):
    """A newer version of gpulease wrote this database."""


def parse_url(url: str) -> URL:
    """The URL of a supported database. Raises `DatabaseUnusable`, without revealing a password."""
    try:
        made = make_url(url)
    except (ArgumentError, ValueError) as error:
        scheme, separator, _ = url.partition("://")
        shape = f"{scheme}://..." if separator else "it"
        raise DatabaseUnusable(f"{shape} is not a database URL.", remedy=f"{EXAMPLE}. {_ENCODED} {_SERVERS}") from error
    if made.drivername in _NAMES:
        return made.set(drivername="postgresql+psycopg")
    if made.get_backend_name() != dialects.SQLITE:
        raise DatabaseUnusable(f"{made.drivername} is not supported.", remedy=EXAMPLE)
    if not made.database or made.database == ":memory:":
        raise DatabaseUnusable(f"{url!r} names no file, so nothing would be stored.", remedy=EXAMPLE)
    return made


def redacted(url: str) -> str:
    """The URL without its password, for messages."""
    text = parse_url(url).render_as_string(hide_password=True).replace("postgresql+psycopg:", "postgresql:")
    return re.sub(r"([?&](?:ssl)?password=)[^&]*", r"\1***", text)


def database_file(url: str) -> Path | None:
    """The file of an SQLite database, without symbolic links, as SQLite names the files beside it; None for PostgreSQL.
    Raises `DatabaseUnusable`."""
    made = parse_url(url)
    return (
        Path(os.path.realpath(made.database)) if made.get_backend_name() == dialects.SQLITE and made.database else None
    )


def connect(url: str) -> Engine:
    """An engine for this database. Connects to nothing yet. Raises `DatabaseUnusable`."""
    made = parse_url(url)
    try:
        if made.get_backend_name() == dialects.POSTGRESQL:
            tables.complete_for_postgresql()
        return dialects.engine(made)
    except ModuleNotFoundError as error:
        raise DatabaseUnusable(
            f"PostgreSQL needs the package {error.name}.", remedy="pip install 'gpulease[server]'"
        ) from error


_FULL = "The disk is full: free some space, then try again."
_SQLITE_REMEDIES = {
    "is full": _FULL,
    "is locked": "Another program has locked it, such as a backup or sqlite3: end that, then try again.",
}
_WHO = (
    "Check the user and the password: --database-url, PGPASSWORD, ~/.pgpass. For the system's daemon they belong in"
    " /etc/gpulease/environment."
)
_OWNER = (
    "Another user owns the tables: name that one in --database-url, or give them to this one: ALTER TABLE name OWNER TO"
    " user, for each."
)
_CONNECTIONS = "End other clients of the server, or raise its max_connections."
_POSTGRESQL_REMEDIES = {
    "authentication failed": _WHO,
    "no password supplied": _WHO,
    "too many clients": _CONNECTIONS,
    "connection slots": _CONNECTIONS,
    "too many connections": "End other clients, or raise the CONNECTION LIMIT of the role or the database.",
    "permission denied for schema": "Make this user the owner: ALTER DATABASE name OWNER TO user",
    "permission denied for table": _OWNER,
    "must be owner of": _OWNER,
    "no schema has been selected": "Its search_path names no schema that exists: ALTER ROLE user RESET search_path",
    "statement pooling mode": "Let the pooler keep sessions (PgBouncer: pool_mode = session).",
    "statement timeout": "Look at what slows the server (pg_stat_activity), and at the user: ALTER ROLE user RESET"
    " statement_timeout",
    "lock timeout": "Another program uses the tables, such as pg_dump or an upgrade: try again when it has ended.",
    dialects.SHARED_MEMORY: dialects.SHARED_MEMORY_REMEDY,
    "No space left": "The disk of the server is full: free some space there, then try again.",
    "does not match host name": "Give the name in its certificate, or check the authority alone: ?sslmode=verify-ca",
    "certificate": "Name the server's authority in --database-url: ?sslmode=verify-full&sslrootcert=/path/to/ca.pem",
    "does not exist": "Create it on the server: createuser USER, createdb --owner=USER NAME; or check --database-url.",
    "read-only transaction": "This server is a replica or read-only: give the address of the primary server.",
}
"""By what the database says: what to do."""
FULL_BYTES = 2**16
"""A disk with less free space is full: SQLite cannot make its files beside the database."""


def unusable_error(url: str, error: BaseException) -> DatabaseUnusable:
    """The error for a database that does not work."""
    message, file = dialects.error_message(error), database_file(url)
    if file is None:
        remedies, remedy = _POSTGRESQL_REMEDIES, "Check that the server runs, and check --database-url."
    else:
        remedies, remedy = _SQLITE_REMEDIES, "Check the path and its permissions."
        if dialects.is_damaged(error):
            remedy = "Restore a backup, see docs/databases.md; check the path if this is not the daemon's file."
        elif _is_full(file.parent):
            remedy = _FULL  # what SQLite calls an I/O error
        elif "unable to open" in message or "readonly" in message:
            remedy = _access_remedy(file) or remedy
        elif dialects.IO_ERROR in message:
            remedy = dialects.IO_REMEDY
    remedy = next((one for words, one in remedies.items() if words in message), remedy)
    return DatabaseUnusable(f"{redacted(url)} cannot be used: {message}.", remedy=remedy)


def _is_full(directory: Path) -> bool:
    try:
        return shutil.disk_usage(directory).free < FULL_BYTES
    except OSError:
        return False


def _access_remedy(file: Path) -> str:
    """What to do where this process may not write the file of a database, or files beside it; empty if it may."""
    try:
        if os.statvfs(file.parent).f_flag & os.ST_RDONLY:
            return (
                "Its file system is read-only: mount it for writing; or copy the file, and the -wal beside it, to"
                " another one, and name the copy in --database-url."
            )
        denied = next((place for place in (file, file.parent) if not os.access(place, os.R_OK | os.W_OK)), None)
        if denied is None or denied.stat().st_uid == os.geteuid():
            return ""
        return f"Run this as {_owner(denied)}, the owner of {denied}."
    except OSError:
        return ""


def _owner(place: Path) -> str:
    try:
        return place.owner()
    except KeyError:
        return f"user {place.stat().st_uid}"


def migrations_directory() -> Path:
    """The directory of the migrations: in the installed package, or beside the server in a checkout."""
    installed = Path(str(resources.files("gpulease_server"))) / "migrations"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "migrations"


def known_revisions() -> list[str]:
    """The revisions of the schema that this program knows, oldest first. The file of each migration begins with one."""
    return sorted(file.name.split("_")[0] for file in (migrations_directory() / "versions").glob("[0-9]*_*.py"))


def revision_of(connection: Connection) -> str | None:
    """The revision of the schema; None if there is no schema yet."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return found


def upgrade(url: str) -> None:
    """Bring the schema up to date, all or nothing; concurrent calls take turns.

    Raises `DatabaseUnusable` if the schema is newer than this program.
    """
    if not is_newest(url):
        migrate(url, known_revisions()[-1])


def is_newest(url: str) -> bool:
    """True if the schema is the one that this program works with. Raises `DatabaseUnusable`."""
    engine = connect(url)
    try:
        with engine.connect() as connection:
            return revision_of(connection) == known_revisions()[-1]
    except (OSError, SQLAlchemyError) as error:
        raise unusable_error(url, error) from error
    finally:
        engine.dispose()


def migrate(url: str, revision: str) -> None:
    """Migrate the schema to a revision, or to `base` for none. Raises `DatabaseUnusable`."""
    engine = connect(url)
    try:
        with dialects.schema_change(engine, MIGRATION_LOCK, MIGRATION_S) as connection:
            current = revision_of(connection)
            _refuse_newer(current)
            if current is None:
                _require_utf8(connection, url)
            if current is None and revision == known_revisions()[-1]:
                _create(connection, revision)
            else:
                from gpulease_server.store.migrations import run_migrations  # noqa: PLC0415 - few starts need Alembic

                run_migrations(connection, migrations_directory(), revision)
    except (OSError, SQLAlchemyError) as error:
        raise unusable_error(url, error) from error
    finally:
        engine.dispose()


def _create(connection: Connection, newest: str) -> None:
    """Create the newest schema in an empty database: what all the migrations together make, in a tenth of the time.

    A test compares the two. A table that is there already is an error, as it is in a migration.
    """
    tables.metadata.create_all(connection, checkfirst=False)
    connection.execute(tables.writer.insert().values(id=1, term=0, first_term=0, name="", since=func.now()))
    connection.execute(tables.pruned.insert().values(id=1, seq=0))
    connection.exec_driver_sql(
        "CREATE TABLE IF NOT EXISTS alembic_version"
        " (version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
    )
    connection.exec_driver_sql(f"INSERT INTO alembic_version VALUES ('{newest}')")  # noqa: S608 - the name of a file


def _require_utf8(connection: Connection, url: str) -> None:
    """Names and labels have any characters."""
    if connection.dialect.name == dialects.SQLITE:
        return
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
    if encoding != "UTF8":
        raise DatabaseUnusable(
            f"{redacted(url)} has the encoding {encoding}, which cannot store every name and label.",
            remedy="Create it again: createdb --template=template0 --encoding=UTF8 --owner=USER NAME",
        )


def refuse_newer(engine: Engine) -> None:
    """Raise `SchemaNewer` if a newer version has upgraded this database; or SQLAlchemyError."""
    with engine.connect() as connection:
        _refuse_newer(revision_of(connection))


def _refuse_newer(current: str | None) -> None:
    if current is not None and current not in known_revisions():
        raise SchemaNewer(
            f"The database has schema {current}, which this version of gpulease does not know.",
            remedy="Start the newer version that wrote it, or restore a backup.",
        )
