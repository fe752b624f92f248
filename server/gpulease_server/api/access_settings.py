"""Settings of authentication and redaction, as an administrator gives them to `gpulease serve`."""

from __future__ import annotations

from gpulease_protocol.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Who is an administrator, how callers are identified, and what they may see."""

    admins: frozenset[str] = frozenset()
    """Login names of administrators, besides root and the daemon's own user."""
    behind_proxy: bool = False
    """TCP callers are identified by bearer token only: the connection is the proxy's."""
    show_commands: bool = True
    """All users see the command lines of all processes, as with `ps`; otherwise only those of their own."""
    origins: frozenset[str] = frozenset()
    """Origins of web pages that may read answers (CORS), spelled as a browser spells them."""
    max_rps_per_user: float = 0.0
    """Requests per second that one user may send, on average; 0: no limit."""
