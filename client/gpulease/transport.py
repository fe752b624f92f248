"""Takes the steps of a conversation in the calling thread, over TCP or a Unix socket, with a bound on every wait."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpcore2  # noqa: F401 - which httpx2 otherwise loads in the first call
import httpx2

from gpulease.addresses import Address
from gpulease.calls import Call
from gpulease.route import Destination
from gpulease.steps import Answered, Attempt, BrokenOff, Emit, NextPiece, NotReached, Result, Sleep, Steps

if TYPE_CHECKING:
    import ssl

MAX_ANSWER_BYTES = 2**26
"""Size of one answer, at most."""
PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})


class Transport:
    """Connections to a daemon. Safe to use from several threads; a forked child opens connections of its own."""

    def __init__(self, destination: Destination) -> None:
        self._to = destination
        # By process: a forked child neither uses nor closes its parent's sockets, whose conversations that could end.
        self._connections: dict[tuple[int, Address], httpx2.Client] = {}

    def close(self) -> None:
        """Close every connection; a later call opens new ones."""
        for key in list(self._connections):
            if key[0] == os.getpid() and (connection := self._connections.pop(key, None)) is not None:
                connection.close()

    def run(self, steps: Steps[Result]) -> Result:
        """What the conversation comes to."""
        outcome, failure = None, None
        while True:
            try:
                step = steps.send(outcome) if failure is None else steps.throw(failure)
            except StopIteration as end:
                result: Result = end.value
                return result
            outcome = failure = None
            try:
                outcome = self._take(step)
            # Ctrl-C as well: the conversation takes back what it has asked for.
            except BaseException as error:
                failure = error

    def emitted(self, steps: Steps[None]) -> Iterator[Any]:
        """What the conversation emits, as it arrives."""
        outcome: object = None
        failure: BaseException | None = None
        stream: _Stream | _Nothing = _Nothing()
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
                        outcome = stream.piece()
                    elif isinstance(step, Attempt) and step.stream:
                        stream.close()
                        outcome, stream = self._open(step)
                    else:
                        outcome = self._take(step)
                except BaseException as error:
                    failure = error
        finally:
            stream.close()

    def _take(self, step: object) -> Answered | None:
        if isinstance(step, Attempt):
            return self._attempt(step)
        assert isinstance(step, Sleep)
        if step.seconds > 0:
            time.sleep(step.seconds)
        return None

    def _attempt(self, attempt: Attempt) -> Answered:
        until = time.monotonic() + attempt.limit_s
        stream = self._send(attempt)
        try:
            return stream.answered(_whole(stream.response, until))
        finally:
            stream.close()

    def _open(self, attempt: Attempt) -> tuple[Answered, _Stream | _Nothing]:
        stream = self._send(attempt)
        if stream.response.is_success:
            return stream.answered(), stream
        try:
            return stream.answered(_whole(stream.response, time.monotonic() + self._to.timeout_s)), _Nothing()
        finally:
            stream.close()

    def _send(self, attempt: Attempt) -> _Stream:
        if attempt.knock and knockable(attempt.address):
            _knock(attempt.address, attempt.connect_s)
        timeout = httpx2.Timeout(attempt.limit_s, connect=attempt.connect_s)
        connection = self._connection(attempt.address)
        request = self._request(connection, attempt.address, attempt.call, timeout)
        try:
            return _Stream(connection.send(request, stream=True), connection)
        except (httpx2.RequestError, OSError) as error:
            raise translated(error) from error
        except RuntimeError as error:
            if not connection.is_closed:
                raise
            raise NotReached("its connections were closed meanwhile") from error  # by `close` in another thread

    def _request(
        self, connection: httpx2.Client, address: Address, call: Call[Any], timeout: httpx2.Timeout
    ) -> httpx2.Request:
        return connection.build_request(
            call.method,
            address.origin + call.path,
            params=call.query,
            json=call.body,
            headers=headers(call, self._to.token),
            timeout=timeout,
        )

    def _connection(self, address: Address) -> httpx2.Client:
        key = (os.getpid(), address)
        if (found := self._connections.get(key)) is not None:
            return found
        secure = trusted(address)
        transport = None if address.socket is None else httpx2.HTTPTransport(uds=str(address.socket), verify=secure)
        made = httpx2.Client(transport=transport, verify=secure, trust_env=not address.local)
        kept = self._connections.setdefault(key, made)
        if kept is not made:  # another thread was first
            made.close()
        return kept


class _Nothing:
    """A stream that is not open."""

    def piece(self) -> bytes | None:
        raise BrokenOff("no answer has begun")

    def close(self) -> None:
        return


class _Stream:
    """An answer while it arrives."""

    def __init__(self, response: httpx2.Response, connection: httpx2.Client) -> None:
        self.response = response
        self._connection = connection
        self._pieces = response.iter_bytes()

    def answered(self, content: bytes = b"") -> Answered:
        return answered(self.response, content)

    def piece(self) -> bytes | None:
        try:
            return next(self._pieces, None)
        except httpx2.RequestError as error:
            raise translated(error) from error

    def close(self) -> None:
        self.response.close()
        if self._connection.is_closed:  # meanwhile, by `close` in another thread: it did not see what was in use
            self.response.extensions["network_stream"].close()


def trusted(address: Address) -> ssl.SSLContext | bool:
    """Which certificates are believed: the system's, or those of SSL_CERT_FILE, also where no proxy has a part.

    Reading them takes 20 ms, and plain HTTP has none.
    """
    return httpx2.create_ssl_context() if address.origin.startswith("https:") else False


def headers(call: Call[Any], token: str | None) -> dict[str, str]:
    """The HTTP headers of a call."""
    found = {"Accept": call.accept}
    if token:
        found["Authorization"] = f"Bearer {token}"
    if call.idempotency_key:
        found["Idempotency-Key"] = call.idempotency_key
    return found


def answered(response: httpx2.Response, content: bytes) -> Answered:
    """What came, without how it came. `Retry-After` counts in its form of whole seconds; a date is passed over."""
    wanted = response.headers.get("Retry-After", "").strip()
    retry_after_s = float(wanted) if wanted.isascii() and wanted.isdigit() and len(wanted) <= 9 else None
    as_of = response.headers.get("Gpulease-As-Of")
    return Answered(response.status_code, response.reason_phrase, content, retry_after_s, as_of)


def translated(error: Exception) -> NotReached | BrokenOff:
    """What a failure of httpx2 says about whether anything was sent."""
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)):
        return NotReached(reason(error))
    return BrokenOff(reason(error), late=isinstance(error, httpx2.TimeoutException))


def reason(error: Exception) -> str:
    """Why, in the system's words."""
    number = error.errno or 0 if isinstance(error, OSError) else 0
    if number > 0:
        return os.strerror(number)
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


def knockable(address: Address) -> bool:
    """True when a connection to the address itself shows whether somebody listens: no proxy stands in between."""
    return address.local or not any(name.lower() in PROXIES for name in os.environ)


def place_of(address: Address) -> tuple[str, int]:
    """Host and port of a TCP address."""
    parts = urlsplit(address.origin)
    return str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)


def _whole(response: httpx2.Response, until: float) -> bytes:
    """The body. Raises BrokenOff when it is not there in time: a read's own limit starts anew with every byte."""
    pieces, size = [], 0
    try:
        for piece in response.iter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                raise BrokenOff(f"its answer is over {MAX_ANSWER_BYTES} bytes")
            if time.monotonic() > until:
                raise BrokenOff("its answer did not end in time", late=True)
    except httpx2.RequestError as error:
        raise translated(error) from error
    return b"".join(pieces)


def _knock(address: Address, limit_s: float) -> None:
    """Raise NotReached unless somebody listens there, within `limit_s` whatever the name resolves to.

    While a daemon is away many clients knock again and again, and a bare connection costs a hundredth of a request;
    httpcore2 also leaves a refused Unix socket open.
    """
    until = time.monotonic() + limit_s
    if address.socket is not None:
        places: list[Any] = [(socket.AF_UNIX, str(address.socket))]
    else:
        places = [(family, where) for family, _, _, _, where in _resolved(*place_of(address), limit_s)]
    failure: Exception = OSError("the name has no address")
    for number, (family, where) in enumerate(places):
        left_s = max(0.01, (until - time.monotonic()) / (len(places) - number))
        try:
            with socket.socket(family, socket.SOCK_STREAM) as knock:
                knock.settimeout(left_s)
                knock.connect(where)
                return
        except OSError as error:
            failure = error
    raise NotReached(reason(failure)) from failure


def _resolved(host: str, port: int, limit_s: float) -> list[Any]:
    """What `getaddrinfo` says, in a thread where it may go out to the network: it knows no time limit of its own."""
    found: dict[str, Any] = {}

    def resolve() -> None:
        try:
            found["places"] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            found["error"] = error

    if re.fullmatch(r"[\d.]+|.*:.*|localhost", host):
        resolve()
    else:
        resolving = threading.Thread(target=resolve, name=f"gpulease-resolve-{host}", daemon=True)
        resolving.start()
        resolving.join(limit_s)
    if "places" in found:
        places: list[Any] = found["places"]
        return places
    error = found.get("error")
    raise NotReached(reason(error) if error else f"the name was not resolved within {limit_s:.2g} s") from error
