"""Logs of a job: as they are now, or followed until the job has ended; of one on several nodes, those of all of them.

Followers notice changes through one poller (`file_poller`) and read (`log_reader`) in a few shared threads
(`log_reader_pool`). There are at most `MAX_FOLLOWERS`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gpulease_protocol.bounds import MAX_NAME
from gpulease_protocol.errors import NotFound, Unavailable
from gpulease_protocol.host.file_poller import POLL_S
from gpulease_protocol.host.log_reader import LogReader
from gpulease_protocol.log_frames import MEDIA_TYPE, LogFrame
from gpulease_protocol.model import Job, JobMember
from gpulease_protocol.node_protocol import LogRequest
from gpulease_server.api import fair_share
from gpulease_server.api.auth.access_rules import CallerDep, holder_of
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.callers import Caller, is_still_valid
from gpulease_server.api.daemon_state import DaemonDep, DaemonState
from gpulease_server.api.headers import LOG_BYTES, LOG_KEPT_BYTES, LOG_OFFSET, UNBUFFERED
from gpulease_server.api.http_limits import USER_SHARE
from gpulease_server.api.problems import error_responses
from gpulease_server.api.routes.jobs import find_job
from gpulease_server.api.streams.gang_log import GangLog
from gpulease_server.api.streams.log_query import LogQuery, by_file, by_node, record_of_attempt
from gpulease_server.api.streams.log_reader_pool import LogReaderPool
from gpulease_server.api.streams.log_source import LocalLog, LogSource, ask_node
from gpulease_server.core.records import JobRecord
from gpulease_server.runtime import clock

router = new_router("/v1/jobs", "jobs")

MAX_FOLLOWERS = 256
"""Followers of logs at one time, of all jobs together."""
RECHECK_S = 0.5
"""How often a follower reads even if the poller has noticed no change, and checks whether its client is still there."""
KEEP_ALIVE_S = 15.0
"""A log that stays silent for so long sends a frame without content, so that no proxy or firewall in between, nor the
client, takes the connection for dead. Bare text has nothing to send then."""
MAX_LINES = 1_000_000
LOG_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {kind: {"schema": {"type": "string"}} for kind in ("text/plain", MEDIA_TYPE)}}
}


class LogTail:
    """One answer while it is sent."""

    def __init__(
        self, pool: LogReaderPool, daemon: DaemonState, request: Request, caller: Caller, job_id: str, query: LogQuery
    ) -> None:
        self._pool = pool
        self._daemon = daemon
        self._request = request
        self._caller = caller
        self._job_id = job_id
        self._query = query
        self._owner: str | None = None
        """The user of the job; None until it is open."""
        self._source: LogSource | None = None
        self._place = ""
        """What the source reads."""
        self._attempt = query.attempt or 1
        """The attempt that it is of."""
        self._changed = asyncio.Event()
        self._interrupted = False
        """True if more may be written than this answer has sent."""
        pool.follower_count += query.follow  # until it is closed
        pool.followers_by_user[self._caller.user] += query.follow

    async def open(self) -> dict[str, str]:
        """Open the files. Returns the headers that say where the answer begins and how long the log is."""
        record = await self._record()
        self._query.check(record.job)
        _, holder = await holder_of(self._daemon, None, self._job_id)
        self._owner = None if holder is None else holder.user
        await self._open_source(record)
        length, kept = await self._source.sizes() if self._source else (0, 0)
        return UNBUFFERED | {LOG_OFFSET: self.offset, LOG_BYTES: str(length), LOG_KEPT_BYTES: str(kept)}

    @property
    def offset(self) -> str:
        """Where to continue reading: the attempt, and the offset in its files."""
        return f"{self._attempt}@{self._query.offset if self._source is None else self._source.offset}"

    async def frames(self) -> AsyncIterator[bytes]:
        """The log in frames."""
        async with aclosing(self.text()) as pieces:
            async for piece in pieces:
                yield LogFrame(self.offset, piece).encoded()
        if not self._interrupted:
            yield LogFrame(self.offset, end=True).encoded()

    async def text(self) -> AsyncGenerator[bytes, None]:
        """The log's bytes; none after `KEEP_ALIVE_S` without any."""
        sent_s = clock.mono_s()
        try:
            while True:
                last = await self._is_last()
                async for piece in self._available(last):
                    if not is_still_valid(self._caller, self._daemon):
                        self._interrupted = True
                        return
                    yield piece
                    sent_s = clock.mono_s()
                if last:
                    return
                if clock.mono_s() - sent_s >= KEEP_ALIVE_S:
                    yield b""
                    sent_s = clock.mono_s()
                await self._wait()
        except (NotFound, Unavailable) as error:
            self._interrupted = True
            yield f"\n[... {error.detail}]\n".encode()

    def close(self) -> None:
        """Stop following and close all files."""
        self._pool.follower_count -= self._query.follow
        self._pool.followers_by_user[self._caller.user] -= self._query.follow
        self._pool.followers_by_user += Counter()  # drops users without followers
        self._close_source()

    async def _available(self, last: bool) -> AsyncIterator[bytes]:
        """All that can be read now; with `last`, also lines that are not ended."""
        self._changed.clear()
        record = await self._record()
        if self._place_of(record) not in (None, self._place):
            async for piece in self._begin_attempt(record, last):
                yield piece
        if self._source is None:
            return
        if isinstance(self._source, GangLog):
            self._source.update(record.job.members, last=last)
        while piece := await self._source.take(last and not self._interrupted):
            yield piece
        if not last:
            self._source.watch()

    async def _begin_attempt(self, record: JobRecord, last: bool) -> AsyncIterator[bytes]:
        """Open the logs of an attempt. The rest of the one before comes first."""
        is_retry = self._source is not None
        if self._source is not None:
            while piece := await self._source.take(True):
                yield piece
        try:
            await self._open_source(record)
        except Unavailable:
            if last:
                raise
            return  # its node may answer the next time
        if is_retry:
            yield f"[... attempt {self._attempt} begins]\n".encode()

    def _place_of(self, record: JobRecord) -> str | None:
        """What there is to read of an attempt; None while nothing is, or where it has no part on what is asked for."""
        job = record.job
        if not job.members:
            return record.log_directory
        rank = self._query.member_rank(job)
        if rank is not None:
            return next((one.log_directory for one in job.members if one.rank == rank), None)
        has_started = any(one.log_directory is not None for one in job.members)
        return f"attempt {job.attempts}" if has_started else None

    async def _open_source(self, record: JobRecord) -> None:
        place = self._place_of(record)
        if place is None:
            return
        source = self._source_of(record.job, place)
        try:
            await source.open()
        except BaseException:
            source.close()
            raise
        self._close_source()
        self._source, self._place, self._attempt = source, place, record.job.attempts

    def _source_of(self, job: Job, place: str) -> LogSource:
        offset, tail = self._query.begin(job.attempts, self._source is None)
        if not job.members or self._query.member_rank(job) is not None:
            return self._source_in(place, job.attempts, None, offset, tail)

        def of_node(member: JobMember, offset: str, tail: int | None) -> LogSource:
            return self._source_in(member.log_directory or "", job.attempts, member.node, offset, tail)

        source = GangLog(of_node, by_node(offset), tail, self._changed)
        source.update(job.members, last=False)
        return source

    def _source_in(self, directory: str, attempt: int, label: str | None, offset: str, tail: int | None) -> LogSource:
        name, follow = self._query.name, self._query.follow
        offsets = by_file(name, offset)
        if directory.startswith("/"):
            reader = LogReader(Path(directory), name, offsets, tail, label=label)
            return LocalLog(self._pool, self._owner, reader, self._pool.poller.follow(self._changed))
        request = LogRequest(
            job_id=self._job_id, attempt=attempt, name=name, label=label, offsets=offsets, tail=tail, follow=follow
        )
        return ask_node(self._daemon, request, directory, self._caller.user, self._changed)

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()

    async def _is_last(self) -> bool:
        """True if nothing more will be written, or if this answer has to end."""
        record = await self._record()
        if not self._query.follow or record.job.state.final:
            return True
        self._interrupted = (
            self._daemon.stopping.is_set()
            or not await self._is_authenticated()
            or await self._request.is_disconnected()
        )
        return self._interrupted

    async def _is_authenticated(self) -> bool:
        """False if the caller's token has become invalid. A standby, which also serves logs, reads the tokens again."""
        token_id, bearers = self._caller.token_id, self._daemon.bearer_tokens
        return token_id is None or (bearers is not None and await bearers.is_still_valid(token_id))

    async def _wait(self) -> None:
        """Wait until a file or the job has changed, at most `RECHECK_S`."""
        timeout_s = POLL_S if self._source is None else RECHECK_S
        waits = {
            asyncio.ensure_future(self._changed.wait()),
            asyncio.ensure_future(self._daemon.writer.wakeups.wait(f"job:{self._job_id}", timeout_s)),
        }
        try:
            async with fair_share.waiting():
                await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _record(self) -> JobRecord:
        record, number = await find_job(self._daemon, self._job_id), self._query.only_attempt
        return record if number is None else record_of_attempt(record, number, self._query.node)


class LogResponse(StreamingResponse):
    """Sends a `LogTail` and closes it, even if the client has disconnected before anything was sent."""

    def __init__(self, tail: LogTail, headers: dict[str, str], frames: bool) -> None:
        content, kind = (tail.frames(), MEDIA_TYPE) if frames else (tail.text(), "text/plain; charset=utf-8")
        super().__init__(content, media_type=kind, headers=headers)
        self._tail = tail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._tail.close()


@router.get(
    "/{job_id}/logs",
    operation_id="getJobLogs",
    response_class=StreamingResponse,
    responses=LOG_RESPONSE | error_responses("not_found"),
)
async def logs(
    job_id: str,
    daemon: DaemonDep,
    caller: CallerDep,
    request: Request,
    follow: Annotated[bool, Query(description="Continue until the job has ended.")] = False,
    rank: Annotated[
        str | None,
        Query(
            pattern=r"^(all|\d{1,4})$",
            description="Only the lines of this rank; `all`: those of all ranks and of the launcher, each after"
            " `[rank N] ` or `[launcher] `; if absent, the launcher's log, which contains all of them. On several"
            " nodes the launchers' lines come after the names of their nodes, as `[gpubox2] `.",
        ),
    ] = None,
    node: Annotated[
        str | None,
        Query(max_length=MAX_NAME, description="Only what runs on this node; if absent, on all nodes of the job."),
    ] = None,
    offset: Annotated[
        str | None,
        Query(
            max_length=50_000,
            description="Where to begin: a number of bytes, or the offset that an earlier answer gave for this rank.",
        ),
    ] = None,
    tail: Annotated[
        int | None, Query(ge=0, le=MAX_LINES, description="Begin with this number of last lines of each rank.")
    ] = None,
    attempt: Annotated[
        int | None,
        Query(
            ge=1,
            le=1_000_000,
            description="Only this attempt of the job; if absent, the last one, and with `follow` those after it. Of"
            " an earlier attempt on several nodes only the log of the first node is known.",
        ),
    ] = None,
    frames: Annotated[
        bool, Query(description="Answer in frames that say where to continue: a line of JSON, then `bytes` bytes.")
    ] = False,
) -> StreamingResponse:
    """The output of a job, byte for byte; of one on several nodes merged by lines. Where older output was dropped, a
    line says how much; where the log of one of several nodes cannot be read, why.

    `Gpulease-Log-Offset` says where the answer begins, `Gpulease-Log-Bytes` how long the log is, and
    `Gpulease-Log-Kept-Bytes` how much of it has not been dropped.
    """
    await find_job(daemon, job_id)
    query = LogQuery.parse(rank, node, offset, tail, follow, attempt)
    pool = LogReaderPool.of(request)
    own = 0 if caller.is_admin else pool.followers_by_user[caller.user]
    if follow and (pool.follower_count >= MAX_FOLLOWERS or own >= MAX_FOLLOWERS // USER_SHARE):
        detail = f"Too many logs are being followed: {pool.follower_count}, {own} of them by you."
        raise Unavailable(detail, remedy="Read it without follow.")
    log_tail = LogTail(pool, daemon, request, caller, job_id, query)
    try:
        return LogResponse(log_tail, await log_tail.open(), frames)
    except BaseException:
        log_tail.close()
        raise
