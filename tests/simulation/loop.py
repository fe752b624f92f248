"""An event loop whose time passes only from one timer to the next, and whose threads are played."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import selectors
from collections.abc import Callable
from typing import Any

START_S = 1000.0


class _Leap(selectors.SelectSelector):
    """Waits for nothing: it moves the clock on by what the loop would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits and no timer runs: the simulation stands still")
        self.now_s += max(timeout, 1e-6)  # a loop that turns without end must not stop the clock
        return []


class PlayedLoop(asyncio.SelectorEventLoop):
    """`delays()` says how long a call into a thread takes until it runs, and from then until its result is there."""

    def __init__(self, delays: Callable[[], tuple[float, float]]) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)
        self._delays = delays

    def time(self) -> float:
        """Seconds on the clock that everyone in the simulation reads."""
        return self._leap.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run it at a later moment, unless its waiter was killed before."""
        future: asyncio.Future[Any] = self.create_future()
        before_s, after_s = self._delays()
        call = functools.partial(contextvars.copy_context().run, func, *args)
        self.call_later(before_s, self._run, future, call, after_s)
        return future

    def _run(self, future: asyncio.Future[Any], call: Callable[[], Any], after_s: float) -> None:
        if future.cancelled():
            return
        try:
            result, error = call(), None
        except Exception as caught:
            result, error = None, caught
        self.call_later(after_s, _deliver, future, result, error)


def _deliver(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
