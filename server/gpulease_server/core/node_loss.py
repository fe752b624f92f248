"""Nodes that are gone for good: after a bound of silence, or at once where an administrator says so; and their names.

A node that is only silent keeps everything. Its worker may be away while its jobs and holders go on, and its GPUs are
`unknown`, so nothing is granted there. A node that was silent for `node_lost_after_s` is *lost*: the daemon no longer
waits for what it had. Its GPUs go on draining, and only a reading begun after that frees them; so no grant rests on a
clock.

    reports <--report--> silent --node_lost_after_s--> lost --report--> reports (what was lost is stopped there)
                           |                             |
                           +--------- forget ------------+---> no such node --report--> a new one

Silence is time in which the daemon ran and the node said nothing (`Ledger.silent_s`). It starts again with the daemon,
after an outage of the database, and after each report. Time in which the daemon was stopped does not count.

Silence never shows that a process has ended: a host that is cut off goes on computing. So a job that is lost is not
tried again elsewhere. An administrator who forgets a node says that its host is off. Then its jobs are tried again. A
job with a fence (`JobSpec.fence_s`) is ended by its node; once that is certain it is lost, and tried again.

| what the node had | lost by silence | forgotten |
|---|---|---|
| a job with a fence that its node has confirmed | at `certain_after_s`, as if it was forgotten | as any other |
| a job | `lost`, no retry | queued again while it has a retry left; `cancelled` if a user cancelled it; else `lost` |
| an active lease | `node_lost`, unless its holder has renewed within the bound | `node_lost` |
| a lease elsewhere, or a queued one, if it watches the owner | its holder must renew from then on | the same |
| a GPU | drains | removed, and its cordon with it |
| a part of a gang | as an active lease: it ends on all of its nodes, whose GPUs drain there | the same |

A node whose worker *leaves* (`gpulease worker --leave-s`) tells so. First it is `leaving`: nothing is granted there,
and its worker ends its jobs. With its last report it has left, which is as if it was forgotten; but no attempt counts
that ended because of it, and what an administrator has said of the node or its GPUs stays.

| what happens then | what is decided |
|---|---|
| the node comes back, its jobs run on | they are not ordered, so its worker ends them; their GPUs drain until then |
| its worker takes in an answer from before the silence | it drops an answer that is too old (`gpulease_worker.loop`) |
| a holder renews after its lease was `node_lost` | revived with its token, while none of its GPUs was granted again |
| a forgotten host was not off | its GPUs are new ones; what runs there makes them `foreign`, and its jobs are ended |
| the daemon restarts every half hour | the bound starts again each time; `gpulease node forget` does not wait for it |
| the daemon is stopped for a day | that day does not count; the silence goes on from where it was |
"""

from __future__ import annotations

from gpulease_protocol.errors import InUse, NotFound
from gpulease_protocol.job_fence import certain_after_s
from gpulease_protocol.model import EndReason, JobState, NodeMode
from gpulease_server.core.elastic_jobs import give_back
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gang_run import lose_part
from gpulease_server.core.gpu import is_unheard, unheard_nodes
from gpulease_server.core.happenings import NodeForgetRequested
from gpulease_server.core.job import finish_job, may_retry, queue_preempted, retry_job, why_cancelled
from gpulease_server.core.lease_end import end_lease
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.liveness import stop_watching
from gpulease_server.core.records import GpuRemoved, JobRecord, NodeRecord, NodeRemoved
from gpulease_server.core.turn import Turn

SEEN_INTERVAL_S = 24 * 3600.0
"""How often it is recorded that a node is still there."""
SLACK_S = 1.0
"""A holder that was heard this much within the bound, and no more, was heard together with its node."""


def lose_silent_nodes(turn: Turn, elapsed_s: float) -> None:
    """Count the silence of each node on by `elapsed_s`, and lose those that reach the bound.

    It begins with the tick that finds a node silent. A lease that its holder has renewed since is looked at again each
    time that the bound has passed once more.
    """
    silent, bound_s = turn.ledger.silent_s, turn.policy.node_lost_after_s
    unheard = unheard_nodes(turn.ledger, turn.now, turn.policy)
    for node in silent.keys() - set(unheard):
        del silent[node]
    for node in unheard:
        if node not in silent:
            silent[node] = 0.0
            continue
        before_s = silent[node]
        silent[node] = before_s + elapsed_s
        _lose_fenced_jobs(turn, node, silent[node])
        if bound_s > 0 and silent[node] // bound_s > before_s // bound_s:
            reason = f"node {node} has been silent for over {bound_s:g} s"
            unheard_since_s = turn.now.mono_s - bound_s + min(SLACK_S, bound_s / 4)
            _lose(turn, node, reason, unheard_since_s=unheard_since_s, is_off=False)


def _lose_fenced_jobs(turn: Turn, node: str, silent_s: float) -> None:
    """End the jobs of a silent node that it has ended by now, see `gpulease_protocol.job_fence`."""
    seen = turn.ledger.node_observations.get(node)
    if seen is not None:  # the tick before may have been long ago
        silent_s = min(silent_s, turn.now.mono_s - seen.reported_at_s)
    for job_id in list(turn.ledger.job_index.of_node.get(node, ())):
        record = turn.ledger.live_jobs[job_id]
        fence_s = record.spec.fence_s
        is_fenced = record.fenced or any(one.fenced for one in record.job.members if one.node == node)
        if not is_fenced or fence_s is None or silent_s < certain_after_s(fence_s):
            continue
        reason = f"node {node} has been silent for over {silent_s:.0f} s, and the job's fence is {fence_s:g} s"
        if record.job.members:
            lose_part(turn, record, node, reason, is_off=True)
        else:
            _end_job_that_is_off(turn, record, reason)


def _end_job_that_is_off(turn: Turn, record: JobRecord, reason: str, *, has_left: bool = False) -> None:
    """End a job, or queue its next attempt. No process of it is left. `has_left`: its node went in good order."""
    if record.cancelled_at is not None:
        finish_job(turn, record, JobState.CANCELLED, f"{why_cancelled(record)}; {reason}", EndReason.NODE_LOST)
    elif record.job.preempt_at is not None:
        queue_preempted(turn, record)
    elif may_retry(record, node_left=has_left):
        retry_job(turn, record, reason, EndReason.NODE_LOST, node_left=has_left)
    else:
        finish_job(turn, record, JobState.LOST, f"{reason}; how the job ended is not known", EndReason.NODE_LOST)


def on_node_forget_requested(turn: Turn, request: NodeForgetRequested) -> None:
    """End everything that a node had, and forget its name and its GPUs. Refused while it reports, or may yet report."""
    name = request.node
    if name not in turn.ledger.nodes:
        detail = f"There is no node {name}."
        turn.answer(request.cause, NotFound(detail, remedy="`GET /v1/nodes` lists all nodes."))
        return
    if not is_unheard(turn.ledger, name, turn.now, turn.policy):
        remedy = "Turn its host off, or stop its worker and everything that runs there, and try again."
        turn.answer(request.cause, InUse(f"Node {name} reports.", remedy=remedy))
        return
    if name not in turn.ledger.node_observations and turn.ledger.silent_s.get(name, 0.0) <= turn.policy.silence_s:
        detail = f"The daemon has just started, and node {name} may yet report."
        turn.answer(request.cause, InUse(detail, remedy="Try again in a few seconds."))
        return
    by = "an administrator" if request.by is None else f"user {request.by}"
    _lose(turn, name, f"node {name} was forgotten by {by}", unheard_since_s=float("inf"), is_off=True)
    _forget(turn, name, f"by {by}")
    turn.answer(request.cause, None)


def on_node_left(turn: Turn, node: str) -> None:
    """Take in that a worker has ended everything that it ran, and that its node goes for good, see `NodeReport.left`.

    What is left of it ends as for a node that is forgotten; but its jobs are tried elsewhere even without a retry that
    is left. A node stays known if an administrator has taken it, or a GPU of it, out of use.
    """
    record = turn.ledger.nodes[node]
    _lose(turn, node, f"node {node} has left", unheard_since_s=float("inf"), is_off=True, has_left=True)
    if record.mode is NodeMode.ACTIVE and not any(gpu.cordoned for gpu in turn.ledger.gpus_on(node)):
        _forget(turn, node, "its worker has left")
        return
    turn.put(replace(turn.ledger.node_observations[node], problem=f"node {node} has left", readings={}, leaving=True))


def _lose(turn: Turn, node: str, reason: str, *, unheard_since_s: float, is_off: bool, has_left: bool = False) -> None:
    """End the jobs of a node, and its leases of which nothing was heard since. `is_off`: no process of it is left;
    `has_left`: no attempt counts that ends by that."""
    ledger, ended = turn.ledger, 0
    for record in [ledger.jobs[job_id] for job_id in ledger.job_index.of_node.get(node, ())]:
        if record.job.members:
            lose_part(turn, record, node, reason, is_off=is_off, node_left=has_left)
        elif is_off:
            _end_job_that_is_off(turn, record, reason, has_left=has_left)
        else:
            finish_job(turn, record, JobState.LOST, f"{reason}; how the job ended is not known", EndReason.NODE_LOST)
        ended += 1
    held = (gpu.lease_id for gpu in ledger.gpus_on(node) if not gpu.draining)
    for lease_id in dict.fromkeys(one for one in held if one is not None):
        lease = ledger.leases[lease_id].lease
        job = ledger.live_jobs.get(lease.job_id or "")
        if job is not None:  # it ends with its job, whose parts on other nodes are ending
            if is_off and all(one.node != node for one in job.job.members):
                give_back(turn, ledger.leases[lease_id], node, reason)  # an elastic one that runs without this node
            continue
        heard_s = ledger.deadlines.get(lease_id, float("-inf")) - lease.ttl_s
        if heard_s <= unheard_since_s:
            end_lease(turn, ledger.leases[lease_id], EndReason.NODE_LOST)
            ended += 1
    stop_watching(turn, node, reason)
    if ended:
        turn.emit("node.lost", node=node, reason=reason)


def _forget(turn: Turn, node: str, reason: str | None = None) -> None:
    """Remove a node with its GPUs. The log says of one that drains why it need not be seen clean any more."""
    for gpu in turn.ledger.gpus_on(node):
        if gpu.draining:
            turn.emit("gpu.gone", node=node, gpus=(gpu.device.uuid,), lease_id=gpu.lease_id)
        turn.put(GpuRemoved(gpu.device.uuid))
    turn.put(NodeRemoved(node))
    turn.requested_readings.pop(node, None)
    turn.emit("node.forgotten", node=node, reason=reason)


def forget_nodes(turn: Turn) -> None:
    """Forget nodes that have reported nothing for `node_lifetime_s`, with their GPUs: hosts with names that do not come
    back, such as containers. One that an administrator has taken out of use stays, as does one that is referred to;
    should a forgotten one come back, it is a new one."""
    oldest_s, now = turn.policy.node_lifetime_s, turn.now
    for node in [turn.ledger.nodes[name] for name in unheard_nodes(turn.ledger, turn.now, turn.policy)]:
        seen = turn.ledger.node_observations.get(node.name)
        if seen is not None and now.mono_s - seen.reported_at_s < oldest_s:
            continue
        if node.seen_at is None:
            turn.put(replace(node, seen_at=now.at))  # of an earlier version: its time begins now
        elif (now.at - node.seen_at).total_seconds() > oldest_s + SEEN_INTERVAL_S and not _referred_to(
            turn.ledger, node
        ):
            _forget(turn, node.name)


def _referred_to(ledger: Ledger, node: NodeRecord) -> bool:
    """True while something needs a node that is away: not a GPU that drains, of which no one will ever see more."""
    if node.mode is not NodeMode.ACTIVE or ledger.watched_owners.get(node.name):
        return True
    gpus = ledger.gpus_on(node.name)
    return any((gpu.lease_id is not None and not gpu.draining) or gpu.cordoned for gpu in gpus)
