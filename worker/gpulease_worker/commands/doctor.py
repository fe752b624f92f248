"""`gpulease doctor`."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import click

from gpulease_cli import output, settings
from gpulease_cli.help_format import command
from gpulease_cli.installed_commands import needs_extra
from gpulease_cli.options import JSON
from gpulease_cli.setting_options import setting_option
from gpulease_protocol.host import config_file
from gpulease_protocol.host.settings import DATA_DIR

SENTENCES_AT = 27
"""The column in which sentences begin."""
COLORS = {"wrong": "red", "warning": "yellow", "unknown": "bright_black", "fine": "green"}


@command(section="serve", examples=("gpulease doctor",))
@setting_option("data_dir", DATA_DIR, Path)
@JSON
@click.pass_context
def doctor(context: click.Context, data_dir: Path | None, json: bool) -> int:
    """Look for problems on this host and say what to do: one line for each check, problems first.

    A `warning` is worth knowing about but stops no one from working. Exits 1 if something is wrong.
    """
    with needs_extra("worker"):
        from gpulease_worker import doctor as checks  # noqa: PLC0415 - an extra
        from gpulease_worker import doctor_facts  # noqa: PLC0415
    directory = (data_dir or doctor_facts.daemon_data_dir()).absolute()
    findings = checks.examine(doctor_facts.gather(directory, _certificate(context, directory)))
    if json:
        output.print_json_list(findings)
    else:
        for finding in findings:
            remedy = f" Do: {finding.remedy}" if finding.remedy else ""
            word, rest = f"{finding.health.value:<8}", f"{finding.check:<17} {finding.sentence}{remedy}"
            click.echo(f"{word} {rest}" if not sys.stdout.isatty() else on_terminal(word, rest))
        click.echo(checks.verdict(findings))
    return output.REFUSED if any(finding.health.value == "wrong" for finding in findings) else output.DONE


def _certificate(context: click.Context, data_dir: Path) -> Path | None:
    """The daemon's certificate, as its settings name it."""
    program: Any = context.find_root().command
    found = {one.key: one.value for one in settings.effective(program, config_file.load(), "serve")}
    if found.get("tls_auto") is True:
        return data_dir / "tls" / "server.pem"
    return Path(found["tls_cert"]) if found.get("tls_cert") else None


def on_terminal(word: str, rest: str) -> str:
    """A finding with its word in color, and its sentences in a column of their own."""
    indent = " " * SENTENCES_AT
    width = max(shutil.get_terminal_size().columns, SENTENCES_AT + 30)
    lines = textwrap.wrap(
        f"{word} {rest}", width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    colored = word if plain else click.style(word, fg=COLORS[word.strip()])
    return "\n".join(lines).replace(word, colored, 1)
