"""Which owners each node watches, and what each bearer token has: indexes of the ledger's leases, which it keeps."""

from __future__ import annotations

from gpulease_protocol.model import Lease, LeaseState, Liveness
from gpulease_protocol.node_protocol import LeaseOwner
from gpulease_server.core.records import LeaseRecord


def put_watch(
    watched: dict[str, dict[LeaseOwner, dict[str, None]]], record: LeaseRecord, *, withdrawn: bool = False
) -> None:
    """Bring up to date whether the owner of a lease is watched. `watched`: by node and owner, its leases."""
    if record.watched_owner is None:
        return
    owners, owner = watched.setdefault(record.watched_owner.node, {}), record.watched_owner.owner
    is_live = not withdrawn and record.lease.state is not LeaseState.ENDED
    if is_live and record.lease.liveness is Liveness.PROCESS:
        owners.setdefault(owner, {})[record.lease.id] = None
    elif owner in owners:
        owners[owner].pop(record.lease.id, None)
        if not owners[owner]:
            del owners[owner]


def count_for_token(of_tokens: dict[str, dict[str, int]], lease: Lease, *, withdrawn: bool = False) -> None:
    """Bring up to date how many GPUs a lease holds for its bearer token. `of_tokens`: by token and lease."""
    if lease.holder.token_id is None:
        return
    leases = of_tokens.setdefault(lease.holder.token_id, {})
    if lease.state is LeaseState.ENDED or withdrawn:
        leases.pop(lease.id, None)
    else:
        leases[lease.id] = len(lease.gpus)
    if not leases:
        del of_tokens[lease.holder.token_id]
