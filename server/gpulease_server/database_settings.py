"""Which database a daemon has, and the setting for it."""

from __future__ import annotations

from pathlib import Path

from gpulease_protocol.host.addresses import default_data_dir
from gpulease_protocol.host.settings import Declaration

DATA = "Data"
"""Heading in `gpulease serve --help`."""


def default_database_url(data_dir: Path) -> str:
    """The database of a daemon that is given none."""
    return f"sqlite:///{data_dir.absolute() / 'gpulease.db'}"


DATABASE_URL = Declaration(
    help="Database: postgresql://user@host/name, or sqlite:////path. A password in this option is visible in `ps`; "
    "prefer the variable or ~/.pgpass.",
    variable="GPULEASE_DATABASE_URL",
    metavar="URL",
    default_text="SQLite in the data directory",
    derive=lambda settings: default_database_url(settings["data_dir"] or default_data_dir()),
    group=DATA,
)
