"""Who holds a lease: a noun of `gpulease_protocol.model`."""

from __future__ import annotations

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder(Noun):
    """Who holds or asks for a lease."""

    user: str | None = None
    """Login name, where the connection shows it."""
    host: str | None = None
    """Host the request came from."""
    owner_pid: int | None = None
    """Process that owns the lease, on that host."""
    label: str = ""
    """Free text of the holder's own; empty where none was given."""
    agent: str = ""
    """The program that asked on the user's behalf, such as a coding agent; empty where none was named."""
    session: str = ""
    """The session of that program; empty where none was named."""
    token_id: str | None = None
    """Id of the bearer token that the request was sent with; null without one."""
