"""`gpulease leases` and `explain`."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from gpulease.client import Client
from gpulease_cli import id_completion, output
from gpulease_cli.help_format import command
from gpulease_cli.options import JSON
from gpulease_cli.parameters import argument, option
from gpulease_protocol.model import Lease, LeaseState
from gpulease_protocol.status_table import align_columns, describe_demand, describe_holder, format_duration, printable

JOB = "job-"
"""Prefix of job ids."""


@command("leases", examples=("gpulease leases --all",))
@option("--all", "include_ended", is_flag=True, help="Include ended leases.")
@JSON
def list_leases(include_ended: bool, json: bool) -> None:
    """List active and queued leases."""
    with Client() as client:
        leases = client.leases(() if include_ended else (LeaseState.ACTIVE, LeaseState.QUEUED))
    if json:
        output.print_json_list(leases)
    else:
        heads = ("LEASE", "STATE", "HOLDER", "GPUS", "SINCE", "UNTIL")
        output.print_table(align_columns(heads, [_row(lease, datetime.now(UTC)) for lease in leases]))


@command(examples=("gpulease explain job-82c4b92c1f47e880",))
@argument("lease", metavar="LEASE|JOB", help="Lease or job id.", shell_complete=id_completion.leases)
@JSON
def explain(lease: str, json: bool) -> None:
    """Explain why a lease or a job waits and what is in the way, or why it ended."""
    with Client() as client:
        job = client.job(lease) if lease.startswith(JOB) else None
        explanation = client.explain(job.lease_id if job else lease)
    if json:
        output.print_json(explanation)
        return
    if job:
        click.echo(f"{job.id} {job.state}{f': {printable(job.reason, 2000)}' if job.reason else ''}")
        if job.ended:
            return
    # The sentence includes every obstacle; here each has a line of its own.
    sentence = explanation.sentence
    for obstacle in explanation.obstacles:
        sentence = sentence.replace(f" {obstacle.sentence}", "", 1)
    click.echo(sentence)
    for obstacle in explanation.obstacles:
        click.echo(f"  {obstacle.sentence}")


def _row(lease: Lease, now: datetime) -> tuple[str, ...]:
    state = lease.state.value
    if lease.position is not None:
        state += f" ({lease.position})"
    elif lease.end_reason is not None:
        state += f" ({lease.end_reason.value})"
    gpus = ", ".join(f"{gpu.node}:{gpu.index}" for gpu in lease.gpus) or describe_demand(lease.demand)
    since = format_duration((now - (lease.ended_at or lease.granted_at or lease.created_at)).total_seconds())
    live = lease.expires_at is not None and lease.state is LeaseState.ACTIVE
    until = "in " + format_duration((lease.expires_at - now).total_seconds()) if live and lease.expires_at else "-"
    return (lease.id, state, describe_holder(lease.holder, lease.job_id), gpus, since, until)
