"""Which address is asked, in what order, and what each outcome means. Pure: `steps` says how it is carried.

- Places where a daemon *may* be (the local sockets, then loopback) can hold different daemons, with different leases.
  The first that answers is the one; from then on no other is asked.
- Addresses that were *given* (`Client([a, b])`, GPULEASE_URL=a,b) are ways to one service. The one that answered is
  kept until it fails: refuses the connection, breaks off, or says that it does not serve (503 `unavailable`, as a
  standby does; 421 or a redirect). Then the next is asked, round about. One that was asked and said nothing in time is
  left alone for a while, as long as any other answers. What a standby reads out from its copy (`Answered.as_of`) is
  the answer only if no other address has one.

A call is sent a second time only if that is safe: nothing was sent the first time, or the daemon says that it did
nothing (503 `unavailable` without `outcome: unknown`), or the call does the same when it comes twice
(`Call.repeatable`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from gpulease import addresses, config_file
from gpulease.addresses import Address
from gpulease.calls import Call
from gpulease.errors import DaemonUnavailable, GpuleaseError, Unavailable, from_problem
from gpulease.steps import Answered, Attempt, BrokenOff, NotReached, Steps

Answer = TypeVar("Answer")

CONNECT_S = 1.0
"""How long to wait for one connection, at most."""
CONNECT_ALL_S = 1.5
"""How long all addresses together may take to show that nobody is there."""
LATE_S = 2.0
"""How long one of several addresses may take to answer, beyond what the call asks the daemon to hold: a daemon that is
stopped still accepts what is sent to it, and another one has taken over after about 3.5 s."""
AVOID_S = 4.0
"""How long one that was late is not asked while another one answers at all."""
HOLD_S, HOLD_OF_SEVERAL_S = 25.0, 2.0
"""How long one long poll lasts at most: below what proxies and load balancers cut off; with several addresses, short
enough to notice in time that the daemon is stopped."""
ELSEWHERE = {301, 302, 303, 307, 308, 421}
"""Statuses by which a server says that somebody else serves this."""
GATEWAY = {502, 503, 504}
"""Statuses by which a proxy says that no server answered it."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The daemon that a client talks to, and what it says of itself."""

    addresses: tuple[Address, ...]
    """Where it may be, in the order in which they are tried."""
    interchangeable: bool
    """True when all addresses lead to one service, false when the first that answers is the one."""
    token: str | None
    """Bearer token."""
    timeout_s: float
    """How long to wait for an answer, beyond what the call asks the daemon to hold."""

    @classmethod
    def of(cls, url: str | Sequence[str] | None, token: str | None, timeout_s: float) -> Self:
        """What the arguments say, else what GPULEASE_URL and GPULEASE_TOKEN say, else a configuration file, whose token
        is for whom it or the default leads to. Raises InvalidRequest."""
        told = bool(url or os.environ.get("GPULEASE_URL"))
        configured = {} if told else config_file.client()
        if token is None:
            token = os.environ.get("GPULEASE_TOKEN") or configured.get("token")
        url = url or configured.get("url")
        return cls(addresses.candidates(url), told or bool(url), token, timeout_s)

    @property
    def local(self) -> bool:
        """True when the daemon, wherever it answers, is on this host, tunnels apart."""
        return all(address.local for address in self.addresses)


class Unanswered(DaemonUnavailable):
    """The call was sent and its answer never came, so it may have been carried out."""


class Elsewhere(Unavailable):
    """Who listens there does not serve this; another one of the given addresses may."""


class Route:
    """The addresses of one client and what is known of them. Shared by its threads; a race costs one attempt more."""

    def __init__(self, destination: Destination) -> None:
        self._to = destination
        self._start = 0
        self._in_doubt = True
        self._avoided: dict[Address, float] = {}
        self._heard = 0
        self.as_of: str | None = None
        """When the last answer was true, if it may be out of date."""
        self.found = False
        """True once anybody has answered, or may have."""

    @property
    def address(self) -> Address:
        """The one that answered last, or that is tried first."""
        return self._to.addresses[self._start]

    @property
    def hold_s(self) -> float:
        """How long one long poll lasts, at most."""
        return HOLD_S if self.alone else HOLD_OF_SEVERAL_S

    def ask(self, call: Call[Answer], timeout_s: float | None = None) -> Steps[Answer]:
        """The answer, by one round through the addresses.

        Raises what the daemon answers; Unanswered; DaemonUnavailable when nothing was sent.
        """
        self.as_of = None
        copies: list[tuple[Address, Answered]] = []
        try:
            return (yield from self._ask(call, timeout_s, copies))
        except (DaemonUnavailable, Unavailable):
            if not copies:
                raise
            self.found = True
            address, newest = max(copies, key=lambda copy: str(copy[1].as_of))
            self.as_of = newest.as_of
            return _read(address, call, newest)

    def _ask(
        self, call: Call[Answer], timeout_s: float | None, copies: list[tuple[Address, Answered]]
    ) -> Steps[Answer]:
        refused: list[str] = []
        failure: GpuleaseError | None = None
        for attempt in self._round(call, self._to.timeout_s if timeout_s is None else timeout_s):
            try:
                answered = yield attempt
                if answered.as_of is not None and not self.alone and answered.status < 500:
                    self._heard += 1
                    copies.append((attempt.address, answered))
                    continue
                self.as_of = answered.as_of
                answer = _read(attempt.address, call, answered)
            except NotReached as error:
                self._in_doubt = True
                refused.append(f"{attempt.address.shown} ({error})")
            except BrokenOff as error:
                self._failed(attempt.address, error.late)
                failure = _unanswered(attempt, error)
                refused.append(f"{attempt.address.shown} ({error})")
                if self.alone or not _may_go_on(call):
                    raise failure from error
            except Unavailable as error:
                self._answered(attempt.address)
                refused.append(f"{attempt.address.shown} ({error.detail})")
                failure = failure if isinstance(failure, Unanswered) else error
                if self.alone or not (isinstance(error, Elsewhere) or _did_nothing(error, call)):
                    raise
            except GpuleaseError:
                self._answered(attempt.address)
                raise
            else:
                self._answered(attempt.address)
                return answer
        raise self._verdict(failure, refused)

    def open(self, call: Call[str], silence_s: float) -> Steps[None]:
        """Begin a streamed answer; what it breaks off with is raised as by `ask`."""
        refused: list[str] = []
        for attempt in self._round(call, silence_s, stream=True):
            try:
                answered = yield attempt
                if not 200 <= answered.status < 300:
                    raise _refusal(attempt.address, answered)
            except NotReached as error:
                self._in_doubt = True
                refused.append(f"{attempt.address.shown} ({error})")
            except BrokenOff as error:
                self._failed(attempt.address)
                raise _unanswered(attempt, error) from error
            else:
                self._answered(attempt.address)
                return
        raise _nobody(refused)

    def broke(self) -> None:
        """The address that answered last has broken off."""
        self._failed(self.address)

    @property
    def alone(self) -> bool:
        """True when there is no other address to ask."""
        return len(self._to.addresses) == 1 or not self._to.interchangeable

    def _round(self, call: Call[Any], limit_s: float, stream: bool = False) -> Iterator[Attempt]:
        """Attempts in order. Who goes on asks for the next; the time for connections is shared fairly."""
        places = self._to.addresses[self._start :] + self._to.addresses[: self._start]
        if self.found and not self._to.interchangeable:
            places = places[:1]
        heard, now_s = self._heard, time.monotonic()
        avoided = {place for place in places if not self.alone and self._avoided.get(place, now_s) > now_s}
        places = (*(place for place in places if place not in avoided), *avoided)
        left_s = CONNECT_ALL_S
        if not self.alone and not stream and call.repeatable:
            limit_s = min(limit_s / len(places), LATE_S)  # one that hangs must leave time for the next
        for index, address in enumerate(places):
            if address in avoided and self._heard > heard:
                return
            connect_s = min(CONNECT_S, max(left_s, 0.05) / (len(places) - index), limit_s)
            begun = time.monotonic()
            yield Attempt(address, call, limit_s + call.hold_s, connect_s, self._in_doubt, stream)
            left_s -= time.monotonic() - begun

    def _answered(self, address: Address) -> None:
        self._start, self.found, self._in_doubt = self._to.addresses.index(address), True, False
        self._avoided.pop(address, None)
        self._heard += 1

    def _failed(self, address: Address, late: bool = False) -> None:
        """A daemon was there and may have done what was asked."""
        if late:
            self._avoided[address] = time.monotonic() + AVOID_S
        self.found = self._in_doubt = True
        index = self._to.addresses.index(address)
        self._start = index if self.alone else (index + 1) % len(self._to.addresses)

    def _verdict(self, failure: GpuleaseError | None, refused: Sequence[str]) -> GpuleaseError:
        if failure is None:
            return _nobody(refused)
        if len(refused) == 1:
            return failure
        kind = Unanswered if isinstance(failure, Unanswered) else Unavailable
        return kind(f"No daemon serves at {', '.join(refused)}.", remedy=failure.remedy, extra=failure.extra)


def _may_go_on(call: Call[Any]) -> bool:
    """True when the next address may be asked at once after one broke off; a long poll is asked again by who waits."""
    return call.repeatable and not call.hold_s


def _did_nothing(error: Unavailable, call: Call[Any]) -> bool:
    """True when a call that was answered so may be sent again."""
    return call.repeatable or not (error.extra.get("by_proxy") or may_have_been_done(error))


def may_have_been_done(error: BaseException) -> bool:
    """True when a call that failed so may have been carried out: its answer was lost, or the daemon does not know."""
    unknown = isinstance(error, Unavailable) and error.extra.get("outcome") == "unknown"
    return unknown or isinstance(error, Unanswered)


def may_be_sent_again(error: GpuleaseError, call: Call[Any]) -> bool:
    """True when sending `call` once more after this failure cannot do anything twice."""
    if isinstance(error, Unanswered):
        return call.repeatable
    if isinstance(error, Unavailable):
        return _did_nothing(error, call)
    return isinstance(error, DaemonUnavailable)


def _read(address: Address, call: Call[Answer], answered: Answered) -> Answer:
    if not 200 <= answered.status < 300:
        raise _refusal(address, answered)
    try:
        return call.read(answered.content.decode() if call.text else json.loads(answered.content))
    except ValueError as error:
        raise GpuleaseError(
            f"{address.shown} answered {call.method} {call.path} with something else than was expected: {error}.",
            remedy="Check that a gpulease daemon of the same version listens there.",
        ) from error


def _refusal(address: Address, answered: Answered) -> GpuleaseError:
    try:
        document = json.loads(answered.content)
    except ValueError:
        document = None
    if isinstance(document, dict) and "code" in document:
        error = from_problem(document)
        if isinstance(error, Unavailable):
            error.retry_after_s = answered.retry_after_s
        return error
    said = f"{address.shown} answered {answered.status} {answered.reason} without saying why."
    remedy = "Check that a gpulease daemon listens there."
    if answered.status in ELSEWHERE:
        return Elsewhere(said, remedy=remedy)
    if answered.status in GATEWAY:
        error = Unavailable(said, remedy=remedy, extra={"by_proxy": True})
        error.retry_after_s = answered.retry_after_s
        return error
    return GpuleaseError(said, remedy=remedy)


def _nobody(tried: Sequence[str]) -> DaemonUnavailable:
    return DaemonUnavailable(
        f"No daemon answers at {', '.join(tried)}.", remedy="Start one with `gpulease serve`, or set GPULEASE_URL."
    )


def _unanswered(attempt: Attempt, error: BrokenOff) -> Unanswered:
    where, what = attempt.address.shown, f"{attempt.call.method} {attempt.call.path}"
    if error.late:
        return Unanswered(
            f"The daemon at {where} did not answer {what} within {attempt.limit_s:.3g} s.",
            remedy="Look at its log, and restart it if it hangs.",
        )
    return Unanswered(
        f"The daemon at {where} broke off during {what}: {error}.",
        remedy="Look at its log: it may have been restarted.",
    )
