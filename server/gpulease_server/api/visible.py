"""What of a noun a caller is shown: what is for its holder alone is left out for others, but for administrators.

That is a lease's fencing token and environment, the traceback of a job, which is of its log, and with
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
    return replace(job, traceback=None, command=job.command if access.show_commands else ())


def gpu_for(caller: Caller, gpu: Gpu, access: Access) -> Gpu:
    """The GPU as this caller may see it."""
    if access.show_commands or caller.admin:
        return gpu
    opened_by = None if gpu.opened_by is None else tuple(_process_for(caller, one) for one in gpu.opened_by)
    return replace(gpu, processes=tuple(_process_for(caller, one) for one in gpu.processes), opened_by=opened_by)


def event_for(caller: Caller, event: Event, ledger: Ledger) -> Event:
    """The event as this caller may see it; of a lease that is no longer in memory the fencing token is left out."""
    if event.token is None:
        return event
    record = ledger.leases.get(event.lease_id or "")
    return event if caller.sees(None if record is None else record.lease.holder) else replace(event, token=None)


def _process_for(caller: Caller, process: Process) -> Process:
    return process if process.user is not None and process.user == caller.user else replace(process, command=None)
