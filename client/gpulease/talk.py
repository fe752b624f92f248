"""What a client says to a daemon and how it waits, as `steps`: written once for `Client` and `AsyncClient`.

Whatever breaks a wait (Ctrl-C, a cancelled task, a timeout of the caller's) takes the request back. A request whose
answer was lost is found by sending it again under its idempotency key: the same key gets the same lease.
"""

from __future__ import annotations

import codecs
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from gpulease import calls
from gpulease.calls import Call
from gpulease.errors import DaemonUnavailable, GpuleaseError, InvalidRequest, LeaseLost, NotNow, StaleToken, Unavailable
from gpulease.event_frames import EventFrames
from gpulease.explanation import Explanation
from gpulease.log_frames import Frames
from gpulease.model import Job, Lease, LeaseState, Page
from gpulease.route import Destination, Route, may_be_sent_again, may_have_been_done
from gpulease.steps import BrokenOff, Emit, NextPiece, Sleep, Steps
from gpulease.wire import LeaseRequest, from_json, to_json

LOG = logging.getLogger("gpulease")

Answer = TypeVar("Answer")
Item = TypeVar("Item")

BRIEFLY_S, TAKEOVER_S = 1.0, 10.0
"""How long an outage is sat out by calls that wait for nothing and hold nothing; with several addresses, until another
daemon has taken over."""
TAKE_BACK_S = 3.0
"""How long each call may take by which a request is taken back: somebody has pressed Ctrl-C and waits."""
SILENCE_S = 300.0
"""How long a followed log may be silent before it is asked for anew."""
EVENTS_SILENCE_S = 45.0
"""The same for events, where the daemon sends a comment every 15 s."""
MAX_PAGES = 1000
"""Pages of one list that are fetched at most."""


class Patience:
    """Bounds how long one outage is sat out, with pauses that double from 0.05 to 1 s, and are no shorter than the
    daemon's `Retry-After`. Where that is longer than what is left, it is asked once more at the very end."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.reset()

    def reset(self) -> None:
        """Forget the outage: an answer has arrived."""
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
            # Not all at the same moment, either.
            pause_s = min(max(pause_s, error.retry_after_s * random.uniform(1.0, 1.25)), left_s)  # noqa: S311
        self._pause_s = min(self._pause_s * 2, 1.0)
        return Sleep(pause_s)


class Talk:
    """One client's conversations with its daemon. Every method is one, to be carried by a transport."""

    def __init__(self, destination: Destination, retry_s: float) -> None:
        self.route = Route(destination)
        self._retry_s = retry_s
        self._briefly_s = BRIEFLY_S if self.route.alone else TAKEOVER_S

    def send(
        self, call: Call[Answer], patience_s: float | None = None, timeout_s: float | None = None
    ) -> Steps[Answer]:
        """The answer to `call`. An outage of at most `patience_s` is sat out once the daemon has been reached; null is
        a brief one, or a takeover where there are several addresses.

        Raises the `GpuleaseError` that the daemon answers; DaemonUnavailable when nothing answers, as Unanswered if the
        call may have been carried out.
        """
        patience, unanswered = Patience(self._briefly_s if patience_s is None else patience_s), None
        while True:
            try:
                return (yield from self.route.ask(call, timeout_s))
            except (DaemonUnavailable, Unavailable) as error:
                unanswered = error if may_have_been_done(error) else unanswered
                if not self.route.found or not may_be_sent_again(error, call):
                    raise
                pause = patience.pause(unanswered or error)
            yield pause

    def every(self, page_after: Callable[[str | None], Call[Page[Item]]]) -> Steps[tuple[Item, ...]]:
        """All items of a list, page by page."""
        items: list[Item] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = yield from self.send(page_after(cursor))
            items.extend(page.items)
            cursor = page.next
            if cursor is None:
                break
        return tuple(items)

    def requested(
        self, request: LeaseRequest, wait_s: float | None, on_queued: Callable[[Lease], None] | None = None
    ) -> Steps[Lease]:
        """A lease: as the daemon answers at once if `wait_s` is null, else once it is granted."""
        if wait_s is None:
            return (yield from self.send(calls.request_lease(request, uuid.uuid4().hex)))
        return (yield from self.granted(request, wait_s, on_queued=on_queued))[0]

    def granted(
        self,
        request: LeaseRequest,
        wait_s: float,
        shared_key: str | None = None,
        on_queued: Callable[[Lease], None] | None = None,
    ) -> Steps[tuple[Lease, float]]:
        """An active lease, and a monotonic time that lies before its grant, or before its last renewal.

        With `shared_key` it may be one that another process was granted, long ago: it is renewed in any case. What
        breaks the wait of one of them takes back a request that still waits, and never a grant: others hold it.
        """
        key = shared_key or uuid.uuid4().hex
        if wait_s <= 0:
            lease, asked_at = yield from self._granted_now(replace(request, queue=False), key, shared_key is not None)
        else:
            # A request that is sent again under its key may have been granted when it was first sent.
            asked_at = time.monotonic()
            # The id is wanted before the wait, so that whatever breaks the wait can take the request back.
            lease = yield from self._asked(calls.request_lease(request, key), self._retry_s, shared_key is not None)
        try:
            if lease.state is LeaseState.QUEUED:
                if on_queued is not None:
                    on_queued(lease)
                lease, asked_at = yield from self._wait_for_grant(lease, asked_at, wait_s)
            return (yield from self._with_time_left(lease, float("-inf") if shared_key else asked_at))
        except GeneratorExit:
            raise
        except BaseException:
            if shared_key is None or lease.state is LeaseState.QUEUED:
                yield from self._take_back(lease.id, granted_too=shared_key is None)
            raise

    def job(self, job_id: str, wait_s: float | None, until: Callable[[Job], bool]) -> Steps[Job]:
        """The job once `until` says so, or as it is after `wait_s`; null waits for ever."""
        begun = time.monotonic()
        job = yield from self.send(calls.job(job_id))
        poll = lambda hold_s, job: calls.job(job_id, hold_s, job.state)  # noqa: E731
        return (yield from self._watch(job, begun, poll, until, wait_s))[0]

    def log(
        self,
        call_at: Callable[[int | None, str | int | None], Call[str]],
        tail: int | None = None,
        offset: str | int | None = None,
    ) -> Steps[None]:
        """Emits the text of a log as it arrives. After an outage it goes on where it broke off."""
        patience, decoder = Patience(self._retry_s), codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            call, frames = call_at(tail, offset), Frames()
            try:
                yield from self.route.open(call, SILENCE_S)
                while (piece := (yield NextPiece())) is not None:
                    patience.reset()
                    for frame in self._taken(frames.feed(piece), call):
                        tail, offset = None, frame.at
                        if text := decoder.decode(frame.content, final=frame.end):
                            yield Emit(text)
                        if frame.end:
                            return
                raise BrokenOff("it ended in the middle")
            except BrokenOff as error:
                self.route.broke()
                if error.late:
                    # Raises unless the daemon still answers: then the job is only silent.
                    yield from self.route.ask(calls.alive())
                    continue
                pause = patience.pause(self._broke_off(call, error))
            except (DaemonUnavailable, Unavailable) as error:
                if not self.route.found:
                    raise
                pause = patience.pause(error)
            yield pause

    def events(self, after: int | None) -> Steps[None]:
        """Emits each event as it is recorded, for ever; after an outage it goes on where it broke off, with no gap.

        Raises EventsPruned where one is missing, and DaemonUnavailable when an outage lasts `retry_s`.
        """
        patience = Patience(self._retry_s)
        while True:
            call, frames = calls.event_stream(after), EventFrames()
            try:
                yield from self.route.open(call, EVENTS_SILENCE_S)
                while (piece := (yield NextPiece())) is not None:
                    patience.reset()
                    for frame in self._taken(frames.feed(piece), call):
                        after = frame.seq if frame.seq is not None else after
                        if frame.event is not None:
                            yield Emit(frame.event)
                raise BrokenOff("it ended")
            except BrokenOff as error:
                self.route.broke()
                pause = patience.pause(self._broke_off(call, error))
            except (DaemonUnavailable, Unavailable) as error:
                if not self.route.found:
                    raise
                pause = patience.pause(error)
            yield pause

    def _broke_off(self, call: Call[Any], error: BrokenOff) -> DaemonUnavailable:
        where = f"The daemon at {self.route.address.shown} broke off during {call.path}: {error}."
        return DaemonUnavailable(where, remedy="Look at its log: it may have been restarted.")

    def _taken(self, frames: Iterator[Item], call: Call[str]) -> Iterator[Item]:
        try:
            yield from frames
        except ValueError as error:
            raise GpuleaseError(
                f"{self.route.address.shown} answered {call.method} {call.path} with something else than was expected:"
                f" {error}.",
                remedy="Check that a gpulease daemon of the same version listens there.",
            ) from error

    def _granted_now(self, request: LeaseRequest, key: str, shared: bool) -> Steps[tuple[Lease, float]]:
        sent_at = time.monotonic()
        try:
            return (yield from self._asked(calls.request_lease(request, key), self._briefly_s, shared)), sent_at
        except NotNow as error:
            raise _not_now(error.extra.get("explanation"), 0, error) from error

    def _asked(self, call: Call[Lease], patience_s: float, shared: bool) -> Steps[Lease]:
        """The answer to a request for a lease; if none arrives, what may have been granted is taken back, unless it is
        `shared`: then it ends with its owner."""
        try:
            return (yield from self.send(call, patience_s))
        except GeneratorExit:
            raise
        except BaseException as error:
            if shared or (isinstance(error, GpuleaseError) and not may_have_been_done(error)):
                raise
            # The daemon may have granted it. The same key gets the same lease, whose id is then known.
            try:
                lease = yield from self.route.ask(call, BRIEFLY_S)
            except (DaemonUnavailable, Unavailable) as again:
                LOG.warning("A request whose answer was lost could not be taken back and ends by itself: %s", again)
            except GpuleaseError as refused:
                LOG.debug("A request was refused when it was to be taken back: %s", refused)
            else:
                yield from self._take_back(lease.id)
            raise

    def _with_time_left(self, lease: Lease, asked_at: float) -> Steps[tuple[Lease, float]]:
        """The lease, renewed if its grant was so long in coming that it may be about to end."""
        if lease.state is LeaseState.ACTIVE and time.monotonic() - asked_at > lease.ttl_s * 3 / 4:
            asked_at = time.monotonic()
            lease = yield from self.send(calls.renew(lease.id, lease.token))
        if lease.state is not LeaseState.ACTIVE:
            raise LeaseLost(f"Request {lease.id} ended before it was granted: {lease.end_reason}.", remedy="Ask again.")
        return lease, asked_at

    def _wait_for_grant(self, lease: Lease, asked_at: float, wait_s: float) -> Steps[tuple[Lease, float]]:
        """The lease once it is granted, and when the last call was sent that still found it queued.

        The call that finds it granted tells less: the answers before it may have been lost with the grant in them.
        """

        def poll(hold_s: float, lease: Lease) -> Call[Lease]:
            # Each poll is a sign of life, and the last must not be older than the ttl.
            return calls.lease(lease.id, min(hold_s, lease.ttl_s / 3), LeaseState.QUEUED)

        left_s = asked_at + wait_s - time.monotonic()
        lease, queued_at = yield from self._watch(
            lease, asked_at, poll, lambda lease: lease.state is not LeaseState.QUEUED, left_s
        )
        if lease.state is LeaseState.QUEUED:
            explanation = yield from self.send(calls.explain(lease.id))
            try:
                yield from self.send(calls.release(lease.id, None))
            except StaleToken:  # granted after the last poll
                return (yield from self.send(calls.lease(lease.id))), queued_at
            raise _not_now(to_json(explanation), wait_s)
        return lease, queued_at

    def _watch(
        self,
        noun: Item,
        asked_at: float,
        poll: Callable[[float, Item], Call[Item]],
        settled: Callable[[Item], bool],
        wait_s: float | None,
    ) -> Steps[tuple[Item, float]]:
        """`noun` after long polls until it is settled or `wait_s` has passed; sits out an outage of `retry_s`.

        Also the monotonic time at which the last call was sent whose answer was not settled; `asked_at` is that of the
        call that answered `noun`.
        """
        deadline = None if wait_s is None else time.monotonic() + wait_s
        patience = Patience(self._retry_s)
        while not settled(noun):
            begun = time.monotonic()
            left_s = self.route.hold_s if deadline is None else deadline - begun
            if left_s <= 0:
                break
            try:
                noun = yield from self.route.ask(poll(min(self.route.hold_s, left_s), noun))
            except (DaemonUnavailable, Unavailable) as error:
                pause = patience.pause(error)
            else:
                patience.reset()
                if settled(noun):
                    break
                asked_at = begun
                # A daemon that does not hold its answers is not to be asked in a tight loop.
                pause = Sleep(0.05 if time.monotonic() - begun < 0.05 else 0.0)
            yield pause
        return noun, asked_at

    def _take_back(self, lease_id: str, granted_too: bool = True) -> Steps[None]:
        """Withdraw a request, with `granted_too` also if it was granted meanwhile; if that fails, its ttl ends it."""
        try:
            try:
                yield from self.send(calls.release(lease_id, None), timeout_s=TAKE_BACK_S)
            except StaleToken:
                if not granted_too:
                    return
                lease = yield from self.send(calls.lease(lease_id), timeout_s=TAKE_BACK_S)
                yield from self.send(calls.release(lease_id, lease.token), timeout_s=TAKE_BACK_S)
        except LeaseLost:
            return
        except GpuleaseError as error:
            LOG.warning("Request %s could not be taken back and ends by itself: %s", lease_id, error)


def lease_request(**fields: Any) -> LeaseRequest:
    """The body of a request for a lease. Raises InvalidRequest, naming the field."""
    try:
        return LeaseRequest(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(error)) from error


def several(state: str | Iterable[str]) -> tuple[str, ...]:
    """One state or more, as a tuple."""
    return (state,) if isinstance(state, str) else tuple(state)


def _not_now(explanation: Mapping[str, Any] | None, wait_s: float, answer: NotNow | None = None) -> NotNow:
    """A refusal that names who holds what."""
    known = from_json(Explanation, explanation) if explanation else None
    when = f"Not granted within {wait_s:g} s." if wait_s > 0 else ""
    said = known.sentence if known else answer.detail if answer else ""
    in_the_way = (
        [obstacle.sentence for obstacle in known.obstacles[:8] if obstacle.sentence not in said] if known else []
    )
    return NotNow(
        " ".join(part for part in (when, said, *in_the_way) if part) or "The GPUs are in use.",
        remedy="Ask again later, or wait longer in the queue.",
        extra={"explanation": explanation},
    )
