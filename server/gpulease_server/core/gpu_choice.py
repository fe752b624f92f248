"""Which of a node's usable GPUs a demand takes."""

from __future__ import annotations

from collections.abc import Sequence

from gpulease_server.core.ledger import Ledger


def choose_gpus(ledger: Ledger, node: str, usable: Sequence[str], count: int) -> Sequence[str]:
    """The best set of `count` GPUs, see `core.topology`, in PCI order. `usable`: UUIDs of free GPUs of the node, in PCI
    order, at least so many."""
    observation = ledger.node_observations.get(node)
    if len(usable) <= count or observation is None or (topology := observation.topology) is None:
        return usable[:count]
    best = topology.best(usable, ledger.fleet.free.get(node, usable), count)
    return [topology.uuids[position] for position in best.positions]
