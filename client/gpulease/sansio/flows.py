"""The flows of a client: how it calls the daemon, retries, waits and streams. Sans I/O, for both clients (`effects`).

Whatever interrupts a wait (Ctrl-C, a cancelled task, a timeout of the caller's) withdraws the request. If the response
to a request was lost, the request is sent again under the same idempotency key, which gets the same lease. A release or
withdrawal that no daemon answers is repeated (`release_retries`).
"""

from __future__ import annotations

import codecs
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpulease.sansio.effects import Emit, Flow, NextChunk, ResponseLost, Sleep
from gpulease.sansio.failover import Destination, Failover, is_safe_to_resend, may_have_taken_effect
from gpulease.sansio.http_requests import check_wait
from gpulease.sansio.release_retries import DEBTS, Debt, is_about_its_debt, is_answer
from gpulease.sansio.wait_announcement import WaitAnnouncement
from gpulease_protocol import endpoints
from gpulease_protocol.codec import to_json
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import (
    DaemonUnavailable,
    GpuleaseError,
    InvalidRequest,
    LeaseLost,
    NotNow,
    StaleToken,
    Unavailable,
)
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.log_frames import LogFrameParser
from gpulease_protocol.model import Demand, Job, Lease, LeaseState, Page
from gpulease_protocol.obstacle_groups import obstacle_groups
from gpulease_protocol.sse import EventStreamParser

if TYPE_CHECKING:
    from gpulease_protocol.event_choice import EventChoice
    from gpulease_protocol.requests import LeaseRequest
from gpulease_protocol.status_table import describe_demand

LOG = logging.getLogger("gpulease")

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Held = TypeVar("Held")

RETRY_S, TAKEOVER_RETRY_S = 1.0, 10.0
"""Retry budget of calls that neither long-poll nor hold a lease; with several addresses, long enough for a takeover."""
STREAM_SILENCE_S = 45.0
"""How long a followed log or the events may be silent before they are requested again. The daemon sends something every
15 s; proxies end what is silent for longer than this."""
MAX_PAGES = 1000
"""Most pages that are fetched of one list."""


class Backoff:
    """Exponential backoff during one outage, within a retry budget of `limit_s` seconds.

    Pauses double from 0.05 to 1 s, with jitter, and are no shorter than the daemon's `Retry-After`. If that is longer
    than the rest of the budget, one last attempt is made at its end.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.reset()

    def reset(self) -> None:
        """End the outage: a response has arrived."""
        self._since: float | None = None
        self._pause_s = 0.05

    def pause(self, error: GpuleaseError) -> Sleep:
        """The pause before the next attempt. Raises `error` when the outage has lasted `limit_s`."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        left_s = self._since + self.limit_s - now
        if self._pause_s > left_s:
            raise error
        pause_s = self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing
        if isinstance(error, Unavailable) and error.retry_after_s is not None:
            # Jitter here too, so that clients do not all come back at the same moment.
            pause_s = min(max(pause_s, error.retry_after_s * random.uniform(1.0, 1.25)), left_s)  # noqa: S311
        self._pause_s = min(self._pause_s * 2, 1.0)
        return Sleep(pause_s)


class Flows:
    """The flows of one client. Each method returns one, for a transport to run."""

    def __init__(self, destination: Destination, retry_s: float) -> None:
        check_wait(retry_s, "retry_s")
        self.failover = Failover(destination)
        self._retry_s = retry_s
        self._short_retry_s = RETRY_S if self.failover.is_single else TAKEOVER_RETRY_S

    def send(self, call: ApiCall[Answer], retry_s: float | None = None, timeout_s: float | None = None) -> Flow[Answer]:
        """The answer to `call`.

        Once the daemon has been reached, the call is retried for `retry_s` in an outage; null means `RETRY_S`, or
        `TAKEOVER_RETRY_S` with several addresses. Raises the daemon's error; DaemonUnavailable if no daemon responds;
        OutcomeUnknown, a subclass of that, if the call may have taken effect.
        """
        backoff, unknown_outcome = Backoff(self._short_retry_s if retry_s is None else retry_s), None
        while True:
            try:
                return (yield from self.failover.send(call, timeout_s))
            except (DaemonUnavailable, Unavailable) as error:
                unknown_outcome = error if may_have_taken_effect(error) else unknown_outcome
                if not self.failover.reached or not is_safe_to_resend(error, call):
                    raise
                pause = backoff.pause(unknown_outcome or error)
            yield pause

    def all_pages(self, page_after: Callable[[str | None], ApiCall[Page[Item]]]) -> Flow[tuple[Item, ...]]:
        """All items of a list, fetched page by page."""
        items: list[Item] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = yield from self.send(page_after(cursor))
            items.extend(page.items)
            cursor = page.next
            if cursor is None:
                break
        return tuple(items)

    def request_lease(
        self, request: LeaseRequest, wait_s: float | None, on_queued: Callable[[Lease], None] | None = None
    ) -> Flow[Lease]:
        """A lease, maybe queued, if `wait_s` is null; else once it is granted."""
        if wait_s is None:
            yield from self._settle_debts()
            call = endpoints.request_lease(request, uuid.uuid4().hex)
            return (yield from self._request(call, self._short_retry_s, shared=False))
        return (yield from self.acquire(request, wait_s, _unheld, on_queued=on_queued))

    def acquire(
        self,
        request: LeaseRequest,
        wait_s: float,
        hold: Callable[..., Held],
        shared_key: str | None = None,
        on_queued: Callable[[Lease], None] | None = None,
    ) -> Flow[Held]:
        """What `hold` makes of an active lease and of `trusted_from`, a monotonic time before its grant or its last
        renewal. Whatever interrupts this before there is a holder gives the lease back.

        With `shared_key` the lease may have been granted to another process long ago, so it is always renewed. If the
        wait is interrupted then, a queued request is withdrawn but never a granted lease, because others hold it.
        """
        check_wait(wait_s)
        yield from self._settle_debts()
        key, shared, lease = shared_key or uuid.uuid4().hex, shared_key is not None, None
        silent = on_queued is not None and not getattr(on_queued, "announces", False)
        with WaitAnnouncement(self.failover, silent=silent) as announcement:
            try:
                # A request that is retried under its key may have been granted at the first attempt.
                sent_at = time.monotonic()
                if wait_s <= 0:
                    lease = yield from self._acquire_now(replace(request, queue=False), key, shared)
                else:
                    # Get the id before waiting, so that the request can be withdrawn whatever interrupts the wait.
                    retry_s = max(self._short_retry_s, min(self._retry_s, wait_s))
                    lease = yield from self._request(endpoints.request_lease(request, key), retry_s, shared)
                if not _settled(lease):
                    if on_queued is not None:
                        on_queued(lease)
                    lease, sent_at = yield from self._wait_for_grant(lease, sent_at, wait_s, announcement)
                lease, sent_at = yield from self._renewed_if_old(lease, float("-inf") if shared else sent_at)
                return hold(lease, trusted_from=sent_at)
            except BaseException as error:
                if lease is not None and not (shared and _settled(lease)):
                    debt = Debt(self.failover, lease_id=lease.id, granted_too=not shared)
                    if (yield from self._settle_or_owe(debt, error)) and not isinstance(error, Exception):
                        announcement.gave_up(error)
                raise

    def release(
        self, lease_id: str, fencing_token: int | None, retry_s: float | None = None, timeout_s: float | None = None
    ) -> Flow[Lease]:
        """End a lease, or cancel a queued one. A release that no daemon answers is owed."""
        try:
            return (yield from self.send(endpoints.release(lease_id, fencing_token), retry_s, timeout_s))
        except BaseException as error:
            if not is_answer(error):
                DEBTS.owe(Debt(self.failover, lease_id=lease_id, fencing_token=fencing_token, granted_too=False))
            raise

    def wait_job(self, job_id: str, wait_s: float | None, until: Callable[[Job], bool]) -> Flow[Job]:
        """The job once `until` returns true for it, or as it is after `wait_s`; null waits forever. An outage that it
        begins in is part of the wait."""
        if wait_s is not None:
            check_wait(wait_s)
        started_at = time.monotonic()
        job = yield from self.send(endpoints.job(job_id), self._retry_s)
        poll = lambda hold_s, job: endpoints.job(job_id, hold_s, job.state)  # noqa: E731
        return (yield from self._poll_until(job, started_at, poll, until, wait_s))[0]

    def job_log(
        self,
        call_at: Callable[[int | None, str | int | None], ApiCall[str]],
        tail: int | None = None,
        offset: str | int | None = None,
        errors: str = "replace",
    ) -> Flow[None]:
        """Emit the text of a log as it arrives. Resumes after an outage where it broke off."""
        backoff, decoder = Backoff(self._retry_s), codecs.getincrementaldecoder("utf-8")(errors)
        while True:
            call, frames = call_at(tail, offset), LogFrameParser()
            try:
                yield from self.failover.open_stream(call, STREAM_SILENCE_S)
                while (chunk := (yield NextChunk())) is not None:
                    for frame in self._parse(frames.feed(chunk), call):
                        backoff.reset()
                        tail, offset = None, frame.at
                        if text := decoder.decode(frame.content, final=frame.end):
                            yield Emit(text)
                        if frame.end:
                            return
                raise ResponseLost("it ended in the middle")
            except ResponseLost as error:
                self.failover.stream_lost()
                if error.timed_out:
                    # Raises unless the daemon still responds: then the job is only silent.
                    yield from self.failover.send(endpoints.alive())
                    continue
                pause = backoff.pause(self._stream_failure(call, error))
            except (DaemonUnavailable, Unavailable) as error:
                if not self.failover.reached:
                    raise
                pause = backoff.pause(error)
            yield pause

    def events(self, after: int, limit: int | None, newest_first: bool, choice: EventChoice) -> Flow[None]:
        """Emit each of these recorded events, fetched page by page."""
        before: int | None = None
        while True:
            page = yield from self.send(
                endpoints.events(after, limit, before=before, newest_first=newest_first, **choice)
            )
            yield from map(Emit, page.items)
            if page.next is None:
                return
            after, before = (after, int(page.next)) if newest_first else (int(page.next), None)

    def watch_events(self, after: int | None) -> Flow[None]:
        """Emit each event as it is recorded, forever. Resumes after an outage where it broke off, without a gap.

        Raises EventsPruned if events in between are gone, DaemonUnavailable if an outage lasts `retry_s`.
        """
        backoff = Backoff(self._retry_s)
        while True:
            call, frames = endpoints.event_stream(after), EventStreamParser()
            try:
                yield from self.failover.open_stream(call, STREAM_SILENCE_S)
                while (chunk := (yield NextChunk())) is not None:
                    for frame in self._parse(frames.feed(chunk), call):
                        after = frame.seq if frame.seq is not None else after
                        if frame.event is not None:
                            yield Emit(frame.event)
                    backoff.reset()
                raise ResponseLost("it ended")
            except ResponseLost as error:
                self.failover.stream_lost()
                pause = backoff.pause(self._stream_failure(call, error))
            except (DaemonUnavailable, Unavailable) as error:
                if not self.failover.reached:
                    raise
                pause = backoff.pause(error)
            yield pause

    def _stream_failure(self, call: ApiCall[Any], error: ResponseLost) -> DaemonUnavailable:
        where = f"The daemon at {self.failover.address.shown} broke off during {call.path}: {error}."
        return DaemonUnavailable(where, remedy="Look at its log: it may have been restarted.")

    def _parse(self, frames: Iterator[Item], call: ApiCall[str]) -> Iterator[Item]:
        try:
            yield from frames
        except ValueError as error:
            raise Unavailable(
                f"{self.failover.address.shown} answered {call.method} {call.path} in an unexpected form: {error}.",
                remedy="Check that a gpulease daemon of the same version listens there.",
            ) from error

    def _acquire_now(self, request: LeaseRequest, key: str, shared: bool) -> Flow[Lease]:
        try:
            return (yield from self._request(endpoints.request_lease(request, key), self._short_retry_s, shared))
        except NotNow as error:
            raise _not_now(request.demand(), error.explanation, 0, error) from None

    def _request(self, call: ApiCall[Lease], retry_s: float, shared: bool) -> Flow[Lease]:
        """The answer to a request for a lease. If none arrives, a lease that may have been granted is released, unless
        it is `shared`: then it ends with its owner."""
        try:
            return (yield from self.send(call, retry_s))
        except BaseException as error:
            refused = isinstance(error, GpuleaseError) and not may_have_taken_effect(error)
            if not shared and not refused:
                yield from self._settle_or_owe(Debt(self.failover, request=call), error)
            raise

    def _settle_or_owe(self, debt: Debt, interruption: BaseException) -> Flow[bool]:
        """Settle the debt at once, because the process may be about to end. What no daemon answers is owed: false."""
        DEBTS.add(debt)
        backoff, until_s = Backoff(RETRY_S), time.monotonic() + RETRY_S
        try:
            # A generator that is being closed can do nothing more itself.
            while not isinstance(interruption, GeneratorExit):
                if (error := (yield from DEBTS.settled(debt))) is None:
                    return True
                try:
                    pause = backoff.pause(error)
                except GpuleaseError:
                    pause = None
                if pause is None or time.monotonic() > until_s:
                    what = f"Request {debt.lease_id}" if debt.lease_id else "A request without a response"
                    LOG.warning("%s is not withdrawn yet; this process keeps trying until it ends: %s", what, error)
                    break
                yield pause
            return False
        finally:
            DEBTS.settle_in_background()

    def _settle_debts(self) -> Flow[None]:
        """Say what is owed before asking for GPUs again, so that no process waits behind its own former request."""
        unresponsive = set()
        for debt in DEBTS.owed_to(self.failover.destination):
            if debt.failover in unresponsive:
                continue
            error = yield from DEBTS.settled(debt)
            if error is not None and not is_about_its_debt(error):
                unresponsive.add(debt.failover)

    def _renewed_if_old(self, lease: Lease, sent_at: float) -> Flow[tuple[Lease, float]]:
        """The lease, renewed if so much time has passed since its grant that it may soon expire."""
        if lease.state is LeaseState.ACTIVE and time.monotonic() - sent_at > lease.ttl_s * 3 / 4:
            sent_at = time.monotonic()
            lease = yield from self.send(endpoints.renew(lease.id, lease.fencing_token))
        if lease.state is not LeaseState.ACTIVE:
            raise LeaseLost(f"Request {lease.id} ended before it was granted: {lease.end_reason}.", remedy="Ask again.")
        return lease, sent_at

    def _wait_for_grant(
        self, lease: Lease, sent_at: float, wait_s: float, announcement: WaitAnnouncement
    ) -> Flow[tuple[Lease, float]]:
        """The lease once it is granted, and when the last call was sent that found it still queued.

        Not when the call that found it granted was sent: an earlier response that said so may have been lost.
        """

        def poll(hold_s: float, lease: Lease) -> ApiCall[Lease]:
            # Each poll keeps the request alive, so polls must be closer together than the ttl.
            return endpoints.lease(lease.id, min(hold_s, lease.ttl_s / 3, announcement.longest_poll_s), lease.state)

        left_s = sent_at + wait_s - time.monotonic()
        lease, queued_at = yield from self._poll_until(lease, sent_at, poll, _settled, left_s, announcement.after_poll)
        if not _settled(lease):
            explanation = yield from self.send(endpoints.explain(lease.id))
            try:
                yield from self.send(endpoints.release(lease.id, None))
            except StaleToken:  # granted after the last poll
                return (yield from self.send(endpoints.lease(lease.id))), queued_at
            raise _not_now(lease.demand, explanation, wait_s)
        return lease, queued_at

    def _poll_until(
        self,
        noun: Item,
        sent_at: float,
        poll: Callable[[float, Item], ApiCall[Item]],
        settled: Callable[[Item], bool],
        wait_s: float | None,
        after_poll: Callable[[Item], Flow[None]] | None = None,
    ) -> Flow[tuple[Item, float]]:
        """Long-poll until `noun` is settled or `wait_s` has passed, retrying for `retry_s` in an outage.

        Returns it, and when the last call without a settled answer was sent, on the monotonic clock. `sent_at` is when
        the call that returned `noun` was sent.
        """
        deadline = None if wait_s is None else time.monotonic() + wait_s
        backoff = Backoff(self._retry_s)
        while not settled(noun):
            started_at = time.monotonic()
            left_s = self.failover.long_poll_s if deadline is None else deadline - started_at
            if left_s <= 0:
                break
            try:
                noun = yield from self.failover.send(poll(min(self.failover.long_poll_s, left_s), noun))
            except (DaemonUnavailable, Unavailable) as error:
                pause = backoff.pause(error)
            else:
                backoff.reset()
                if settled(noun):
                    break
                sent_at = started_at
                if after_poll is not None:
                    yield from after_poll(noun)
                # Do not poll in a tight loop if the daemon does not hold its responses.
                pause = Sleep(0.05 if time.monotonic() - started_at < 0.05 else 0.0)
            yield pause
        return noun, sent_at


def _unheld(lease: Lease, trusted_from: float) -> Lease:
    """For who renews and releases it: the lease itself."""
    return lease


def _settled(lease: Lease) -> bool:
    """False while it waits, in whatever state: a newer daemon may have one between `queued` and `active`."""
    return lease.state in (LeaseState.ACTIVE, LeaseState.ENDED)


def lease_request(**fields: Any) -> LeaseRequest:
    """The body of a lease request. Raises InvalidRequest, naming the field."""
    from gpulease_protocol.requests import LeaseRequest  # noqa: PLC0415 - for who asks for leases

    try:
        return LeaseRequest(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(error)) from error


def as_tuple(state: str | Iterable[str]) -> tuple[str, ...]:
    """One state or several, as a tuple."""
    return (state,) if isinstance(state, str) else tuple(state)


def _not_now(demand: Demand, explanation: Explanation | None, wait_s: float, answer: NotNow | None = None) -> NotNow:
    """A refusal in one look: what was asked for, and who has the GPUs."""
    if explanation is None:
        detail = answer.detail if answer else "The GPUs are in use."
    elif groups := obstacle_groups(explanation.obstacles):
        not_granted = f", not granted within {wait_s:g} s" if wait_s > 0 else ""
        detail = f"Not now: asked for {describe_demand(demand)}{not_granted}. {'. '.join(groups)}."
    else:
        detail = explanation.sentence
    remedy = "Wait longer: `wait_s=600`." if wait_s > 0 else "Wait in the queue: `wait_s=600`."
    return NotNow(detail, remedy=remedy, extra={"explanation": to_json(explanation) if explanation else None})
