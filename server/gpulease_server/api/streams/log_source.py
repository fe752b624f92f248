"""Where the log of one attempt of a job comes from: files of this host, or the worker of the node that has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from gpulease_protocol.errors import NotFound, Unavailable
from gpulease_protocol.host.file_poller import FileFollower
from gpulease_protocol.host.log_reader import LogReader
from gpulease_protocol.node_protocol import LogRequest
from gpulease_server.api import fair_share
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.streams.log_reader_pool import LogReaderPool
from gpulease_server.core.gpu import is_unheard, node_problem
from gpulease_server.runtime.log_relay import RelayedLog

FIRST_PIECE_S = 20.0
"""How long a node may take to begin to send."""


class LogSource(Protocol):
    """The log of one attempt. It is opened first and closed in any case."""

    @property
    def offset(self) -> str:
        """Where to continue reading: an offset, or one for each file that is merged."""

    async def open(self) -> None:
        """Begin. Raises NotFound, Unavailable."""

    async def sizes(self) -> tuple[int, int]:
        """Total length of the log, and how much of that has not been dropped. In bytes."""

    async def take(self, last: bool) -> bytes:
        """The next bytes; empty if there are none now. With `last`, nothing more will be written. Raises LogsHang and
        Unavailable."""

    def watch(self) -> None:
        """From now on tell of more."""

    def close(self) -> None:
        """End it."""


class LocalLog:
    """Files that this daemon reads itself.

    Args:
        pool: The threads that read.
        owner: The user of the job.
        reader: Of the files.
        follower: Is told of changes.
    """

    def __init__(self, pool: LogReaderPool, owner: str | None, reader: LogReader, follower: FileFollower) -> None:
        self._pool, self._owner, self._reader, self._follower = pool, owner, reader, follower

    @property
    def offset(self) -> str:
        """As `LogSource.offset`."""
        return self._reader.offset

    async def open(self) -> None:
        """Open the files."""
        await self._pool.run(self._owner, self._reader.open)

    async def sizes(self) -> tuple[int, int]:
        """As `LogSource.sizes`."""
        return await self._pool.run(self._owner, self._reader.sizes)

    async def take(self, last: bool) -> bytes:
        """Read."""
        return await self._pool.run(self._owner, self._reader.take, last)

    def watch(self) -> None:
        """Follow the files that there are by now."""
        self._follower.set_files(self._reader.descriptors)

    def close(self) -> None:
        """Close the files."""
        self._follower.close()
        self._pool.submit(self._reader.close)


class RemoteLog:
    """Files that the worker of another node reads and sends.

    Args:
        log: What it sends.
        check: Raises Unavailable or NotFound when the node cannot send now.
    """

    def __init__(self, log: RelayedLog, check: Callable[[], None]) -> None:
        self._log = log
        self._check = check

    @property
    def offset(self) -> str:
        """As `LogSource.offset`."""
        return self._log.offset

    async def open(self) -> None:
        """Wait until the node has begun to send."""
        async with fair_share.waiting():
            await self._log.first(FIRST_PIECE_S)
        if self._log.problem is not None:
            job_id, node = self._log.request.job_id, self._log.node
            raise NotFound(f"The log of job {job_id} on node {node}: {self._log.problem}.", remedy="It is gone.")

    async def sizes(self) -> tuple[int, int]:
        """As `LogSource.sizes`, as of when it was opened."""
        return self._log.sizes or (0, 0)

    async def take(self, last: bool) -> bytes:
        """What has arrived; with `last`, what is still to come too."""
        if (piece := self._log.take()) or not last:
            return piece
        self._check()
        async with fair_share.waiting():
            return await self._log.rest()

    def watch(self) -> None:
        """Nothing to do: the worker sends more when there is more."""

    def close(self) -> None:
        """Ask for no more."""
        self._log.close()


def ask_node(
    daemon: DaemonState, request: LogRequest, directory: str, user: str | None, changed: asyncio.Event
) -> RemoteLog:
    """Ask the node of `NODE:DIRECTORY`, see `api.report_body`. Raises NotFound and Unavailable, with the place."""
    node, _, path = directory.partition(":/")
    place = f"The log of job {request.job_id} is on node {node}, in /{path}"
    check = partial(_check_sends, daemon, node, place)
    check()
    return RemoteLog(daemon.log_relay.ask(node, request, user, changed), check)


def _check_sends(daemon: DaemonState, node: str, place: str) -> None:
    """Raises NotFound or Unavailable when a node does not send the log that is in this place."""
    ledger, now = daemon.ledger, daemon.now()
    if daemon.writer.problem is None and node not in ledger.nodes:
        raise NotFound(
            f"{place}, and that node is gone: it has left, or was forgotten.",
            remedy=f"Read it there, if its host still has it, or start a worker for {node} again.",
        )
    observation = ledger.node_observations.get(node)
    if daemon.writer.problem is not None or observation is None or is_unheard(ledger, node, now, daemon.policy):
        why = daemon.writer.problem or node_problem(ledger, node, now, daemon.policy) or f"{node} does not report"
        raise Unavailable(f"{place}, and cannot be read now: {why}.", remedy="Ask again when the node reports.")
    if not observation.sends_logs:
        raise NotFound(
            f"{place}, and the worker there is of a release that does not send logs.",
            remedy=f"Read it there, or upgrade gpulease on {node}.",
        )
