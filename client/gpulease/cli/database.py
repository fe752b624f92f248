"""`gpulease db`: the daemon's database, looked after without the daemon, or while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpulease.addresses import default_data_dir
from gpulease.cli import output
from gpulease.cli.options import Json
from gpulease.cli.serve import DatabaseUrl, DataDir, extra
from gpulease.model import Noun


def upgrade(database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Bring the database to the schema of this version; `serve` does so too when it starts."""
    with extra("server"):
        from gpulease_server.store.database import upgrade as to_newest  # noqa: PLC0415 - an extra
    to_newest(_url(database_url, data_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision(Noun):
    """How far the schema of a database is."""

    revision: str | None
    """That of the database; null while it is empty."""
    newest: str
    """The one that this version works with."""


def current(database_url: DatabaseUrl = None, data_dir: DataDir = None, json: Json = False) -> int:
    """Print the revision of the schema, and whether it is the newest. Exits 1 if it is not."""
    with extra("server"):
        from gpulease_server.store.examine import revisions  # noqa: PLC0415 - an extra
    found, newest = revisions(_url(database_url, data_dir))
    if json:
        output.noun(Revision(revision=found, newest=newest))
        return output.DONE if found == newest else output.REFUSED
    if found == newest:
        typer.echo(f"{found} (the newest)")
        return output.DONE
    typer.echo(f"{found or 'empty'} (the newest is {newest}: gpulease db upgrade)")
    return output.REFUSED


def check(database_url: DatabaseUrl = None, data_dir: DataDir = None, json: Json = False) -> int:
    """Look for what is wrong with the database: its files, its schema, and whether the ledger agrees with itself.

    Prints a line for each thing that is wrong, and exits 1 if there is one.
    """
    with extra("server"):
        from gpulease_server.store.examine import examine  # noqa: PLC0415 - an extra
    findings = examine(_url(database_url, data_dir))
    if json:
        output.nouns(findings)
        return output.REFUSED if findings else output.DONE
    for finding in findings:
        typer.echo(f"wrong: {finding}")
    if not findings:
        typer.echo("nothing is wrong")
    return output.REFUSED if findings else output.DONE


def backup(
    file: Annotated[Path, typer.Argument(help="Where to; it must not be there yet.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Copy an SQLite database as it is now, also while the daemon runs. PostgreSQL has `pg_dump` for that."""
    with extra("server"):
        from gpulease_server.store.backup import backup as copy  # noqa: PLC0415 - an extra
    copy(_url(database_url, data_dir), file)
    typer.echo(f"{file} holds everything; start a daemon on it with --database-url sqlite:///{file.absolute()}")


def _url(database_url: str | None, data_dir: Path | None) -> str:
    return database_url or f"sqlite:///{(data_dir or default_data_dir()).absolute() / 'gpulease.db'}"
