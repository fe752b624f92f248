"""`gpulease db`: maintenance of the daemon's database, with or without the daemon running."""

from __future__ import annotations

import os
from pathlib import Path

import click

from gpulease_cli import output
from gpulease_cli.command_groups import CommandGroup
from gpulease_cli.installed_commands import needs_extra
from gpulease_cli.options import JSON
from gpulease_cli.parameters import argument
from gpulease_cli.setting_options import setting_option
from gpulease_protocol.host.addresses import default_data_dir
from gpulease_protocol.host.config_file import SYSTEM
from gpulease_protocol.host.settings import DATA_DIR
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun
from gpulease_server.database_settings import DATABASE_URL, default_database_url, sqlite_url

DATABASE = setting_option("database_url", DATABASE_URL, str)
DIRECTORY = setting_option("data_dir", DATA_DIR, Path)

SERVICE_ENVIRONMENT = SYSTEM.with_name("environment")
"""Which gpulease.service reads; the database's password belongs there."""

db = CommandGroup("db", "The daemon's database: schema, integrity check, backup.")


@db.command(section="serve", examples=("gpulease db upgrade",))
@DATABASE
@DIRECTORY
def upgrade(database_url: str | None, data_dir: Path | None) -> None:
    """Migrate the database to this version's schema; `serve` also does so when it starts.

    Refused if a migration is needed while a daemon runs.
    """
    with needs_extra("server"):
        from gpulease_server.runtime.leadership.takeover import upgrade_alone  # noqa: PLC0415 - an extra
    upgrade_alone(_url(database_url, data_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision(Noun):
    """The schema revision of a database."""

    revision: str | None
    """The database's own; null while it is empty."""
    newest: str
    """The one that this version needs."""


@db.command(section="serve", examples=("gpulease db current",))
@DATABASE
@DIRECTORY
@JSON
def current(database_url: str | None, data_dir: Path | None, json: bool) -> int:
    """Print the schema revision and whether it is the newest. Exits 1 if it is not."""
    with needs_extra("server"):
        from gpulease_server.store.database import known_revisions  # noqa: PLC0415 - an extra
        from gpulease_server.store.integrity_check import revisions  # noqa: PLC0415 - an extra
    found, newest = revisions(_url(database_url, data_dir))
    if json:
        output.print_json(Revision(revision=found, newest=newest))
        return output.DONE if found == newest else output.REFUSED
    if found == newest:
        click.echo(f"{found} (the newest)")
        return output.DONE
    if found is not None and found not in known_revisions():
        click.echo(f"{found} (newer than {newest}, the newest that this version knows: use the gpulease that wrote it)")
        return output.REFUSED
    click.echo(f"{found or 'empty'} (the newest is {newest}: gpulease db upgrade)")
    return output.REFUSED


@db.command(section="serve", examples=("gpulease db check",))
@DATABASE
@DIRECTORY
@JSON
def check(database_url: str | None, data_dir: Path | None, json: bool) -> int:
    """Check the database: its files, its schema, and the consistency of the ledger.

    Prints one line for each problem, and exits 1 if there is one.
    """
    with needs_extra("server"):
        from gpulease_server.store.integrity_check import check_database  # noqa: PLC0415 - an extra
    findings = check_database(_url(database_url, data_dir))
    if json:
        output.print_json_list(findings)
        return output.REFUSED if findings else output.DONE
    for finding in findings:
        click.echo(f"wrong: {finding}")
    if not findings:
        click.echo("nothing is wrong")
    return output.REFUSED if findings else output.DONE


@db.command(section="serve", examples=("gpulease db backup gpulease-backup.db",))
@argument("file", metavar="FILE", type=click.Path(path_type=Path), help="The new file; it must not exist.")
@DATABASE
@DIRECTORY
def backup(file: Path, database_url: str | None, data_dir: Path | None) -> None:
    """Copy an SQLite database, also while the daemon runs. For PostgreSQL use `pg_dump`."""
    with needs_extra("server"):
        from gpulease_server.store.backup import backup as copy  # noqa: PLC0415 - an extra
    copy(_url(database_url, data_dir), file)
    click.echo(f"{file} is a complete copy; to start a daemon on it: --database-url {sqlite_url(file)}")


def _url(database_url: str | None, data_dir: Path | None) -> str:
    """The database that is given; else, for root, that of the service: what its unit reads counts here, too."""
    if database_url is None and data_dir is None and os.geteuid() == 0:
        for name, value in service_environment(SERVICE_ENVIRONMENT).items():
            os.environ.setdefault(name, value)
        database_url = os.environ.get(DATABASE_URL.variable)
        data_dir = Path(os.environ[DATA_DIR.variable]) if os.environ.get(DATA_DIR.variable) else None
    return database_url or default_database_url(data_dir or default_data_dir())


def service_environment(file: Path) -> dict[str, str]:
    """The variables in an `EnvironmentFile=` of systemd; none for a user who cannot read it."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    given = (line.strip().partition("=") for line in lines if not line.strip().startswith(("#", ";")))
    return {name: value.strip().strip("\"'") for name, separator, value in given if separator}
