"""The log of a job on several nodes: those of all its nodes, merged by lines.

The log of each node is a `LogSource` of its own: files of this host, or files that the node's worker sends. A node
whose log cannot be read is named in its place, once. With the others it goes on; that node is asked again after
`AGAIN_S`. Where to continue is the offset of each node after its rank: `0/4096;1/812`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from gpulease_protocol.errors import GpuleaseError, NotFound, Unavailable
from gpulease_protocol.model import JobMember
from gpulease_server.api import fair_share
from gpulease_server.api.streams.log_source import LogSource

AGAIN_S = 5.0
"""Pause before a node is asked again when its log could not be read."""

NewSource = Callable[[JobMember, str, int | None], LogSource]
"""Makes the source of one node's log, from where to begin (an offset) and with how many last lines."""


def _unreadable(member: JobMember, error: OSError | GpuleaseError) -> Unavailable:
    """What to say of a log that is there and cannot be read."""
    why = error.detail if isinstance(error, GpuleaseError) else error.strerror or str(error)
    return Unavailable(f"The log of node {member.node} cannot be read: {why}", remedy="It is tried again.")


class _NodeLog:
    """The log of one node."""

    def __init__(self, member: JobMember, offset: str, tail: int | None) -> None:
        self.member = member
        self.offset = offset
        """Where it goes on while it is not open."""
        self.tail = tail
        self.source: LogSource | None = None
        self.opening: asyncio.Task[None] | None = None
        self.problem: GpuleaseError | None = None
        """Why it could not be read the last time."""
        self.note = b""
        """What to say of that."""
        self.again_s = 0.0
        """When to try again, by the monotonic clock."""

    def fail(self, error: GpuleaseError) -> None:
        """Note why it cannot be read, and when to try again: never where it is gone."""
        if self.problem is None:
            self.note = f"[{self.member.node}] [... {error.detail}]\n".encode()
        self.problem = error
        self.again_s = float("inf") if isinstance(error, NotFound) else time.monotonic() + AGAIN_S
        self.close()

    def close(self) -> None:
        """Close the source, and keep where to go on."""
        if self.source is not None:
            self.offset, self.tail = self.source.offset, None
            self.source.close()
            self.source = None


class GangLog:
    """A `LogSource` of several nodes.

    Args:
        new_source: Makes that of one node.
        offsets: Where to begin in the log of each node, by its rank; at its beginning where there is none.
        tail: Begin with this number of last lines of each file; None: at its offset.
        changed: Is set when there may be more to read.
    """

    def __init__(
        self, new_source: NewSource, offsets: Mapping[int, str], tail: int | None, changed: asyncio.Event
    ) -> None:
        self._new_source = new_source
        self._offsets = offsets
        self._tail = tail
        self._changed = changed
        self._logs: dict[int, _NodeLog] = {}
        self._next = 0

    @property
    def offset(self) -> str:
        """As `LogSource.offset`."""
        places = ((rank, one.offset if one.source is None else one.source.offset) for rank, one in self._logs.items())
        return ";".join(f"{rank}/{offset}" for rank, offset in places) or "0"

    def update(self, members: Iterable[JobMember], *, last: bool) -> None:
        """Begin to open the logs of nodes that have one by now. With `last` a node is asked again at once."""
        for member in members:
            one = self._logs.get(member.rank)
            if one is None:
                tail = None if member.rank in self._offsets else self._tail
                one = self._logs[member.rank] = _NodeLog(member, self._offsets.get(member.rank, "0"), tail)
            one.member = member
            is_due = time.monotonic() >= one.again_s or (last and one.again_s != float("inf"))
            if member.log_directory is not None and one.source is None and one.opening is None and is_due:
                one.opening = asyncio.create_task(self._open(one))

    async def open(self) -> None:
        """Return when every node has begun to send, or cannot. Raises NotFound, Unavailable where none can."""
        async with fair_share.waiting():
            await asyncio.gather(*(one.opening for one in self._logs.values() if one.opening is not None))
        opened = [one for one in self._logs.values() if one.member.log_directory is not None]
        if opened and all(one.problem is not None for one in opened):
            assert opened[0].problem is not None
            raise opened[0].problem

    async def _open(self, one: _NodeLog) -> None:
        fair_share.TURN.set(None)  # a task of its own takes no turn
        source = None
        try:
            source = self._new_source(one.member, one.offset, one.tail)
            await source.open()
            one.source, one.problem, source = source, None, None
        except (NotFound, Unavailable) as error:
            one.fail(error)
        except (OSError, GpuleaseError) as error:
            one.fail(_unreadable(one.member, error))
        finally:
            if source is not None:
                source.close()
            one.opening = None
            self._changed.set()

    async def sizes(self) -> tuple[int, int]:
        """As `LogSource.sizes`, of the nodes with an open log."""
        sizes = [await one.source.sizes() for one in self._logs.values() if one.source is not None]
        return sum(size for size, _ in sizes), sum(kept for _, kept in sizes)

    async def take(self, last: bool) -> bytes:
        """The next bytes, from the nodes in turn; empty if there are none now."""
        logs = list(self._logs.values())
        for _ in logs:
            self._next = (self._next + 1) % len(logs)
            if piece := await self._take(logs[self._next - 1], last):
                return piece
        return b""

    async def _take(self, one: _NodeLog, last: bool) -> bytes:
        if last and one.opening is not None:
            async with fair_share.waiting():
                await one.opening
        if one.source is not None:
            try:
                return await one.source.take(last)
            except (NotFound, Unavailable) as error:
                one.fail(error)
            except (OSError, GpuleaseError) as error:
                one.fail(_unreadable(one.member, error))
        note, one.note = one.note, b""
        return note

    def watch(self) -> None:
        """As `LogSource.watch`."""
        for one in self._logs.values():
            if one.source is not None:
                one.source.watch()

    def close(self) -> None:
        """Close the logs of all nodes."""
        for one in self._logs.values():
            if one.opening is not None:
                one.opening.cancel()
            one.close()
