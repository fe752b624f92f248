"""The writer's queue of what has happened and is not decided yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.core.happenings import Happening
from gpulease_server.core.turn import Answer

MAX_QUEUED = 20_000
"""Happenings that may be queued; beyond that callers get 503."""
QUIET_ROUNDS, MAX_ROUNDS = 2, 64
"""A turn begins after so many rounds of the event loop in which nothing arrived, or after so many in all. A request
takes up to two rounds from its socket to the queue: its bytes are read in one, its task runs in the next."""


class Reply(Protocol):
    """What waits for an answer: a future, or a `Callback`."""

    def done(self) -> bool:
        """True if there is an answer, or no one waits any more."""

    def cancelled(self) -> bool:
        """True if no one waits any more."""

    def set_result(self, answer: Answer, /) -> None:
        """Answer, once."""


class Callback:
    """Calls a function with the answer, in a round of the event loop of its own. In place of a future and a task that
    it wakes: a request without a task costs less."""

    __slots__ = ("_call", "_is_done", "_unanswered")

    def __init__(self, call: Callable[[Answer], None], unanswered: dict[Reply, None]) -> None:
        self._call, self._unanswered = call, unanswered
        self._is_done = False

    def done(self) -> bool:
        """True if there is an answer."""
        return self._is_done

    def cancelled(self) -> bool:
        """It always waits."""
        return False

    def set_result(self, answer: Answer, /) -> None:
        """Answer, once."""
        self._is_done = True
        del self._unanswered[self]
        asyncio.get_running_loop().call_soon(self._call, answer)


@dataclass(slots=True)
class Submission:
    """A happening in the writer's queue, and what waits for its answer; None for one that needs no answer."""

    happening: Happening
    future: Reply | None

    @property
    def refused(self) -> bool:
        """True if its caller was answered already; a caller that went away was not."""
        return self.future is not None and self.future.done() and not self.future.cancelled()


class SubmissionQueue:
    """Submissions in order of arrival, for one reader. An `asyncio.Queue` with a time-out starts a task for each wait,
    which takes as long as a small turn.

    Args:
        most: How many may be queued.
    """

    def __init__(self, most: int = MAX_QUEUED) -> None:
        self._most = most
        self._queued: deque[Submission] = deque()
        self._arrival: asyncio.Future[None] | None = None
        """What the reader waits for."""

    def __len__(self) -> int:
        return len(self._queued)

    def put(self, submission: Submission) -> bool:
        """Add a submission. False if there are too many."""
        if len(self._queued) >= self._most:
            return False
        self._queued.append(submission)
        self._end_wait()
        return True

    def take(self, most: int) -> list[Submission]:
        """Remove and return the oldest, at most so many."""
        return [self._queued.popleft() for _ in range(min(most, len(self._queued)))]

    async def wait(self, timeout_s: float) -> None:
        """Return when there are submissions, with those that follow at once, or after this time.

        A turn of one request costs about as much as a turn of twenty. Clients that were answered together ask again
        together, but not in the same round of the event loop: without this pause the first would get a turn of its own.
        """
        if not self._queued:
            await self._wait_for_arrival(timeout_s)
        seen, quiet = 0, 0
        for _ in range(MAX_ROUNDS):
            quiet = 0 if len(self._queued) > seen else quiet + 1
            if quiet == QUIET_ROUNDS:
                return
            seen = len(self._queued)
            await asyncio.sleep(0)

    async def _wait_for_arrival(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._arrival = loop.create_future()
        timer = loop.call_later(timeout_s, self._end_wait)
        try:
            await self._arrival
        finally:
            timer.cancel()
            self._arrival = None

    def _end_wait(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
