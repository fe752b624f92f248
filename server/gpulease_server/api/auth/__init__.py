"""Authentication, authorization and redaction: who sends a request, what they may do, and what they may see.

Several classes describe people and processes. From the connection to the ledger:

| class | describes | made from |
|---|---|---|
| `PeerCredentials` | the other end of a connection: uid, gid, pid | SO_PEERCRED, or who owns the peer's socket |
| `TokenIdentity` (`runtime.bearer_tokens`) | user and role of a valid bearer token | the Authorization header |
| `Caller` | who sends a request: user, role, and how that is known | a token if one is sent, else the peer |
| `OwnerClaim` | the process that a request names as owner of its lease | the request, checked against the peer |
| `Holder` (`gpulease_protocol.model`) | who holds a lease, in the ledger and on the wire | `Caller` and `OwnerClaim` |
| `TokenAccount` (`runtime.host_accounts`) | login name, uid and gid on this host | the name in a token request |

`access_rules.authorize` runs before every route: it makes the `Caller` and applies the rule of the route. `redaction`
removes from answers what only the holder may see.
"""
