"""HTTP by httpx2: over TLS, through proxies, to other hosts, and in event loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpcore2  # noqa: F401 - else httpx2 would load it during the first call
import httpx2

from gpulease.sansio import proxies
from gpulease.sansio.effects import Attempt, NotConnected, Response, ResponseLost
from gpulease.sansio.failover import Destination
from gpulease.sansio.http_requests import encoded_body, error_reason, headers, not_utf_8, retry_after_s
from gpulease.sansio.httpx_log_filter import without_httpx_log
from gpulease.sansio.server_check import ServerCheck
from gpulease.sansio.tls_errors import tls_failure
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host.addresses import Address

if TYPE_CHECKING:
    import ssl


class HttpxConnection:
    """Connections to one address. Safe to use from several threads."""

    def __init__(self, address: Address, destination: Destination) -> None:
        self._address = address
        self._destination = destination
        verify = ssl_verification(address, destination.ca_file)
        transport = None if address.socket is None else httpx2.HTTPTransport(uds=str(address.socket), verify=verify)
        self._client = proxies.with_proxies(
            lambda use: httpx2.Client(transport=transport, verify=verify, trust_env=use), address, destination
        )

    def close(self) -> None:
        """Close them; what is arriving on one of them may still arrive."""
        self._client.close()

    def send(self, attempt: Attempt) -> ArrivingResponse:
        """The response, as soon as its headers are there. Raises NotConnected, ResponseLost, InvalidRequest."""
        trace = ServerCheck(self._address, self._destination)
        request = build_request(self._client, attempt, self._destination.bearer_token, trace)
        try:
            with without_httpx_log():
                return ArrivingResponse(self._client.send(request, stream=True), self._client)
        except (httpx2.RequestError, OSError) as error:
            failure = proxies.named(translate_error(error), self._address, self._destination)
            raise tls_failure(error, failure, self._address) or failure from error
        except RuntimeError as error:
            if not self._client.is_closed:
                raise
            raise NotConnected("its connections were closed meanwhile") from error  # by `close` in another thread


class ArrivingResponse:
    """A response with a body that is still to be read."""

    def __init__(self, response: httpx2.Response, client: httpx2.Client) -> None:
        self._response = response
        self._client = client
        self._chunks = response.iter_bytes()

    @property
    def is_success(self) -> bool:
        """True for a 2xx status."""
        return self._response.is_success

    def response_with(self, content: bytes = b"") -> Response:
        """The response as flows see it."""
        return to_response(self._response, content)

    def next_chunk(self) -> bytes | None:
        """The next bytes of the body, None at its end. Raises ResponseLost if it breaks off."""
        try:
            return next(self._chunks, None)
        except httpx2.RequestError as error:
            raise translate_error(error) from error

    def wait_no_longer(self) -> None:
        """Raise ResponseLost: what has arrived cannot be told from what has not."""
        raise ResponseLost("its response did not end in time", timed_out=True)

    def close(self) -> None:
        """Read no more of it."""
        self._response.close()
        if self._client.is_closed:  # by `close` in another thread, which does not see sockets in use
            self._response.extensions["network_stream"].close()


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
    """The HTTP request of an attempt. `trace` checks its new connections.

    Raises InvalidRequest, naming the field, for text that UTF-8 cannot encode.
    """
    call = attempt.call
    try:
        return connection.build_request(
            call.method,
            attempt.address.origin + call.path,
            params=call.query,
            content=encoded_body(call),
            headers=headers(call, bearer_token),
            timeout=httpx2.Timeout(attempt.timeout_s, connect=attempt.connect_timeout_s),
            extensions={} if attempt.address.origin.startswith("https:") else {"trace": trace},
        )
    except UnicodeEncodeError as error:
        raise not_utf_8(error, call) from error


def to_response(response: httpx2.Response, content: bytes) -> Response:
    """The response as flows see it."""
    wait_s = retry_after_s(response.headers.get("Retry-After", ""))
    as_of = response.headers.get("Gpulease-As-Of")
    return Response(response.status_code, response.reason_phrase, content, wait_s, as_of)


def translate_error(error: Exception) -> NotConnected | ResponseLost:
    """A failure of httpx2 as the failure of a flow: whether the daemon may have received the call."""
    timed_out = isinstance(error, httpx2.TimeoutException)
    reason = "timed out" if timed_out else error_reason(error)
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)):
        return NotConnected(reason)
    return ResponseLost(reason, timed_out=timed_out)
