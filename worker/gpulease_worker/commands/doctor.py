"""`gpulease doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpulease_cli import output
from gpulease_cli.installed_commands import needs_extra
from gpulease_cli.options import Json
from gpulease_cli.setting_options import setting_option
from gpulease_protocol.host.addresses import default_data_dir
from gpulease_protocol.host.settings import DATA_DIR

if TYPE_CHECKING:
    DataDir = Path | None
else:
    DataDir = setting_option(DATA_DIR, Path)


def doctor(data_dir: DataDir = None, json: Json = False) -> int:
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
            typer.echo(f"{finding.health.value:<8} {finding.check:<17} {finding.sentence}{remedy}")
    return output.REFUSED if any(finding.health.value == "wrong" for finding in findings) else output.DONE
