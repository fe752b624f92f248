"""`gpulease doctor`."""

from __future__ import annotations

import os
import sys
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

COLORS = {"wrong": "red", "warning": "yellow", "unknown": "bright_black", "fine": "green"}


@command(section="serve", examples=("gpulease doctor",))
@setting_option("data_dir", DATA_DIR, Path)
@JSON
@click.pass_context
def doctor(context: click.Context, data_dir: Path | None, json: bool) -> int:
    """Look for problems on this host and say what to do: one line for each check, what is wrong first.

    A `warning` is worth knowing about, but keeps no one from working. Exits 1 if something is wrong.
    """
    with needs_extra("worker"):
        from gpulease_worker import doctor as checks  # noqa: PLC0415 - an extra
        from gpulease_worker import doctor_facts  # noqa: PLC0415
    directory = (data_dir or doctor_facts.daemon_data_dir()).absolute()
    findings = checks.examine(doctor_facts.gather(directory, _certificate(context)))
    if json:
        output.print_json_list(findings)
    else:
        for finding in findings:
            remedy = f" Do: {finding.remedy}" if finding.remedy else ""
            word = _colored(f"{finding.health.value:<8}", COLORS[finding.health.value])
            click.echo(f"{word} {finding.check:<17} {finding.sentence}{remedy}")
        click.echo(checks.verdict(findings))
    return output.REFUSED if any(finding.health.value == "wrong" for finding in findings) else output.DONE


def _certificate(context: click.Context) -> Path | None:
    """The daemon's certificate, as its settings name it."""
    program: Any = context.find_root().command
    found = {one.key: one.value for one in settings.effective(program, config_file.load(), "serve")}
    return Path(found["tls_cert"]) if found.get("tls_cert") else None


def _colored(word: str, color: str) -> str:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return word if plain else click.style(word, fg=color)
