"""Runs flows in the calling thread, over TCP or a Unix socket, with a time limit on every wait."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpcore2  # noqa: F401 - else httpx2 would load it during the first call
import httpx2

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
from gpulease.sansio.server_check import ServerCheck
from gpulease.sansio.tls_errors import speaks_tls, tls_failure, use_https
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host.addresses import Address

if TYPE_CHECKING:
    import ssl

MAX_RESPONSE_BYTES = 2**26
"""Largest body of a response."""
PROXY_VARIABLES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
"""Environment variables, in lower case, that name a proxy."""


class Transport:
    """Connections to a daemon. Safe to use from several threads; a forked child opens its own connections."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._contacted: set[Address] = set()
        """Where a connection was made before, which may have failed only later."""
        # Keyed by process: a forked child must neither use nor close the sockets of its parent.
        self._connections: dict[tuple[int, Address], httpx2.Client] = {}

    def close(self) -> None:
        """Close every connection; a later call opens new ones."""
        for key in list(self._connections):
            if key[0] == os.getpid() and (connection := self._connections.pop(key, None)) is not None:
                connection.close()

    def run(self, flow: Flow[Result]) -> Result:
        """What the flow returns."""
        driver = FlowDriver(flow)
        try:
            while (effect := driver.next_effect()) is not None:
                try:
                    driver.outcome = self._perform(effect)
                # Ctrl-C as well: the flow withdraws its request.
                except BaseException as error:
                    driver.failure = error
            return driver.result
        finally:
            flow.close()  # Ctrl-C between two effects: the flow still learns of it

    def emitted(self, flow: Flow[None]) -> Iterator[Any]:
        """The items that the flow emits, as they arrive."""
        driver = FlowDriver(flow)
        stream: _Stream | _NoStream = _NoStream()
        try:
            while (effect := driver.next_effect()) is not None:
                if isinstance(effect, Emit):
                    yield effect.item
                    continue
                try:
                    if isinstance(effect, NextChunk):
                        driver.outcome = stream.next_chunk()
                    elif isinstance(effect, Attempt) and effect.stream:
                        stream.close()
                        driver.outcome, stream = self._open(effect)
                    else:
                        driver.outcome = self._perform(effect)
                except BaseException as error:
                    driver.failure = error
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
            return stream.response_with(_read_body(stream.response, until))
        finally:
            stream.close()

    def _open(self, attempt: Attempt) -> tuple[Response, _Stream | _NoStream]:
        stream = self._send(attempt)
        if stream.response.is_success:
            return stream.response_with(), stream
        try:
            return stream.response_with(
                _read_body(stream.response, time.monotonic() + self._destination.timeout_s)
            ), _NoStream()
        finally:
            stream.close()

    def _send(self, attempt: Attempt) -> _Stream:
        if attempt.check_listening and connects_directly(attempt.address):
            _check_listening(attempt.address, attempt.connect_timeout_s)
        connection = self._connection(attempt.address)
        trace = ServerCheck(attempt.address, self._destination)
        request = build_request(connection, attempt, self._destination.bearer_token, trace)
        try:
            response = connection.send(request, stream=True)
        except (httpx2.RequestError, OSError) as error:
            first = attempt.address not in self._contacted
            self._contacted.add(attempt.address)
            if first and may_speak_tls(error, attempt.address) and speaks_tls(attempt.address, self._destination):
                raise use_https(attempt.address) from error
            raise tls_failure(error, attempt.address) or translate_error(error) from error
        except RuntimeError as error:
            if not connection.is_closed:
                raise
            raise NotConnected("its connections were closed meanwhile") from error  # by `close` in another thread
        self._contacted.add(attempt.address)
        return _Stream(response, connection)

    def _connection(self, address: Address) -> httpx2.Client:
        key = (os.getpid(), address)
        if (existing := self._connections.get(key)) is not None:
            return existing
        verify = ssl_verification(address, self._destination.ca_file)
        transport = None if address.socket is None else httpx2.HTTPTransport(uds=str(address.socket), verify=verify)
        new = httpx2.Client(
            transport=transport, verify=verify, trust_env=self._destination.use_proxies and not address.local
        )
        kept = self._connections.setdefault(key, new)
        if kept is not new:  # another thread was first
            new.close()
        return kept


class _NoStream:
    """Stands for a stream before the first one is open."""

    def next_chunk(self) -> bytes | None:
        raise ResponseLost("no response has begun")

    def close(self) -> None:
        return


class _Stream:
    """A response that is arriving."""

    def __init__(self, response: httpx2.Response, connection: httpx2.Client) -> None:
        self.response = response
        self._connection = connection
        self._chunks = response.iter_bytes()

    def response_with(self, content: bytes = b"") -> Response:
        return to_response(self.response, content)

    def next_chunk(self) -> bytes | None:
        try:
            return next(self._chunks, None)
        except httpx2.RequestError as error:
            raise translate_error(error) from error

    def close(self) -> None:
        self.response.close()
        if self._connection.is_closed:  # by `close` in another thread, which does not see sockets in use
            self.response.extensions["network_stream"].close()


def ssl_verification(address: Address, ca_file: str | None) -> ssl.SSLContext | bool:
    """Trusted certificates: those of `ca_file`, else the system's or those of SSL_CERT_FILE, also without a proxy.

    False for plain HTTP, because reading them takes 20 ms. Raises InvalidRequest for a file without certificates.
    """
    if not address.origin.startswith("https:"):
        return False
    if ca_file is None:
        return httpx2.create_ssl_context()
    import ssl  # noqa: PLC0415 - for https only

    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError:
        raise InvalidRequest(
            f"{ca_file} has no certificate that TLS can use.", remedy="Name a file in PEM format, as the daemon's own."
        ) from None


def build_request(
    connection: httpx2.Client | httpx2.AsyncClient, attempt: Attempt, bearer_token: str | None, trace: Any
) -> httpx2.Request:
    """The HTTP request of an attempt, whose new connections `trace` checks.

    Raises InvalidRequest, naming the field, for text that UTF-8 cannot encode.
    """
    call = attempt.call
    try:
        return connection.build_request(
            call.method,
            attempt.address.origin + call.path,
            params=call.query,
            json=call.body,
            headers=headers(call, bearer_token),
            timeout=httpx2.Timeout(attempt.timeout_s, connect=attempt.connect_timeout_s),
            extensions={} if attempt.address.origin.startswith("https:") else {"trace": trace},
        )
    except UnicodeEncodeError as error:
        fields: dict[str, Any] = {**dict(call.query), **(call.body or {})}
        name = next((name for name, value in fields.items() if not _is_unicode(value)), "request")
        shown = ascii(error.object[max(0, error.start - 40) : error.end + 40])
        raise InvalidRequest(
            f"{name}: must be text in UTF-8, not {shown}.", remedy="Rename it, or leave it out."
        ) from error


def _is_unicode(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def headers(call: ApiCall[Any], bearer_token: str | None) -> dict[str, str]:
    """The HTTP headers of a call."""
    values = {"Accept": call.accept}
    if bearer_token:
        values["Authorization"] = f"Bearer {bearer_token}"
    if call.idempotency_key:
        values["Idempotency-Key"] = call.idempotency_key
    return values


def to_response(response: httpx2.Response, content: bytes) -> Response:
    """The response as flows see it. Only a `Retry-After` in whole seconds counts, not one with a date."""
    retry_after = response.headers.get("Retry-After", "").strip()
    retry_after_s = (
        float(retry_after) if retry_after.isascii() and retry_after.isdigit() and len(retry_after) <= 9 else None
    )
    as_of = response.headers.get("Gpulease-As-Of")
    return Response(response.status_code, response.reason_phrase, content, retry_after_s, as_of)


def translate_error(error: Exception) -> NotConnected | ResponseLost:
    """A failure of httpx2 as the failure of a flow: whether the daemon may have received the call."""
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)):
        return NotConnected(error_reason(error))
    return ResponseLost(error_reason(error), timed_out=isinstance(error, httpx2.TimeoutException))


def may_speak_tls(error: Exception, address: Address) -> bool:
    """True if plain HTTP failed as it does at a server that speaks TLS: the connection ends instead of a response."""
    plain = address.socket is None and address.origin.startswith("http:")
    return plain and isinstance(error, httpx2.RemoteProtocolError)


def error_reason(error: Exception) -> str:
    """The reason, in the words of the operating system."""
    number = error.errno or 0 if isinstance(error, OSError) else 0
    if number > 0:
        return os.strerror(number)
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


def connects_directly(address: Address) -> bool:
    """True if no proxy is in between, so that a bare connection shows whether a daemon is listening."""
    return address.local or not any(name.lower() in PROXY_VARIABLES for name in os.environ)


def host_and_port(address: Address) -> tuple[str, int]:
    """Host and port of a TCP address."""
    parts = urlsplit(address.origin)
    return str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)


def _read_body(response: httpx2.Response, until: float) -> bytes:
    """The body. Raises ResponseLost if it is incomplete at `until`: httpx2's read timeout restarts with every chunk."""
    chunks, size = [], 0
    try:
        for chunk in response.iter_bytes():
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_RESPONSE_BYTES:
                raise ResponseLost(f"its response is larger than {MAX_RESPONSE_BYTES} bytes")
            if time.monotonic() > until:
                raise ResponseLost("its response did not end in time", timed_out=True)
    except httpx2.RequestError as error:
        raise translate_error(error) from error
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
        thread.start()
        thread.join(limit_s)
    if "targets" in outcome:
        targets: list[Any] = outcome["targets"]
        return targets
    error = outcome.get("error")
    raise NotConnected(error_reason(error) if error else f"its name was not resolved within {limit_s:.2g} s") from error
