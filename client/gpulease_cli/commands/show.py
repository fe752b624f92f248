"""`gpulease show`: everything about one job, array, lease, GPU or node."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import click

from gpulease.client import Client
from gpulease_cli import id_completion, names, output
from gpulease_cli.help_format import command
from gpulease_cli.options import JSON
from gpulease_cli.parameters import argument
from gpulease_protocol.model import Gpu, GpuState, Job, JobMember, JobState, Lease, LeaseState, Node
from gpulease_protocol.status_table import (
    count_gpus,
    describe_demand,
    describe_end,
    describe_holder,
    describe_kept,
    describe_places,
    describe_state,
    format_duration,
    format_indices,
    gibibytes,
    job_label,
    printable,
)

Facts = Iterator[tuple[str, object]]
"""What a line is about, and what it says; a line with nothing to say is left out."""


@command(examples=("gpulease show resnet", "gpulease show lease-6434526eb94cfb23", "gpulease show gpubox:3"))
@argument(
    "word",
    metavar="NAME",
    help="A job, array or lease (id, beginning of an id, or name of a job of yours), a GPU or a node.",
    shell_complete=id_completion.jobs,
)
@JSON
def show(word: str, json: bool) -> None:
    """Show everything about one job, array, lease, GPU or node."""
    with Client() as client:
        now = datetime.now(UTC)
        noun: Job | Lease | Gpu | Node | tuple[Job, ...]
        node = gpu = None
        if not word.startswith(("job-", "lease-", "array-")):
            node = next((node for node in client.nodes() if node.name == word), None)
            gpu = None if node else names.look_for_gpu(client.gpus(), word)
        if node is not None:
            noun, facts = node, _node_facts(node)
        elif gpu is not None:
            lease = client.lease_by_id(gpu.lease_id) if gpu.lease_id else None
            job = client.job(lease.job_id) if lease is not None and lease.job_id else None
            noun, facts = gpu, _gpu_facts(gpu, lease, job, now)
        else:
            noun, facts = _record(client, word, now)
    if json:
        output.print_json_list(noun) if isinstance(noun, tuple) else output.print_json(noun)
        return
    lines = [(head, str(text)) for head, text in facts if text]
    width = max(len(head) for head, _ in lines)
    for head, text in lines:
        click.echo(f"{head:<{width}}  {printable(text, 4000)}")


def _record(client: Client, word: str, now: datetime) -> tuple[Job | Lease | tuple[Job, ...], Facts]:
    """The job, lease or array of this name, and what is known of it."""
    match = names.find(client, word, names.LEASES_TOO)
    if match.kind == "array":
        jobs = names.members(client, match.id)
        return jobs, _array_facts(jobs)
    if match.kind == "lease":
        lease = client.lease_by_id(match.id)
        return lease, _lease_facts(client, lease, now)
    job = client.job(match.id)
    return job, _job_facts(client, job, now)


def _job_facts(client: Client, job: Job, now: datetime) -> Facts:
    yield "job", job.id
    yield "name", job.name
    yield "state", output.spelled(job.state) + (f", exit code {job.exit_code}" if job.exit_code else "")
    yield "why", job.reason
    if job.state is JobState.QUEUED:
        yield from _waits(client, job.lease_id)
    yield "user", job.user
    yield "command", " ".join(job.command)
    yield "launcher", job.launcher
    yield "directory", job.working_directory
    yield "GPUs", _places(job.gpus) if job.gpus else count_gpus(job.gpu_count) if job.gpu_count else None
    if job.max_nodes:
        yield (
            "nodes",
            f"{len(job.members)} of {job.nodes}:{job.max_nodes}" if job.members else f"{job.nodes}:{job.max_nodes}",
        )
    for member in job.members:
        yield f"node {member.rank}", _part(member)
    yield "submitted", _moment(job.created_at, now)
    yield "started", _moment(job.started_at, now)
    yield "ended", _moment(job.ended_at, now)
    if job.started_at and job.state is not JobState.QUEUED:
        yield "ran for", format_duration(((job.ended_at or now) - job.started_at).total_seconds())
    yield "time limit", job.timeout_s and _limit(job, now)
    yield "attempts", _attempts(job)
    yield (
        "preemptible",
        "it may end for others, and is queued again then" if job.preemptible and not job.ended else None,
    )
    yield "preempted", job.preempted and ("once" if job.preempted == 1 else f"{job.preempted} times")
    for attempt in job.attempt_history:
        yield f"attempt {attempt.number}", attempt.reason
    if job.after:
        yield "after", ", ".join(f"{dependency.job} has {dependency.when}" for dependency in job.after)
    yield "logs", job.log_directory and f"{job.log_directory}{f' on {job.gpus[0].node}' if job.gpus else ''}"
    yield "array", job.array_id and f"{job.array_id}, index {job.array_index}"
    yield "lease", job.lease_id


def _part(member: JobMember) -> str:
    """The part of a job on one node."""
    code = f", exit code {member.exit_code}" if member.exit_code else ""
    reason = f": {member.reason}" if member.reason and member.failure is not None else ""
    return f"{member.node} ({member.address}): {output.spelled(member.state)}{code}{reason}"


def _array_facts(jobs: tuple[Job, ...]) -> Facts:
    first = jobs[0]
    yield "array", first.array_id
    yield "name", first.name
    yield "user", first.user
    states = [output.spelled(state) for state in JobState for job in jobs if job.state is state]
    yield "jobs", f"{len(jobs)}: " + ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    yield "at once", first.array_at_most and str(first.array_at_most)
    yield "indices", format_indices(job.array_index or 0 for job in jobs)
    yield "first", " ".join(first.command)
    for state in (JobState.FAILED, JobState.TIMED_OUT, JobState.LOST):
        bad = [job.array_index or 0 for job in jobs if job.state is state]
        yield output.spelled(state), format_indices(bad)
    yield "list", f"gpulease jobs --array {first.array_id}"


def _lease_facts(client: Client, lease: Lease, now: datetime) -> Facts:
    job = client.job(lease.job_id) if lease.job_id else None
    yield "lease", lease.id
    yield "state", lease.state.value + (f": {output.spelled(lease.end_reason)}" if lease.end_reason else "")
    yield "holder", describe_holder(lease.holder)
    yield "host", lease.holder.host
    yield "job", job and f"{job.id} {printable(job.name)}".strip()
    yield "GPUs", _places(lease.gpus) if lease.gpus else None
    for member in lease.members:
        yield f"node {member.rank}", f"{member.node} ({member.address}): {_places(member.gpus)}"
    yield "asked for", describe_demand(lease.demand)
    if lease.state is LeaseState.QUEUED:
        yield from _waits(client, lease.id)
    yield "requested", _moment(lease.created_at, now)
    yield "granted", _moment(lease.granted_at, now)
    yield "ended", _moment(lease.ended_at, now)
    end = describe_end(lease, job, now)
    yield "until", None if end == "-" else end
    yield "kept", describe_kept(lease, now)
    yield (
        "preempted",
        lease.preempt_at and f"by {lease.preempt_at.astimezone():%Y-%m-%d %H:%M:%S}, for others that wait",
    )
    yield (
        "gives back",
        lease.demand.reclaim_idle_after_s
        and (f"after {format_duration(lease.demand.reclaim_idle_after_s)} without work, if others wait"),
    )
    for problem in lease.problems:
        yield "problem", problem


def _gpu_facts(gpu: Gpu, lease: Lease | None, job: Job | None, now: datetime) -> Facts:
    leased = gpu.state is GpuState.LEASED
    yield "GPU", f"{gpu.node}:{gpu.index}"
    yield "UUID", gpu.uuid
    yield "model", gpu.name
    yield "state", describe_state(gpu, now)
    yield "why", None if leased else gpu.reason
    yield "holder", gpu.holder and describe_holder(gpu.holder, job_label(job))
    yield "lease", gpu.lease_id
    yield "until", describe_end(lease, job, now) if leased else None
    yield "cordoned", "yes" if gpu.cordoned else None
    yield "memory", f"{gibibytes(gpu.memory_used_bytes)} of {gibibytes(gpu.memory_total_bytes)} GiB used"
    yield "utilization", None if gpu.utilization_ratio is None else f"{gpu.utilization_ratio:.0%}"
    yield "temperature", None if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} C"
    yield "power", None if gpu.power_w is None else f"{gpu.power_w:.0f} W"
    yield "health", gpu.health
    yield "warnings", ", ".join(gpu.warnings)
    yield "compute mode", gpu.compute_mode
    yield "PCI bus id", gpu.pci_bus_id
    for process in gpu.processes:
        size = f", {gibibytes(process.memory_bytes)} GiB" if process.memory_bytes is not None else ""
        whose = f" ({process.lease_id})" if process.lease_id else "" if process.bystander else " (no lease)"
        yield "process", f"{process.pid} of {process.user or '?'}{size}: {process.command or '?'}{whose}"
    yield "read", _moment(gpu.observed_at, now)


def _node_facts(node: Node) -> Facts:
    yield "node", node.name
    yield "state", node.state.value
    yield "mode", node.mode.value
    yield "why", node.reason
    yield "host", node.host
    yield "address", node.address and (f"{node.address} ({node.interface})" if node.interface else node.address)
    yield "GPUs", str(node.gpu_count)
    yield "driver", node.driver_version
    yield "simulated", "yes: its GPUs are not real" if node.simulated else None
    yield "read", _moment(node.observed_at, datetime.now(UTC))


def _waits(client: Client, lease_id: str) -> Facts:
    """The obstacles of a request that waits."""
    explanation = client.explain(lease_id)
    yield "place", explanation.position and str(explanation.position)
    yield "in the way", output.local_times(explanation.sentence.removeprefix("Not now: "))


def _limit(job: Job, now: datetime) -> str:
    limit = format_duration(job.timeout_s or 0.0)
    if job.started_at is None or job.timeout_s is None or job.ended or job.state is JobState.QUEUED:
        return limit
    if job.attempt_history and job.attempt_history[-1].regrouped:
        return f"{limit} for all attempts under its lease"
    left = job.started_at + timedelta(seconds=job.timeout_s) - now
    return f"{limit}, ends in at most {format_duration(left.total_seconds())}"


def _attempts(job: Job) -> str:
    return f"{job.attempts} of {job.retries + 1}" if job.retries else str(job.attempts)


def _places(gpus: tuple[object, ...]) -> str:
    return describe_places(gpus, True)  # type: ignore[arg-type]


def _moment(at: datetime | None, now: datetime) -> str | None:
    """A time of this time zone, and how long ago it was."""
    if at is None:
        return None
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S} ({format_duration((now - at).total_seconds())} ago)"
