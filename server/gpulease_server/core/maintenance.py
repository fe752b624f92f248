"""What an administrator takes out of use, and puts back: nodes and single GPUs. It is stored, so it outlives a restart.

No lease ends by it: out of use only means that nothing more is granted there.
"""

from __future__ import annotations

from gpulease_protocol.errors import InUse, NotFound
from gpulease_protocol.model import NodeMode
from gpulease_protocol.node_protocol import PAUSED, NodeReport
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gpu import node_mode
from gpulease_server.core.happenings import CordonRequested, NodeModeRequested
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.turn import Turn

MODE_EVENTS = {NodeMode.ACTIVE: "node.resumed", NodeMode.DRAINING: "node.drained", NodeMode.PAUSED: "node.paused"}


def on_node_mode_requested(turn: Turn, change: NodeModeRequested) -> None:
    """Drain, pause or resume a node. Pausing is refused while a lease is active there, unless it is forced."""
    node = turn.ledger.nodes.get(change.node)
    if node is None:
        detail = f"There is no node {change.node}."
        turn.answer(change.cause, NotFound(detail, remedy="`GET /v1/nodes` lists all nodes."))
        return
    holding = _active_leases(turn.ledger, change.node)
    if change.mode is NodeMode.PAUSED and node.mode is not NodeMode.PAUSED and holding and not change.force:
        detail = f"Node {change.node} has active leases: {', '.join(holding[:8])}{' ...' if len(holding) > 8 else ''}."
        remedy = 'Drain it and pause it when they have ended, or pause it with `"force": true`: they stay, unwatched.'
        turn.answer(change.cause, InUse(detail, remedy=remedy))
        return
    out_of_use = change.mode is not NodeMode.ACTIVE
    reason = (change.reason or node.mode_reason) if out_of_use else None
    if (node.mode, node.mode_reason) != (change.mode, reason):
        by = change.by if out_of_use else None
        turn.put(replace(node, mode=change.mode, mode_reason=reason, mode_by=by))
        words = [word for word in (_by(change.by), reason) if word]
        turn.emit(MODE_EVENTS[change.mode], node=change.node, reason=": ".join(words) or None)
    if node.mode is not change.mode and NodeMode.PAUSED in (node.mode, change.mode):
        _forget_reading(turn, change)
    turn.answer(change.cause, None)


def on_cordon_requested(turn: Turn, change: CordonRequested) -> None:
    """Cordon one GPU, or put it back into use."""
    gpu = turn.ledger.gpus.get(change.uuid)
    if gpu is None:
        detail = f"There is no GPU {change.uuid}."
        turn.answer(change.cause, NotFound(detail, remedy="`GET /v1/gpus` lists all GPUs."))
        return
    if gpu.cordoned is not change.cordoned:
        turn.put(replace(gpu, cordoned=change.cordoned))
        kind = "gpu.cordoned" if change.cordoned else "gpu.uncordoned"
        turn.emit(kind, node=gpu.device.node, gpus=(change.uuid,), reason=_by(change.by))
    turn.answer(change.cause, None)


def discard_if_paused(ledger: Ledger, node: str, report: NodeReport) -> NodeReport:
    """The report as it counts: nothing that a worker read before it knew of the pause does."""
    if node_mode(ledger, node) is not NodeMode.PAUSED or report.problem is not None:
        return report
    return replace(report, problem=f"{PAUSED}, but still read", gpus=())


def _forget_reading(turn: Turn, change: NodeModeRequested) -> None:
    """What was read before a pause says nothing after it: the hardware may be another one."""
    before = turn.ledger.node_observations.get(change.node)
    if before is not None:
        problem = f"{PAUSED}, a moment ago"
        if change.mode is not NodeMode.PAUSED:
            problem = f"node {change.node} was resumed and has not reported since"
        turn.put(replace(before, problem=problem, observed_at_s=None, readings={}))
    turn.request_reading(change.node)


def _active_leases(ledger: Ledger, node: str) -> list[str]:
    held = {gpu.lease_id for gpu in ledger.gpus_on(node) if not gpu.draining}
    return sorted(lease_id for lease_id in held if lease_id is not None)


def _by(user: str | None) -> str | None:
    return None if user is None else f"by user {user}"
