"""`gpulease acquire`, `renew`, `release`, `leases` and `explain`: leases by hand."""

from __future__ import annotations

import os
import shlex
from datetime import UTC, datetime
from typing import Annotated

import typer

from gpulease.cli import output, waiting
from gpulease.cli.options import Gpus, Json, Label, Model, Node, Token, Wait, checked, duration
from gpulease.client import Client
from gpulease.model import Lease, LeaseState
from gpulease.table import asked_for, columns, plain, who
from gpulease.table import duration as spell
from gpulease.wire import LeaseRequest

JOB = "job-"
"""What the id of a job begins with."""


def _a_lease(text: str) -> str:
    if text.startswith(JOB):
        raise typer.BadParameter(f"{text} is a job; `gpulease cancel {text}` ends it, and so its lease")
    return text


LeaseId = Annotated[str, typer.Argument(metavar="LEASE", help="Id of the lease.", callback=_a_lease)]
LeaseOrJobId = Annotated[str, typer.Argument(metavar="LEASE|JOB", help="Id of the lease, or of the job.")]
Ttl = Annotated[
    float,
    typer.Option(
        parser=duration,
        metavar="DURATION",
        show_default="2h",
        help="How long the lease lasts unless it is renewed, such as 30m.",
    ),
]


def acquire(
    gpus: Gpus = 1,
    ttl: Ttl = 7200.0,
    wait: Wait = 0.0,
    label: Label = "",
    model: Model = None,
    node: Node = None,
    json: Json = False,
) -> None:
    """Take a lease and leave it standing: it ends at its ttl, or with `gpulease release`.

    The output is for a shell: eval "$(gpulease acquire -n 1)" binds it to the GPUs, or fails with the exit code.
    """
    request = checked(
        lambda: LeaseRequest(count=gpus, ttl_s=ttl, label=label, gpu_model=model, node=node, queue=wait > 0)
    )
    with Client() as client, waiting.QueueWatch(client) as queue:
        lease = client.request_lease(request, wait, queue.watch)
    if json:
        output.noun(lease)
        return
    typer.echo(
        f"lease {lease.id} lasts {spell(lease.ttl_s)} unless renewed; `gpulease release {lease.id}` gives it back",
        err=True,
    )
    for name, value in lease.env.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def renew(lease: LeaseId, token: Token = None, json: Json = False) -> None:
    """Give a lease its full ttl again."""
    with Client() as client:
        renewed = client.renew(lease, _token(client, lease, token))
    if json:
        output.noun(renewed)
    else:
        typer.echo(f"lease {renewed.id} lasts {spell(renewed.ttl_s)} from now")


def release(lease: LeaseId, token: Token = None, json: Json = False) -> None:
    """Give a lease's GPUs back; a waiting request is withdrawn. An administrator may do it to anybody's."""
    with Client() as client:
        ended = client.release(lease, _token(client, lease, token))
    if json:
        output.noun(ended)
    else:
        typer.echo(f"lease {ended.id} is {ended.end_reason or ended.state}")


def list_leases(
    every: Annotated[bool, typer.Option("--all", help="Those that have ended, too.")] = False, json: Json = False
) -> None:
    """List the leases that are active or waiting."""
    with Client() as client:
        leases = client.leases(() if every else (LeaseState.ACTIVE, LeaseState.QUEUED))
    if json:
        output.nouns(leases)
    else:
        heads = ("LEASE", "STATE", "HOLDER", "GPUS", "SINCE", "UNTIL")
        output.text(columns(heads, [_row(lease, datetime.now(UTC)) for lease in leases]))


def explain(lease: LeaseOrJobId, json: Json = False) -> None:
    """Say why a lease or a job waits, and what is in the way, or why it ended."""
    with Client() as client:
        job = client.job(lease) if lease.startswith(JOB) else None
        explanation = client.explain(job.lease_id if job else lease)
    if json:
        output.noun(explanation)
        return
    if job:
        typer.echo(f"job {job.id} {job.state}{f': {plain(job.reason, 2000)}' if job.reason else ''}")
        if job.state.final:
            return
    # The sentence is whole, for those who see nothing else; here each obstacle has a line of its own.
    sentence = explanation.sentence
    for obstacle in explanation.obstacles:
        sentence = sentence.replace(f" {obstacle.sentence}", "", 1)
    typer.echo(sentence)
    for obstacle in explanation.obstacles:
        typer.echo(f"  {obstacle.sentence}")


def _token(client: Client, lease_id: str, token: int | None) -> int | None:
    """The token as given, else of the surrounding lease, else as the daemon shows it."""
    if token is not None:
        return token
    inherited = os.environ.get("GPULEASE_LEASE_TOKEN", "")
    if os.environ.get("GPULEASE_LEASE_ID") == lease_id and inherited.isascii() and inherited.isdigit():
        return int(inherited)
    return client.lease_by_id(lease_id).token


def _row(lease: Lease, now: datetime) -> tuple[str, ...]:
    state = lease.state.value
    if lease.position is not None:
        state += f" ({lease.position})"
    elif lease.end_reason is not None:
        state += f" ({lease.end_reason.value})"
    gpus = ", ".join(f"{gpu.node}:{gpu.index}" for gpu in lease.gpus) or asked_for(lease.demand)
    since = spell((now - (lease.ended_at or lease.granted_at or lease.created_at)).total_seconds())
    live = lease.expires_at is not None and lease.state is LeaseState.ACTIVE
    until = "in " + spell((lease.expires_at - now).total_seconds()) if live and lease.expires_at else "-"
    return (lease.id, state, who(lease.holder, lease.job_id), gpus, since, until)
