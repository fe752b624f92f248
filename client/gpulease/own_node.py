"""Which nodes are this host: what runs here can use their GPUs, and no others.

A node says where its worker sees processes (`Node.realm`): the boot of the machine and the pid namespace. Two hosts may
have one name, but never one boot, so a name counts only for nodes that say no realm.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable
from typing import Protocol

from gpulease_protocol.errors import NeverFits
from gpulease_protocol.host.process_id import realm
from gpulease_protocol.model import Node

ANY_NODE = "any"
"""As a node's name: any node of the daemon, also one of another host."""


class NodeClient(Protocol):
    """The part of `Client` that is needed to find the own node."""

    def nodes(self) -> tuple[Node, ...]:
        """As `Client.nodes`."""


def nodes_here(nodes: Iterable[Node]) -> list[Node]:
    """Those of this host, by name; several where the host has several workers.

    Workers that count pids as this process does come before others of this boot: one of the two may be in a container.
    Nodes without a known realm count only if no other is here; then their host name decides.
    """
    here, host = realm(), socket.gethostname()
    ranked: dict[int, list[Node]] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        if (rank := _rank(node, here, host)) is not None:
            ranked.setdefault(rank, []).append(node)
    found = ranked[min(ranked)] if ranked else []
    return [node for node in found if node.host == host] or found


def _rank(node: Node, here: str | None, host: str) -> int | None:
    """How surely a node is this host, 0 is best; None if it is another."""
    if here is None or node.realm is None:
        return 2 if node.host == host else None
    if node.realm == here:
        return 0
    return 1 if _boot(node.realm) == _boot(here) else None


def _boot(realm: str) -> str:
    return realm.partition("/")[0]


def own_node(nodes: Iterable[Node]) -> Node | None:
    """The node of this host: of several, the one that is named as the host, else the first. None if there is none."""
    host, found = socket.gethostname(), nodes_here(nodes)
    return next((node for node in found if node.name == host), found[0] if found else None)


def node_to_ask_for(client: NodeClient, node: str | None, *, must_be_here: bool) -> str | None:
    """The node to name in a request, for a caller that has named this one or none; None for any.

    Without a name that is the own node, where the daemon has others too. Raises NeverFits if `must_be_here` and no node
    of the daemon is.
    """
    if node is not None:
        return None if node == ANY_NODE else node
    nodes = client.nodes()
    if must_be_here and nodes and not nodes_here(nodes):
        raise none_here(nodes)
    own = own_node(nodes)
    return None if own is None or len(nodes_here(nodes)) == len(nodes) else own.name


def none_here(nodes: Collection[Node]) -> NeverFits:
    """That this host has no node, so that nothing that runs here can use a GPU of the daemon."""
    names = sorted(node.name for node in nodes)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    where = f"This host ({socket.gethostname()}) has no node of the daemon"
    return NeverFits(
        f"{where}, which has {shown}: what runs here cannot use GPUs of other hosts.",
        remedy="Send the command there: gpulease submit. Or run a worker here: gpulease worker --url URL.",
    )
