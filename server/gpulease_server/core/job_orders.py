"""What the worker of a node is told to run."""

from __future__ import annotations

from gpulease_protocol.model import JobMember
from gpulease_protocol.node_protocol import GangPlace, JobOrder
from gpulease_server.core.declared_ends import spec_of_attempt
from gpulease_server.core.gang_run import failure_of, must_stop, stop_grace_s
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.presentation import job_view
from gpulease_server.core.records import JobRecord


def job_order(ledger: Ledger, record: JobRecord, node: str, *, simulated: bool) -> JobOrder:
    """The order for a job that has not ended, to a node on which it has GPUs."""
    job, lease = record.job, ledger.leases[record.job.lease_id].lease
    member = next((one for one in lease.members if one.node == node), None)
    gpus = job.gpus if member is None else member.gpus
    return JobOrder(
        job_id=job.id,
        attempt=job.attempts,
        lease_id=job.lease_id,
        uid=record.uid,
        gid=record.gid,
        gpus=tuple(device.uuid for device in gpus),
        indices=tuple(device.index for device in gpus),
        simulated=simulated,
        spec=spec_of_attempt(record, lease),
        env=lease.env if member is None else member.env,
        stop=must_stop(record),
        grace_s=stop_grace_s(record),
        again=record.cancelled_at is None and (job.preempt_at is not None or record.grows_at is not None),
        failure=failure_of(record),
        job=job_view(record) if record.spec.notify is not None and (member is None or member.rank == 0) else None,
        gang=None if member is None else _place(job.members, member.rank),
        go=member is None or record.go_at is not None,
    )


def _place(parts: tuple[JobMember, ...], rank: int) -> GangPlace:
    nodes, addresses = tuple(one.node for one in parts), tuple(one.address for one in parts)
    return GangPlace(rank=rank, nodes=nodes, addresses=addresses)
