"""Runs flows in an event loop: the twin of `sync_transport`, with the same limits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx2

from gpulease.sansio import proxies
from gpulease.sansio.effects import (
    Attempt,
    Effect,
    Emit,
    Flow,
    FlowDriver,
    NextChunk,
    NotConnected,
    Response,
    ResponseLost,
    Result,
    Sleep,
)
from gpulease.sansio.failover import Destination
from gpulease.sansio.http_requests import MAX_RESPONSE_BYTES, error_reason
from gpulease.sansio.httpx_connection import build_request, ssl_verification, to_response, translate_error
from gpulease.sansio.httpx_log_filter import without_httpx_log
from gpulease.sansio.server_check import ServerCheck
from gpulease.sansio.sync_transport import connects_directly, host_and_port
from gpulease.sansio.tls_errors import may_speak_tls, speaks_tls, tls_failure, use_https
from gpulease_protocol.host.addresses import Address


class AsyncTransport:
    """Connections to a daemon, for one event loop at a time; it opens new ones in another loop or a forked child.

    If a loop ends without `close`, the garbage collector closes its connections.
    """

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._contacted: set[Address] = set()
        """Where a connection was made before, which may have failed only later."""
        self._loop: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._connections: dict[Address, httpx2.AsyncClient] = {}

    async def close(self) -> None:
        """Close every connection; a later call opens new ones."""
        same_loop = self._is_own_loop()
        connections, self._connections = self._connections, {}
        if same_loop:
            for connection in connections.values():
                await connection.aclose()

    async def run(self, flow: Flow[Result]) -> Result:
        """What the flow returns. If the task is cancelled, the flow still withdraws its request."""
        driver = FlowDriver(flow)
        while (effect := driver.next_effect()) is not None:
            try:
                driver.outcome = await self._perform(effect)
            except asyncio.CancelledError as error:
                driver.failure = error
                await self._finish_cancelled(driver)
                raise
            except BaseException as error:
                driver.failure = error
        return driver.result

    async def emitted(self, flow: Flow[None]) -> AsyncIterator[Any]:
        """The items that the flow emits, as they arrive."""
        driver = FlowDriver(flow)
        stream: _Stream | None = None
        try:
            while (effect := driver.next_effect()) is not None:
                if isinstance(effect, Emit):
                    yield effect.item
                    continue
                try:
                    if isinstance(effect, NextChunk):
                        driver.outcome = await _next_chunk(stream)
                    elif isinstance(effect, Attempt) and effect.stream:
                        if stream is not None:
                            await stream.close()
                        driver.outcome, stream = await self._open(effect)
                    else:
                        driver.outcome = await self._perform(effect)
                except Exception as error:
                    driver.failure = error
        finally:
            if stream is not None:
                await stream.close()

    async def _finish_cancelled(self, driver: FlowDriver[Any]) -> None:
        """Run the flow to its end although the task is cancelled, even if it is cancelled again meanwhile.

        This is bounded, because the calls that withdraw a request have short time limits.
        """
        try:
            first = driver.next_effect()
        except asyncio.CancelledError:
            return
        if first is None:
            return

        async def finish() -> None:
            effect: Effect | None = first
            while effect is not None:
                try:
                    driver.outcome = await self._perform(effect)
                except BaseException as error:
                    driver.failure = error
                try:
                    effect = driver.next_effect()
                except asyncio.CancelledError:
                    return

        finishing = asyncio.create_task(finish())
        with suppress(asyncio.CancelledError):  # the caller raises it in any case
            await wait_through_cancellation(finishing)
        finishing.result()

    async def _perform(self, effect: Effect) -> Response | None:
        if isinstance(effect, Attempt):
            return await self._attempt(effect)
        assert isinstance(effect, Sleep)
        if effect.seconds > 0:
            await asyncio.sleep(effect.seconds)
        return None

    async def _attempt(self, attempt: Attempt) -> Response:
        try:
            async with asyncio.timeout(attempt.timeout_s + attempt.connect_timeout_s):
                stream = await self._send(attempt)
                try:
                    return stream.response_with(await _read_body(stream.response))
                finally:
                    await stream.close()
        except TimeoutError as error:
            raise ResponseLost("its response did not end in time", timed_out=True) from error

    async def _open(self, attempt: Attempt) -> tuple[Response, _Stream | None]:
        stream = await self._send(attempt)
        if stream.response.is_success:
            return stream.response_with(), stream
        try:
            async with asyncio.timeout(self._destination.timeout_s):
                return stream.response_with(await _read_body(stream.response)), None
        except TimeoutError as error:
            raise ResponseLost("its response did not end in time", timed_out=True) from error
        finally:
            await stream.close()

    async def _send(self, attempt: Attempt) -> _Stream:
        if attempt.check_listening and connects_directly(attempt.address):
            await _check_listening(attempt.address, attempt.connect_timeout_s)
        connection = self._connection(attempt.address)
        trace = ServerCheck(attempt.address, self._destination).asynchronous
        request = build_request(connection, attempt, self._destination.bearer_token, trace)
        try:
            with without_httpx_log():
                response = await connection.send(request, stream=True)
        except (httpx2.RequestError, OSError) as error:
            failure = translate_error(error)
            first = attempt.address not in self._contacted
            self._contacted.add(attempt.address)
            if (
                first
                and may_speak_tls(failure, attempt.address)
                and await asyncio.to_thread(speaks_tls, attempt.address, self._destination)
            ):
                raise use_https(attempt.address) from error
            named = proxies.named(failure, attempt.address, self._destination)
            raise tls_failure(error, named, attempt.address) or named from error
        except RuntimeError as error:
            if not connection.is_closed:
                raise
            raise NotConnected("its connections were closed meanwhile") from error
        self._contacted.add(attempt.address)
        return _Stream(response, connection)

    def _is_own_loop(self) -> bool:
        return self._loop == (os.getpid(), asyncio.get_running_loop())

    def _connection(self, address: Address) -> httpx2.AsyncClient:
        if not self._is_own_loop():
            # Sockets of another loop can neither be used nor closed here.
            self._connections, self._loop = {}, (os.getpid(), asyncio.get_running_loop())
        if address not in self._connections:
            verify = ssl_verification(address, self._destination.ca_file)
            socket = None if address.socket is None else str(address.socket)
            transport = None if socket is None else httpx2.AsyncHTTPTransport(uds=socket, verify=verify)
            self._connections[address] = proxies.with_proxies(
                lambda use: httpx2.AsyncClient(transport=transport, verify=verify, trust_env=use),
                address,
                self._destination,
            )
        return self._connections[address]


class _Stream:
    """A response that is arriving."""

    def __init__(self, response: httpx2.Response, connection: httpx2.AsyncClient) -> None:
        self.response = response
        self._connection = connection
        self._chunks = response.aiter_bytes()

    def response_with(self, content: bytes = b"") -> Response:
        return to_response(self.response, content)

    async def next_chunk(self) -> bytes | None:
        try:
            return await anext(self._chunks, None)
        except httpx2.RequestError as error:
            raise translate_error(error) from error

    async def close(self) -> None:
        await self.response.aclose()
        if self._connection.is_closed:  # by `close` in another task, which does not see sockets in use
            await self.response.extensions["network_stream"].aclose()


async def wait_through_cancellation(future: asyncio.Future[Any]) -> None:
    """Wait until `future` is done, even if the waiting task is cancelled; CancelledError is raised at the end."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _next_chunk(stream: _Stream | None) -> bytes | None:
    if stream is None:
        raise ResponseLost("no response has begun")
    return await stream.next_chunk()


async def _read_body(response: httpx2.Response) -> bytes:
    chunks, size = [], 0
    try:
        async for chunk in response.aiter_bytes():
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_RESPONSE_BYTES:
                raise ResponseLost(f"its response is larger than {MAX_RESPONSE_BYTES} bytes")
    except httpx2.RequestError as error:
        raise translate_error(error) from error
    return b"".join(chunks)


async def _check_listening(address: Address, limit_s: float) -> None:
    """Raise NotConnected unless something listens at the address; `sync_transport` says why."""
    try:
        async with asyncio.timeout(limit_s):
            if address.socket is not None:
                _, connection = await asyncio.open_unix_connection(str(address.socket))
            else:
                _, connection = await asyncio.open_connection(*host_and_port(address))
    except TimeoutError as error:
        raise NotConnected("timed out") from error
    except (OSError, UnicodeError) as error:
        raise NotConnected(error_reason(error)) from error
    connection.close()
    with suppress(OSError):
        await connection.wait_closed()
