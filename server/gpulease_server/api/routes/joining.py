"""How another host joins: the daemon's certificate authority, and a worker's token for a join token."""

from __future__ import annotations

from gpulease_protocol.joining import Authority
from gpulease_protocol.tokens import NewBearerToken
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.callers import invalid_token
from gpulease_server.api.daemon_state import DaemonDep

router = new_router("/v1", "nodes")


@router.get("/ca", operation_id="getAuthority")
async def show_authority(daemon: DaemonDep) -> Authority:
    """The daemon's own certificate authority (`--tls-auto`), and where other hosts reach the daemon.

    Anyone may ask: a new host checks the certificate against the fingerprint in its join token.
    """
    return daemon.authority


@router.post(
    "/nodes/{name}/join",
    operation_id="joinNode",
    status_code=201,
    response_description="Joined; `bearer` is not shown again, and the join token is used up.",
)
async def join(name: str, daemon: DaemonDep, caller: CallerDep) -> NewBearerToken:
    """A token of role `worker` for this node, in exchange for one of role `join`, which is valid once."""
    bearers = daemon.bearer_tokens
    made = None if bearers is None else await bearers.join(caller.token_id or "", name)
    if made is None:
        raise invalid_token()
    return made
