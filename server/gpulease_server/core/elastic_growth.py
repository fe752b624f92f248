"""Elastic jobs that take more nodes: those of their lease that are back, and further ones that are free.

    runs on fewer nodes than it may, for long enough -> a node of its lease is back: all parts are stopped for it
                                                     -> a free node, and no one waits: its GPUs join the lease, too

- A node that is back costs no one anything: the lease has its GPUs.
- A further node is taken only while no one waits whom it would overtake, also not one that could not run now. Who is
  kept out by a limit, by a pause or by the limit of an array is not delayed, unless the job is under that limit, too.
  Nor is one to which the calendar closes these GPUs, with the same exception. The node is granted like any other: by a
  recent reading, within the limits of the user and the budget of the token, of the model and within reach of the
  others, and committed before anything starts there.
- All ranks start again each time. So the longer a job's nodes go on changing, the longer it runs in between:
  `pause_s`. A node that comes and goes, or fails each time that it has joined, costs less and less.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpulease_protocol.model import JobState, Lease, LeaseMember
from gpulease_server.core.backfill import Reservations
from gpulease_server.core.budget_records import count_gpu_time
from gpulease_server.core.calendar import NO_GPUS
from gpulease_server.core.elastic_jobs import MAX_REGROUPS, may_take_part
from gpulease_server.core.eligibility import divided_queue, is_eligible, min_gpus_of
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gang_records import GangTimes
from gpulease_server.core.gpu_observation import baseline_of
from gpulease_server.core.job import change_job
from gpulease_server.core.lease_env import LOOPBACK
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.placement import Search, find_candidates, reach_of
from gpulease_server.core.preempted_gpus import preemptions_under_way
from gpulease_server.core.records import GpuRecord, JobRecord, LeaseRecord
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import never_within_limits, usage_by_user
from gpulease_server.core.user_order import UserOrder
from gpulease_server.core.wording import name_nodes

GROW_AFTER_S = 30.0
"""How long an attempt runs at least before it is stopped for another node: time for a checkpoint."""
CHANGES = 4
"""The pause doubles each time that a job's nodes have changed so often."""
MAX_DOUBLINGS = 8


def pause_s(record: JobRecord) -> float:
    """How long the attempt must have run before it is stopped for another node: up to two hours."""
    return float(GROW_AFTER_S * 2 ** min(record.regroups // CHANGES, MAX_DOUBLINGS))


def watch_elastic(turn: Turn) -> None:
    """Stop the parts of jobs that have run for long enough, and for which there is another node."""
    growing, now_s = turn.ledger.job_index.growing, turn.now.mono_s
    for job_id, since_s in list(growing.items()):
        record = turn.ledger.jobs[job_id]
        if since_s is None:
            growing[job_id] = now_s
        elif now_s - since_s >= pause_s(record) and record.regroups < MAX_REGROUPS:
            here, lease = {one.node for one in record.job.members}, turn.ledger.leases[record.job.lease_id]
            absent = [one for one in lease.lease.members if one.node not in here]
            nodes = [one.node for one in absent if may_take_part(turn, record, one)]
            if not nodes and len(lease.lease.members) < (record.spec.max_nodes or 0):
                nodes = _take_free_node(turn, lease, record.regroups)
            if nodes:
                _stop_to_grow(turn, record, nodes)


def _stop_to_grow(turn: Turn, record: JobRecord, nodes: Sequence[str]) -> None:
    """Have every part end, so that all can start again with these nodes."""
    turn.put(replace(record, grows_at=turn.now.at, parts_stopped_at=turn.now.at))
    reason = f"It starts again with {name_nodes(nodes)}."
    change_job(turn, turn.ledger.jobs[record.job.id], JobState.STOPPING, reason=reason)
    turn.put(GangTimes(record.job.id, turn.now.mono_s, stop_s=turn.now.mono_s))


def _take_free_node(turn: Turn, record: LeaseRecord, regroups: int) -> list[str]:
    """Add the GPUs of a free node to a lease. Returns its name; nothing where there is none, or where it is to be read
    first. `regroups`: how often the nodes of its job have changed; by two where one has joined and was given back."""
    ledger, lease = turn.ledger, record.lease
    users = usage_by_user(ledger, turn.policy.limits, turn.now)
    left, closed = users.gpus_left(lease), users.closed_to(lease)
    if turn.pending or (left is not None and left < lease.demand.count):
        return []
    found, model = find_candidates(ledger, lease.demand), lease.gpus[0].name or ""
    here = {one.node for one in lease.members}
    reach = reach_of(ledger, lease.demand, lease.members[0].node)
    held = {uuid for one, _ in preemptions_under_way(ledger, turn.now, turn.policy) for uuid in one.gpus}
    search = Search(ledger, lease.demand, closed | held, turn.now, turn.policy, (), None, float("-inf"), False)
    nodes = [node for node in found.by_model.get(model, ()) if node in ledger.fleet.free and node not in here]
    nodes = [node for node in nodes if all(gpu.lease_id != lease.id for gpu in ledger.gpus_on(node))]
    reached = (node for node in nodes if reach is not None and reach_of(ledger, lease.demand, node) == reach)
    ranked = {node: one for node in reached if (one := search.on_node(node, found, model)) is not None}
    if ranked and (passing := _open_in_passing(turn, lease)) is not None:  # which costs most, so it is asked last
        ranked = {node: one for node, one in ranked.items() if passing.issuperset(gpu.device.uuid for gpu in one.gpus)}
    if not ranked:
        return []
    # A node that has joined and failed is taken again only where there is no other; of several each has its turn.
    untried = [one for node, one in ranked.items() if not _was_given_back(ledger, lease, node)]
    node = min(one.rank for one in untried)[2] if untried else sorted(ranked)[regroups // 2 % len(ranked)]
    if ranked[node].rank[0]:
        turn.request_reading(node)
        return []
    _extend(turn, record, node, ranked[node].gpus)
    return [node]


def _open_in_passing(turn: Turn, lease: Lease) -> frozenset[str] | None:
    """The GPUs that this lease may take although others wait: those that the calendar closes to all whom it could
    delay. None while it could delay no one. Costs a look at each kind of requests up to one to which nothing is
    closed."""
    ledger, users = turn.ledger, usage_by_user(turn.ledger, turn.policy.limits, turn.now)
    order = UserOrder(Reservations(ledger, turn.now, turn.policy, users))
    own, found = {one.key for one in users.applied(lease)}, None
    for place, _, _ in divided_queue(ledger, users, turn.policy).heads:
        record = ledger.leases[place[3]]
        wanted = min_gpus_of(ledger, users, record.lease.demand)
        if not is_eligible(ledger, record, turn.now) or never_within_limits(users, record.lease, wanted) is not None:
            continue
        shares = record.lease.holder.token_id is not None and record.lease.holder.token_id == lease.holder.token_id
        shares = shares or not own.isdisjoint(one.key for one in users.applied(record.lease))
        if shares or not order.keeps_out(record):
            closed = NO_GPUS if shares else users.closed_to(record.lease)
            found = closed if found is None else found & closed
            if not found:
                return NO_GPUS
    return found


def _was_given_back(ledger: Ledger, lease: Lease, node: str) -> bool:
    """True where a GPU of a node was last granted with the token of this lease, which has it no longer."""
    return any(gpu.fencing_token == lease.fencing_token for gpu in ledger.gpus_on(node))


def _extend(turn: Turn, record: LeaseRecord, node: str, gpus: tuple[GpuRecord, ...]) -> None:
    """Give these GPUs of one node to an active lease, as its last member."""
    lease, observation = record.lease, turn.ledger.node_observations[node]
    count_gpu_time(turn, lease)
    devices = tuple(gpu.device for gpu in gpus)
    address = observation.address or LOOPBACK
    member = LeaseMember(rank=len(lease.members), node=node, address=address, gpus=devices, env={})
    turn.put(replace(record, lease=replace(lease, gpus=(*lease.gpus, *devices), members=(*lease.members, member))))
    for gpu in gpus:
        if gpu.lease_id is not None:
            raise AssertionError(f"GPU {gpu.device.uuid} is still held by {gpu.lease_id}")
        baseline, token = baseline_of(observation, gpu), lease.fencing_token or 0
        turn.put(replace(gpu, lease_id=lease.id, draining=False, fencing_token=token, baseline_bytes=baseline))
    turn.emit(
        "lease.grown",
        lease_id=lease.id,
        job_id=lease.job_id,
        node=node,
        gpus=tuple(device.uuid for device in devices),
        fencing_token=lease.fencing_token,
    )
