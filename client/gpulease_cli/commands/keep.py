"""`gpulease keep`: idle GPUs that are kept on purpose."""

from __future__ import annotations

import click

from gpulease.client import Client
from gpulease_cli import names, output
from gpulease_cli.commands.leases import LEASE_OR_JOB, lease_or_job
from gpulease_cli.help_format import command
from gpulease_cli.option_types import DURATION, Field
from gpulease_cli.options import FENCING_TOKEN, JSON
from gpulease_cli.parameters import option
from gpulease_cli.surrounding_lease import lease_token
from gpulease_protocol.keep import KeepRequest
from gpulease_protocol.status_table import format_duration


@command(examples=("gpulease keep resnet --reason 'the data set is being copied' --for 2h",))
@LEASE_OR_JOB
@option(
    "--reason",
    type=Field(click.STRING, KeepRequest, "reason"),
    metavar="TEXT",
    required=True,
    help="Reason. Users who wait for these GPUs see it.",
)
@option(
    "--for",
    "for_s",
    type=Field(DURATION, KeepRequest, "for_s"),
    metavar="DURATION",
    required=True,
    help="How long from now; the administrator sets a maximum.",
)
@FENCING_TOKEN
@JSON
def keep(lease: str | None, reason: str, for_s: float, token: int | None, json: bool) -> None:
    """Say that idle GPUs of a lease are kept on purpose, until when and why.

    Until then no notice goes out that the lease is idle, and its GPUs are not taken back because they are idle. In all
    other ways the lease ends as before. The last call counts, even if its time is shorter. Administrators can keep the
    GPUs of any user's lease.
    """
    word = lease_or_job(lease)
    with Client() as client:
        lease_id, _ = names.find_lease(client, word)
        kept = client.keep(lease_id, lease_token(client, lease_id, token), reason=reason, for_s=for_s)
    if json:
        output.print_json(kept)
    else:
        click.echo(
            f"{kept.id} may be idle for {format_duration(for_s)} from now: no notice goes out. It ends as before."
        )
