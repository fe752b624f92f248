"""Fair share: how much of the daemon's time one user may take, and who works next.

The daemon answers on one event loop, so that whatever one request costs, the others wait for. Without a limit, a user
with a hundred connections is served a hundred times before another user is served once. So of each user one request is
worked on at a time; the others of that user wait for it, and those of other users do not. While others use the daemon,
one user gets at most `SHARE` of its time: after a request that took long, the user's next one waits in proportion.

| a request | and the share |
|---|---|
| waits for a commit, a grant, a change, its body or its client | is not counted; the next one begins |
| waits for its turn, and its client leaves | is not begun: clients that come and go would leave any number waiting |
| has a large body, or submits an array | is counted to its end: writing it takes as long as reading it |
| renews or releases a lease | has a share of its own, so that no one loses a lease because of their other requests |
| is of root or of the daemon's user, or is the report of a worker | has no limit |
| is of no one whom the kernel shows | is counted by its token if that is valid, or else by its host |

What is counted is time, from when a request is worked on until it is answered or waits. That includes threads of the
daemon, which hold the interpreter's lock for most of their time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import field

from starlette.requests import ClientDisconnect

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.runtime import clock

SHARE = 0.25
"""How much of the daemon's time one user gets while others use it."""
BURST_S = 0.25
"""How much a user may take at once, after a time in which they took less."""
OTHERS_S = 1.0
"""How long after their last request others count as using the daemon."""
REQUEST_S = 0.0005
"""What each request counts at least: the HTTP server has read it before its turn, and sends its answer after it."""
WRITE_S = 0.003
"""What a request counts for that the writer decides and commits, unless it is counted to its end."""
MAX_COUNTED_S = 1.0
"""How much one request counts at most: one that hangs has not worked all the time."""
MAX_USERS = 1000
"""Above this number, users without a request are forgotten."""


@dataclass(slots=True)
class _User:
    """One user's requests."""

    working: bool = False
    resuming: deque[asyncio.Future[bool]] = field(default_factory=deque)
    """Requests that go on after a wait: before those that have not begun. Each is told whether it may work."""
    beginning: deque[asyncio.Future[bool]] = field(default_factory=deque)
    used_s: float = 0.0
    """Time taken as of `at_s`; it fades at `SHARE` seconds a second."""
    at_s: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def update(self, now_s: float) -> None:
        """Let what was taken fade."""
        self.used_s = max(0.0, self.used_s - SHARE * (now_s - self.at_s))
        self.at_s = now_s


class FairShare:
    """Lets one request of each user work at a time. For one event loop.

    Args:
        is_stopping: True when the daemon ends, and every request is to be answered at once.
        now_s: The monotonic clock.
    """

    def __init__(
        self,
        is_stopping: Callable[[], bool] = lambda: False,
        now_s: Callable[[], float] = clock.mono_s,
    ) -> None:
        self._is_stopping = is_stopping
        self._now_s = now_s
        self._users: dict[Hashable, _User] = {}
        self._last: tuple[Hashable, float] = (None, float("-inf"))
        """Who asked last, and when."""
        self._last_other_s = float("-inf")
        """When another user asked last."""

    def note_request(self, user: Hashable) -> None:
        """This user uses the daemon."""
        if user != self._last[0]:
            self._last_other_s = self._last[1]
        self._last = (user, self._now_s())

    def begins_at_once(self, user: Hashable, lane: str) -> bool:
        """True if a request of this user works from now on. Otherwise it has to `begin`."""
        own = self._users.get((user, lane))
        if own is None:
            self._forget_idle()
            own = self._users[user, lane] = _User(at_s=self._now_s())
        if own.working or own.resuming or own.beginning or self._delay_s(user, own) > 0.0:
            return False
        own.working = True
        return True

    async def begin(
        self,
        user: Hashable,
        lane: str,
        *,
        resumes: bool = False,
        on_disconnect: list[Callable[[], None]] | None = None,
    ) -> None:
        """Return when a request of this user may work.

        Raises `ClientDisconnect` if a function that is in `on_disconnect` meanwhile is called before.
        """
        if self.begins_at_once(user, lane):
            return
        own = self._users[user, lane]
        waiting = own.resuming if resumes else own.beginning
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def leave() -> None:
            if not turn.done():
                turn.set_result(False)
                self._serve(user, own)

        calls = [] if on_disconnect is None else on_disconnect
        calls.append(leave)
        waiting.append(turn)
        self._serve(user, own)
        try:
            if not await turn:
                raise ClientDisconnect
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.end(user, lane, 0.0)
            raise
        finally:
            calls.remove(leave)

    def end(self, user: Hashable, lane: str, took_s: float) -> None:
        """The request that worked has ended or waits; the user's next one may work."""
        own = self._users[user, lane]
        own.working = False
        self._count(user, own, min(took_s, MAX_COUNTED_S))
        self._serve(user, own)

    def _serve(self, user: Hashable, own: _User) -> None:
        if own.timer is not None:
            own.timer.cancel()
            own.timer = None
        while not own.working and (waiting := own.resuming or own.beginning):
            if waiting[0].done():  # its request was cancelled, or its client has left
                waiting.popleft()
                continue
            delay_s = self._delay_s(user, own)
            if delay_s > 0.0:
                own.timer = asyncio.get_running_loop().call_later(delay_s, self._serve, user, own)
                return
            own.working = True
            waiting.popleft().set_result(True)

    def _delay_s(self, user: Hashable, own: _User) -> float:
        """How long the user's next request has to wait, because of what the earlier ones took."""
        self._count(user, own, 0.0)
        return (own.used_s - BURST_S) / SHARE

    def _count(self, user: Hashable, own: _User, took_s: float) -> None:
        """Add to what the user took. While no one else is there, it makes no one wait later."""
        now_s = self._now_s()
        own.update(now_s)
        own.used_s += took_s
        others_s = self._last_other_s if self._last[0] == user else self._last[1]
        if now_s - others_s > OTHERS_S or self._is_stopping():
            own.used_s = min(own.used_s, BURST_S)

    def _forget_idle(self) -> None:
        if len(self._users) > MAX_USERS:
            now_s = self._now_s()
            for key, own in list(self._users.items()):
                own.update(now_s)
                if own.used_s == 0.0 and not (own.working or own.resuming or own.beginning):
                    del self._users[key]


class Turn:
    """One request's part in it. `on_disconnect` has functions that are called when its client leaves."""

    def __init__(
        self, share: FairShare, user: Hashable, lane: str, on_disconnect: list[Callable[[], None]] | None = None
    ) -> None:
        self._share, self._user, self._lane = share, user, lane
        self._on_disconnect = on_disconnect
        self._since_s: float | None = None
        """When it began to work; None while it waits."""
        self.is_large = False
        """True if it is counted while it waits for the writer, too."""
        self.is_exempt = False
        """True if it has no limit any more."""

    def begins_at_once(self, *, resumes: bool = False) -> bool:
        """True if it works from now on, or does already. Otherwise it has to `begin`."""
        if not self.is_exempt and self._since_s is None:
            if not self._share.begins_at_once(self._user, self._lane):
                return False
            self._since_s = clock.mono_s() - (0.0 if resumes else REQUEST_S)
        return True

    async def begin(self, *, resumes: bool = False) -> None:
        """Return when it may work; at once if it does. Raises `ClientDisconnect` if its client leaves before, unless it
        resumes."""
        if not self.is_exempt and self._since_s is None:
            on_disconnect = None if resumes else self._on_disconnect
            await self._share.begin(self._user, self._lane, resumes=resumes, on_disconnect=on_disconnect)
            self._since_s = clock.mono_s() - (0.0 if resumes else REQUEST_S)
            if self.is_exempt:  # since it has waited
                self.end()

    def end(self, further_s: float = 0.0) -> None:
        """It has ended, or waits. `further_s`: what it takes elsewhere meanwhile."""
        if self._since_s is not None:
            took_s, self._since_s = clock.mono_s() - self._since_s + further_s, None
            self._share.end(self._user, self._lane, took_s)

    def end_for_writer(self) -> None:
        """It waits for the writer: that is work, too, and counted to its end where that is a lot."""
        if not self.is_large:
            self.end(WRITE_S)

    def exempt(self) -> None:
        """Give it no limit from now on, as at its end: a task that outlives its request takes no turn."""
        self.is_exempt = True
        self.end()


TURN: ContextVar[Turn | None] = ContextVar("turn", default=None)
"""The current request's part; None where it has no limit."""


async def resume() -> None:
    """Return when the current request may work again, after a part of its answer was sent."""
    turn = TURN.get()
    if turn is not None:
        await turn.begin(resumes=True)


@asynccontextmanager
async def waiting() -> AsyncIterator[None]:
    """While the current request waits: what it waits for takes none of its user's share."""
    turn = TURN.get()
    if turn is not None:
        turn.end()
    yield
    await resume()


@asynccontextmanager
async def waiting_for_writer() -> AsyncIterator[None]:
    """As `waiting`, but what it waits for is work, too, see `Turn.end_for_writer`."""
    turn = TURN.get()
    if turn is not None:
        turn.end_for_writer()
    yield
    await resume()


def count_writing() -> None:
    """Count the current request also while it is written: that is a lot of work."""
    turn = TURN.get()
    if turn is not None:
        turn.is_large = True


def exempt() -> None:
    """Give the current request no limit from now on."""
    turn = TURN.get()
    if turn is not None:
        turn.exempt()
