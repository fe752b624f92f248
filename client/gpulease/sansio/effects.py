"""The effects of the sans-I/O client, which flows yield and a transport performs.

A flow (`flows.Flows`) is a generator that decides and does no I/O, like httpx's `Auth.auth_flow`:

    def alive(self) -> Flow[bool]:
        try:
            response = yield Attempt(address, call, ...)     # the transport sends it, and sends the response in here
        except NotConnected:                                 # or throws in the failure
            yield Sleep(0.1)
            return False
        return response.status == 200

`sync_transport.Transport` runs a flow in the calling thread, `async_transport.AsyncTransport` in an event loop. So
every decision (which address, whether to retry, when to withdraw a request) is written once.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Generic, TypeAlias, TypeVar

from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.host.addresses import Address
from gpulease_protocol.lazy_dataclass import dataclass

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Send one call to one address. The outcome is a `Response`; or `NotConnected` or `ResponseLost` is thrown in."""

    address: Address
    """Where to send it."""
    call: ApiCall[Any]
    """What to send."""
    timeout_s: float
    """How long to wait for the response, and for each part of it."""
    connect_timeout_s: float
    """How long to wait for a connection, within `timeout_s`."""
    check_listening: bool
    """Open a bare connection first, because no daemon may be listening."""
    stream: bool = False
    """Leave the body of a 2xx response to be read with `NextChunk`."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait; there is no outcome."""

    seconds: float
    """How long."""


@dataclass(frozen=True, slots=True)
class NextChunk:
    """Read the next bytes of the streamed response. The outcome is None at its end; `ResponseLost` if it breaks off."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Pass an item to the reader of a stream."""

    item: Any
    """A piece of a log, or an event."""


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response of any status."""

    status: int
    """HTTP status."""
    reason: str
    """Reason phrase."""
    content: bytes = b""
    """The body; empty for a streamed response."""
    retry_after_s: float | None = None
    """`Retry-After` in seconds, if the server sent one."""
    as_of: str | None = None
    """When the content was current, if the daemon cannot vouch for it: it is a standby, or has lost its lock."""


class NotConnected(Exception):
    """Nothing was sent, because no connection was made."""


class NotTrusted(NotConnected):
    """Who listens may not be a daemon, or cannot be spoken to; nothing that counts was sent."""

    def __init__(self, reason: str, remedy: str, sentence: str | None = None) -> None:
        super().__init__(reason)
        self.remedy = remedy
        """What to do."""
        self.sentence = sentence
        """The same as `reason`, as a whole sentence with the address; None where `reason` says enough beside it."""


class ResponseLost(Exception):
    """The daemon may have acted on the call, but no complete response came."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out
        """True if the time limit passed, false if the connection broke."""


Effect: TypeAlias = "Attempt | Sleep | NextChunk | Emit"
Flow: TypeAlias = "Generator[Effect, Any, Result]"


class FlowDriver(Generic[Result]):
    """Drives a flow for a transport, which sets `outcome` or `failure` before it calls `next_effect` again."""

    result: Result
    """What the flow returned."""

    def __init__(self, flow: Flow[Result]) -> None:
        self._flow = flow
        self.outcome: object = None
        """What the last effect came to."""
        self.failure: BaseException | None = None
        """What the last effect raised."""

    def next_effect(self) -> Effect | None:
        """The next effect to perform; None when the flow has returned. Raises what the flow raises."""
        outcome, failure, self.outcome, self.failure = self.outcome, self.failure, None, None
        try:
            return self._flow.send(outcome) if failure is None else self._flow.throw(failure)
        except StopIteration as end:
            self.result = end.value
            return None
