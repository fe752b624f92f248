"""`gpulease keep`: idle GPUs that are kept on purpose."""

from __future__ import annotations

import os

import click

from gpulease.client import Client
from gpulease.device_reuse import LEASE_VARIABLE
from gpulease_cli import id_completion, names, output
from gpulease_cli.help_format import command
from gpulease_cli.option_types import DURATION, Field
from gpulease_cli.options import FENCING_TOKEN, JSON
from gpulease_cli.parameters import argument, option
from gpulease_cli.surrounding_lease import lease_token
from gpulease_protocol.keep import KeepRequest
from gpulease_protocol.status_table import format_duration


@command(examples=("gpulease keep resnet --reason 'the data set is being copied' --for 2h",))
@argument(
    "lease",
    metavar="[LEASE|JOB]",
    required=False,
    help="A lease or job: id, beginning of one, or name of a job of yours. By default the lease of this shell.",
    shell_complete=id_completion.jobs,
)
@option(
    "--reason",
    type=Field(click.STRING, KeepRequest, "reason"),
    metavar="TEXT",
    required=True,
    help="Why. Users who wait for these GPUs are told.",
)
@option(
    "--for",
    "for_s",
    type=Field(DURATION, KeepRequest, "for_s"),
    metavar="DURATION",
    required=True,
    help="For how long from now; the administrator sets a bound.",
)
@FENCING_TOKEN
@JSON
def keep(lease: str | None, reason: str, for_s: float, token: int | None, json: bool) -> None:
    """Say that idle GPUs of a lease are kept on purpose, until when and why.

    Until then no one is told that the lease is idle, and its GPUs are not taken back for that. Otherwise it ends as
    before. It may be said again: the last one counts, also where it is for a shorter time. Administrators may say it of
    any user's lease.
    """
    word = lease or os.environ.get(LEASE_VARIABLE)
    if not word:
        raise click.UsageError("LEASE|JOB is missing, and this shell has no lease", click.get_current_context())
    with Client() as client:
        lease_id, _ = names.find_lease(client, word)
        kept = client.keep(lease_id, lease_token(client, lease_id, token), reason=reason, for_s=for_s)
    if json:
        output.print_json(kept)
    else:
        click.echo(
            f"{kept.id} may be idle for {format_duration(for_s)} from now: no notice goes out. It ends as before."
        )
