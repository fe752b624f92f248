"""Logs of jobs on other hosts: the daemon asks their nodes for them, and passes on what they send.

A request is a part of the node's desired state while someone waits for it (`DesiredState.log_requests`). Its worker
posts pieces, each answered once it was taken, so a slow caller slows down the reading and no one stores anything. The
worker's side, and what happens when something fails, is in `gpulease_worker.jobs.log_sender`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from gpulease_protocol.errors import InvalidRequest, Unavailable
from gpulease_protocol.host.log_reader import key_of
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.node_protocol import LogPiece, LogProgress, LogRequest

MAX_REQUESTS = 64
"""Logs that one node is asked for at a time, at most."""
MAX_REQUESTS_PER_USER = 16
"""Of those, for one caller."""
WINDOW = 2
"""Pieces that have arrived and were not sent on, at most."""
HOLD_S = 20.0
"""How long the answer to a piece is held while the caller takes none."""
GONE = LogProgress(next_number=-1, is_wanted=False)
"""The answer to a piece of a log that no one waits for."""


@dataclass(frozen=True, slots=True)
class TakenPiece:
    """A piece for the caller."""

    offset: str
    content: bytes


class RelayedLog:
    """One log that a node is asked for, while someone waits for it."""

    def __init__(
        self, relay: LogRelay, node: str, request: LogRequest, user: str | None, changed: asyncio.Event
    ) -> None:
        self._relay = relay
        self.node = node
        self.request = request
        self.user = user
        self.sizes: tuple[int, int] | None = None
        """Length of the log and how much of it is kept, as of the last piece; None before the first."""
        self.problem: str | None = None
        """Why the node sends no more."""
        self.ended = False
        """True when the last piece has arrived."""
        parts = [f"{key}:{place}" for key, place in request.offsets.items()]
        self.offset = (",".join(parts) if request.name is None else parts[0].partition(":")[2] if parts else "") or "0"
        self._pieces: deque[TakenPiece] = deque()
        self._next_number = 0
        self._arrived_offset: str | None = None
        self._changed = changed
        self._arrived = asyncio.Event()
        self._space = asyncio.Event()
        self._space.set()
        self._closed = False

    async def deliver(self, piece: LogPiece) -> LogProgress:
        """Take a piece in when there is space for it; what the worker goes on with. Raises InvalidRequest."""
        content = _decoded(piece)
        try:
            async with asyncio.timeout(HOLD_S):
                await self._space.wait()
        except TimeoutError:
            return self._progress()
        if self._closed:
            return GONE
        if piece.number != self._next_number:
            return self._progress()
        self._next_number += 1
        self._arrived_offset = piece.offset
        self.sizes = (max(piece.total_bytes, 0), max(piece.kept_bytes, 0))
        self.problem, self.ended = piece.problem, piece.end
        if not content and not self._pieces:
            self.offset = piece.offset
        if content:
            self._pieces.append(TakenPiece(piece.offset, content))
        if len(self._pieces) >= WINDOW:
            self._space.clear()
        self._arrived.set()
        self._changed.set()
        return self._progress()

    def _progress(self) -> LogProgress:
        offsets = () if self._arrived_offset is None else tuple(_offsets(self.request.name, self._arrived_offset))
        return LogProgress(next_number=self._next_number, is_wanted=not self.ended, offsets=dict(offsets))

    async def first(self, timeout_s: float) -> None:
        """Return when the node has begun to send. Raises Unavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            raise self._silent() from None

    def take(self) -> bytes:
        """The next bytes; empty if there are none now."""
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        self._space.set()
        self.offset = piece.offset
        return piece.content

    async def rest(self) -> bytes:
        """The next bytes, or empty when all have come. Asks for no more than there is. Raises Unavailable."""
        if self.request.follow:
            self.request = replace(self.request, follow=False)
            self._relay.tell(self.node)
        while not self._pieces:
            if self.ended:
                return b""
            self._arrived.clear()
            await self.first(HOLD_S)
        return self.take()

    def _silent(self) -> Unavailable:
        return Unavailable(
            f"Node {self.node}, where the log of job {self.request.job_id} is, does not send it.",
            remedy=f"Ask again, or look at the worker of {self.node}.",
        )

    def close(self) -> None:
        """Ask for it no longer."""
        self._closed = True
        self._space.set()
        self._relay.drop(self)


class LogRelay:
    """The logs that nodes are asked for. For one event loop.

    Args:
        tell: Called with a node's name when what it is asked for has changed.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self._logs: dict[str, dict[str, RelayedLog]] = {}
        """By node and id."""

    def ask(self, node: str, request: LogRequest, user: str | None, changed: asyncio.Event) -> RelayedLog:
        """Ask a node for a log, on behalf of a user. `changed` is set when a piece arrives. Raises Unavailable."""
        logs = self._logs.get(node, {})
        own = sum(one.user == user for one in logs.values())
        if len(logs) >= MAX_REQUESTS or own >= MAX_REQUESTS_PER_USER:
            detail = f"Node {node} sends {len(logs)} logs already, {own} of them to you."
            raise Unavailable(detail, remedy="End one of them, or ask again later.")
        request = replace(request, id=secrets.token_hex(16))
        log = RelayedLog(self, node, request, user, changed)
        self._logs.setdefault(node, {})[request.id] = log
        self.tell(node)
        return log

    def requests(self, node: str) -> tuple[LogRequest, ...]:
        """What a node is asked for."""
        return tuple(log.request for log in self._logs.get(node, {}).values() if not log.ended)

    async def deliver(self, node: str, piece: LogPiece) -> LogProgress:
        """Pass on a piece that a node's worker has sent. Raises InvalidRequest."""
        log = self._logs.get(node, {}).get(piece.request_id)
        return GONE if log is None else await log.deliver(piece)

    def drop(self, log: RelayedLog) -> None:
        """No one waits for a log any more."""
        logs = self._logs.get(log.node, {})
        if logs.pop(log.request.id, None) is not None:
            if not logs:
                del self._logs[log.node]
            self.tell(log.node)


def _decoded(piece: LogPiece) -> bytes:
    try:
        return base64.b64decode(piece.content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("content: must be base64.") from error


def _offsets(name: str | None, offset: str) -> list[tuple[str, int]]:
    """Where each file goes on, by its key, from the offset of a piece."""
    if name is not None:
        return [(key_of(name), int(offset))] if offset.isdecimal() else []
    parts = [part.split(":") for part in offset.split(",") if ":" in part]
    return [(key, int(place)) for key, place in parts if place.isdecimal()]
