"""Which nodes of a gang are asked for a reading at a moment: so that slow readings end at the same time.

A gang needs a recent reading of each of its nodes at once, and a reading stays recent for `max_observation_age_s` after
it has ended. Where each node is asked as soon as its last reading is too old, readings of a second and more end one
after the other, and each is too old when the next one ends: four nodes then wait for minutes. So

- while a node is asked, no other is that would end later: once the last one has answered, all are asked together;
- of nodes that take unequally long, the quicker are asked later, so that they end with the slowest;
- a recent reading is asked for again if it would be too old by then.

How long a node takes is what its last reading took. Only when to ask rests on that, never a grant. A node that others
ask all the time holds up no gang: what has been too old for twice as long as the slowest takes is asked in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuRecord, NodeObservation
from gpulease_server.core.turn import Turn


def nodes_to_ask(turn: Turn, old: Collection[str], gpus: Sequence[GpuRecord]) -> list[str]:
    """The nodes to be asked now for a gang that would get these GPUs. `old`: those with a reading that is too old."""
    seen, nodes = turn.ledger.node_observations, dict.fromkeys([*(gpu.device.node for gpu in gpus), *old])
    if len(nodes) == 1:
        return list(old)
    took_s = {node: _took_s(seen.get(node)) for node in nodes}
    slowest_s, slack_s, now_s = max(took_s.values()), turn.policy.max_observation_age_s / 2, turn.now.mono_s
    if slowest_s <= slack_s:
        return list(old)
    until_s = {node: _recent_until_s(seen.get(node), took_s[node], turn.policy) for node in took_s}
    ends_s = [turn.requested_readings[node] + took_s[node] for node in took_s if node in turn.requested_readings]
    others = [node for node in took_s if node not in turn.requested_readings]
    overdue = [node for node in others if node in old and until_s[node] < now_s - 2 * slowest_s]
    if ends_s:
        end_s = max(now_s, *ends_s)
        in_time = [node for node in others if until_s[node] < end_s and abs(now_s + took_s[node] - end_s) <= slack_s]
        return list(dict.fromkeys([*in_time, *overdue]))
    needed = [node for node in others if node in old]
    while True:  # each round needs more nodes, or is the last
        end_s = now_s + max((took_s[node] for node in needed), default=0.0)
        more = [node for node in others if node in old or until_s[node] < end_s]
        if len(more) == len(needed):
            return [node for node in needed if now_s + took_s[node] >= end_s - slack_s]
        needed = more


def _took_s(observation: NodeObservation | None) -> float:
    return 0.0 if observation is None else min(observation.read_s or 0.0, observation.reading_limit_s)


def _recent_until_s(observation: NodeObservation | None, took_s: float, policy: Policy) -> float:
    """Until when the last reading of a node counts for a gang, see `gpu.is_recent`; it may have counted never."""
    if observation is None or observation.observed_at_s is None:
        return float("-inf")
    return observation.observed_at_s + policy.max_observation_age_s + (took_s if observation.answers_request else 0.0)
