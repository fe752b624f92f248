"""`gpulease doctor`."""

from __future__ import annotations

import typer

from gpulease.addresses import default_data_dir
from gpulease.cli import output
from gpulease.cli.options import Json
from gpulease.cli.serve import DataDir, examine_host


def doctor(data_dir: DataDir = None, json: Json = False) -> int:
    """Look for what is wrong on this host, and say what to do: one line for each check. Exits 1 if something is.

    A `warning` should be known and stops nobody."""
    findings = examine_host((data_dir or default_data_dir()).absolute())
    if json:
        output.nouns(findings)
    else:
        for finding in findings:
            remedy = f" Do: {finding.remedy}" if finding.remedy else ""
            typer.echo(f"{finding.health.value:<8} {finding.check:<17} {finding.sentence}{remedy}")
    return output.REFUSED if any(finding.health.value == "wrong" for finding in findings) else output.DONE
