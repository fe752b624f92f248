"""`gpulease acquire`, `renew` and `release`: leases without a command."""

from __future__ import annotations

import os
import shlex

import click

from gpulease.client import Client
from gpulease_cli import id_completion, output, wait_progress
from gpulease_cli.commands.leases import JOB
from gpulease_cli.help_format import command
from gpulease_cli.options import FENCING_TOKEN, GPUS, JSON, LABEL, MODEL, NODE, WAIT, checked, ttl
from gpulease_cli.parameters import argument
from gpulease_protocol.launchers import lease_variables
from gpulease_protocol.requests import LeaseRequest
from gpulease_protocol.status_table import format_duration


def _lease_id(context: click.Context, parameter: click.Parameter, text: str) -> str:
    if text.startswith(JOB):
        raise click.BadParameter(f"{text} is a job; `gpulease cancel {text}` ends it and its lease")
    return text


LEASE = argument("lease", metavar="LEASE", help="Lease id.", callback=_lease_id, shell_complete=id_completion.leases)


@command(examples=('eval "$(gpulease acquire -n 1 --ttl 2h)"',))
@GPUS
@ttl("2h", "Lifetime of the lease unless it is renewed, such as 30m.")
@WAIT
@LABEL
@MODEL
@NODE
@JSON
def acquire(gpus: int, ttl: float, wait: float, label: str, model: str | None, node: str | None, json: bool) -> None:
    """Lease GPUs without running a command; the lease ends after its ttl or with `gpulease release`.

    The output is for a shell: eval "$(gpulease acquire -n 1)" binds the shell to the GPUs, or fails with the exit code.
    """
    request = checked(
        lambda: LeaseRequest(count=gpus, ttl_s=ttl, label=label, gpu_model=model, node=node, queue=wait > 0)
    )
    with Client() as client, wait_progress.QueueProgress(client) as progress:
        lease = client.request_lease(request, wait, progress.start)
    if json:
        output.print_json(lease)
        return
    click.echo(
        f"{lease.id} lasts {format_duration(lease.ttl_s)} unless renewed; `gpulease release {lease.id}` ends it",
        err=True,
    )
    for name, value in lease_variables(lease.env).items():
        click.echo(f"export {name}={shlex.quote(value)}")


@command(examples=("gpulease renew lease-6434526eb94cfb23",))
@LEASE
@FENCING_TOKEN
@JSON
def renew(lease: str, token: int | None, json: bool) -> None:
    """Extend a lease by its full ttl from now."""
    with Client() as client:
        renewed = client.renew(lease, _token(client, lease, token))
    if json:
        output.print_json(renewed)
    else:
        click.echo(f"{renewed.id} lasts {format_duration(renewed.ttl_s)} from now")


@command(examples=("gpulease release lease-6434526eb94cfb23",))
@LEASE
@FENCING_TOKEN
@JSON
def release(lease: str, token: int | None, json: bool) -> None:
    """End a lease and free its GPUs; a queued request is withdrawn. Administrators may end any user's lease."""
    with Client() as client:
        ended = client.release(lease, _token(client, lease, token))
    if json:
        output.print_json(ended)
    else:
        click.echo(f"{ended.id} is {ended.end_reason or ended.state}")


def _token(client: Client, lease_id: str, token: int | None) -> int | None:
    """The fencing token: as given, else that of the surrounding lease, else as the daemon shows it."""
    if token is not None:
        return token
    inherited = os.environ.get("GPULEASE_LEASE_TOKEN", "")
    if os.environ.get("GPULEASE_LEASE_ID") == lease_id and inherited.isascii() and inherited.isdigit():
        return int(inherited)
    return client.lease_by_id(lease_id).fencing_token
