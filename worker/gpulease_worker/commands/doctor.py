"""`gpulease doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.installed_commands import needs_extra
from gpulease_cli.options import JSON
from gpulease_cli.setting_options import setting_option
from gpulease_protocol.host.addresses import default_data_dir
from gpulease_protocol.host.settings import DATA_DIR


@command(section="serve", examples=("gpulease doctor",))
@setting_option("data_dir", DATA_DIR, Path)
@JSON
def doctor(data_dir: Path | None, json: bool) -> int:
    """Look for problems on this host and say what to do: one line for each check. Exits 1 if something is wrong.

    A `warning` is worth knowing about, but keeps no one from working."""
    with needs_extra("worker"):
        from gpulease_worker import doctor as checks  # noqa: PLC0415 - an extra
        from gpulease_worker import doctor_facts  # noqa: PLC0415
    findings = checks.examine(doctor_facts.gather((data_dir or default_data_dir()).absolute()))
    if json:
        output.print_json_list(findings)
    else:
        for finding in findings:
            remedy = f" Do: {finding.remedy}" if finding.remedy else ""
            click.echo(f"{finding.health.value:<8} {finding.check:<17} {finding.sentence}{remedy}")
    return output.REFUSED if any(finding.health.value == "wrong" for finding in findings) else output.DONE
