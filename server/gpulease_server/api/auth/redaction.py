"""Redaction: fields that only the holder may see are removed for everyone except the holder and administrators.

They are a lease's fencing token and environment, what a job has printed (its traceback, and why it failed), its
directories, and with `--show-commands own` the command lines of processes and jobs.
"""

from __future__ import annotations

from dataclasses import replace

from gpulease_protocol.model import Event, Gpu, Job, Lease, Process
from gpulease_server.api.access_settings import AccessSettings
from gpulease_server.api.auth.callers import Caller
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.presentation import job_view
from gpulease_server.core.records import JobRecord

ADMIN_KINDS = "token.", "limits."
"""Prefixes of the kinds of events that only administrators see: they name tokens, and limits of others."""


def redact_lease(caller: Caller, lease: Lease) -> Lease:
    """The lease as this caller may see it."""
    return lease if caller.may_see(lease.holder) else replace(without_env(lease), fencing_token=None)


def without_env(lease: Lease) -> Lease:
    """The lease without the variables of its nodes."""
    return replace(lease, env={}, members=tuple(replace(member, env={}) for member in lease.members))


def redact_job(caller: Caller, record: JobRecord, ledger: Ledger, access: AccessSettings) -> Job:
    """The job as this caller may see it."""
    job, lease = job_view(record), ledger.leases.get(record.job.lease_id)
    is_own_after_pruning = lease is None and caller.uid is not None and record.uid == caller.uid
    if is_own_after_pruning or caller.may_see(None if lease is None else lease.lease.holder):
        return job
    # The reason of a failure quotes the last lines of the job's output.
    reason = job.reason if job.started_at is None and job.attempts <= 1 else None
    return replace(
        job,
        traceback=None,
        reason=reason,
        command=job.command if access.show_commands else (),
        working_directory=None,
        log_directory=None,
        members=tuple(replace(one, reason=None, log_directory=None) for one in job.members),
        attempt_history=tuple(replace(one, reason=None, log_directory=None) for one in job.attempt_history),
    )


def redact_gpu(caller: Caller, gpu: Gpu, access: AccessSettings) -> Gpu:
    """The GPU as this caller may see it."""
    if access.show_commands or caller.is_admin:
        return gpu
    opened_by = None if gpu.opened_by is None else tuple(_redact_process(caller, one) for one in gpu.opened_by)
    unreadable = None if gpu.unreadable_process is None else _redact_process(caller, gpu.unreadable_process)
    processes = tuple(_redact_process(caller, one) for one in gpu.processes)
    return replace(gpu, processes=processes, opened_by=opened_by, unreadable_process=unreadable)


def hidden_kinds(caller: Caller) -> tuple[str, ...]:
    """Prefixes of the kinds of events that this caller may not see."""
    return () if caller.is_admin else ADMIN_KINDS


def redact_event(caller: Caller, event: Event, ledger: Ledger) -> Event:
    """The event as this caller may see it: the fencing token and the reason of a job's failure are the holder's.

    They are removed for all but administrators when the lease is no longer in memory.
    """
    has_job_reason = event.kind.startswith("job.") and event.reason is not None
    if event.fencing_token is None and not has_job_reason:
        return event
    record = ledger.leases.get(event.lease_id or "")
    if caller.may_see(None if record is None else record.lease.holder):
        return event
    return replace(event, fencing_token=None, reason=None if has_job_reason else event.reason)


def _redact_process(caller: Caller, process: Process) -> Process:
    return process if process.user is not None and process.user == caller.user else replace(process, command=None)
