"""Which nodes are ready for a gang that waits, and what the others wait for."""

from __future__ import annotations

from gpulease_protocol.explanation import NodeReadiness
from gpulease_protocol.model import Demand
from gpulease_server.core.calendar import NO_GPUS
from gpulease_server.core.explain.obstacles import obstacle
from gpulease_server.core.gpu import ends_too_soon
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.placement import find_candidates, reach_of
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant
from gpulease_server.core.wording import count_gpus, some_of


def node_readiness(
    ledger: Ledger,
    demand: Demand,
    reserved_for: dict[str, str],
    unread: set[str],
    now: Instant,
    policy: Policy,
    closed: frozenset[str] = NO_GPUS,
) -> tuple[NodeReadiness, ...]:
    """Each node by name. Ready ones are those of one group, of which most are ready: one model, and nodes that reach
    each other."""
    if demand.nodes == 1:
        return ()
    free: dict[tuple[str, str], dict[str, int]] = {}
    said: dict[str, str] = {}
    for model, by_node in find_candidates(ledger, demand).by_model.items():
        for node, uuids in by_node.items():
            free_now = (uuid for uuid in uuids if uuid in ledger.fleet.free_gpus and uuid not in closed)
            usable = sum(
                obstacle(ledger, demand, ledger.gpus[uuid], reserved_for, unread, now, policy) is None
                for uuid in free_now
            )
            reach = reach_of(ledger, demand, node)
            if reach is None:
                said[node] = f"Node {node} {_no_address(ledger, node)}."
                continue
            free.setdefault((model, reach), {})[node] = usable
            if ends_too_soon(ledger, demand, node, now):
                said[node] = f"Node {node} goes before this must have ended."
            said.setdefault(node, f"Node {node} has {usable} of {count_gpus(demand.count)}.")
    best = max(sorted(free), key=lambda key: sum(number >= demand.count for number in free[key].values()), default=None)
    ready = {node for node, number in free.get(best or ("", ""), {}).items() if number >= demand.count}
    for key, numbers in free.items():
        for node, number in numbers.items():
            if key != best and number >= demand.count and node not in ready:
                said[node] = f"Node {node} has {count_gpus(number)} {_other_group(key, best)}."
    known = sorted(ledger.fleet.gpus_of_node)
    return tuple(
        NodeReadiness(
            node=node,
            ready=node in ready,
            sentence=f"Node {node} is ready."
            if node in ready
            else said.get(node, f"Node {node} has fewer than {count_gpus(demand.count)} for it."),
        )
        for node in known
    )


def describe_readiness(demand: Demand, nodes: tuple[NodeReadiness, ...]) -> str:
    """How many nodes are ready, and what the others lack, as a part of the sentence; empty without a gang."""
    if demand.nodes == 1:
        return ""
    ready = [one.node for one in nodes if one.ready]
    named = f": {some_of(ready)}" if ready else ""
    others = " ".join([one.sentence for one in nodes if not one.ready][:8])
    return f" {len(ready)} of {demand.nodes} nodes are ready{named}. {others}".rstrip()


def _no_address(ledger: Ledger, node: str) -> str:
    if node not in ledger.node_observations:
        return "has not reported yet"
    return "has no address at which other nodes reach it; start its worker with --address"


def _other_group(key: tuple[str, str], best: tuple[str, str] | None) -> str:
    if best is not None and key[0] != best[0]:
        return f"of another model ({key[0] or 'unknown'})"
    return "and an address that other nodes do not reach; start its worker with --address"
