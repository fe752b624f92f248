"""`gpulease config`: settings and their origins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gpulease_cli import output, settings
from gpulease_cli.help_format import ARGUMENTS_LAST, command
from gpulease_cli.options import JSON
from gpulease_cli.parameters import argument
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host import config_file
from gpulease_protocol.status_table import align_columns


@command(
    context_settings=ARGUMENTS_LAST,
    examples=("gpulease config show", "gpulease config show serve --port 9000"),
)
@argument(
    "words",
    nargs=-1,
    metavar="[client|serve|worker [OPTION]...]",
    help="Show only this section, as with these options.",
)
@JSON
@click.pass_context
def show(context: click.Context, words: tuple[str, ...], json: bool) -> None:
    """Print every setting with its value and origin: an option, the environment, a file, or the default.

    Secrets are hidden. `gpulease config show serve --port 9000` shows what `gpulease serve --port 9000` would use.
    """
    program = context.find_root().command
    section, *arguments = words or ("",)
    if section and section not in config_file.SECTIONS:
        raise InvalidRequest(
            f"{section}: not a section.", remedy=f"Use one of {', '.join(config_file.SECTIONS)}, or none for all."
        )
    sections = config_file.load()
    settings.check(program, sections)
    settings_shown = [
        setting
        for name in ((section,) if section else config_file.SECTIONS)
        for setting in settings.effective(program, sections, name, arguments)
    ]
    if json:
        output.print_json_list(settings_shown)
        return
    rows = [(f"{one.section}.{one.key}", _format_value(one.value), one.place or one.origin) for one in settings_shown]
    output.print_table(align_columns(("SETTING", "VALUE", "FROM"), rows))


@command(examples=("gpulease config check config.toml",))
@argument(
    "file",
    required=False,
    metavar="[FILE]",
    type=click.Path(path_type=Path),
    help="The file; by default the files that would be read.",
)
@click.pass_context
def check(context: click.Context, file: Path | None) -> None:
    """Check a configuration file for unknown sections and keys, and for values that are not allowed."""
    sections = config_file.read(file.absolute()) if file is not None else config_file.load()
    settings.check(context.find_root().command, sections)
    files = (file,) if file is not None else [path for path in config_file.files() if path.exists()]
    click.echo(f"no problems found in {' and '.join(map(str, files))}" if files else "no configuration file found")


def _format_value(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
