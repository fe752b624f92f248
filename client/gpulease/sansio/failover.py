"""Failover: which address a call is sent to, in what order, and what each outcome means. Sans I/O (see `effects`).

- Default addresses (the local sockets, then loopback) may belong to different daemons, with different leases. The
  first one that responds is the daemon of this client; no other is tried from then on.
- Configured addresses (`Client([a, b])`, GPULEASE_URL=a,b) lead to one service. The client stays with the one that
  responded until it fails: it refuses the connection, breaks off, or does not serve (503 `unavailable`, as a standby
  says; 421 or a redirect). Then the next one is tried, round robin. One that timed out is avoided for a while, as long
  as any other responds. A stale read from a standby (`Response.as_of`) counts only if no other address responds.

A call is sent a second time only if that is safe: nothing was sent the first time, or the daemon says that it did
nothing (503 `unavailable` without `outcome: unknown`), or the call is repeatable (`ApiCall.is_repeatable`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Self, TypeVar

from gpulease.cuda import ranks
from gpulease.rest_words import METHODS
from gpulease.sansio.effects import Attempt, Flow, NotConnected, NotTrusted, Response, ResponseLost
from gpulease.sansio.http_requests import check_timeout
from gpulease_protocol.endpoints import ApiCall, without_refused_fields
from gpulease_protocol.errors import (
    DaemonUnavailable,
    GpuleaseError,
    InvalidRequest,
    Unavailable,
    error_from_problem,
    respelled,
)
from gpulease_protocol.host import addresses, certificates, config_file, systemd, token_file
from gpulease_protocol.host.addresses import Address
from gpulease_protocol.host.variables import unknown_variables
from gpulease_protocol.lazy_dataclass import dataclass

LOG = logging.getLogger("gpulease")

Answer = TypeVar("Answer")

CONNECT_TIMEOUT_S = 1.0
"""Time limit for one connection."""
CONNECT_ALL_TIMEOUT_S = 1.5
"""Time limit for connections to all addresses together: how soon a client knows that no daemon is listening."""
DISTANT_CONNECT_TIMEOUT_S = 1.8
"""Time limit for a connection to another host, where no other address leads to the daemon: what a bad network loses is
sent again after 1 s. A client knows within 2 s that no daemon responds."""
FAILOVER_TIMEOUT_S = 2.0
"""Time limit for a response from one of several addresses, beyond `ApiCall.hold_s`. A daemon that is stopped (SIGSTOP)
still accepts connections; a standby has taken over after about 3.5 s."""
AVOID_S = 4.0
"""How long an address that timed out is avoided, as long as another one responds."""
LONG_POLL_S, FAILOVER_LONG_POLL_S = 25.0, 2.0
"""Longest long poll: shorter than the time limits of proxies and load balancers; with several addresses, short enough
to notice in time that the daemon is stopped."""
CHECK_LISTENER = "Check that a gpulease daemon listens there."
MISDIRECTED_STATUSES = {301, 302, 303, 307, 308, 421}
"""Statuses of a server that does not serve this API."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a client finds its daemon, and its credentials."""

    addresses: tuple[Address, ...]
    """Addresses, in the order in which they are tried."""
    interchangeable: bool
    """True if all addresses lead to one service; false if the first daemon that responds is the one to use."""
    bearer_token: str | None
    """Bearer token; null sends none."""
    timeout_s: float
    """Time limit for a response, beyond `ApiCall.hold_s`."""
    use_proxies: bool = True
    """Use the proxies that the environment names, if any, to reach other hosts."""
    obeys: bool = False
    """This process does what the daemon orders, as a worker does, so it believes fewer users (`server_check`)."""
    plain_http: bool = True
    """Plain HTTP may lead to another host, where nothing shows who answers."""
    ca_file: str | None = None
    """File with the certificates that https is to be trusted by, instead of the system's."""

    @classmethod
    def of(cls, url: str | Sequence[str] | None, bearer_token: str | None, timeout_s: float) -> Self:
        """From the arguments, else GPULEASE_URL, GPULEASE_TOKEN or GPULEASE_TOKEN_FILE, and GPULEASE_CACERT, else a
        configuration file.

        The file's token is never sent to an address from elsewhere. Raises InvalidRequest.
        """
        check_timeout(timeout_s)
        _warn_of_unknown_variables()
        is_explicit = bool(url or os.environ.get("GPULEASE_URL"))
        configured = {} if is_explicit else config_file.client()
        if bearer_token is None:
            bearer_token = token_file.from_environment() or configured.get("token")
        elif bearer_token:
            bearer_token = token_file.checked(bearer_token, "token")
        url = url or configured.get("url")
        found = addresses.candidates(url)
        trusted = certificates.ca_file(found)
        return cls(found, is_explicit or bool(url), bearer_token, timeout_s, ca_file=trusted)

    @property
    def local(self) -> bool:
        """True if the daemon is on this host at whichever address it responds, tunnels aside."""
        return all(address.local for address in self.addresses)

    def overlaps(self, other: Destination) -> bool:
        """True if both may lead to the same daemon, with the same credentials."""
        return self.bearer_token == other.bearer_token and not set(self.addresses).isdisjoint(other.addresses)


@cache
def _warn_of_unknown_variables() -> None:
    """Once in each process, and by one of the ranks of a training."""
    if ranks.is_first_rank():
        for sentence in unknown_variables():
            LOG.warning(sentence)


class OutcomeUnknown(DaemonUnavailable):
    """The call was sent and no response came, so the daemon may have acted on it."""


class Misdirected(Unavailable):
    """The server at this address does not serve the API; another of the configured addresses may."""


class Failover:
    """The addresses of one client and their state. Shared by its threads; a race costs one more attempt."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        """The addresses and the credentials."""
        self._current = 0
        self._check_first = True
        self._avoided: dict[Address, float] = {}
        self._responses = 0
        self.as_of: str | None = None
        """When the last answer was current, if it may be stale."""
        self.reached = False
        """True once a daemon has responded, or may have."""

    @property
    def address(self) -> Address:
        """The address that responded last, or that is tried first."""
        return self.destination.addresses[self._current]

    @property
    def long_poll_s(self) -> float:
        """Longest long poll."""
        return LONG_POLL_S if self.is_single else FAILOVER_LONG_POLL_S

    def send(self, call: ApiCall[Answer], timeout_s: float | None = None) -> Flow[Answer]:
        """The answer, after at most one attempt at each address; again without the optional fields that are refused.

        Raises the daemon's error; OutcomeUnknown; DaemonUnavailable if nothing was sent.
        """
        try:
            return (yield from self._send_or_read_stale(call, timeout_s))
        except InvalidRequest as error:
            for_older_daemon = without_refused_fields(call, error.detail)
            if for_older_daemon is None:
                raise
        return (yield from self.send(for_older_daemon, timeout_s))

    def _send_or_read_stale(self, call: ApiCall[Answer], timeout_s: float | None) -> Flow[Answer]:
        self.as_of = None
        stale_responses: list[tuple[Address, Response]] = []
        try:
            return (yield from self._send(call, timeout_s, stale_responses))
        except (DaemonUnavailable, Unavailable):
            if not stale_responses:
                raise
            self.reached = True
            address, newest = max(stale_responses, key=lambda stale: str(stale[1].as_of))
            self.as_of = newest.as_of
            return _read(address, call, newest)

    def _send(
        self, call: ApiCall[Answer], timeout_s: float | None, stale_responses: list[tuple[Address, Response]]
    ) -> Flow[Answer]:
        failures = _Failures()
        failure: GpuleaseError | None = None
        for attempt in self._attempts(call, self.destination.timeout_s if timeout_s is None else timeout_s):
            try:
                response = yield attempt
                if response.as_of is not None and not self.is_single and response.status < 500:
                    self._responses += 1
                    stale_responses.append((attempt.address, response))
                    continue
                self.as_of = response.as_of
                answer = _read(attempt.address, call, response)
            except NotConnected as error:
                self._check_first = True
                failures.add(attempt.address, error)
            except ResponseLost as error:
                self._failed(attempt.address, error.timed_out)
                failure = _outcome_unknown(attempt, error)
                failures.add(attempt.address, error)
                if self.is_single or not _may_try_next_address(call):
                    raise failure from error
            except Unavailable as error:
                self._succeeded(attempt.address)
                failures.add(attempt.address, error)
                failure = failure if isinstance(failure, OutcomeUnknown) else error
                if self.is_single or not (isinstance(error, Misdirected) or _had_no_effect(error, call)):
                    raise
            except GpuleaseError:
                self._succeeded(attempt.address)
                raise
            else:
                self._succeeded(attempt.address)
                return answer
        raise self._overall_failure(failure, failures)

    def open_stream(self, call: ApiCall[str], silence_s: float) -> Flow[None]:
        """Begin a streamed response. Raises as `send`."""
        failures = _Failures()
        for attempt in self._attempts(call, silence_s, stream=True):
            try:
                response = yield attempt
                if not 200 <= response.status < 300:
                    raise _error_from(attempt.address, response)
            except NotConnected as error:
                self._check_first = True
                failures.add(attempt.address, error)
            except ResponseLost as error:
                self._failed(attempt.address)
                raise _outcome_unknown(attempt, error) from error
            else:
                self._succeeded(attempt.address)
                return
        raise self._no_daemon(failures)

    def stream_lost(self) -> None:
        """Note that the stream from the current address broke off."""
        self._failed(self.address)

    @property
    def is_single(self) -> bool:
        """True if there is no other address to fail over to."""
        return len(self.destination.addresses) == 1 or not self.destination.interchangeable

    def _attempts(self, call: ApiCall[Any], timeout_s: float, stream: bool = False) -> Iterator[Attempt]:
        """The attempts, in order. Each takes its fair share of the time for connections."""
        candidates = self.destination.addresses[self._current :] + self.destination.addresses[: self._current]
        if self.reached and not self.destination.interchangeable:
            candidates = candidates[:1]
        responses_before, now_s = self._responses, time.monotonic()
        avoided = {
            address for address in candidates if self._avoided.get(address, now_s) > now_s and not self.is_single
        }
        candidates = (*(address for address in candidates if address not in avoided), *avoided)
        longest_s, left_s = CONNECT_TIMEOUT_S, CONNECT_ALL_TIMEOUT_S
        if len(candidates) == 1 and not candidates[0].local:
            longest_s = left_s = DISTANT_CONNECT_TIMEOUT_S
        if not self.is_single and not stream and call.is_repeatable:
            # A daemon that hangs must leave time for the next one.
            timeout_s = min(timeout_s / len(candidates), FAILOVER_TIMEOUT_S)
        for index, address in enumerate(candidates):
            if address in avoided and self._responses > responses_before:
                return
            connect_timeout_s = min(longest_s, max(left_s, 0.05) / (len(candidates) - index), timeout_s)
            started = time.monotonic()
            yield Attempt(address, call, timeout_s + call.hold_s, connect_timeout_s, self._check_first, stream)
            left_s -= time.monotonic() - started

    def _succeeded(self, address: Address) -> None:
        self._current, self.reached, self._check_first = self.destination.addresses.index(address), True, False
        self._avoided.pop(address, None)
        self._responses += 1

    def _failed(self, address: Address, timed_out: bool = False) -> None:
        """Note that a daemon was there, and may have acted on the call."""
        if timed_out:
            self._avoided[address] = time.monotonic() + AVOID_S
        self.reached = self._check_first = True
        index = self.destination.addresses.index(address)
        self._current = index if self.is_single else (index + 1) % len(self.destination.addresses)

    def _overall_failure(self, failure: GpuleaseError | None, failures: _Failures) -> GpuleaseError:
        if failure is None:
            return self._no_daemon(failures)
        if len(failures.places) == 1:
            return failure
        kind = OutcomeUnknown if isinstance(failure, OutcomeUnknown) else Unavailable
        return kind(f"No daemon serves at {failures}.", remedy=failure.remedy, extra=failure.extra)

    def _no_daemon(self, failures: _Failures) -> DaemonUnavailable:
        not_tried, systems = "", self.destination.addresses[-1].socket is not None
        if not self.destination.interchangeable and systems:
            not_tried = (
                f" {addresses.DEFAULT_URL} was not tried: this host has {addresses.SYSTEM_DATA_DIR}, so its daemon is "
                "looked for at its socket only."
            )
        if failures.distrust is not None:
            remedy = failures.distrust.remedy
        elif self.destination.interchangeable:
            remedy = "Check the address (GPULEASE_URL), and that the daemon runs there."
        elif systems and os.path.exists(addresses.SYSTEM_DATA_DIR / "worker" / "environment"):
            # `gpulease node join` has written it.
            remedy = f"This host is a node of a daemon elsewhere: name it by GPULEASE_URL, or `url` under [client] in \
{config_file.SYSTEM}."
        elif systems:
            look = "Look at `systemctl status gpulease`" if systemd.runs() else "Start it as root (docs/install.md)"
            remedy = f"{look}, or ask the administrator of this machine."
        else:
            remedy = (
                "On a shared machine ask its administrator; `gpulease serve` starts one of your own, and GPULEASE_URL"
                " names one elsewhere."
            )
        where = failures.distrust.sentence if len(failures.places) == 1 and failures.distrust else None
        error = DaemonUnavailable(where or f"No daemon answers at {failures}.{not_tried}", remedy=remedy)
        error.may_come = failures.distrust is None
        return error


class _Failures:
    """Why each address failed."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.distrust: NotTrusted | None = None
        """The last failure of an address at which something answers that is not trusted."""

    def add(self, address: Address, error: Exception) -> None:
        self.places.append(f"{address.shown} ({getattr(error, 'detail', error)})")
        if isinstance(error, NotTrusted):
            self.distrust = error

    def __str__(self) -> str:
        return ", ".join(self.places)


def _may_try_next_address(call: ApiCall[Any]) -> bool:
    """True if the next address may be tried at once after a lost response. Long polls are repeated by their flow."""
    return call.is_repeatable and not call.hold_s


def _had_no_effect(error: Unavailable, call: ApiCall[Any]) -> bool:
    """True if a call with this 503 may be sent again."""
    return call.is_repeatable or not (error.extra.get("by_proxy") or may_have_taken_effect(error))


def may_have_taken_effect(error: BaseException) -> bool:
    """True if a call that failed so may have taken effect: the response was lost, or the daemon does not know."""
    unknown = isinstance(error, Unavailable) and error.extra.get("outcome") == "unknown"
    return unknown or isinstance(error, OutcomeUnknown)


def is_safe_to_resend(error: GpuleaseError, call: ApiCall[Any]) -> bool:
    """True if sending `call` again after this failure cannot do anything twice."""
    if isinstance(error, OutcomeUnknown):
        return call.is_repeatable
    if isinstance(error, Unavailable):
        return _had_no_effect(error, call)
    return isinstance(error, DaemonUnavailable)


def _read(address: Address, call: ApiCall[Answer], response: Response) -> Answer:
    if not 200 <= response.status < 300:
        raise _error_from(address, response)
    try:
        return call.read(response.content.decode() if call.text else json.loads(response.content))
    except json.JSONDecodeError as error:
        raise _by_proxy(
            f"{address.shown} answered {call.method} {call.path} with something else than JSON.", response
        ) from error
    except ValueError as error:
        raise GpuleaseError(
            f"{address.shown} answered {call.method} {call.path} in an unexpected form: {error}.",
            remedy="Check that a gpulease daemon of the same version listens there.",
        ) from error


def _error_from(address: Address, response: Response) -> GpuleaseError:
    try:
        document = json.loads(response.content)
    except ValueError:
        document = None
    if isinstance(document, dict) and "code" in document:
        error = error_from_problem(document)
        error.args = (f"{error.detail} {respelled(error.remedy, METHODS)}".strip(),)  # what a traceback shows
        if isinstance(error, Unavailable):
            error.retry_after_s = response.retry_after_s
        return error
    detail = f"{address.shown} answered {response.status} {response.reason} without saying why."
    if response.status in MISDIRECTED_STATUSES:
        return Misdirected(detail, remedy=CHECK_LISTENER)
    return _by_proxy(detail, response)


def _by_proxy(detail: str, response: Response) -> Unavailable:
    """The failure where a proxy, or another program, answers in place of the daemon, which may come back."""
    error = Unavailable(detail, remedy=CHECK_LISTENER, extra={"by_proxy": True})
    error.retry_after_s = response.retry_after_s
    return error


def _outcome_unknown(attempt: Attempt, error: ResponseLost) -> OutcomeUnknown:
    where, what = attempt.address.shown, f"{attempt.call.method} {attempt.call.path}"
    if error.timed_out:
        return OutcomeUnknown(
            f"The daemon at {where} did not answer {what} within {attempt.timeout_s:.3g} s.",
            remedy="Look at its log, and restart it if it hangs.",
        )
    return OutcomeUnknown(
        f"The daemon at {where} broke off during {what}: {error}.",
        remedy="Look at its log: it may have been restarted.",
    )
