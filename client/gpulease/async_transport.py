"""Takes the steps of a conversation in an event loop: the twin of `transport`, with the same bounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx2

from gpulease.addresses import Address
from gpulease.route import Destination
from gpulease.steps import Answered, Attempt, BrokenOff, Emit, NextPiece, NotReached, Result, Sleep, Steps
from gpulease.transport import MAX_ANSWER_BYTES, answered, headers, knockable, place_of, reason, translated, trusted


class AsyncTransport:
    """Connections to a daemon, for one event loop at a time; in another loop or a forked child it opens new ones.

    Those of a loop that has ended without `close` end when the garbage collector finds them.
    """

    def __init__(self, destination: Destination) -> None:
        self._to = destination
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._connections: dict[Address, httpx2.AsyncClient] = {}

    async def close(self) -> None:
        """Close every connection; a later call opens new ones."""
        here = self._at_home()
        connections, self._connections = self._connections, {}
        if here:
            for connection in connections.values():
                await connection.aclose()

    async def run(self, steps: Steps[Result]) -> Result:
        """What the conversation comes to. When the task is cancelled, it still takes back what it has asked for."""
        outcome, failure = None, None
        while True:
            try:
                step = steps.send(outcome) if failure is None else steps.throw(failure)
            except StopIteration as end:
                result: Result = end.value
                return result
            outcome = failure = None
            try:
                outcome = await self._take(step)
            except asyncio.CancelledError as error:
                await self._wind_up(steps, error)
                raise
            except BaseException as error:
                failure = error

    async def emitted(self, steps: Steps[None]) -> AsyncIterator[Any]:
        """What the conversation emits, as it arrives."""
        outcome: object = None
        failure: BaseException | None = None
        stream: _Stream | None = None
        try:
            while True:
                try:
                    step = steps.send(outcome) if failure is None else steps.throw(failure)
                except StopIteration:
                    return
                outcome = failure = None
                if isinstance(step, Emit):
                    yield step.item
                    continue
                try:
                    if isinstance(step, NextPiece):
                        outcome = await _piece(stream)
                    elif isinstance(step, Attempt) and step.stream:
                        if stream is not None:
                            await stream.close()
                        outcome, stream = await self._open(step)
                    else:
                        outcome = await self._take(step)
                except Exception as error:
                    failure = error
        finally:
            if stream is not None:
                await stream.close()

    async def _wind_up(self, steps: Steps[Any], error: asyncio.CancelledError) -> None:
        """Let the conversation end itself although the task is cancelled, and cancelled again while it does.

        The calls of such an end have short time limits of their own, so this is bounded.
        """
        try:
            step = steps.throw(error)
        except (StopIteration, asyncio.CancelledError):
            return

        async def rest() -> None:
            outcome, failure, at = None, None, step
            while True:
                try:
                    outcome = await self._take(at)
                except BaseException as cut:
                    failure = cut
                try:
                    at = steps.send(outcome) if failure is None else steps.throw(failure)
                except (StopIteration, asyncio.CancelledError):
                    return
                outcome = failure = None

        winding_up = asyncio.create_task(rest())
        with suppress(asyncio.CancelledError):  # which the caller raises in any case
            await until_done(winding_up)
        winding_up.result()

    async def _take(self, step: object) -> Answered | None:
        if isinstance(step, Attempt):
            return await self._attempt(step)
        assert isinstance(step, Sleep)
        if step.seconds > 0:
            await asyncio.sleep(step.seconds)
        return None

    async def _attempt(self, attempt: Attempt) -> Answered:
        try:
            async with asyncio.timeout(attempt.limit_s + attempt.connect_s):
                stream = await self._send(attempt)
                try:
                    return stream.answered(await _whole(stream.response))
                finally:
                    await stream.close()
        except TimeoutError as error:
            raise BrokenOff("its answer did not end in time", late=True) from error

    async def _open(self, attempt: Attempt) -> tuple[Answered, _Stream | None]:
        stream = await self._send(attempt)
        if stream.response.is_success:
            return stream.answered(), stream
        try:
            async with asyncio.timeout(self._to.timeout_s):
                return stream.answered(await _whole(stream.response)), None
        except TimeoutError as error:
            raise BrokenOff("its answer did not end in time", late=True) from error
        finally:
            await stream.close()

    async def _send(self, attempt: Attempt) -> _Stream:
        if attempt.knock and knockable(attempt.address):
            await _knock(attempt.address, attempt.connect_s)
        call, address = attempt.call, attempt.address
        connection = self._connection(address)
        request = connection.build_request(
            call.method,
            address.origin + call.path,
            params=call.query,
            json=call.body,
            headers=headers(call, self._to.token),
            timeout=httpx2.Timeout(attempt.limit_s, connect=attempt.connect_s),
        )
        try:
            return _Stream(await connection.send(request, stream=True), connection)
        except (httpx2.RequestError, OSError) as error:
            raise translated(error) from error
        except RuntimeError as error:
            if not connection.is_closed:
                raise
            raise NotReached("its connections were closed meanwhile") from error

    def _at_home(self) -> bool:
        return self._home == (os.getpid(), asyncio.get_running_loop())

    def _connection(self, address: Address) -> httpx2.AsyncClient:
        if not self._at_home():
            # Sockets of another loop can be neither used nor closed here.
            self._connections, self._home = {}, (os.getpid(), asyncio.get_running_loop())
        if address not in self._connections:
            secure = trusted(address)
            socket = None if address.socket is None else str(address.socket)
            transport = None if socket is None else httpx2.AsyncHTTPTransport(uds=socket, verify=secure)
            self._connections[address] = httpx2.AsyncClient(
                transport=transport, verify=secure, trust_env=not address.local
            )
        return self._connections[address]


class _Stream:
    """An answer while it arrives."""

    def __init__(self, response: httpx2.Response, connection: httpx2.AsyncClient) -> None:
        self.response = response
        self._connection = connection
        self._pieces = response.aiter_bytes()

    def answered(self, content: bytes = b"") -> Answered:
        return answered(self.response, content)

    async def piece(self) -> bytes | None:
        try:
            return await anext(self._pieces, None)
        except httpx2.RequestError as error:
            raise translated(error) from error

    async def close(self) -> None:
        await self.response.aclose()
        if self._connection.is_closed:  # meanwhile, by `close` in another task: it did not see what was in use
            await self.response.extensions["network_stream"].aclose()


async def until_done(future: asyncio.Future[Any]) -> None:
    """Wait for `future` to its end, although the task that waits is cancelled meanwhile: that is raised at the end."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _piece(stream: _Stream | None) -> bytes | None:
    if stream is None:
        raise BrokenOff("no answer has begun")
    return await stream.piece()


async def _whole(response: httpx2.Response) -> bytes:
    pieces, size = [], 0
    try:
        async for piece in response.aiter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                raise BrokenOff(f"its answer is over {MAX_ANSWER_BYTES} bytes")
    except httpx2.RequestError as error:
        raise translated(error) from error
    return b"".join(pieces)


async def _knock(address: Address, limit_s: float) -> None:
    """Raise NotReached unless somebody listens there; `transport` says why."""
    try:
        async with asyncio.timeout(limit_s):
            if address.socket is not None:
                _, knock = await asyncio.open_unix_connection(str(address.socket))
            else:
                _, knock = await asyncio.open_connection(*place_of(address))
    except TimeoutError as error:
        raise NotReached("timed out") from error
    except (OSError, UnicodeError) as error:
        raise NotReached(reason(error)) from error
    knock.close()
    with suppress(OSError):
        await knock.wait_closed()
