"""What a job printed: as it stands, or live until the job has ended.

Who follows is told of changes by inotify (`log_watch`), reads in a few threads that all share (`log_reader`), and is
one of at most MAX_FOLLOWERS.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Query, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gpulease.errors import InvalidRequest, Unavailable
from gpulease.exchange import parts_of_run
from gpulease.log_frames import MEDIA_TYPE, Frame

from ..core.ledger import JobRecord
from .callers import Caller
from .connection import SHARE
from .daemon import Daemon, TheDaemon
from .identity import TheCaller
from .jobs import _find
from .log_reader import LAUNCHER, LogReader, key_of
from .log_watch import LOOK_S, LOOK_UNTOLD_S, Watching
from .problems import documented
from .routers import new_router

router = new_router("/v1/jobs", "jobs")

OFFSET, LENGTH, KEPT = "Gpulease-Log-Offset", "Gpulease-Log-Bytes", "Gpulease-Log-Kept-Bytes"
"""Headers of an answer that is text."""
MAX_FOLLOWERS = 256
"""Followers of logs at one time, of all jobs together."""
THREADS = 4
"""Threads that read logs: a file system that hangs holds up logs and nothing else."""
BATCH_S = 0.005
"""Pause after a change, so that a burst of writes is read at once."""
MAX_RANK = 4096
MAX_LINES = 1_000_000
PLACE = re.compile(
    r"(?:(?P<attempt>\d{1,6})@)?(?:(?P<offset>\d{1,18})|(?P<several>(?:\d{1,4}|launcher):\d{1,18}"
    r"(?:,(?:\d{1,4}|launcher):\d{1,18})*))"
)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a job's logs is asked for."""

    name: str | None
    """Name of the file; None for those of all ranks, merged."""
    attempt: int | None
    """The attempt that `places` belongs to; None for whichever is the last."""
    places: dict[str, int]
    """Where to begin in each file."""
    tail: int | None
    """Begin with so many last lines of each file."""
    follow: bool
    """Go on until the job has ended."""

    @classmethod
    def of(cls, rank: str | None, offset: str | None, tail: int | None, follow: bool) -> Wanted:
        """What the query says. Raises InvalidRequest."""
        name = None if rank == "all" else LAUNCHER if rank is None else f"rank-{int(rank)}.log"
        if offset is None:
            return cls(name, None, {}, tail, follow)
        if tail is not None:
            raise InvalidRequest("offset: excludes tail.", remedy="Give one of them.")
        found = PLACE.fullmatch(offset)
        if found is None or (found["several"] is None) == (name is None and offset != "0"):
            raise InvalidRequest(
                f"offset: {offset[:60]!r} is no place in {'the logs of all ranks' if name is None else 'one log'}.",
                remedy="Give a number of bytes, or what Gpulease-Log-Offset or a frame's `at` said for the same rank.",
            )
        attempt = int(found["attempt"]) if found["attempt"] else None
        if found["several"] is None:
            return cls(name, attempt, {} if name is None else {key_of(name): int(found["offset"])}, tail, follow)
        places = dict(part.split(":") for part in found["several"].split(","))
        return cls(name, attempt, {key: int(place) for key, place in places.items()}, tail, follow)

    def reader(self, directory: str, first: bool) -> LogReader:
        """For an attempt's directory; `first` is False when an earlier attempt was read before."""
        same = first and self.attempt in (None, parts_of_run(Path(directory).parent.name)[1])
        return LogReader(Path(directory), self.name, self.places if same else {}, self.tail if first else None)


class LogFeed:
    """What all who read logs share. For one event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.followers = 0
        self.followers_of = Counter[str | None]()
        """By user."""
        self.watching = Watching()
        self._threads = ThreadPoolExecutor(THREADS, "logs")

    @classmethod
    def of(cls, request: Request) -> LogFeed:
        """The one of the application that a request has come to."""
        state = request.app.state
        feed: LogFeed | None = getattr(state, "log_feed", None)
        if feed is None or feed.loop is not asyncio.get_running_loop():
            feed = state.log_feed = cls()
        return feed

    async def blocking(self, call: Callable[..., Result], *arguments: object) -> Result:
        """The result of a call that blocks."""
        return await self.loop.run_in_executor(self._threads, call, *arguments)

    def later(self, call: Callable[[], None]) -> None:
        """Have a call that blocks made, without waiting for it."""
        self._threads.submit(call)


class Reading:
    """One answer while it is sent."""

    def __init__(
        self, feed: LogFeed, daemon: Daemon, request: Request, caller: Caller, job_id: str, wanted: Wanted
    ) -> None:
        self._feed = feed
        self._daemon = daemon
        self._request = request
        self._caller = caller
        self._job_id = job_id
        self._wanted = wanted
        self._reader: LogReader | None = None
        self._attempt = wanted.attempt or 1
        self._changed = asyncio.Event()
        self._told = feed.watching.told(self._changed)
        self._broken_off = False
        feed.followers += wanted.follow  # until it is closed
        feed.followers_of[self._caller.user] += wanted.follow

    async def begin(self) -> dict[str, str]:
        """Open what there is. Returns the headers that say where it begins and how much there is."""
        await self._turn_to((await self._record()).log_directory)
        length, kept = await self._feed.blocking(self._reader.sizes) if self._reader else (0, 0)
        return {
            OFFSET: self.place,
            LENGTH: str(length),
            KEPT: str(kept),
            "X-Content-Type-Options": "nosniff",
        }

    @property
    def place(self) -> str:
        """Where the reading goes on: the attempt, and the place in its files."""
        return f"{self._attempt}@{self._reader.place if self._reader else '0'}"

    async def frames(self) -> AsyncIterator[bytes]:
        """The log in frames."""
        async with aclosing(self.text()) as pieces:
            async for piece in pieces:
                yield Frame(self.place, piece).encoded()
        if not self._broken_off:
            yield Frame(self.place, end=True).encoded()

    async def text(self) -> AsyncGenerator[bytes, None]:
        """The log's bytes."""
        while True:
            last = await self._is_last()
            async for piece in self._what_there_is(last):
                if not self._daemon.knows(self._caller):
                    self._broken_off = True
                    return
                yield piece
            if last:
                return
            await self._wait()

    def close(self) -> None:
        """Be told of nothing and read nothing any more."""
        self._feed.followers -= self._wanted.follow
        self._feed.followers_of[self._caller.user] -= self._wanted.follow
        self._feed.followers_of += Counter()  # forgets whoever follows none
        self._told.close()
        self._close_reader()

    async def _what_there_is(self, last: bool) -> AsyncIterator[bytes]:
        self._changed.clear()
        directory = (await self._record()).log_directory
        if directory is not None and (self._reader is None or str(self._reader.logs) != directory):
            if self._reader is not None:  # another attempt: first the rest of the one before
                while piece := await self._feed.blocking(self._reader.take, True):
                    yield piece
                self._told.close()
            again = self._reader is not None
            await self._turn_to(directory)
            if again:
                yield f"[... attempt {self._attempt} begins]\n".encode()
        if self._reader is None:
            return
        while True:
            while piece := await self._feed.blocking(self._reader.take, last):
                yield piece
            if last or not self._told.of(self._reader.descriptors):
                return

    async def _turn_to(self, directory: str | None) -> None:
        if directory is None:
            return
        first = self._reader is None
        self._close_reader()
        self._reader = self._wanted.reader(directory, first)
        self._attempt = parts_of_run(Path(directory).parent.name)[1]
        await self._feed.blocking(self._reader.open)

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._feed.later(self._reader.close)

    async def _is_last(self) -> bool:
        """True when what is there now is all that there will be, or all that this answer can still send."""
        if not self._wanted.follow or (await self._record()).job.state.final:
            return True
        self._broken_off = (
            self._daemon.stopping.is_set() or not await self._still_known() or await self._request.is_disconnected()
        )
        return self._broken_off

    async def _still_known(self) -> bool:
        """False when the caller's token is in force no more. Also a daemon that stands by lets logs be followed."""
        token_id, bearers = self._caller.token_id, self._daemon.bearers
        return token_id is None or (bearers is not None and await bearers.still_in_force(token_id))

    async def _wait(self) -> None:
        """Until a file has changed, the job has, or it is time to look."""
        look_s = LOOK_S if self._told.everything and self._reader is not None else LOOK_UNTOLD_S
        waits = {
            asyncio.ensure_future(self._changed.wait()),
            asyncio.ensure_future(self._daemon.writer.topics.wait(f"job:{self._job_id}", look_s)),
        }
        try:
            await asyncio.wait(waits, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._changed.is_set():
            await asyncio.sleep(BATCH_S)

    async def _record(self) -> JobRecord:
        return await _find(self._daemon, self._job_id)


class LogResponse(StreamingResponse):
    """Sends a reading and closes it, also where the client has gone before anything could be sent."""

    def __init__(self, reading: Reading, headers: dict[str, str], frames: bool) -> None:
        content, kind = (reading.frames(), MEDIA_TYPE) if frames else (reading.text(), "text/plain; charset=utf-8")
        super().__init__(content, media_type=kind, headers=headers)
        self._reading = reading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reading.close()


@router.get("/{job_id}/logs", response_class=StreamingResponse, responses=documented("not_found", "unavailable"))
async def logs(
    job_id: str,
    daemon: TheDaemon,
    caller: TheCaller,
    request: Request,
    follow: Annotated[bool, Query(description="Go on until the job has ended.")] = False,
    rank: Annotated[
        str | None,
        Query(
            pattern=r"^(all|\d{1,4})$",
            description="Only this rank's lines; with `all` those of all ranks and of the launcher, each after"
            " `[rank N] ` or `[launcher] `; the launcher's log, which has all in it, when left out.",
        ),
    ] = None,
    offset: Annotated[
        str | None,
        Query(
            max_length=50_000,
            description="Begin there: a number of bytes, or a place that an earlier answer named for the same rank.",
        ),
    ] = None,
    tail: Annotated[
        int | None, Query(ge=0, le=MAX_LINES, description="Begin with so many last lines, of each rank.")
    ] = None,
    frames: Annotated[
        bool, Query(description="Answer in frames that say where to go on: a line of JSON, then `bytes` bytes.")
    ] = False,
) -> StreamingResponse:
    """What the job printed, byte for byte. A line says how much is no longer kept.

    `Gpulease-Log-Offset` says where the answer begins, `Gpulease-Log-Bytes` how long the log is and
    `Gpulease-Log-Kept-Bytes` how much of that is still there.
    """
    await _find(daemon, job_id)
    wanted = Wanted.of(rank, offset, tail, follow)
    feed = LogFeed.of(request)
    own = 0 if caller.admin else feed.followers_of[caller.user]
    if follow and (feed.followers >= MAX_FOLLOWERS or own >= MAX_FOLLOWERS // SHARE):
        detail = f"{feed.followers} logs are followed at this moment, {own} by you, and no more can be."
        raise Unavailable(detail, remedy="Read it without follow.")
    reading = Reading(feed, daemon, request, caller, job_id, wanted)
    try:
        return LogResponse(reading, await reading.begin(), frames)
    except BaseException:
        reading.close()
        raise
