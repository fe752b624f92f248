"""How much memory a request keeps: counted against its user while it waits, and bounded once it has ended.

The text of a request is counted as CPython stores it: a string of one letter takes 50 bytes, and one character outside
Latin-1 makes the whole string two or four times as large. What JSON counts as 1 MiB may be 25 MiB here.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import getsizeof

from gpulease_protocol.model import Job, JobSpec, Lease
from gpulease_server.core.records import Change, JobRecord, LeaseRecord

RECORD_BYTES = 1024
"""A record beside its texts, with its places in the ledger's indexes."""
ENTRY_BYTES = 40
"""One place in a list or dictionary, or one number."""


def lease_bytes(lease: Lease) -> int:
    """Memory of a lease."""
    demand, holder = lease.demand, lease.holder
    size = RECORD_BYTES + ENTRY_BYTES * len(demand.indices)
    for text in (holder.user, holder.host, holder.label, demand.node, demand.gpu_model):
        if text is not None:  # written out, because each lease is counted several times
            size += getsizeof(text) + ENTRY_BYTES
    if demand.uuids or demand.among:
        size += _text_bytes((*demand.uuids, *(demand.among or ())))
    for member in lease.members:
        size += RECORD_BYTES + _text_bytes(member.env.values())
    return size


def job_bytes(spec: JobSpec, job: Job | None = None) -> int:
    """Memory of what a job is to run, and of what it waits for and has tried."""
    texts = (spec.working_directory, spec.interpreter, spec.notify, *spec.command)
    size = RECORD_BYTES + _text_bytes(texts) + _text_bytes(spec.environment) + _text_bytes(spec.environment.values())
    if job is not None:
        size += sum(_text_bytes([one.job]) + 5 * ENTRY_BYTES for one in job.after)
        size += sum(RECORD_BYTES + _text_bytes([one.reason, one.log_directory]) for one in job.attempt_history)
        size += sum(RECORD_BYTES + _text_bytes([one.reason, one.log_directory]) for one in job.members)
    return size


def records_bytes(changes: Iterable[Change]) -> int:
    """Memory of the leases and jobs among the records of a request."""
    leases = sum(lease_bytes(change.lease) for change in changes if isinstance(change, LeaseRecord))
    return leases + sum(job_bytes(change.spec, change.job) for change in changes if isinstance(change, JobRecord))


def shown_characters(record: LeaseRecord | JobRecord) -> int:
    """Characters of a request that a list shows, of those texts that may be long."""
    if isinstance(record, JobRecord):
        job = record.job
        history = sum(len(one.reason or "") for one in job.attempt_history) + 80 * len(job.after)
        history += sum(len(one.reason or "") + 200 for one in job.members)
        return sum(map(len, job.command)) + len(job.name) + len(job.traceback or "") + history
    demand = record.lease.demand
    return sum(map(len, demand.among or ())) + sum(map(len, demand.uuids)) + len(record.lease.holder.label)


def _text_bytes(texts: Iterable[str | None]) -> int:
    present = [text for text in texts if text is not None]
    return sum(map(getsizeof, present)) + ENTRY_BYTES * len(present)
