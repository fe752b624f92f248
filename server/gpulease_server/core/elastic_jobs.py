"""Elastic jobs: they run on `nodes` to `max_nodes` nodes, and go on when a node is lost or comes back.

    granted on as many nodes as are free -> one attempt on all of them, see `core.gang_run`
    a node is lost -> all parts of the attempt end -> the next attempt, on the nodes that are left
    it reports again, or another one is free, see `core.elastic_growth` -> all parts end -> the next attempt, with it

All these attempts are under one lease, which keeps its GPUs, also those of a node that is lost: nothing is known of
them, so they could be granted to no one, and the job keeps its place. Each attempt has a port and ranks of its own. So
a lost node that is only cut off can never meet the ranks of the next attempt.

What must always hold
---------------------
- The next attempt begins when every part of the last one has ended, by the rules of `core.gang_run`.
- It runs on at least `nodes` nodes; with fewer, the attempt counts as any other that has ended: the lease ends, and
  the job is tried again if it may.
- A lease may lose GPUs: those of a node that is forgotten while it takes no part, and those of a node that has joined
  later and failed. These drain as after the end of a lease.
- A job goes on only when no program has failed: a failure ends it, as it ends any other job.

What each failure does
----------------------
| what fails | what is decided |
|---|---|
| a host, with or without the leader | its part is lost: the next attempt runs on the others |
| its supervisor is killed, or its host has restarted before that was noticed | the next attempt, with it |
| its worker has lost the record of its part | the next attempt runs on the others; it joins later |
| a node is out of reach for the job's `fence_s` | the next attempt, with it once it reports that its part has ended |
| a node leaves, or is forgotten | the next attempt runs on the others |
| a node is drained, or paused by force | the next attempt runs on the others; if they are too few, on a drained one \
too |
| a node's reports are late as the attempt ends, of one that took part or that all were stopped for | the next attempt \
waits for it, for a while: a busy host is not a lost one |
| fewer than `nodes` are left | as any attempt that was lost |
| a node that has joined later fails, before or after the start | it is given back, and the others go on without it |
| a rank, a launcher, also while all are stopped for a node | as for any job on several nodes |
| a node is lost again and again | each time the others start again; MAX_REGROUPS times |
| it changes nodes with a `timeout_s` | the next attempt has what is left of it for the lease |
| the daemon restarts | the pause before the next change begins again; an attempt that ends waits for the reports of \
all nodes |
"""

from __future__ import annotations

from collections.abc import Sequence

from gpulease_protocol.model import (
    GpuState,
    Job,
    JobMember,
    JobState,
    LeaseMember,
    NodeMode,
    PartState,
)
from gpulease_server.core.budget_records import count_gpu_time
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gang_records import GangTimes
from gpulease_server.core.gpu import is_unheard, node_mode, state_of
from gpulease_server.core.grant import free_port
from gpulease_server.core.job import ended_attempt, kept_history
from gpulease_server.core.lease_env import gang_members
from gpulease_server.core.records import JobRecord, LeaseRecord
from gpulease_server.core.turn import Turn
from gpulease_server.core.wording import name_nodes

MAX_REGROUPS = 1000
"""How many times the nodes of a job may change."""


def go_on(turn: Turn, record: JobRecord, origin: JobMember | None, reason: str) -> bool:
    """Begin the next attempt of an elastic job under its lease, where only its nodes have changed and enough are left.
    `origin`: the part that has failed first, and so ended the attempt; None where none has."""
    if record.spec.max_nodes is None or record.regroups >= MAX_REGROUPS:
        return False
    faulty = None
    is_stopped = origin is None or (record.grows_at is not None and origin.follows)
    if origin is not None and not is_stopped and not _is_fault_of_host(record.job, origin):
        if not origin.joined_later or origin.follows:
            return False
        faulty = origin.node
    lease = turn.ledger.leases[record.job.lease_id]
    left = [one for one in lease.lease.members if one.node != faulty and may_take_part(turn, record, one)]
    if len(left) < record.spec.nodes:
        return False
    active = [one for one in left if node_mode(turn.ledger, one.node) is NodeMode.ACTIVE]
    left = active if len(active) >= record.spec.nodes else left
    if faulty is not None:
        give_back(turn, lease, faulty, reason)
    _regroup(turn, record, left, reason)
    return True


def give_back(turn: Turn, record: LeaseRecord, node: str, reason: str) -> None:
    """Take the GPUs of one node out of a lease. They drain from this moment."""
    lease = record.lease
    count_gpu_time(turn, lease)
    gone = [gpu for gpu in turn.ledger.held_by(lease) if gpu.device.node == node]
    members = [one for one in lease.members if one.node != node]
    left = replace(
        lease,
        gpus=tuple(device for one in members for device in one.gpus),
        members=tuple(replace(one, rank=rank) for rank, one in enumerate(members)),
    )
    turn.put(replace(record, lease=left))
    for gpu in gone:
        turn.put(replace(gpu, draining=True, drains_since_s=turn.now.mono_s))
        turn.request_reading(node)
    uuids = tuple(gpu.device.uuid for gpu in gone)
    turn.emit("lease.shrunk", lease_id=lease.id, job_id=lease.job_id, node=node, gpus=uuids, reason=reason)


def _is_fault_of_host(job: Job, origin: JobMember) -> bool:
    """True where a part has ended for another reason than what it ran: its node is gone, or out of reach for the job's
    `fence_s`, or its supervisor is."""
    is_killed = origin.exit_code is None and job.started_at is not None and not origin.follows
    return origin.state is PartState.LOST or origin.node_left or origin.fence_reached or is_killed


def may_take_part(turn: Turn, record: JobRecord, member: LeaseMember) -> bool:
    """True for a node of the lease that can run a part: of one that took no part in the last attempt, a reading must
    show that its GPUs work. One of which it is not known how its part ended waits at least until the next attempt has
    run for a while, see `core.elastic_growth`."""
    if is_unheard(turn.ledger, member.node, turn.now, turn.policy) or not _is_fit(turn, record, member):
        return False
    return _took_part(record, member) or _states(turn, member) == {GpuState.LEASED}


def is_late(turn: Turn, record: JobRecord, member: LeaseMember) -> bool:
    """True for a node of the lease that cannot run a part of the next attempt only because its last report is too old,
    or shows nothing: one that has taken part in this attempt, or that may be the one that all were stopped for."""
    if not _is_fit(turn, record, member) or may_take_part(turn, record, member):
        return False
    may_show = _states(turn, member) <= {GpuState.LEASED, GpuState.UNKNOWN}
    return _took_part(record, member) or (record.grows_at is not None and may_show)


def _is_fit(turn: Turn, record: JobRecord, member: LeaseMember) -> bool:
    """True for a node of the lease on which nothing but its reports and its readings keeps a part from running."""
    ledger, observation = turn.ledger, turn.ledger.node_observations.get(member.node)
    if observation is None or observation.leaving or observation.address is None or not observation.takes_gangs:
        return False
    mode = node_mode(ledger, member.node)
    if mode is NodeMode.PAUSED or not _are_held(turn, record.job.lease_id, member):
        return False
    part = next((one for one in record.job.members if one.node == member.node), None)
    # What its worker has lost the record of may still run: its supervisor ends it, but no one reports that.
    return mode is NodeMode.ACTIVE if part is None else part.state is not PartState.LOST


def _took_part(record: JobRecord, member: LeaseMember) -> bool:
    return any(one.node == member.node for one in record.job.members)


def _states(turn: Turn, member: LeaseMember) -> set[GpuState]:
    return {state_of(turn.ledger, turn.ledger.gpus[one.uuid], turn.now, turn.policy) for one in member.gpus}


def _are_held(turn: Turn, lease_id: str, member: LeaseMember) -> bool:
    """True while the lease has the GPUs of a node, which was not forgotten."""
    gpus = [turn.ledger.gpus.get(device.uuid) for device in member.gpus]
    return all(gpu is not None and gpu.lease_id == lease_id and not gpu.draining for gpu in gpus)


def _regroup(turn: Turn, record: JobRecord, left: Sequence[LeaseMember], reason: str) -> None:
    """Begin the next attempt on these nodes."""
    job, before = record.job, {one.node for one in record.job.members}
    # One that has just joined does not lead: if the others cannot reach it, it must be the one that is given back.
    left = sorted(left, key=lambda one: (one.node not in before, one.node))
    members = _with_ranks(turn, record, left)
    gained, lost = [one.node for one in members if one.node not in before], before - {one.node for one in members}
    what = (
        " and ".join(
            [f"with {name_nodes(gained)}"] * bool(gained) + [f"without {name_nodes(sorted(lost))}"] * bool(lost)
        )
        or "with the same nodes"
    )
    said = f"It goes on {what}, on {len(members)} of at most {record.spec.max_nodes}."
    why = reason
    if record.grows_at is not None:
        why = f"It started again with {name_nodes(gained)}." if gained else "The node it was stopped for is away again."
    attempt = replace(ended_attempt(turn, record, why), regrouped=True)
    again = replace(
        job,
        state=JobState.STARTING,
        reason=said,
        gpus=tuple(device for one in members for device in one.gpus),
        members=tuple(
            JobMember(rank=one.rank, node=one.node, address=one.address, joined_later=one.node in gained)
            for one in members
        ),
        attempts=job.attempts + 1,
        exit_code=None,
        traceback=None,
        started_at=None,
        attempt_history=kept_history((*job.attempt_history, attempt)),
    )
    fresh = replace(record, job=again, log_directory=None, fenced=False, go_at=None, parts_stopped_at=None)
    turn.put(replace(fresh, grows_at=None, stuck_on=(), regroups=record.regroups + 1))
    turn.put(GangTimes(job.id, turn.now.mono_s))
    more = len(members) - len(before)
    kind = "grown" if more > 0 else "shrunk" if more < 0 else "regrouped"
    turn.emit(f"job.{kind}", job_id=job.id, lease_id=job.lease_id, reason=f"{why} {said}")
    turn.emit("job.starting", job_id=job.id, lease_id=job.lease_id, node=members[0].node)


def _with_ranks(turn: Turn, record: JobRecord, left: Sequence[LeaseMember]) -> tuple[LeaseMember, ...]:
    """Give these nodes of a lease ranks in this order, environments and a port for the next attempt. Its other nodes
    come after them, without an environment; those that were forgotten are left out."""
    ledger = turn.ledger
    lease_record = ledger.leases[record.job.lease_id]
    lease, nodes = lease_record.lease, {one.node for one in left}
    gpus = tuple(ledger.gpus[device.uuid] for one in left for device in one.gpus)
    count_gpu_time(turn, lease)
    port = free_port(turn, gpus[0].device.node, f"{lease.id} {record.job.attempts}")
    members = gang_members(ledger, lease, gpus, lease.fencing_token or 0, port)
    absent = [one for one in lease.members if one.node not in nodes and _are_held(turn, lease.id, one)]
    all_members = (*members, *(replace(one, rank=len(members) + at, env={}) for at, one in enumerate(absent)))
    changed = replace(
        lease,
        gpus=tuple(device for one in all_members for device in one.gpus),
        members=all_members,
        env=members[0].env,
    )
    turn.put(replace(lease_record, lease=changed, port=port))
    return members
