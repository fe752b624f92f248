"""One entrance for everything that can happen."""

from __future__ import annotations

import itertools
from dataclasses import replace

from gpulease.model import LeaseState

from .administration import on_cordon_set, on_mode_set
from .gpu import node_problem
from .happenings import (
    CordonSet,
    Happening,
    JobCancelled,
    JobSubmitted,
    LeaseAsked,
    LeaseReleased,
    LeaseRenewed,
    NodeModeSet,
    NodeReported,
    Ticked,
    TokenChanged,
    WaiterSeen,
)
from .job import on_cancelled, on_submitted
from .lease import expire, on_asked, on_released, on_renewed, on_waiter_seen
from .ledger import Deadline, KeyForgotten
from .node import forget_nodes, on_reported
from .turn import Turn


def decide(turn: Turn, happening: Happening) -> None:  # noqa: C901
    """Decide on one happening; its effects are in the turn. `settle` closes the turn."""
    turn.cause = happening.cause
    match happening:
        case LeaseAsked():
            on_asked(turn, happening)
        case LeaseRenewed():
            on_renewed(turn, happening)
        case LeaseReleased():
            on_released(turn, happening)
        case WaiterSeen():
            on_waiter_seen(turn, happening)
        case JobSubmitted():
            on_submitted(turn, happening)
        case JobCancelled():
            on_cancelled(turn, happening)
        case NodeReported():
            on_reported(turn, happening)
        case NodeModeSet():
            on_mode_set(turn, happening)
        case CordonSet():
            on_cordon_set(turn, happening)
        case TokenChanged():
            turn.event(happening.kind, reason=happening.reason)
            turn.answer(happening.cause, None)
        case Ticked():
            on_ticked(turn, happening)


def on_ticked(turn: Turn, ticked: Ticked) -> None:
    """End what is due. Time in which the daemon could hear nobody is given back to every holder first."""
    if ticked.since_last_s > turn.policy.stall_s:
        for lease_id, at_s in list(turn.ledger.deadlines.items()):
            turn.put(Deadline(lease_id, at_s + ticked.since_last_s))
    expire(turn)
    _notice_silence(turn)
    forget_nodes(turn)
    _forget_keys(turn)


def _notice_silence(turn: Turn) -> None:
    for sighting in list(turn.ledger.sightings.values()):
        if sighting.problem is None:
            problem = node_problem(turn.ledger, sighting.node, turn.now, turn.policy)
            if problem is not None:
                turn.put(replace(sighting, problem=problem, observed_at_s=None))
                turn.event("node.unknown", node=sighting.node, reason=problem)


def _forget_keys(turn: Turn) -> None:
    if len(turn.ledger.keys_since) < len(turn.ledger.keys):
        # Those of an earlier process, whose age only the wall clock could tell. All are older than those of this one.
        known = turn.ledger.keys_since
        earlier = dict.fromkeys((key for key in turn.ledger.keys if key not in known), turn.now.mono_s)
        turn.ledger.keys_since = earlier | known
    oldest_s = turn.now.mono_s - turn.policy.key_lifetime_s
    surplus = len(turn.ledger.keys) - turn.policy.max_keys
    for number, (key, since_s) in enumerate(list(itertools.islice(turn.ledger.keys_since.items(), 1000))):
        if since_s > oldest_s and number >= surplus:
            break
        made = turn.ledger.leases.get(turn.ledger.keys[key].made)
        if made is not None and made.lease.state is not LeaseState.ENDED:
            # The ranks of a training that is started again after days ask by it for the lease that they still have.
            del turn.ledger.keys_since[key]
            turn.ledger.keys_since[key] = turn.now.mono_s
        else:
            turn.put(KeyForgotten(key))
