"""What a pool asks of the daemon, over the API that everyone uses, with an administrator's rights."""

from __future__ import annotations

from gpulease.client import Client
from gpulease_protocol.errors import InUse, NotFound
from gpulease_protocol.model import GpuState, NodeState
from gpulease_protocol.tokens import Role, TokenRequest


class DaemonClient:
    """The daemon. All raise `GpuleaseError`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def ready_nodes(self) -> frozenset[str]:
        """Names of the nodes that report."""
        return frozenset(node.name for node in self._client.nodes() if node.state is NodeState.READY)

    def known_nodes(self) -> frozenset[str]:
        """Names of all nodes."""
        return frozenset(node.name for node in self._client.nodes())

    def idle_nodes(self) -> frozenset[str]:
        """Names of the nodes with all GPUs free."""
        gpus = self._client.gpus()
        return frozenset(gpu.node for gpu in gpus) - {gpu.node for gpu in gpus if gpu.state is not GpuState.FREE}

    def has_queue(self) -> bool:
        """True while a request waits for GPUs."""
        return bool(self._client.leases(state="queued"))

    def make_token(self, note: str) -> str:
        """A new token for a worker, with a note by which it is found."""
        made = self._client.create_token(TokenRequest(user="gpulease-fleet", role=Role.WORKER, note=note))
        return made.bearer

    def has_token(self, note: str) -> bool:
        """True if a token with that note is valid."""
        return any(token.note == note for token in self._client.tokens())

    def revoke_tokens(self, note: str) -> None:
        """Revoke every token with that note."""
        for token in self._client.tokens():
            if token.note == note:
                self._client.revoke_token(token.id)

    def forget(self, node: str) -> bool:
        """Forget a node that has lost its allocation. False while its worker is still heard."""
        try:
            self._client.forget_node(node)
        except NotFound:
            return True
        except InUse:
            return False
        return True
