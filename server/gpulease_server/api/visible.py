"""What of a noun a caller is shown: what is for its holder alone is left out for others, but for administrators.

That is a lease's fencing token and environment, what a job has printed (its traceback, and why it failed), and with
`--show-commands own` command lines.
"""

from __future__ import annotations

from dataclasses import replace

from gpulease.model import Event, Gpu, Job, Lease, Process

from ..core.ledger import JobRecord, Ledger
from .callers import Access, Caller


def lease_for(caller: Caller, lease: Lease) -> Lease:
    """The lease as this caller may see it."""
    return lease if caller.sees(lease.holder) else replace(lease, env={}, token=None)


def job_for(caller: Caller, record: JobRecord, ledger: Ledger, access: Access) -> Job:
    """The job as this caller may see it."""
    job, lease = record.job, ledger.leases.get(record.job.lease_id)
    long_ended_own = lease is None and caller.uid is not None and record.uid == caller.uid
    if long_ended_own or caller.sees(None if lease is None else lease.lease.holder):
        return job
    # What a job has printed last is in the reason of a failure.
    reason = job.reason if job.started_at is None and job.attempts <= 1 else None
    return replace(job, traceback=None, reason=reason, command=job.command if access.show_commands else ())


def gpu_for(caller: Caller, gpu: Gpu, access: Access) -> Gpu:
    """The GPU as this caller may see it."""
    if access.show_commands or caller.admin:
        return gpu
    opened_by = None if gpu.opened_by is None else tuple(_process_for(caller, one) for one in gpu.opened_by)
    return replace(gpu, processes=tuple(_process_for(caller, one) for one in gpu.processes), opened_by=opened_by)


OF_TOKENS = "token."
"""How the kinds of events begin that are for administrators alone."""


def kinds_hidden(caller: Caller) -> str | None:
    """How the kinds of events begin that this caller is not shown; None where he is shown all."""
    return None if caller.admin else OF_TOKENS


def event_for(caller: Caller, event: Event, ledger: Ledger) -> Event:
    """The event as this caller may see it: without another's fencing token, and why his job failed. So it is, too, when
    the lease is no longer in memory."""
    of_job = event.kind.startswith("job.") and event.reason is not None
    if event.token is None and not of_job:
        return event
    record = ledger.leases.get(event.lease_id or "")
    if caller.sees(None if record is None else record.lease.holder):
        return event
    return replace(event, token=None, reason=None if of_job else event.reason)


def _process_for(caller: Caller, process: Process) -> Process:
    return process if process.user is not None and process.user == caller.user else replace(process, command=None)
