"""The queue as rows, for `gpulease queue` and `gpulease top`."""

from __future__ import annotations

from gpulease_cli.expected_start import expected_starts
from gpulease_cli.snapshot import Snapshot
from gpulease_protocol.status_table import describe_demand, describe_holder, format_duration, job_label, short_id

HEADS = ("PLACE", "WHO", "WANTS", "WAITING", "START", "LEASE")
CUT, DROP = {"WHO": 14, "WANTS": 8, "START": 12}, ("LEASE",)
"""How it is made to fit a terminal; see `align_columns`."""


def queue_rows(now: Snapshot, *, short: bool) -> list[tuple[str, ...]]:
    """A row for each waiting request, the next one first; `short` for a terminal, with the beginnings of ids."""
    starts, jobs = expected_starts(now.gpus, now.leases, now.jobs, now.queue, now.at), now.job_of_lease
    return [
        (
            str(lease.position or "-"),
            describe_holder(lease.holder, job_label(jobs.get(lease.id))),
            describe_demand(lease.demand),
            format_duration((now.at - lease.created_at).total_seconds()),
            starts.get(lease.id, "-"),
            short_id(lease.id) if short else lease.id,
        )
        for lease in now.queue
    ]
