"""What a conversation with a daemon is made of, whoever carries it.

A conversation (`talk`) is a generator that decides and does nothing: it yields a step and is sent what came of it, or
has the failure thrown in. `transport.Transport` takes the steps in the calling thread, `async_transport.AsyncTransport`
in an event loop. So every decision (which address, whether to ask again, when to take a request back) is written once.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from gpulease.addresses import Address
from gpulease.calls import Call

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Send one call to one address. Its outcome is an `Answered`, `NotReached` or `BrokenOff`."""

    address: Address
    """Where to."""
    call: Call[Any]
    """What to ask."""
    limit_s: float
    """How long to wait for the answer, and for each part of it."""
    connect_s: float
    """How long to wait for a connection, within `limit_s`."""
    knock: bool
    """Try a bare connection first, because nobody may be there."""
    stream: bool = False
    """Leave the body of a 2xx answer to be read by `NextPiece`."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait, without an outcome."""

    seconds: float
    """How long."""


@dataclass(frozen=True, slots=True)
class NextPiece:
    """The next bytes of the streamed answer; null at its end, and `BrokenOff` when it breaks off."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand something to whoever reads a stream."""

    item: Any
    """Text of a log, or an event."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An HTTP answer of whatever status."""

    status: int
    """HTTP status."""
    reason: str
    """Its words."""
    content: bytes = b""
    """The body; empty for a streamed one."""
    retry_after_s: float | None = None
    """How long the server wants to be left alone, where it says that."""
    as_of: str | None = None
    """When the answer was true, where the daemon cannot say that it still is: it stands by, or has lost its lock."""


class NotReached(Exception):
    """Nothing was sent: nobody is there, or no connection came about."""


class BrokenOff(Exception):
    """The call may have been carried out, but no answer came."""

    def __init__(self, reason: str, *, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late
        """True when the time was over, false when the connection broke."""


Step: TypeAlias = "Attempt | Sleep | NextPiece | Emit"
Steps: TypeAlias = "Generator[Step, Any, Result]"
