"""Granting: GPUs, fencing token and port for a queued lease; and reviving a lease by a late renewal."""

from __future__ import annotations

import zlib

from gpulease_protocol.model import GpuState, Lease, LeaseState, Liveness, NodeMode
from gpulease_protocol.node_protocol import LEASE_PORTS
from gpulease_server.core.budget_records import count_gpu_time
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gpu import claimed_elsewhere, node_mode, state_of
from gpulease_server.core.gpu_observation import baseline_of
from gpulease_server.core.lease_env import gang_members, lease_env
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.liveness import extend_deadline, extend_unclaimed
from gpulease_server.core.order_records import RanAhead
from gpulease_server.core.records import Deadline, GpuRecord, LeaseRecord
from gpulease_server.core.token_budgets import held_s, is_time_over
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import usage_by_user


def grant(
    turn: Turn, record: LeaseRecord, gpus: tuple[GpuRecord, ...], *, unclaimed: bool, reason: str | None = None
) -> None:
    """Give these GPUs to a queued lease: one token, one port, all of them or a broken invariant. Those of a gang come
    node by node; the port is one of the first node, where rank 0 is.

    `unclaimed`: it was granted out of the queue while its holder did not wait, who must ask about it before its owner's
    life keeps it.
    """
    ledger, lease = turn.ledger, record.lease
    token, node = ledger.next_token, gpus[0].device.node
    port, devices = free_port(turn, node, lease.id), tuple(gpu.device for gpu in gpus)
    members = gang_members(ledger, lease, gpus, token, port)
    granted = replace(
        lease,
        state=LeaseState.ACTIVE,
        gpus=devices,
        members=members,
        env=members[0].env if members else lease_env(lease, devices, token, port),
        fencing_token=token,
        granted_at=turn.now.at,
    )
    count_gpu_time(turn, lease)
    told_at = None if unclaimed else turn.now.at
    turn.put(replace(record, lease=granted, port=port, renewed_at=told_at, granted_at_s=turn.now.mono_s))
    for gpu in gpus:
        if gpu.lease_id is not None:
            raise AssertionError(f"GPU {gpu.device.uuid} is still held by {gpu.lease_id}")
        baseline = baseline_of(ledger.node_observations.get(gpu.device.node), gpu)
        turn.put(replace(gpu, lease_id=lease.id, draining=False, fencing_token=token, baseline_bytes=baseline))
    if lease.liveness is Liveness.JOB:
        turn.put(Deadline(lease.id, None))
    elif unclaimed:
        extend_unclaimed(turn, lease)
    else:
        extend_deadline(turn, lease)
    turn.emit(
        "lease.granted",
        lease_id=lease.id,
        job_id=lease.job_id,
        node=node,
        gpus=tuple(gpu.device.uuid for gpu in gpus),
        fencing_token=token,
        reason=reason,
    )


def free_port(turn: Turn, node: str, lease_id: str) -> int:
    """A port that no lease of the node's host holds and nothing there listens on.

    Of those that the node's worker has reserved: two daemons on one host do not know of each other's leases. Where it
    has reserved none, or too few, any port of the range. The search begins at a place that follows from the lease's
    random id, so that even then two daemons are unlikely to choose the same port before a process listens on it.
    """
    ledger, host = turn.ledger, turn.ledger.nodes[node].host
    busy = turn.busy_ports.get(host)
    if busy is None:
        busy = turn.busy_ports[host] = _busy_ports(ledger, node)
    begin = zlib.crc32(lease_id.encode())
    observation = ledger.node_observations.get(node)
    reserved = () if observation is None else observation.ports_reserved
    for ports in (reserved, LEASE_PORTS):
        for step in range(begin, begin + len(ports)):
            if (port := ports[step % len(ports)]) not in busy:
                busy.add(port)
                return port
    return LEASE_PORTS[begin % len(LEASE_PORTS)]


def _busy_ports(ledger: Ledger, node: str) -> set[int]:
    """The ports of the leases of a node's host, and those on which something there listens."""
    here = _same_host(ledger, node) & ledger.node_observations.keys()
    busy = {port for name in here for port in ledger.node_observations[name].ports_in_use}
    return busy | {ledger.leases[holder].port or 0 for holder in _holders(ledger, node)}


def _same_host(ledger: Ledger, node: str) -> set[str]:
    """The nodes on a node's host: two simulated ones may share it."""
    return set(ledger.fleet.nodes_of_host[ledger.nodes[node].host])


def _holders(ledger: Ledger, node: str) -> set[str]:
    """The leases that hold or drain GPUs on the host of a node."""
    return {holder for name in _same_host(ledger, node) for holder in ledger.fleet.holders_of_node.get(name, ())}


REVIVABLE = {False: (GpuState.FREE,), True: (GpuState.DRAINING, GpuState.UNKNOWN)}
"""States in which a GPU may go back to its last lease: for one that nothing holds, and for one that still drains."""


def can_revive(turn: Turn, lease: Lease) -> bool:
    """True if every GPU remembers this grant as its last, and still drains of it or is free.

    The limits of its user must still allow it, and its time must not be over. Its node must not be paused: an
    administrator may be resetting the GPUs there.

    | the GPU | drains | is free |
    |---|---|---|
    | is healthy, its node reports | revives | revives |
    | is cordoned, or its node is drained: running work may end | revives | does not |
    | its node is silent, its probe hangs | revives | does not: unknown is never free |
    | is unhealthy, or prohibited | does not | does not |
    | its node is paused, whether its worker has closed NVML yet or not | does not | does not |
    | is reserved for others before the lease would have ended | does not | does not |
    | was granted again since, or is in another daemon's ledger | does not | does not |
    """
    ledger = turn.ledger
    if is_time_over(ledger, ledger.leases[lease.id], turn.now):
        return False
    if any(node_mode(ledger, device.node) is NodeMode.PAUSED for device in lease.gpus):
        return False
    for device in lease.gpus:
        gpu = ledger.gpus.get(device.uuid)
        if gpu is None or gpu.fencing_token != lease.fencing_token or claimed_elsewhere(ledger, gpu) is not None:
            return False
        if state_of(ledger, gpu, turn.now, turn.policy) not in REVIVABLE[gpu.lease_id is not None]:
            return False
    users = usage_by_user(ledger, turn.policy.limits, turn.now)
    closed = users.closed_to(lease, held_s(ledger.leases[lease.id], turn.now))
    if closed and not closed.isdisjoint(device.uuid for device in lease.gpus):
        return False
    within = users.limit_reached(lease, len(lease.gpus)) is None
    return within and _port_is_free(turn, lease)


def _port_is_free(turn: Turn, lease: Lease) -> bool:
    """True while no other lease of the host was given the port of this one."""
    port = turn.ledger.leases[lease.id].port
    others = _holders(turn.ledger, lease.gpus[0].node) - {lease.id}
    return all(turn.ledger.leases[holder].port != port for holder in others)


def revive(turn: Turn, record: LeaseRecord) -> LeaseRecord:
    lease = replace(record.lease, state=LeaseState.ACTIVE, end_reason=None, ended_at=None)
    revived = replace(record, lease=lease, granted_at_s=turn.now.mono_s - held_s(record, turn.now))
    count_gpu_time(turn, lease)
    turn.put(revived)
    if lease.demand.time_s is not None and lease.id not in turn.ledger.ran_ahead:
        # It may have run ahead of those who wait, which is not known once its GPUs are clean.
        turn.put(RanAhead(lease.id))
    for device in lease.gpus:
        turn.put(replace(turn.ledger.gpus[device.uuid], lease_id=lease.id, draining=False))
    turn.emit(
        "lease.revived",
        lease_id=lease.id,
        node=lease.gpus[0].node,
        gpus=tuple(device.uuid for device in lease.gpus),
        fencing_token=lease.fencing_token,
    )
    return revived
