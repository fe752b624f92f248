"""Sends the daemon what it asks for of the logs of this node's jobs, for callers of `GET /v1/jobs/{id}/logs`.

The daemon names each request in its desired state, for as long as someone waits for it. A task reads the files, as a
daemon does on its own host (`gpulease_protocol.host.log_reader`), and posts what is there in pieces, one at a time: the
answer to one comes when the caller has taken those before it. Then it waits until a file grows.

| what fails | what happens |
|---|---|
| a piece, or its answer, is lost | it is sent again; the daemon knows its number, and takes it once |
| the worker | the next one is asked for the same, and is told where to go on |
| the daemon | its requests are gone; the caller asks the next daemon for the rest |
| a file does not answer (its user's file system) | the caller is told; its thread counts until it has ended |
| many are asked for | `MAX_REQUESTS` at a time; together `RATE_BYTES_S`; `MAX_OPEN_FILES` of one user |
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.errors import GpuleaseError, Unavailable
from gpulease_protocol.host.daemon_thread import call_in_thread
from gpulease_protocol.host.file_poller import FileFollower, FilePoller
from gpulease_protocol.host.log_reader import LAUNCHER, RANK_LOG, LogReader
from gpulease_protocol.node_protocol import LogPiece, LogProgress, LogRequest, attempt_name

MAX_REQUESTS = 64
"""Logs that are sent at one time, at most."""
RATE_BYTES_S = 16 * 2**20
"""What is sent of all logs together, in bytes per second."""
CHUNK_BYTES = 2**15
"""What is read at a time: a piece of many short lines is twelve times as long with the names of their ranks."""
PATIENCE_S = 20.0
"""How long a read may take."""
RECHECK_S = 2.0
"""How often a followed log is read even if no file of it has changed, as the poller sees them."""
RETRY_S = (0.1, 2.0)
"""First and longest pause before a piece is sent again."""
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")

Send = Callable[[LogPiece], Awaitable[LogProgress]]

log = logging.getLogger(__name__)


class LogSenders:
    """The logs that are being sent.

    Args:
        jobs: The directory of this node's jobs.
        send: Sends a piece to the daemon. Raises GpuleaseError.
    """

    def __init__(self, jobs: Path, send: Send) -> None:
        self._jobs = jobs
        self._send = send
        self._senders: dict[str, _Sender] = {}
        self._poller = FilePoller(lambda poll, files: asyncio.wrap_future(call_in_thread(poll, files)))
        self._hanging = 0
        """Reads that have not ended in time, and have not ended since."""
        self._next_s = 0.0
        """When the next piece may be sent, by the monotonic clock."""

    def reconcile(self, requests: Sequence[LogRequest]) -> None:
        """Send what is asked for, and nothing that no longer is."""
        wanted = {request.id: request for request in requests}
        for request_id in self._senders.keys() - wanted.keys():
            self._senders.pop(request_id).cancel()
        for request_id, request in wanted.items():
            if (sender := self._senders.get(request_id)) is not None:
                sender.update(request)
            elif len(self._senders) + self._hanging < MAX_REQUESTS:
                self._senders[request_id] = _Sender(self, request)

    async def close(self) -> None:
        """Send nothing more."""
        tasks = [sender.cancel() for sender in self._senders.values()]
        self._senders.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    def directory(self, request: LogRequest) -> Path | None:
        """The logs that are asked for; None if they can be none of this node's jobs."""
        name = attempt_name(request.job_id, request.attempt)
        of_job = request.name in (None, LAUNCHER) or RANK_LOG.fullmatch(request.name or "") is not None
        return self._jobs / name / "logs" if JOB_ID.fullmatch(request.job_id) and of_job else None

    async def read(self, function: Callable[..., bytes | None], *arguments: object) -> bytes | None:
        """The result of a read, in a thread of its own. Raises TimeoutError for one that hangs."""
        work = call_in_thread(function, *arguments)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.shield(asyncio.wrap_future(work))
        except TimeoutError:
            self._hanging += 1
            work.add_done_callback(lambda _: _call_in(loop, self._hangs_no_longer))
            raise

    def _hangs_no_longer(self) -> None:
        self._hanging -= 1

    async def send(self, piece: LogPiece) -> LogProgress:
        """Send a piece when its turn comes, until a daemon has answered."""
        now_s = time.monotonic()
        self._next_s = max(self._next_s, now_s) + len(piece.content) / RATE_BYTES_S
        await asyncio.sleep(max(0.0, self._next_s - now_s - 1.0))  # a second ahead, so that short logs are not paced
        pause_s, longest_s = RETRY_S
        while True:
            try:
                return await self._send(piece)
            except GpuleaseError as error:
                log.debug("a piece of a log was not taken: %s", error.detail)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def follow(self, changed: asyncio.Event) -> FileFollower:
        """A follower of no files yet; `changed` is set whenever one of its files changes."""
        return self._poller.follow(changed)


class _Sender:
    """Sends one log."""

    def __init__(self, senders: LogSenders, request: LogRequest) -> None:
        self._senders = senders
        self._request = request
        self._changed = asyncio.Event()
        self._follower = senders.follow(self._changed)
        self._reader: LogReader | None = None
        self._number = 0
        self._task = asyncio.create_task(self._run())

    def update(self, request: LogRequest) -> None:
        """The request as it is now: whether more is wanted than is there."""
        if request.follow is not self._request.follow:
            self._request = request
            self._changed.set()

    def cancel(self) -> asyncio.Task[None]:
        """Send nothing more."""
        self._task.cancel()
        return self._task

    async def _run(self) -> None:
        try:
            while await self._next():
                pass
        except TimeoutError:
            with suppress(GpuleaseError):
                await self._send(b"", end=True, problem="its files do not answer")
        except OSError as error:
            await self._send(b"", end=True, problem=f"it cannot be read: {error.strerror or error}")
        except Unavailable as error:
            await self._send(b"", end=True, problem=error.detail.rstrip("."))
        finally:
            self._follower.close()
            if self._reader is not None:
                call_in_thread(self._reader.close)

    async def _next(self) -> bool:
        """Send what is there, or wait for more. False when all is sent that was asked for."""
        if self._reader is None and not await self._open(self._request.offsets, self._request.tail):
            await self._send(b"", end=True, problem="it is no longer there")
            return False
        reader = self._reader
        assert reader is not None
        if self._number == 0:
            return await self._send(b"", end=False)
        self._changed.clear()
        last = not self._request.follow
        content = await self._senders.read(reader.take, last) or b""
        if not content and not last:
            self._follower.set_files(reader.descriptors)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RECHECK_S)
            return True
        end = last and not content
        return await self._send(content, end=end)

    async def _open(self, offsets: dict[str, int], tail: int | None) -> bool:
        directory = self._senders.directory(self._request)
        if directory is None or not await asyncio.to_thread(directory.parent.is_dir):
            return False
        name, label = self._request.name, self._request.label
        self._reader = LogReader(directory, name, offsets, tail, label=label, chunk_bytes=CHUNK_BYTES)
        await self._senders.read(self._reader.open)
        return True

    async def _send(self, content: bytes, *, end: bool, problem: str | None = None) -> bool:
        """Send a piece until it is taken. False when nothing more is wanted."""
        reader = self._reader
        sizes = (0, 0) if reader is None or problem else await asyncio.to_thread(reader.sizes)
        piece = LogPiece(
            request_id=self._request.id,
            number=self._number,
            offset="0" if reader is None else reader.offset,
            content=base64.b64encode(content).decode(),
            total_bytes=sizes[0],
            kept_bytes=sizes[1],
            end=end,
            problem=problem,
        )
        while True:
            progress = await self._senders.send(piece)
            if progress.next_number == piece.number:
                continue
            if progress.is_wanted and progress.next_number != piece.number + 1:
                # Another worker began it: this one goes on from there.
                self._number = progress.next_number
                if reader is not None:
                    call_in_thread(reader.close)
                self._follower.close()
                return await self._open(dict(progress.offsets), None)
            self._number += 1
            return progress.is_wanted and not end


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function)
