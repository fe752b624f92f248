"""Which database a daemon has, and the setting for it."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

from gpulease_protocol.host.addresses import default_data_dir
from gpulease_protocol.host.settings import Declaration

DATA = "Data"
"""Heading in `gpulease serve --help`."""


def default_database_url(data_dir: Path) -> str:
    """The database of a daemon that is given none."""
    return sqlite_url(data_dir / "gpulease.db")


def sqlite_url(file: Path) -> str:
    """The URL of an SQLite database, in which `%`, `?` and a space of its path are encoded."""
    return f"sqlite:///{re.sub('[%? ]', lambda found: quote(found[0]), str(file.absolute()))}"


DATABASE_URL = Declaration(
    help="Database: postgresql://user@host/name, or sqlite:////path. A password in this option is visible in `ps`; "
    "prefer the variable or ~/.pgpass.",
    variable="GPULEASE_DATABASE_URL",
    metavar="URL",
    default_text="SQLite in the data directory",
    derive=lambda settings: default_database_url(settings["data_dir"] or default_data_dir()),
    group=DATA,
)
