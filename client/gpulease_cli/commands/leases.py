"""`gpulease leases` and `explain`."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import click

from gpulease.client import Client
from gpulease.device_reuse import LEASE_VARIABLE
from gpulease_cli import id_completion, names, output
from gpulease_cli.help_format import command
from gpulease_cli.options import JSON
from gpulease_cli.parameters import argument, option
from gpulease_cli.snapshot import LIVE_JOBS, LIVE_LEASES
from gpulease_protocol.model import Job, Lease
from gpulease_protocol.obstacle_groups import obstacle_lines
from gpulease_protocol.status_table import (
    describe_demand,
    describe_end,
    describe_holder,
    describe_places,
    format_duration,
    job_label,
    printable,
    short_id,
)

LEASE_OR_JOB = argument(
    "lease",
    metavar="[LEASE|JOB]",
    required=False,
    help="A lease or job: id, beginning of one, or name of a job of yours. By default the lease of this shell.",
    shell_complete=id_completion.jobs,
)


@command("leases", examples=("gpulease leases --all",))
@option("--all", "include_ended", is_flag=True, help="Include ended leases.")
@JSON
def list_leases(include_ended: bool, json: bool) -> None:
    """List active and queued leases."""
    with Client() as client:
        leases = client.leases(() if include_ended else LIVE_LEASES)
        jobs = {job.lease_id: job for job in client.jobs(LIVE_JOBS)} if not json else {}
    if json:
        output.print_json_list(leases)
    else:
        now, several_nodes = datetime.now(UTC), len({gpu.node for lease in leases for gpu in lease.gpus}) > 1
        short = output.terminal_width() is not None
        rows = [_row(lease, jobs.get(lease.id), now, several_nodes, short) for lease in leases]
        heads = ("LEASE", "STATE", "HOLDER", "GPUS", "SINCE", "UNTIL")
        none = "No leases." if include_ended else "No lease is active or queued. --all shows those that have ended."
        cut = {"STATE": 10, "HOLDER": 10, "GPUS": 6}
        output.print_rows(heads, rows, cut=cut, drop=("SINCE", "UNTIL"), none=none)


@command(examples=("gpulease explain job-82c4b92c1f47e880",))
@LEASE_OR_JOB
@JSON
def explain(lease: str | None, json: bool) -> None:
    """Explain why a lease or a job waits and what is in the way, or why it ended."""
    word = lease_or_job(lease)
    with Client() as client:
        lease_id, job = names.find_lease(client, word)
        explanation = client.explain(lease_id)
    if json:
        output.print_json(explanation)
        return
    if job:
        click.echo(f"{job.id} {output.spelled(job.state)}{f': {printable(job.reason, 2000)}' if job.reason else ''}")
        if job.ended:
            return
    # The sentence includes every obstacle; here those that are alike have a line of their own.
    sentence = explanation.sentence
    for obstacle in explanation.obstacles:
        sentence = sentence.replace(f" {obstacle.sentence}", "", 1)
    click.echo(output.local_times(sentence))
    for line in obstacle_lines(explanation.obstacles):
        click.echo(f"  {output.local_times(line)}")
    if explanation.unlisted_gpus:
        click.echo(f"  {explanation.unlisted_gpus} more GPUs are not listed.")


def lease_or_job(word: str | None) -> str:
    """What was typed for a lease or a job; without it the surrounding lease. Raises UsageError where there is none."""
    word = (os.environ.get(LEASE_VARIABLE) or None) if word is None else word
    if word is None:
        raise click.UsageError("LEASE|JOB is missing, and this shell has no lease", click.get_current_context())
    return word


def _row(lease: Lease, job: Job | None, now: datetime, several_nodes: bool, short: bool) -> tuple[str, ...]:
    state = lease.state.value
    if lease.position is not None:
        state += f" ({lease.position})"
    elif lease.end_reason is not None:
        state += f" ({output.spelled(lease.end_reason)})"
    gpus = describe_places(lease.gpus, several_nodes) if lease.gpus else describe_demand(lease.demand)
    since = format_duration((now - (lease.ended_at or lease.granted_at or lease.created_at)).total_seconds())
    holder = describe_holder(lease.holder, job_label(job) or lease.job_id)
    shown = short_id(lease.id) if short else lease.id
    return (shown, state, holder, gpus, since, describe_end(lease, job, now))
