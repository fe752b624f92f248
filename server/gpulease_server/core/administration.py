"""What an administrator takes out of use, and puts back: nodes and single GPUs. It is stored, so it outlives a restart.

Nobody loses anything by it: a lease that is active stays. Taking out of use only means that nothing more is granted.
"""

from __future__ import annotations

from dataclasses import replace

from gpulease.errors import InUse, NotFound
from gpulease.exchange import PAUSED, NodeReport
from gpulease.model import NodeMode

from .gpu import mode_of
from .happenings import CordonSet, NodeModeSet
from .ledger import Ledger
from .turn import Turn

EVENTS = {NodeMode.ACTIVE: "node.resumed", NodeMode.DRAINING: "node.drained", NodeMode.PAUSED: "node.paused"}


def on_mode_set(turn: Turn, wanted: NodeModeSet) -> None:
    """Drain, pause or resume a node. Pausing is refused while a lease is active there, unless it is forced."""
    node = turn.ledger.nodes.get(wanted.node)
    if node is None:
        detail = f"There is no node {wanted.node}."
        turn.answer(wanted.cause, NotFound(detail, remedy="gpulease node list shows those there are."))
        return
    holding = _active_leases(turn.ledger, wanted.node)
    if wanted.mode is NodeMode.PAUSED and node.mode is not NodeMode.PAUSED and holding and not wanted.force:
        detail = f"Node {wanted.node} has active leases: {', '.join(holding[:8])}{' ...' if len(holding) > 8 else ''}."
        remedy = "Drain it and pause it when they have ended, or pause it with force: they stay, and nobody watches."
        turn.answer(wanted.cause, InUse(detail, remedy=remedy))
        return
    if node.mode is not wanted.mode:
        turn.put(replace(node, mode=wanted.mode))
        turn.event(EVENTS[wanted.mode], node=wanted.node, reason=_by(wanted.by))
        if NodeMode.PAUSED in (node.mode, wanted.mode):
            _forget_reading(turn, wanted)
    turn.answer(wanted.cause, None)


def on_cordon_set(turn: Turn, wanted: CordonSet) -> None:
    """Cordon one GPU, or put it back into use."""
    gpu = turn.ledger.gpus.get(wanted.uuid)
    if gpu is None:
        detail = f"There is no GPU {wanted.uuid}."
        turn.answer(wanted.cause, NotFound(detail, remedy="gpulease status --json shows those there are."))
        return
    if gpu.cordoned is not wanted.cordoned:
        turn.put(replace(gpu, cordoned=wanted.cordoned))
        kind = "gpu.cordoned" if wanted.cordoned else "gpu.uncordoned"
        turn.event(kind, node=gpu.device.node, gpus=(wanted.uuid,), reason=_by(wanted.by))
    turn.answer(wanted.cause, None)


def while_paused(ledger: Ledger, node: str, report: NodeReport) -> NodeReport:
    """The report as it counts: nothing that a worker read before it knew of the pause does."""
    if mode_of(ledger, node) is not NodeMode.PAUSED or report.problem is not None:
        return report
    return replace(report, problem=f"{PAUSED}, but still read", gpus=())


def _forget_reading(turn: Turn, wanted: NodeModeSet) -> None:
    """What was read before a pause says nothing after it: the hardware may be another one."""
    before = turn.ledger.sightings.get(wanted.node)
    if before is not None:
        problem = f"{PAUSED}, a moment ago"
        if wanted.mode is not NodeMode.PAUSED:
            problem = f"node {wanted.node} was resumed and has not reported since"
        turn.put(replace(before, problem=problem, observed_at_s=None, readings={}))
    turn.want_reading(wanted.node)


def _active_leases(ledger: Ledger, node: str) -> list[str]:
    held = {gpu.lease_id for gpu in ledger.gpus.values() if gpu.device.node == node and not gpu.draining}
    return sorted(lease_id for lease_id in held if lease_id is not None)


def _by(user: str | None) -> str | None:
    return None if user is None else f"by user {user}"
