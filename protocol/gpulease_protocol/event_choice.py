"""Which events of the history are meant, for `GET /v1/events`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TypedDict


class EventChoice(TypedDict, total=False):
    """Each is optional; together they must all be true of an event."""

    from_at: datetime | None
    """At this time or later."""
    to_at: datetime | None
    """Before this time."""
    kinds: str | Iterable[str]
    """Of this kind, or of one of these: `lease.granted`, or `lease` for all of leases."""
    user: str | None
    """Of leases and jobs of this user."""
    gpu: str | None
    """Of the GPU with this UUID."""
    node: str | None
    lease: str | None
    job: str | None


def query_of(choice: EventChoice) -> list[tuple[str, str]]:
    """The choice as query parameters."""
    query = [
        (name, moment.isoformat())
        for name, moment in (("from", choice.get("from_at")), ("to", choice.get("to_at")))
        if moment is not None
    ]
    names = ("user", "gpu", "node", "lease", "job")
    query += [(name, str(choice.get(name))) for name in names if choice.get(name) is not None]
    kinds = choice.get("kinds", ())
    return query + [("kind", kind) for kind in ((kinds,) if isinstance(kinds, str) else kinds)]
