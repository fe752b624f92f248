"""Events as a client receives them: server-sent events, put together from the pieces in which they arrive.

Source of the format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from gpulease_protocol.codec import from_json
from gpulease_protocol.errors import error_from_problem
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Event

MAX_EVENT_BYTES = 2**22
"""One event with its lists of GPUs, at most."""
FIELDS = frozenset({"id", "event", "data", "retry"})
FIELD_STARTS = b":" + b"".join(field[:1].encode() for field in sorted(FIELDS))
PRUNED = "events_pruned"


@dataclass(frozen=True, slots=True)
class EventFrame:
    """What stood between two empty lines."""

    seq: int | None
    """Where to go on after it."""
    event: Event | None = None
    """The event; null where only the place was told."""


class EventStreamParser:
    """Puts events together from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[EventFrame]:
        """What is whole with this piece. Raises EventsPruned where the stream says so, and ValueError for anything that
        is no stream of events."""
        *whole, self._rest = (self._rest + piece).split(b"\n\n")
        begins = self._rest[:1]
        if len(self._rest) > MAX_EVENT_BYTES or (begins and begins not in FIELD_STARTS):
            raise ValueError("that is not a stream of events")
        for block in whole:
            frame = _frame(block.decode())
            if frame is not None:
                yield frame


def _frame(block: str) -> EventFrame | None:
    found: dict[str, str] = {}
    for line in block.split("\n"):
        field, _, value = line.partition(":")
        if field and field not in FIELDS:
            raise ValueError("that is not a stream of events")
        if field:
            found[field] = value.removeprefix(" ")
    if found.get("event") == PRUNED:
        raise error_from_problem(json.loads(found["data"]))
    if "id" not in found:
        return None
    event = from_json(Event, json.loads(found["data"])) if "data" in found else None
    return EventFrame(int(found["id"]), event)
