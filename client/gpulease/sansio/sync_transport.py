"""Runs flows in the calling thread, over TCP or a Unix socket, with a time limit on every wait."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from traceback import walk_tb
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpulease.sansio.direct_http import DirectHttp
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
from gpulease.sansio.tls_errors import may_speak_tls, speaks_tls, use_https
from gpulease_protocol.host.addresses import Address

if TYPE_CHECKING:
    from gpulease.sansio import direct_http, httpx_connection

    Connections = DirectHttp | httpx_connection.HttpxConnection
    ArrivingResponse = direct_http.ArrivingResponse | httpx_connection.ArrivingResponse

PROXY_VARIABLES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
"""Environment variables, in lower case, that name a proxy."""


class Transport:
    """Connections to a daemon. Safe to use from several threads; a forked child opens its own connections.

    One that is forgotten closes them, so that no caller of `find_usable_cuda_devices` and the like, which make a client
    of their own, sees a ResourceWarning: in many a test suite that is a failure.
    """

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._contacted: set[Address] = set()
        """Where a connection was made before, which may have failed only later."""
        # Keyed by process: a forked child must neither use nor close the sockets of its parent.
        self._connections: dict[tuple[int, Address], Connections] = {}
        weakref.finalize(self, _close, self._connections).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process that gets it, as with the arguments of a pool's task, opens connections of its own."""
        return type(self), (self._destination,)

    def close(self) -> None:
        """Close every connection; a later call opens new ones."""
        _close(self._connections)

    def run(self, flow: Flow[Result]) -> Result:
        """What the flow returns."""
        driver, handled = FlowDriver(flow), sys.exception()
        try:
            while (effect := driver.next_effect()) is not None:
                try:
                    driver.outcome = self._perform(effect)
                # Ctrl-C as well: the flow withdraws its request.
                except BaseException as error:
                    driver.failure = _interruption(error, handled) or error
            return driver.result
        finally:
            flow.close()  # Ctrl-C between two effects: the flow still learns of it

    def emitted(self, flow: Flow[None]) -> Iterator[Any]:
        """The items that the flow emits, as they arrive."""
        driver = FlowDriver(flow)
        stream: ArrivingResponse | _NoStream = _NoStream()
        try:
            while (effect := driver.next_effect()) is not None:
                if isinstance(effect, Emit):
                    yield effect.item
                    continue
                handled = sys.exception()
                try:
                    if isinstance(effect, NextChunk):
                        driver.outcome = stream.next_chunk()
                    elif isinstance(effect, Attempt) and effect.stream:
                        stream.close()
                        driver.outcome, stream = self._open(effect)
                    else:
                        driver.outcome = self._perform(effect)
                except BaseException as error:
                    driver.failure = _interruption(error, handled) or error
        finally:
            stream.close()

    def _perform(self, effect: Effect) -> Response | None:
        if isinstance(effect, Attempt):
            return self._attempt(effect)
        assert isinstance(effect, Sleep)
        if effect.seconds > 0:
            time.sleep(effect.seconds)
        return None

    def _attempt(self, attempt: Attempt) -> Response:
        until = time.monotonic() + attempt.timeout_s
        stream = self._send(attempt)
        try:
            return stream.response_with(_read_body(stream, until))
        finally:
            stream.close()

    def _open(self, attempt: Attempt) -> tuple[Response, ArrivingResponse | _NoStream]:
        stream = self._send(attempt)
        if stream.is_success:
            return stream.response_with(), stream
        try:
            return stream.response_with(_read_body(stream, time.monotonic() + self._destination.timeout_s)), _NoStream()
        finally:
            stream.close()

    def _send(self, attempt: Attempt) -> ArrivingResponse:
        connections = self._connections_to(attempt.address)
        if attempt.check_listening and not isinstance(connections, DirectHttp) and connects_directly(attempt.address):
            _check_listening(attempt.address, attempt.connect_timeout_s)
        first = attempt.address not in self._contacted
        self._contacted.add(attempt.address)
        try:
            return connections.send(attempt)
        except ResponseLost as error:
            if first and may_speak_tls(error, attempt.address) and speaks_tls(attempt.address, self._destination):
                raise use_https(attempt.address) from error
            raise

    def _connections_to(self, address: Address) -> Connections:
        key = (os.getpid(), address)
        if (existing := self._connections.get(key)) is not None:
            return existing
        new = _connections(address, self._destination)
        kept = self._connections.setdefault(key, new)
        if kept is not new:  # another thread was first
            new.close()
        return kept


def _interruption(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """The error of a signal handler that became a failure of the connection; None if no handler raised it.

    An alarm's TimeoutError is an OSError, as those of sockets are. The call is to end with it, not to be sent again.
    One that the caller handled when the effect began is in the context of each failure, and did not cause it.
    """
    if not isinstance(error, NotConnected | ResponseLost) or threading.current_thread() is not threading.main_thread():
        return None
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(handler, "func", handler), "__code__", None) for handler in handlers}
    raised: BaseException | None = error
    while raised is not None and raised is not handled:
        if any(frame.f_code in codes for frame, _ in walk_tb(raised.__traceback__)):
            return raised
        raised = raised.__cause__ or raised.__context__
    return None


def _close(connections: dict[tuple[int, Address], Connections]) -> None:
    """Close those of this process."""
    for key in list(connections):
        if key[0] == os.getpid() and (connection := connections.pop(key, None)) is not None:
            connection.close()


def _connections(address: Address, destination: Destination) -> Connections:
    if address.local and address.origin.startswith("http:"):
        return DirectHttp(address, destination)
    from gpulease.sansio.httpx_connection import HttpxConnection  # noqa: PLC0415 - 80 ms

    return HttpxConnection(address, destination)


class _NoStream:
    """Stands for a stream before the first one is open."""

    def next_chunk(self) -> bytes | None:
        raise ResponseLost("no response has begun")

    def close(self) -> None:
        return


def connects_directly(address: Address) -> bool:
    """True if no proxy is in between, so that a bare connection shows whether a daemon is listening."""
    return address.local or not any(name.lower() in PROXY_VARIABLES for name in os.environ)


def host_and_port(address: Address) -> tuple[str, int]:
    """Host and port of a TCP address."""
    parts = urlsplit(address.origin)
    return str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)


def _read_body(stream: ArrivingResponse, until: float) -> bytes:
    """The body. Raises ResponseLost if it has not arrived by `until`: the limit of one read restarts with every chunk.

    What has arrived is read also later: code that keeps the GIL may have held up this thread for long.
    """
    chunks, size = [], 0
    while (chunk := stream.next_chunk()) is not None:
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_RESPONSE_BYTES:
            raise ResponseLost(f"its response is larger than {MAX_RESPONSE_BYTES} bytes")
        if time.monotonic() > until:
            stream.wait_no_longer()
    return b"".join(chunks)


def _check_listening(address: Address, limit_s: float) -> None:
    """Raise NotConnected unless something listens at the address, within `limit_s` whatever its name resolves to.

    While a daemon is down, many clients retry, and a bare connection costs a hundredth of a request. httpcore2 also
    leaves the socket open when a Unix socket refuses the connection.
    """
    until = time.monotonic() + limit_s
    if address.socket is not None:
        targets: list[Any] = [(socket.AF_UNIX, str(address.socket))]
    else:
        targets = [(family, target) for family, _, _, _, target in _resolve(*host_and_port(address), limit_s)]
    failure: Exception = OSError("its name has no address")
    for number, (family, target) in enumerate(targets):
        left_s = max(0.01, (until - time.monotonic()) / (len(targets) - number))
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(left_s)
                connection.connect(target)
                return
        except OSError as error:
            failure = error
    raise NotConnected(error_reason(failure)) from failure


def _resolve(host: str, port: int, limit_s: float) -> list[Any]:
    """`getaddrinfo` with a time limit: in a thread of its own if it may query the network."""
    outcome: dict[str, Any] = {}

    def resolve() -> None:
        try:
            outcome["targets"] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            outcome["error"] = error

    if re.fullmatch(r"[\d.]+|.*:.*|localhost", host):
        resolve()
    else:
        thread = threading.Thread(target=resolve, name=f"gpulease-resolve-{host}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is exiting, and since Python 3.12 it starts no more threads
            resolve()
        else:
            thread.join(limit_s)
    if "targets" in outcome:
        targets: list[Any] = outcome["targets"]
        return targets
    error = outcome.get("error")
    raise NotConnected(error_reason(error) if error else f"its name was not resolved within {limit_s:.2g} s") from error
