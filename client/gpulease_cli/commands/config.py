"""`gpulease config`: settings and their origins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from gpulease_cli import output, settings
from gpulease_cli.help_format import ARGUMENTS_LAST, command
from gpulease_cli.options import JSON
from gpulease_cli.parameters import argument
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host import config_file
from gpulease_protocol.host.addresses import SYSTEM_DATA_DIR, has_system_socket
from gpulease_protocol.status_table import align_columns

OF_ONES_OWN = (
    f"[serve] and [worker] are those of a daemon that you would start. The one of this host is the owner's of"
    f" {SYSTEM_DATA_DIR}: `sudo gpulease config show` shows its settings."
)
"""For a user who looks for the settings of the daemon that they use."""


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
    if "--json" in arguments:  # no section has such an option
        json, arguments = True, [word for word in arguments if word != "--json"]
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
    if section != "client" and os.geteuid() != 0 and has_system_socket():
        click.echo(OF_ONES_OWN, err=True)


@command(examples=("gpulease config check config.toml",))
@argument(
    "file",
    required=False,
    metavar="[FILE]",
    type=click.Path(path_type=Path),
    help="The file; by default the files that would be read.",
)
@click.pass_context
def check(context: click.Context, file: Path | None) -> int:
    """Check a configuration file for unknown sections and keys, and for values that are not allowed.

    Names every mistake with its file and line.
    """
    files = config_file.files() if file is None else (file.absolute(),)
    mistakes = []
    for path in files:
        named = file is not None or config_file.VARIABLE in os.environ
        sections, found = config_file.examine(path, required=named)
        found += settings.mistakes(context.find_root().command, sections)
        mistakes += sorted(found, key=lambda mistake: mistake.line or 0)
    if len(mistakes) == 1:
        raise mistakes[0]
    for mistake in mistakes:
        click.echo(f"{mistake.detail} {mistake.remedy}", err=True)
    if mistakes:
        click.echo(f"{len(mistakes)} mistakes", err=True)
        return output.USAGE
    present = [str(path) for path in files if path.exists()]
    if present:
        click.echo(f"no problems found in {' and '.join(present)}")
    else:
        click.echo(f"no configuration file; looked for {' and '.join(map(str, files))}")
    return output.DONE


def _format_value(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
