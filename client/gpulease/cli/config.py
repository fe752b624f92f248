"""`gpulease config`: the settings, and where each comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gpulease import config_file
from gpulease.cli import output, settings
from gpulease.cli.options import Json
from gpulease.errors import InvalidRequest
from gpulease.table import columns


def show(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[client|serve|worker [OPTION]...]", help="Only that section, with these options."),
    ] = None,
    json: Json = False,
) -> None:
    """Print every setting with its value and where that comes from: an option, the environment, a file, or the default.

    Secrets are left out. `gpulease config show serve --port 9000` shows what `gpulease serve --port 9000` would use.
    """
    program = context.find_root().command
    section, *arguments = command or [""]
    if section and section not in config_file.SECTIONS:
        raise InvalidRequest(
            f"{section}: is no section.", remedy=f"Give one of {', '.join(config_file.SECTIONS)}, or none for all."
        )
    sections = config_file.load()
    settings.check(program, sections)
    found = [
        setting
        for name in ((section,) if section else config_file.SECTIONS)
        for setting in settings.effective(program, sections, name, arguments)
    ]
    if json:
        output.nouns(found)
        return
    rows = [(f"{one.section}.{one.key}", _spelt(one.value), one.place or one.origin) for one in found]
    output.text(columns(("SETTING", "VALUE", "FROM"), rows))


def check(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="The file.", show_default="those that would be read")] = None,
) -> None:
    """Look for what is wrong with a configuration file: unknown sections and keys, and values that cannot be."""
    sections = config_file.read(file.absolute()) if file is not None else config_file.load()
    settings.check(context.find_root().command, sections)
    files = (file,) if file is not None else [path for path in config_file.files() if path.exists()]
    typer.echo(f"nothing is wrong with {' and '.join(map(str, files))}" if files else "there is no configuration file")


def _spelt(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
